"""The statistics of a pool: what it holds and has done, at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from greensched.leasing.device_pool import DevicePool
from greensched.leasing.pool_state import PoolState
from greensched.scheduling.histogram import Durations
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.statistics import SchedulerStatistics, ServiceStatistics


@dataclass(frozen=True, slots=True)
class PoolStatistics(SchedulerStatistics):
    """What a pool holds and has done: SMs of all devices, and counts since it was opened.

    Attributes:
        waiting, requested, granted, cancelled, expired, refused: Numbers of requests.
        sms_leased, sms_draining: How many of the `sms_total` SMs are leased or draining.
        sms_free: The SMs that one request can get now, summed over the devices. This excludes
            free SMs that do not fit into one partition with others.
        executors: How many green contexts exist for leases, about 6 MiB each. With 256 of them, a
            device makes another one only for a request that could wait for one without end.
        executors_made: How many of them were made so far, including those that no longer exist.
        values_made: How many values of `p.local` and executable graphs of `p.capture` leases
            made. Values that `prepare_local` made before traffic do not count.
        policy: The name of the policy, such as `"fifo"`.
        granularity: `"coscheduled"` or `"fine"`, as for `Pool`.
        completion: `"word"` if streams write tickets to memory; `"event"` if they cannot here.
        degraded: One sentence for each feature that a driver refused at `open`.
        services: The statistics of each class; "" is for requests without a class.
        wake: Times from a queued request's grant until its task resumed; a slow event loop makes
            them long. None before `Pool.time_leases` is called.
        executors_hung: Executors with hanging work, whose SMs are not granted (`Pool.hung`).
    """

    state: PoolState
    devices: int
    sms_total: int
    leases: int
    executors: int
    executors_made: int
    values_made: int
    policy: str
    granularity: str
    completion: str
    degraded: tuple[str, ...]
    services: Mapping[str, ServiceStatistics]
    wake: Durations | None = None
    executors_hung: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as values for `json.dumps`."""
        return {**asdict(self), "state": self.state.value}


def collect_statistics(
    state: PoolState,
    device_pools: Sequence[DevicePool],
    leases: int,
    scheduler: Scheduler,
    now: float,
    wake: Durations | None,
) -> PoolStatistics:
    """Collect the statistics of one moment. The caller holds the manager's lock."""
    executors = [
        executor for device_pool in device_pools for executor in device_pool.executors.values()
    ]
    return PoolStatistics(
        state=state,
        devices=len(device_pools),
        sms_total=sum(device_pool.cells.total for device_pool in device_pools),
        leases=leases,
        executors=len(executors),
        executors_made=sum(device_pool.builder.made for device_pool in device_pools),
        values_made=sum(executor.locals.made for executor in executors),
        policy=type(scheduler.queue.policy.policy).__name__.lower(),
        granularity="fine" if device_pools[0].builder.is_fine else "coscheduled",
        completion="event" if executors and executors[0].uses_events else "word",
        degraded=tuple(what for device_pool in device_pools for what in device_pool.degraded),
        services=scheduler.services(now),
        wake=wake,
        executors_hung=sum(executor.hang is not None for executor in executors),
        **asdict(scheduler.statistics()),
    )


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease that holds SMs; see `Pool.leases`.

    Attributes:
        holder: The name of its task or thread.
        service: Its class, or "".
        device: The ordinal of its device.
        sms: The number of its SMs; `cells` is their bit mask.
        since: When it was granted, in seconds as in `Record.time`.
        draining_since: When its block was left, if its work still runs; otherwise None.
        place: Where the code took it; "" if unknown. It is known for a range of sizes, and for all
            leases with `hang_after` or in Python's development mode.
    """

    holder: str
    service: str
    device: int
    sms: int
    cells: int
    since: float
    draining_since: float | None
    place: str
