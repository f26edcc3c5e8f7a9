"""Snapshots: the state of a pool, its leases and its queue at one moment."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from greensched.leasing.device_pool import DevicePool
from greensched.leasing.manager import LeaseManager
from greensched.leasing.pool_lifecycle import PoolLifecycle
from greensched.leasing.pool_state import PoolState
from greensched.leasing.pool_statistics import LeaseInfo
from greensched.observability.waiting import WaitingRequest, describe
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.histogram import Durations
from greensched.scheduling.policy import Fair, Policy
from greensched.scheduling.requests import Request, by_rank
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import NO_CAP
from greensched.scheduling.statistics import ServiceStatistics

CellState = Literal["free", "leased", "draining", "hung"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a device.

    Attributes:
        sms: The number of its SMs.
        state: `draining`: its lease has ended, but not the lease's work. `hung`: its work has
            taken longer than `hang_after`.
        services: The classes of its leases; several only if leases are shared.
        leases: The indices of its leases in `DeviceSnapshot.leases`; empty until the granted task
            resumes.
        owner: The class of the reserve that it belongs to: if the cell is free, it is kept for
            this class, otherwise this class lends it. "": none.
    """

    sms: int
    state: CellState
    services: tuple[str, ...] = ()
    leases: tuple[int, ...] = ()
    owner: str = ""


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One device of a pool.

    Attributes:
        device: The device's ordinal.
        failure: The fault that made it unusable, or "".
        hung: What hangs, and where: one sentence for each executor.
        cells: All cells in order; the last one is the remainder of the split.
        leases: The leases that hold its SMs, oldest first.
    """

    device: int
    name: str
    uuid: str
    sms: int
    failure: str
    hung: tuple[str, ...]
    cells: tuple[Cell, ...]
    leases: tuple[LeaseInfo, ...]


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """One service class. Times are in seconds.

    Attributes:
        name: The name; "" for requests without a class.
        sms: The SMs that it holds, including draining ones.
        sms_draining: The SMs of ended leases whose work is not done.
        sms_lent, sms_borrowed: SMs of its reserve that other classes hold, and the reverse.
        cap: The most SMs that it may hold. None: all.
        share: The fraction of SM-time that it is due: by weight with `policy="fair"`, otherwise
            by its reserve.
        sm_time: The fraction of all classes' SM-time that it had. None: not known yet.
        sm_seconds: The SM-time of its leases since the start. None: not counted.
        wait_p50: The median wait for a grant. None: there was no wait, or leases are not timed
            (`Pool.time_leases`).
        wait_p99: The 99th percentile of waits.
        use_p50: The median time from grant to end of block.
        use_p99: The 99th percentile of these times.
        drain_p99: The 99th percentile of the drains of ended leases.
        first: Its first queued request. None: no request is queued, or a policy is deciding now.
    """

    name: str
    reserve: int
    cap: int | None
    weight: float
    priority: float
    is_shared: bool
    sms: int
    sms_draining: int
    sms_lent: int
    sms_borrowed: int
    waiting: int
    granted: int
    cancelled: int
    expired: int
    refused: int
    share: float
    sm_time: float | None
    sm_seconds: float | None
    wait_p50: float | None
    wait_p99: float | None
    use_p50: float | None
    use_p99: float | None
    drain_p99: float | None
    first: WaitingRequest | None


@dataclass(frozen=True, slots=True)
class Event:
    """A rare event: its time, in seconds of the pool's clock, and a description."""

    time: float
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool at one moment; see `Pool.snapshot`. Times are in seconds of the pool's clock.

    Attributes:
        pid: The process id.
        time: When the snapshot was taken.
        state: The value of the `PoolState`, such as `open` or `poisoned`.
        opening_error: Why the last opening failed; "" after a successful one.
        driver: The name of the driver.
        policy: The name of the policy, such as `fifo`.
        waiting, max_waiting: The requests in the queue, and the most it can hold.
        requested, granted, cancelled, expired, refused: Numbers of requests since the start.
        is_timed: Whether leases are timed (`Pool.time_leases`); otherwise waits and uses are None.
        wake_p99: The 99th percentile of times from a grant until its task resumed, which a slow
            event loop makes long. None: there was no such time, or leases are not timed.
        degraded: One sentence for each feature that the pool lacks because a driver refused it.
        devices, services: Empty while the pool is not open.
        events: The last rare events, oldest first.
    """

    pid: int
    time: float
    state: str
    opening_error: str = ""
    driver: str = ""
    policy: str = ""
    waiting: int = 0
    max_waiting: int = 0
    requested: int = 0
    granted: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    is_timed: bool = False
    wake_p99: float | None = None
    degraded: tuple[str, ...] = ()
    devices: tuple[DeviceSnapshot, ...] = ()
    services: tuple[ServiceSnapshot, ...] = ()
    events: tuple[Event, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as values for `json.dumps`."""
        return asdict(self)


def take_snapshot(lifecycle: PoolLifecycle) -> Snapshot:
    """Return the present state of a pool, its leases and its queue. From any thread.

    It waits only for the pool's lock.

    Raises:
        InvalidRequest: Called by a policy or a curve, during an incomplete decision.
    """
    lifecycle.refuse_in_decision()
    manager = lifecycle.granting
    if manager is None or lifecycle.state is PoolState.FORKED:
        error = lifecycle.opening_error
        return Snapshot(
            os.getpid(), 0.0, lifecycle.state.value, "" if error is None else str(error)
        )
    manager.take_over_closed_loops()
    with manager.reads.read() as may_change:
        if may_change:
            manager.scheduler.reclaim(manager.driver.time())
        return _of_manager(manager, may_change=may_change)


def snapshots_of(lifecycle: PoolLifecycle) -> Callable[[], Snapshot]:
    """Return a function that takes snapshots of a pool, and does not keep the pool alive."""
    reference = weakref.ref(lifecycle)

    def take() -> Snapshot:
        pool = reference()
        if pool is None:
            return Snapshot(os.getpid(), 0.0, PoolState.CLOSED.value)
        return take_snapshot(pool)

    return take


def _of_manager(manager: LeaseManager, *, may_change: bool) -> Snapshot:
    held, now = manager.held_locked(), manager.driver.time()
    scheduler, statistics = manager.scheduler, manager.statistics_locked()
    policy = scheduler.queue.policy.policy
    return Snapshot(
        pid=os.getpid(),
        time=now,
        state=statistics.state.value,
        driver=manager.driver.name,
        policy=statistics.policy,
        waiting=statistics.waiting,
        max_waiting=scheduler.max_waiting,
        requested=statistics.requested,
        granted=statistics.granted,
        cancelled=statistics.cancelled,
        expired=statistics.expired,
        refused=statistics.refused,
        is_timed=statistics.wake is not None,
        wake_p99=_quantile(statistics.wake, 0.99),
        degraded=statistics.degraded,
        devices=tuple(
            _device(device_pool, scheduler, index, held)
            for index, device_pool in enumerate(manager.device_pools)
        ),
        services=_services(manager, statistics.services, now, policy, may_change=may_change),
        events=tuple(Event(*event) for event in manager.records.recent.copy()),
    )


# -- devices -----------------------------------------------------------------------------------


def _device(
    device_pool: DevicePool, scheduler: Scheduler, index: int, held: Iterable[LeaseInfo]
) -> DeviceSnapshot:
    device = device_pool.device
    failure = device.health.failure
    leases = tuple(info for info in held if info.device == device.ordinal)
    hung = [executor for executor in device_pool.executors.values() if executor.hang is not None]
    return DeviceSnapshot(
        device.ordinal,
        device.name,
        device.uuid,
        device_pool.cells.total,
        "" if failure is None else str(failure),
        tuple(str(executor.hang) for executor in hung),
        _cells(scheduler, index, leases, tuple(executor.mask for executor in hung)),
        leases,
    )


def _cells(
    scheduler: Scheduler, index: int, leases: tuple[LeaseInfo, ...], hung: tuple[int, ...]
) -> tuple[Cell, ...]:
    allocator, grants = scheduler.allocator, tuple(scheduler.allocator.grants[index])
    cells, owners = allocator.devices[index], _owners(scheduler, index)
    cell_list = []
    for number in range(cells.full_mask.bit_length()):
        cell = 1 << number
        holders = [grant for grant in grants if grant.mask & cell]
        state: CellState = "leased" if holders else "free"
        if holders and all(grant.draining for grant in holders):
            state = "draining"
        if any(mask & cell for mask in hung):
            state = "hung"
        cell_list.append(
            Cell(
                cells.sm_count(cell),
                state,
                tuple(dict.fromkeys(grant.class_state.name for grant in holders)),
                tuple(i for i, lease in enumerate(leases) if lease.cells & cell),
                owners.get(cell, ""),
            )
        )
    return tuple(cell_list)


def _owners(scheduler: Scheduler, index: int) -> dict[int, str]:
    """Return the owner of each cell that is lent, or free and kept for the owner.

    A reserve is a number of cells. The result names cells of the owner's own block, if these are
    held or free, and then other cells.
    """
    allocator, owners = scheduler.allocator, dict[int, str]()
    reservations = allocator.reservations[index]

    def mark(owner: ClassState, among: int, count: int) -> None:
        block = reservations.blocks.get(owner, 0)
        for part in (among & block, among & ~block):
            for number in range(part.bit_length()):
                if count and part >> number & 1 and 1 << number not in owners:
                    owners[1 << number] = owner.name
                    count -= 1

    for grant in reservations.borrowers:
        for owner, count in grant.loans.items():
            mark(owner, grant.mask & allocator.devices[index].cell_mask, count)
    free = allocator.free_masks[index] & allocator.devices[index].cell_mask
    for owner in reservations.owners:
        mark(owner, free, owner.reserved_free)
    return owners


# -- classes -----------------------------------------------------------------------------------


def _services(
    manager: LeaseManager,
    counted: Mapping[str, ServiceStatistics],
    now: float,
    policy: Policy,
    *,
    may_change: bool,
) -> tuple[ServiceSnapshot, ...]:
    scheduler = manager.scheduler
    states = scheduler.allocator.classes
    grants = [grant for of_device in scheduler.allocator.grants for grant in of_device]
    sm_seconds = {name: statistics.sm_seconds for name, statistics in counted.items()}
    all_seconds, firsts = sum(sm_seconds.values()), _firsts(scheduler) if may_change else {}
    used = [
        state for name, state in states.items() if name or state.waiting or sm_seconds.get(name)
    ]
    weights, is_fair = sum(state.weight for state in used), isinstance(policy, Fair)
    ordinals = [device_pool.device.ordinal for device_pool in manager.device_pools]
    snapshots = []
    for name, state in states.items():
        statistics = counted.get(name)
        wait, use, drain = (
            (statistics.wait, statistics.use, statistics.drain)
            if statistics
            else (None, None, None)
        )
        reserve = state.reserve_cells * scheduler.allocator.devices[state.home].size
        due = state.weight / weights if is_fair and state in used else 0.0
        first = firsts.get(state)
        snapshots.append(
            ServiceSnapshot(
                name=name,
                reserve=reserve,
                cap=None if state.cap >= NO_CAP else state.cap,
                weight=state.weight,
                priority=state.priority,
                is_shared=state.shared and not scheduler.allocator.split_controller.is_split,
                sms=state.sms,
                sms_draining=sum(x.sms for x in grants if x.class_state is state and x.draining),
                sms_lent=state.lent * scheduler.allocator.devices[state.home].size,
                sms_borrowed=_borrowed(scheduler, state),
                waiting=state.waiting,
                granted=scheduler.granted if statistics is None else statistics.granted,
                cancelled=state.cancelled,
                expired=state.expired,
                refused=state.refused,
                share=due if is_fair else reserve / scheduler.allocator.total,
                sm_time=sm_seconds[name] / all_seconds if statistics and all_seconds else None,
                sm_seconds=None if statistics is None else statistics.sm_seconds,
                wait_p50=_quantile(wait, 0.5),
                wait_p99=_quantile(wait, 0.99),
                use_p50=_quantile(use, 0.5),
                use_p99=_quantile(use, 0.99),
                drain_p99=_quantile(drain, 0.99),
                first=None if first is None else describe(scheduler, ordinals, first, now),
            )
        )
    return tuple(snapshots)


def _borrowed(scheduler: Scheduler, state: ClassState) -> int:
    """Return how many SMs of other reserves a class holds."""
    allocator = scheduler.allocator
    return sum(
        sum(grant.loans.values()) * allocator.devices[grant.device].size
        for reservations in allocator.reservations
        for grant in reservations.borrowers
        if grant.class_state is state
    )


def _firsts(scheduler: Scheduler) -> dict[ClassState, Request]:
    """Return each class's first queued request, or the request for which a device is kept."""
    queue, firsts = scheduler.queue, dict[ClassState, Request]()
    for request in sorted(queue.firsts(), key=by_rank):
        firsts.setdefault(request.class_state, request)
    if queue.reservation is not None:
        first = queue.reservation.request
        firsts[first.class_state] = first
    return firsts


def _quantile(durations: Durations | None, fraction: float) -> float | None:
    return None if durations is None else durations.quantile(fraction)
