"""The host's time for each operation of the measured workloads, partly fitted to them."""

from __future__ import annotations

from dataclasses import dataclass

from greensched.capacity.host_costs import HostCost

NONE = HostCost()


@dataclass(frozen=True, slots=True)
class Host:
    """The host's time for each operation.

    Attributes:
        start: From a request to its kernel's start on an idle partition, by a raw launch.
        submission: The extra time of a bound launch over a raw launch.
        lease: Acquiring and returning a lease, next to another user of the event loop.
        request: The extra time of a request with its own lease: binding its kernels, and the
            way back of its result.
        launch: The extra time for each bound launch of a request.
        checkpoint: A checkpoint, from the end of the work before to the submission of the next.
    """

    start: HostCost = NONE
    submission: HostCost = NONE
    lease: HostCost = NONE
    request: HostCost = NONE
    launch: HostCost = NONE
    checkpoint: HostCost = NONE


#: The host of an H200, with greensched compiled, and of an H100, as Python. `start`: W1's median
#: and 99th percentile on the best split. `submission` and `lease`: W1 beside kernels of 0.04 and
#: 0.25 ms. `request` and `launch`: the medians of W8 (shared) and of W2 at load 0.25 (reserve
#: kept). Other cases, arms, loads and workloads are held out (`measured.FITTED`).
#: `checkpoint`: of an engine's step on the H200, and by `greensched measure --host` on the H100
#: (docs/measurements/h100-580/tables.json).
HOSTS = {
    "h200": Host(
        start=HostCost(11.2, 31.0),
        submission=HostCost(0.5, 3.0),
        lease=HostCost(20.5, 78.0),
        request=HostCost(70.0, 110.0),
        launch=HostCost(1.6, 1.6),
        checkpoint=HostCost(77.0, 110.0),
    ),
    "h100": Host(
        start=HostCost(13.1, 37.0),
        submission=HostCost(5.0, 10.0),
        lease=HostCost(38.0, 215.0),
        request=HostCost(102.0, 150.0),
        launch=HostCost(2.9, 2.9),
        checkpoint=HostCost(143.8, 164.6),
    ),
}
