"""What if: traffic against the real scheduler and pool, on simulated GPUs, in virtual time.

`greensched simulate` is its door. It stands above the pool and uses what anybody can use; nothing
but the command line uses it.
"""
