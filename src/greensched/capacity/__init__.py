"""Capacity planning: traffic against the real scheduler and pool, in virtual time.

The command `greensched simulate` uses it. It uses the pool as any program would.
"""
