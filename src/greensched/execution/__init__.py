"""Submitting work without blocking an event loop: jobs, completion, threads, event loops."""
