"""Before any claim: does the simulation show what is known? Printed with every report.

Each check says which figures went in (*calibration*: lengths of kernels, latencies of an idle
partition, time slices) and what came out (*prediction*: what residency, sharing and service times
make of them). Nothing is fitted to a result. What does not come out within a quarter of what was
published is printed as not reproduced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from greensched.capacity.validation.colocation import check_colocation, nothing_saturates
from greensched.capacity.validation.isolation import inversion, start_latency
from greensched.capacity.validation.scenarios import Check


@functools.cache
def checks(seed: int = 1) -> tuple[Check, ...]:
    """All of them; a few seconds of the host."""
    return (
        *start_latency(seed),
        *inversion(seed),
        *check_colocation(seed),
        *nothing_saturates(seed),
    )


def lines(found: Sequence[Check]) -> list[str]:
    """A table, with what went in below each."""
    told = [f"{'Does it show what is known?':60} {'known':>8} {'here':>8}"]
    given = ""
    for check in found:
        if check.given != given:
            given = check.given
            told.append(f"  given: {given}")
        told.append(f"    {check}")
    return told
