"""Timing, reports, plots, and what several benchmarks share."""
