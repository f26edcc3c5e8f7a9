"""Statistics of the scheduler and its classes."""

from __future__ import annotations

from dataclasses import dataclass

from greensched.scheduling.histogram import Durations


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
