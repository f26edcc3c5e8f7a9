"""The executors that a class uses, and values that are made on them before traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from greensched.errors import InvalidRequest
from greensched.execution.progress import ProgressCallback
from greensched.execution.worker_calls import check_blocking
from greensched.leasing.partition import Partition
from greensched.leasing.pool_lifecycle import PoolLifecycle
from greensched.leasing.requests import LeaseRequest
from greensched.scheduling.cells import SizeRange


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """An executor that leases of a class use.

    Attributes:
        device_id: The ordinal of the device.
        sm_count: The number of SMs.
        cells: The cells of the device, as a bit mask.
    """

    device_id: int
    sm_count: int
    cells: int


def executors(lifecycle: PoolLifecycle, service: str) -> tuple[ExecutorInfo, ...]:
    """See `Pool.executors`."""
    manager = lifecycle.manager()
    manager.check()
    infos = [
        ExecutorInfo(device_pool.device.ordinal, device_pool.cells.sm_count(mask), mask)
        for index, device_pool in enumerate(manager.device_pools)
        for mask in manager.scheduler.home_masks(index, service)
    ]
    if not infos:
        raise InvalidRequest(
            f"service {service!r} names no sizes, so its leases may use any executor: give it "
            "some, such as ServiceClass(..., sizes=(24, 48))"
        )
    return tuple(infos)


async def prepare_local(
    lifecycle: PoolLifecycle,
    service: str,
    factory: Callable[[], Any],
    progress: ProgressCallback | None,
) -> None:
    """See `Pool.prepare_local`."""
    check_blocking(factory)
    infos = executors(lifecycle, service)
    for done, info in enumerate(infos, 1):
        sms = info.sm_count
        request = LeaseRequest((SizeRange(sms, sms),), (sms,), device=info.device_id)
        lease = await lifecycle.manager().claim(request, info.cells)
        values = lease.executor.locals
        values.is_prepared = True
        try:
            async with Partition(lifecycle, request, lease) as p:
                p.local(factory)  # leaving the block waits for it, and raises its failure
        finally:
            values.is_prepared = False
        if progress is not None:
            progress(done, len(infos))
