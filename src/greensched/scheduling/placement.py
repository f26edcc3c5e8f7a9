"""On which device first, where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from greensched.scheduling.cells import DeviceCells

#: Spread: where most is free, so that neighbours share as little as can be of a device's memory
#: bandwidth. Pack: where least is free, so that the others stay free for large requests.
Placement = Literal["spread", "pack"]


def in_order(
    where: Sequence[int],
    devices: Sequence[DeviceCells],
    free: Sequence[int],
    placement: Placement,
    near: int | None,
) -> list[int]:
    """The devices to try, in this order; the one the data is on before all others."""
    sign = -1 if placement == "spread" else 1
    return sorted(where, key=lambda d: (d != near, sign * devices[d].sms(free[d])))
