"""Requests, grants and partitions, and the pool's devices."""
