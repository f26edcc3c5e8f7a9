"""Decide which request is granted which SMs, and when.

Pure and synchronous: no clock, no event loop, no thread, no driver. The pool, the property tests
and the capacity planner use the same objects.
"""
