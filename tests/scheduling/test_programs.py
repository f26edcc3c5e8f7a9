"""Random programs, a few of them: `make fuzz-scheduler` runs many."""

from __future__ import annotations

import pytest

from greensched.scheduling.policy import POLICIES

from .fuzz import faults
from .programs import draw, partitions

SEEDS = range(60)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_program_locks_or_starves(policy: str) -> None:
    """Nothing waits for what is free, for ever, or far longer than on fixed partitions."""
    for seed in SEEDS:
        program = draw(seed)
        found = faults(program, policy, partitions(program))
        assert not {"locked", "free", "starved"} & {*found}, seed
