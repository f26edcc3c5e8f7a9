"""Benchmarks that need a GPU: isolation, contexts, peers, sharing, torch."""
