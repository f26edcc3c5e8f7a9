"""How many SMs an elastic request should have now, by a policy that sizes (`Policy.size`).

The policy sees a device: the possible sizes, what higher classes neither have nor want, and whether
the request is alone. Its answer is kept within what was asked for, what the class may have, and
what is there once other leases have given back what they can at a checkpoint: a request is not kept
waiting for more. A request that its own reserve satisfies is granted all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.cells import SizeRange
from greensched.scheduling.policy import SizingView
from greensched.scheduling.request_line import RequestLine
from greensched.scheduling.requests import Grant, Request

#: `Policy.size`.
Size = Callable[[Any, SizingView], tuple[int, int]]


def target_size(
    size: Size,
    allocator: SMAllocator,
    lines: Iterable[RequestLine],
    request: Request,
    device: int,
    grant: Grant | None = None,
) -> SizeRange:
    """Return what a request should have on a device; `grant`: what it has there already."""
    (asked,), cells = request.parts, allocator.devices[device]
    most = max(asked.least, cells.largest(allocator.most_now(request, device, grant)))
    sizes = range(cells.cells_for(asked.least) * cells.size, most, cells.size)
    taken, kept, is_alone = _others(allocator, lines, request, device, grant)
    view = SizingView((*sizes, most), max(0, cells.total - taken), is_alone)
    least, upto = size(request, view)
    # What its own reserve gives, it has without waiting for more.
    reserve = allocator.reservations[device].unmet(request.class_state) * cells.size
    if reserve >= asked.least:
        least = min(least, reserve)
    least = max(asked.least, min(least, most, cells.total - kept))
    return SizeRange(least, min(max(upto, least), most))


def _others(
    allocator: SMAllocator,
    lines: Iterable[RequestLine],
    request: Request,
    device: int,
    grant: Grant | None,
) -> tuple[int, int, bool]:
    """Return what other grants have, and other requests want, on a device.

    Returns:
        SMs that classes of higher priority have or want; SMs that grants keep to their end; whether
        there is no other grant or request.
    """
    priority, taken, kept, is_alone = request.class_state.priority, 0, 0, True
    cells = allocator.devices[device]
    for other in allocator.grants[device]:
        if other is not grant:
            is_alone = False
            keeps = cells.cells_for(other.request.parts[0].least) * cells.size
            kept += min(other.sms, keeps) if other.request.is_elastic else other.sms
            if other.class_state.priority > priority:
                taken += max(other.sms, other.request.target[0].least)
    for line in lines:
        first = line.first()
        if first is not None and first is not request and device in first.devices:
            is_alone = False
            if line.class_state.priority > priority:
                taken += first.target[0].least
    return taken, kept, is_alone
