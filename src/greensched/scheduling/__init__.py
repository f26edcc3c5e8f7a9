"""The head: who is next, how large, and which cells. It decides and never touches.

Pure and synchronous: no clock, no loop, no thread, no driver. The same objects run under the
pool, under the property tests, and in a simulation of traffic.
"""
