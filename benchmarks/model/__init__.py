"""The simulation's model: does it reproduce published figures, and those measured on GPUs?

Each check of a published figure names its inputs (kernel lengths, latencies of an idle partition,
time slices) and its prediction, which follows from residency, sharing and service times. Nothing is
fitted to a result. A prediction that is wrong by more than a quarter is printed as not reproduced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from benchmarks.model.colocation import check_colocation, nothing_saturates
from benchmarks.model.isolation import inversion, start_latency
from benchmarks.model.scenarios import Check


@functools.cache
def checks(seed: int = 1) -> tuple[Check, ...]:
    """Run all checks; they take a few seconds."""
    return (
        *start_latency(seed),
        *inversion(seed),
        *check_colocation(seed),
        *nothing_saturates(seed),
    )


def lines(found: Sequence[Check]) -> list[str]:
    """Format the checks as a table, each group under its inputs."""
    rows = [f"{'Are published figures reproduced?':60} {'known':>8} {'here':>8}"]
    given = ""
    for check in found:
        if check.given != given:
            given = check.given
            rows.append(f"  given: {given}")
        rows.append(f"    {check}")
    return rows
