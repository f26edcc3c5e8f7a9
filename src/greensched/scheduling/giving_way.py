"""What elastic leases give up at their checkpoints for a request that precedes them."""

from __future__ import annotations

from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.cells import SizeRange
from greensched.scheduling.requests import Grant, Request


def kept_at_checkpoint(
    allocator: SMAllocator, request: Request, grant: Grant, now: float, *, is_aged: bool
) -> int | None:
    """Return the SMs that an elastic lease keeps at its checkpoint for a request; 0 for none.

    None means what its policy says, which leaves enough for the request. Leases are first reduced
    to their minimum, then to nothing. The order is: leases of the request's priority or lower,
    lowest class and longest lease first; then, for an aged request, leases of higher priority,
    which keep their minimum if their end is known. Only as many leases give way as are needed, and
    none gives up its minimum if the request would still not fit. A lease of higher priority then
    gives up nothing, because it would only end later. But a request of a higher class gets what
    this lease gives up if that suffices now: it does not wait for a lower class's checkpoint. Nor
    does it wait for a lease of its own class or a higher one, which may reach no checkpoint before
    its end.

    Args:
        allocator: The cells.
        request: The request that precedes the lease.
        grant: The lease at its checkpoint.
        now: The time in seconds.
        is_aged: Whether the request has aged, or the device is kept for it, so that leases of all
            classes give way.
    """
    left, priority = _Left(allocator, request, grant), request.class_state.priority
    if left.is_enough():
        return None
    if priority > grant.class_state.priority and (now_enough := left.keeps_now(grant)) is not None:
        return now_enough
    elastic = sorted(left.elastic, key=lambda lease: (lease.class_state.priority, lease.began))
    lower = [lease for lease in elastic if lease.class_state.priority <= priority]
    higher = elastic[len(lower) :] if is_aged else []
    if not is_aged:
        lower = [lease for lease in lower if lease.class_state.priority < priority]
    if grant not in lower and grant not in higher:
        return None
    keeps, least = None, grant.request.target[0].least
    for group in (lower, higher):
        for is_least in (True, False):
            for other in group:
                if not is_least and group is higher and other.will_end(now):
                    continue
                kept = other.request.target[0].least if is_least else 0
                left.keep(other, kept)
                if other is grant:
                    keeps = kept
                if left.is_enough():
                    return keeps
    return grant.sms if grant in higher else least


class _Left:
    """The cells of a device that would be free for a request."""

    def __init__(self, allocator: SMAllocator, request: Request, lease: Grant) -> None:
        self._allocator, self._request, self._device = allocator, request, lease.device
        self._cells = allocator.devices[lease.device]
        self._left: dict[Grant, int] = {}
        #: The leases that give SMs back at checkpoints.
        self.elastic: list[Grant] = []
        priority = request.class_state.priority
        is_lower = lease.class_state.priority < priority
        for grant in allocator.grants[lease.device]:
            if grant.draining:
                self._left[grant] = grant.mask & self._cells.full_mask
            elif grant.request.is_elastic and not grant.is_shared:
                self.elastic.append(grant)
                if not (is_lower and grant.class_state.priority >= priority):
                    self.keep(grant, grant.request.target[0].least)

    def keep(self, grant: Grant, sms: int) -> None:
        """Let an elastic lease keep this many of its SMs, or none (0)."""
        self._left[grant] = self._given(grant, sms)

    def _given(self, grant: Grant, sms: int) -> int:
        kept = self._cells.fit(grant.mask, SizeRange(sms, sms)) if sms else 0
        return 0 if sms and not kept else grant.mask & ~kept

    def is_enough(self) -> bool:
        """Say whether the request fits."""
        return self._allocator.would_fit(self._request, self._device, self._left)

    def keeps_now(self, grant: Grant) -> int | None:
        """Return what a lease may keep so that the request fits now, or None."""
        for sms in (grant.request.target[0].least, 0):
            freed = {grant: self._given(grant, sms)}
            if self._allocator.would_fit(self._request, self._device, freed):
                return sms
        return None
