"""Sizes: how many SMs an elastic request is to have now, by a policy that says so (`Policy.size`).

The policy sees the room there is on a device: the sizes, what classes above neither have nor want,
whether anybody else does. What it says is kept within what was asked for, what the class may have,
and what there is once others have given back what they can at a checkpoint: for more nobody is kept
waiting. And whoever is granted his floor without it is granted it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.cells import SizeRange
from greensched.scheduling.policy import SizingView
from greensched.scheduling.requests import Grant, Request, RequestLine

#: `Policy.size`.
Size = Callable[[Any, SizingView], tuple[int, int]]


def wanted(
    size: Size,
    ground: SMAllocator,
    lines: Iterable[RequestLine],
    request: Request,
    device: int,
    lease: Grant | None = None,
) -> SizeRange:
    """What it is to have on a device now; `lease`: what it has there."""
    (asked,), cells = request.parts, ground.devices[device]
    most = max(asked.least, cells.largest(ground.most_now(request, device, lease)))
    sizes = range(-(-asked.least // cells.size) * cells.size, most, cells.size)
    taken, kept, is_alone = _others(ground, lines, request, device, lease)
    room = SizingView((*sizes, most), max(0, cells.total - taken), is_alone)
    least, upto = size(request, room)
    # What his floor gives him he has without waiting for more.
    floor = ground.floors[device].unmet(request.flow) * cells.size
    if floor >= asked.least:
        least = min(least, floor)
    least = max(asked.least, min(least, most, cells.total - kept))
    return SizeRange(least, min(max(upto, least), most))


def _others(
    ground: SMAllocator,
    lines: Iterable[RequestLine],
    request: Request,
    device: int,
    lease: Grant | None,
) -> tuple[int, int, bool]:
    """What others have or want there.

    Returns:
        SMs that classes of higher priority have or want; SMs that leases keep to their end; whether
        nobody has or wants any.
    """
    flow, taken, kept, is_alone = request.flow, 0, 0, True
    size = ground.devices[device].size
    for other in ground.live[device]:
        if other is not lease:
            is_alone = False
            keeps = -(-other.request.parts[0].least // size) * size
            kept += min(other.sms, keeps) if other.request.is_elastic else other.sms
            if other.flow.priority > flow.priority:
                taken += max(other.sms, other.request.wants[0].least)
    for line in lines:
        first = line.first()
        if first is not None and first is not request and device in first.devices:
            is_alone = False
            if line.flow.priority > flow.priority:
                taken += first.wants[0].least
    return taken, kept, is_alone
