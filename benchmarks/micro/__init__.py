"""Benchmarks of single operations: launch, lease, call, completion, scheduling."""
