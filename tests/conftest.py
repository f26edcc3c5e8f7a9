"""Settings of the whole suite: Hypothesis is deterministic, so that a failure comes again."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("greensched", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("greensched")
