"""What happens when a device is lost: a device fault ends the pool and all waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Protocol

from greensched.errors import DeviceLost
from greensched.execution.completion_poller import PollerRegistry
from greensched.execution.lease import Lease
from greensched.leasing.device_pool import DevicePool
from greensched.leasing.lease_records import LeaseRecords
from greensched.leasing.pool_state import PoolState
from greensched.leasing.watchdog import ExitPolicy, end_process
from greensched.records import holder_name


class LosingHost(Protocol):
    """What the loss of a device needs from the manager."""

    lock: RLock
    state: PoolState
    device_pools: tuple[DevicePool, ...]
    leases: set[Lease]
    pollers: PollerRegistry
    records: LeaseRecords
    exit_policy: ExitPolicy

    def stop_granting_locked(self, error: Callable[[], Exception]) -> None: ...

    def refuse_closed(self) -> None: ...


def device_lost(host: LosingHost, error: BaseException) -> None:
    """End the pool because of a device fault. Repeated calls do nothing. From any thread.

    Each later use of the pool raises `DeviceLost` with this cause; no further CUDA call is made.
    """
    with host.lock:
        if first_fault(host.device_pools) is not None or host.state is PoolState.CLOSED:
            return
        host.state = PoolState.POISONED
        host.stop_granting_locked(lambda: DeviceLost(error))
        pollers = host.pollers.all_locked()
        for device_pool in host.device_pools:
            device_pool.device_failed(error)
        leased = []
        for lease in host.leases:
            lease.close_bound_launches()
            if not lease.grant.over:
                holder = lease.holder or holder_name(lease.grant.holder)
                leased.append(f"{holder} ({lease.grant.sms} SMs)")
    host.refuse_closed()
    for poller in pollers:
        poller.kick_threadsafe()
    host.records.lost(error, sorted(leased))
    end_process(host.exit_policy)


def first_fault(device_pools: Sequence[DevicePool]) -> BaseException | None:
    """Return the first device fault of a pool, or None."""
    failures = (device_pool.device.health.failure for device_pool in device_pools)
    return next((failure for failure in failures if failure is not None), None)
