"""What the scheduler and its classes have done so far."""

from __future__ import annotations

from dataclasses import dataclass

from greensched.scheduling.histogram import Durations


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts since the start, and the present state.

    Every accepted request counts as `requested`, and is then `waiting`, `granted`, `expired` or
    `cancelled` (also when the pool closes, or when it can never be granted any more). A request
    that raised `QueueFull`, `WouldBlock` or `DeadlineImpossible` counts as `refused` alone.

    `sms_free` is what a request can get: the SMs of the largest partition that the free cells of a
    device can form, summed over the devices. Free SMs that cannot be in it are not counted.
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
    """What a class holds, and what it had.

    Attributes:
        sms: SMs it holds, including those of ended leases whose work is not done.
        sms_lent: SMs of its reserve that other classes have borrowed.
        waiting: its queued requests.
        granted: its leases since the start.
        sm_seconds: what its leases took so far, draining included.
        is_shared: it is granted all SMs of a device, shared with other such classes.
        reserve, weight: of its `ServiceClass`; SMs are whole cells.
        cancelled, expired, refused: its requests that ended otherwise.
        wait, use, drain: how long its requests waited for a grant; its leases lasted, from the
            grant to the end of the block; and their work took after that. None unless
            `Pool.time_leases` was called: counted since.
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
