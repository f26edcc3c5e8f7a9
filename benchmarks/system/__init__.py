"""Benchmarks of whole services, and the soak."""
