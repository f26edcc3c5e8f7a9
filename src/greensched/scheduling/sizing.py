"""How many SMs an elastic request should have now, by a policy that sizes (`Policy.size`).

The policy sees a device: the possible sizes, what higher classes neither have nor want, what other
leases leave at their checkpoints, and what the next request needs. Its answer is limited to what
was requested and what the class may have. A request waits for this size until it has aged; from
then on it gets at most what is free once lower classes have given way. A request is always granted
if it fits into its class's reserve and the class uses none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.policy import SizingView
from greensched.scheduling.request_line import RequestLine
from greensched.scheduling.requests import Grant, Request, by_rank

#: The type of `Policy.size`.
Size = Callable[[Any, SizingView], tuple[int, int]]


def target_size(
    size: Size,
    allocator: SMAllocator,
    lines: Iterable[RequestLine],
    request: Request,
    device: int,
    grant: Grant | None = None,
    *,
    is_aged: bool = False,
) -> SizeRange:
    """Return the size that a request should have on a device.

    Args:
        size: The policy's method.
        allocator: The cells.
        lines: The lines of the queue.
        request: The request.
        device: The index of the device.
        grant: The grant that it already has there, or None.
        is_aged: Whether it has waited so long that it should get whatever is free.
    """
    (part,), cells = request.parts, allocator.devices[device]
    most = max(part.least, cells.largest(allocator.most_now(request, device, grant)))
    sizes = request.class_state.sizes or cells.sizes_from(part.least)
    sizes = tuple(n for n in sizes if part.least <= n < most)
    claims = _Claims(cells, request, grant)
    for other in allocator.grants[device]:
        claims.add_grant(other)
    for line in lines:
        first = line.first()
        if first is not None and device in first.devices:
            claims.add_waiting(first)
    left = max(0, cells.total - claims.taken)
    beside = cells.largest(max(0, cells.total - claims.kept - claims.given_way))
    spare = 0 if claims.is_alone else most
    if claims.next is not None:
        spare = allocator.most_idle(claims.next, device) - claims.next.line.least
    view = SizingView((*sizes, most), left, beside, spare)
    least, upto = size(request, view)
    # It gets what its own reserve provides without waiting for more.
    reservations, state = allocator.reservations[device], request.class_state
    reserve = reservations.unmet(state) * cells.size
    if part.least <= reserve == state.reserve_cells * cells.size:
        least = min(least, reserve)
    if is_aged:
        count, _ = reservations.available_for(cells.count, request, request.fewest)
        free = count * cells.size + cells.remainder - claims.kept
        least = min(least, cells.largest(max(0, free)))
    least = max(part.least, min(least, most))
    return SizeRange(least, min(max(upto, least), most))


class _Claims:
    """What other leases and requests have and want on a device, apart from one request.

    Leases of higher priority, and among equals the earlier ones, precede the request. An elastic
    lease that does not precede it gives way at its checkpoint (`Dispatcher.keeps_at_checkpoint`).
    """

    def __init__(self, cells: DeviceCells, request: Request, grant: Grant | None) -> None:
        self._cells = cells
        self._request = request
        self._grant = grant
        #: The SMs that classes of higher priority have or want.
        self.taken = 0
        #: The SMs that leases keep in any case, and the least that leases which can give way keep.
        self.kept = self.given_way = 0
        #: Whether no other request or lease has or wants SMs.
        self.is_alone = True
        #: The first of the other queued requests.
        self.next: Request | None = None

    def add_grant(self, grant: Grant) -> None:
        """Count a lease."""
        if grant is self._grant or grant.is_shared:
            return
        self.is_alone = False
        request, cells = grant.request, self._cells
        priority, own = request.class_state.priority, self._request.class_state.priority
        if priority > own:
            self.taken += max(grant.sms, request.target[0].least)
        if grant.draining or not request.is_elastic:
            self.kept += grant.sms
        elif priority >= own:
            self.kept += min(grant.sms, cells.cells_for(request.target[0].least) * cells.size)
        else:
            self.given_way += min(grant.sms, cells.cells_for(request.parts[0].least) * cells.size)

    def add_waiting(self, first: Request) -> None:
        """Count a queued request."""
        if first is self._request:
            return
        self.is_alone = False
        if first.class_state.priority > self._request.class_state.priority:
            self.taken += first.target[0].least
        if self.next is None or by_rank(first) < by_rank(self.next):
            self.next = first
