"""Sizes: how many SMs an elastic request is to have now, by a policy that says so (`Policy.size`).

The policy sees the room there is on a device: the sizes, what classes above neither have nor want,
whether anybody else does. What it says is kept within what was asked for and what the class may
have; and whoever is granted his floor without it is granted it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from greensched.planning.cells import Demand
from greensched.planning.ground import Ground
from greensched.planning.policy import Room
from greensched.planning.requests import Lease, Line, Request

#: `Policy.size`.
Size = Callable[[Any, Room], tuple[int, int]]


def wanted(
    size: Size,
    ground: Ground,
    lines: Iterable[Line],
    request: Request,
    device: int,
    lease: Lease | None = None,
) -> Demand:
    """What it is to have on a device now; `lease`: what it has there."""
    (asked,), cells = request.parts, ground.devices[device]
    most = max(asked.least, ground.most_now(request, device, lease))
    sizes = range(-(-asked.least // cells.size) * cells.size, min(most, cells.total), cells.size)
    taken, is_alone = _others(ground, lines, request, device, lease)
    room = Room((*sizes, min(most, cells.total)), max(0, cells.total - taken), is_alone)
    least, upto = size(request, room)
    # What his floor gives him he has without waiting for more.
    floor = ground.floors[device].unmet(request.flow) * cells.size
    if floor >= asked.least:
        least = min(least, floor)
    least = min(max(least, asked.least), most)
    return Demand(least, min(max(upto, least), most))


def _others(
    ground: Ground, lines: Iterable[Line], request: Request, device: int, lease: Lease | None
) -> tuple[int, bool]:
    """SMs that classes of higher priority have or want there; whether nobody has or wants any."""
    flow, taken, is_alone = request.flow, 0, True
    for other in ground.live[device]:
        if other is not lease:
            is_alone = False
            if other.flow.priority > flow.priority:
                taken += max(other.sms, other.request.wants[0].least)
    for line in lines:
        first = line.first()
        if first is not None and first is not request and device in first.devices:
            is_alone = False
            if line.flow.priority > flow.priority:
                taken += first.wants[0].least
    return taken, is_alone
