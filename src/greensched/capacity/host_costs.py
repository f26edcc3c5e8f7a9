"""The host's time for each operation: measured by `greensched measure --host`.

A simulated device models only the time of kernels. On a GPU every operation also takes time on the
event loop's thread, which matters if pieces of work are shorter than a few milliseconds.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from greensched._validation import reason
from greensched.errors import InvalidRequest

#: The 99th percentile of a normal distribution, in standard deviations.
P99 = 2.3263


@dataclass(frozen=True, slots=True)
class HostCost:
    """The microseconds of one operation: median and 99th percentile of a lognormal distribution."""

    p50_us: float = 0.0
    p99_us: float = 0.0

    def seconds(self, rng: random.Random) -> float:
        """Draw the seconds of one operation."""
        if self.p50_us <= 0:
            return 0.0
        sigma = math.log(max(1.0, self.p99_us / self.p50_us)) / P99
        return 1e-6 * self.p50_us * math.exp(sigma * rng.gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class HostCosts:
    """The host's time for each operation.

    Attributes:
        lease: Acquiring and returning a lease.
        checkpoint: A checkpoint, from the end of the work before to the submission of the next.
        awaited: A launch that is awaited: its submission, and the event loop's wake-up at its end.
    """

    lease: HostCost = HostCost()
    checkpoint: HostCost = HostCost()
    awaited: HostCost = HostCost()


#: A host whose operations take no time, because they were not measured.
NO_COSTS = HostCosts()


#: For each attribute, the operations in a file whose times are added.
OF_FILES = {
    "lease": ("lease",),
    "checkpoint": ("checkpoint",),
    "awaited": ("submission", "wake"),
}


def load(path: Path) -> HostCosts:
    """Read what a simulated strategy spends from a file of `greensched measure --host`.

    If the file has no host costs, return `NO_COSTS`.

    Raises:
        InvalidRequest: The file cannot be read, or a cost is invalid.
    """
    try:
        costs = json.loads(path.read_text()).get("host", {})
        return HostCosts(
            **{
                name: HostCost(
                    *(sum(float(costs[op][part]) for op in ops) for part in ("p50_us", "p99_us"))
                )
                for name, ops in OF_FILES.items()
                if all(op in costs for op in ops)
            }
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f"{path}: give the file that `greensched measure --host` writes: {reason(error)}"
        ) from error
