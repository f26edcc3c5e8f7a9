"""Decide which request is granted which SMs, and when.

Pure and synchronous: no clock, no event loop, no thread, no driver. The same objects run under the
pool, under the property tests and in the capacity planner.
"""
