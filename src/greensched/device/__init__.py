"""Devices, streams, memory and launches: synchronous, and usable without a pool."""
