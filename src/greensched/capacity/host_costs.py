"""The host's time for each operation: measured by `greensched measure --host`, or built in.

A simulated device models only the time of kernels. On a GPU every operation also takes time on the
event loop's thread, which matters if pieces of work are shorter than a few milliseconds.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

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
        start: From a request to its kernel's start on an idle partition, by a raw launch.
        submission: The extra time of a bound launch over a raw launch.
        lease: Acquiring and returning a lease, next to another user of the event loop.
        request: The extra time of a request with its own lease: binding its kernels, and the
            way back of its result.
        launch: The extra time for each bound launch of a request.
        checkpoint: A checkpoint, from the end of the work before to the submission of the next.
        awaited: A launch that is awaited: its submission, and the event loop's wake-up at its end.
    """

    start: HostCost = HostCost()
    submission: HostCost = HostCost()
    lease: HostCost = HostCost()
    request: HostCost = HostCost()
    launch: HostCost = HostCost()
    checkpoint: HostCost = HostCost()
    awaited: HostCost = HostCost()


#: A host whose operations take no time, because they were not measured.
NO_COSTS = HostCosts()
#: The host of an H200, with greensched compiled, and of an H100, as Python. `start`: W1's median
#: and 99th percentile on the best split. `submission` and `lease`: W1 beside kernels of 0.04 and
#: 0.25 ms. `request` and `launch`: the medians of W8 (shared) and of W2 at load 0.25 (reserve
#: kept). Other cases, arms, loads and workloads are held out (`measured.FITTED`).
#: `checkpoint`: of an engine's step on the H200, and by `greensched measure --host` on the H100
#: (docs/measurements/h100-580/tables.json).
H200_HOST = HostCosts(
    start=HostCost(11.2, 31.0),
    submission=HostCost(0.5, 3.0),
    lease=HostCost(20.5, 78.0),
    request=HostCost(70.0, 110.0),
    launch=HostCost(1.6, 1.6),
    checkpoint=HostCost(77.0, 110.0),
)
H100_HOST = HostCosts(
    start=HostCost(13.1, 37.0),
    submission=HostCost(5.0, 10.0),
    lease=HostCost(38.0, 215.0),
    request=HostCost(102.0, 150.0),
    launch=HostCost(2.9, 2.9),
    checkpoint=HostCost(143.8, 164.6),
)


#: For some attributes, the operations in a file whose times are added. A file's `submission` is not
#: the attribute of that name: it is the whole time of a bound launch.
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
        given = json.loads(path.read_text()).get("host", {})
        return HostCosts(
            **{
                name: HostCost(
                    *(sum(float(given[op][part]) for op in ops) for part in ("p50_us", "p99_us"))
                )
                for name, ops in OF_FILES.items()
                if all(op in given for op in ops)
            }
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f"{path}: give the file that `greensched measure --host` writes: {error!r}"
        ) from error
