"""The statistics of a pool: what it has and did, at one moment."""

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
    """What a pool has and did: SMs over all devices, counts since it was opened.

    Attributes:
        waiting, requested, granted, cancelled, expired, refused: requests.
        sms_leased, sms_draining: of the `sms_total`.
        sms_free: the SMs that one request can get now, summed over the devices: fewer than the
            rest where free SMs do not fit into one partition.
        values_made: values of `p.local`, and executable graphs of `p.capture`, that were made in a
            lease: what `prepare_local` made before traffic does not count.
        completion: `"word"` if streams write tickets to memory; `"event"` if they cannot here.
        degraded: what the pool does without because a driver refused it at `open`: a sentence each.
        services: the statistics of each class; "": of requests that name none.
        wake: how long after its grant a queued request's task went on: what a slow event loop
            costs. None unless `Pool.time_leases` was called: counted since.
        executors_hung: executors with work that hangs now, whose SMs are not granted (`Pool.hung`).
    """

    state: PoolState
    devices: int
    sms_total: int
    leases: int
    executors: int
    executors_made: int
    values_made: int
    completion: str
    degraded: tuple[str, ...]
    services: Mapping[str, ServiceStatistics]
    wake: Durations | None = None
    executors_hung: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the same as values that `json.dumps` takes."""
        return {**asdict(self), "state": self.state.value}


def collect_statistics(
    state: PoolState,
    device_pools: Sequence[DevicePool],
    leases: int,
    scheduler: Scheduler,
    now: float,
    wake: Durations | None,
) -> PoolStatistics:
    """Collect what a pool has and did, at one moment; the caller holds the manager's lock."""
    executors = [executor for each in device_pools for executor in each.executors.values()]
    return PoolStatistics(
        state=state,
        devices=len(device_pools),
        sms_total=sum(each.cells.total for each in device_pools),
        leases=leases,
        executors=len(executors),
        executors_made=sum(each.builder.made for each in device_pools),
        values_made=sum(each.values_made for each in device_pools)
        + sum(executor.locals.made for executor in executors),
        completion="event" if executors and executors[0].uses_events else "word",
        degraded=tuple(what for each in device_pools for what in each.degraded),
        services=scheduler.services(now),
        wake=wake,
        executors_hung=sum(executor.hang is not None for executor in executors),
        **asdict(scheduler.statistics()),
    )


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease that holds SMs; see `Pool.leases`.

    Attributes:
        holder: the name of its task or thread.
        service: its class; "": none.
        device: the ordinal.
        sms: how many, in so many `cells`, a bit mask.
        since: when it was granted, in seconds as of `Record.time`.
        draining_since: when its block was left, while its work still runs; None: it was not.
        place: where the code took it, known of leases of a range of sizes; "": not known.
    """

    holder: str
    service: str
    device: int
    sms: int
    cells: int
    since: float
    draining_since: float | None
    place: str
