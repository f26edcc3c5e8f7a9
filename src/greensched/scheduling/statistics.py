"""Statistics of the scheduler and its classes: SMs that are free, leased and draining; counts."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from itertools import chain

from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.histogram import Durations, durations
from greensched.scheduling.requests import Grant


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts since the start, and the present state.

    Every accepted request counts as `requested`, and then as `waiting`, `granted`, `expired` or
    `cancelled` (also if the pool closes, or if it can never be granted any more). A request
    that raised `QueueFull`, `WouldBlock` or `DeadlineImpossible` counts only as `refused`.

    `sms_free` is what a request can get: the SMs of the largest partition that the free cells of a
    device can form, summed over the devices. Other free SMs do not count.
    """

    waiting: int
    requested: int
    granted: int
    cancelled: int
    expired: int
    refused: int
    sms_free: int
    sms_leased: int
    sms_draining: int


@dataclass(frozen=True, slots=True)
class ServiceStatistics:
    """What a class holds and has used.

    Attributes:
        sms: The SMs that it holds, including those of ended leases whose work is not done.
        sms_lent: The SMs of its reserve that other classes have borrowed.
        waiting: The number of its queued requests.
        granted: The number of its leases since the start.
        sm_seconds: The SM-seconds of its leases so far, draining included.
        is_shared: Whether it gets all SMs of a device, shared with other such classes.
        reserve, weight: As in its `ServiceClass`, but with SMs of whole cells.
        cancelled, expired, refused: The numbers of its requests with other outcomes.
        wait, use, drain: How long its requests waited for a grant; its leases lasted, from the
            grant to the end of the block; and their work took after that. None unless
            `Pool.time_leases` was called, since which they count.
    """

    sms: int
    sms_lent: int
    waiting: int
    granted: int
    sm_seconds: float
    is_shared: bool
    reserve: int = 0
    weight: float = 1.0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    wait: Durations | None = None
    use: Durations | None = None
    drain: Durations | None = None


def count_sms(allocator: SMAllocator) -> tuple[int, int, int]:
    """Return `sms_free`, `sms_leased` and `sms_draining`, as in `SchedulerStatistics`."""
    free = leased = draining = 0
    for device, cells in enumerate(allocator.devices):
        held = all_held = 0
        for grant in allocator.grants[device]:
            all_held |= grant.mask
            held |= 0 if grant.draining else grant.mask
        leased += cells.sm_count(held & cells.full_mask)
        draining += cells.sm_count(all_held & ~held & cells.full_mask)
        free += cells.largest_within(cells.full_mask & ~all_held)
    return free, leased, draining


def granted_of(allocator: SMAllocator, state: ClassState, granted: int) -> int:
    """Return the number of granted requests of a class; `granted` counts all classes."""
    return state.granted if allocator.is_classed else granted


def statistics_by_class(
    allocator: SMAllocator, suspended: Container[Grant], granted: int, now: float
) -> dict[str, ServiceStatistics]:
    """Return statistics by class name; empty if there are no classes, unless leases are timed.

    Args:
        allocator: The classes and their grants.
        suspended: The suspended grants.
        granted: The number of granted requests of all classes.
        now: The time in seconds.
    """
    if not (allocator.is_classed or allocator.is_timed):
        return {}
    running: dict[ClassState, float] = {}
    for grant in chain.from_iterable(allocator.grants):
        state, is_suspended = grant.class_state, grant in suspended
        if grant.short_uses:
            allocator.count_short_uses(grant)
        used = allocator.unsettled_sm_time(grant, now, is_suspended=is_suspended)
        running[state] = running.get(state, 0.0) + used
    return {
        name: _of_class(
            allocator, state, granted_of(allocator, state, granted), running.get(state, 0.0)
        )
        for name, state in allocator.classes.items()
    }


def _of_class(
    allocator: SMAllocator, state: ClassState, granted: int, running: float
) -> ServiceStatistics:
    cells = allocator.devices[state.home].size
    wait: Durations | None = None
    use: Durations | None = None
    drain: Durations | None = None
    if allocator.is_timed:
        use = durations(state.use)
        wait = durations(state.wait, granted - state.untimed - sum(state.wait.counts))
        drain = durations(state.drain, use.count - sum(state.drain.counts))
    return ServiceStatistics(
        sms=state.sms,
        sms_lent=state.lent * cells,
        waiting=state.waiting,
        granted=granted,
        sm_seconds=state.sm_time + running,
        is_shared=state.shared and not allocator.split_controller.is_split,
        reserve=state.reserve_cells * cells,
        weight=state.weight,
        cancelled=state.cancelled,
        expired=state.expired,
        refused=state.refused,
        wait=wait,
        use=use,
        drain=drain,
    )
