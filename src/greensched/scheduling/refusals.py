"""Refusals: errors of requests that may not be queued, and the time after which to retry."""

from __future__ import annotations

from collections.abc import Sequence

from greensched.errors import WouldBlock, WouldDeadlock
from greensched.scheduling import shared_grants
from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.cells import SizeRange
from greensched.scheduling.class_state import UNKNOWN_LEASE
from greensched.scheduling.dispatch import Dispatcher
from greensched.scheduling.requests import Request
from greensched.typing import ALL


def would_block(dispatcher: Dispatcher, request: Request) -> WouldBlock:
    """Return the error for a request that may not wait, and does not fit now."""
    if request.missing_executors:
        return WouldBlock(
            "the SMs are free, but there is no executor for them yet: use "
            "`async with pool.partition(...)`, which waits for one"
        )
    allocator = dispatcher.allocator
    free = max(
        allocator.devices[d].largest_within(allocator.free_masks[d]) for d in request.devices
    )
    return WouldBlock(
        f"{dispatcher.asked(request)} SMs cannot be granted now ({free} are free; other "
        "requests may go first): use `async with pool.partition(...)`, which waits"
    )


def check_deadlock(dispatcher: Dispatcher, request: Request, able: Sequence[int]) -> None:
    """Refuse a request that cannot be granted while its own holder keeps its grants.

    Args:
        dispatcher: Knows the grants of each holder.
        request: The request.
        able: The devices on which it fits once all leases have ended.

    Raises:
        WouldDeadlock: It would wait for its own holder.
    """
    allocator, held = dispatcher.allocator, dispatcher.held_by(request)
    if not held or any(shared_grants.can_share(allocator, request, d) for d in able):
        return
    if any(allocator.can_ever_fit(request, d, held.get(d, 0)) for d in able):
        return
    most = holds = 0
    together: tuple[int, ...] = ()
    for device in able:
        cells, mask = allocator.devices[device], held.get(device, 0)
        most = max(most, cells.largest_within(allocator.reachable(request, device, mask)))
        sizes = [SizeRange(n, n) for n in dispatcher.held_sizes(request, device)]
        if not any(part.named is ALL for part in request.parts):
            reachable = allocator.reachable(request, device)
            nearest = cells.nearest(reachable, (*sizes, *request.parts))
            together = max(together, nearest, key=sum)
    holds = sum(allocator.devices[d].sm_count(mask) for d, mask in held.items())
    raise WouldDeadlock(holds, dispatcher.asked(request), most, together=together)


def retry_after(
    allocator: SMAllocator, request: Request, asked: int, now: float, mean_duration: float
) -> float:
    """Predict the seconds until the queue accepts a request again.

    That is when the first of the present leases ends, but not before a further lease could end. A
    further lease is assumed to take its expected duration, or else the mean of its class or of all
    leases, or else the shortest time that a present lease has taken so far.
    """
    grants = [grant for of_device in allocator.grants for grant in of_device]
    lease = (
        request.seconds(asked)
        or request.class_state.mean_duration
        or mean_duration
        or min((now - grant.began for grant in grants), default=0.0)
    )
    lease = max(lease, UNKNOWN_LEASE)
    ends = [lease if grant.ends is None else grant.ends - now for grant in grants]
    return max(lease, min(ends, default=0.0))
