"""greensched: an asyncio-first scheduler for CUDA green contexts.

Importing it loads only the errors, neither CUDA nor numpy. Other names are loaded at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from greensched import errors

if TYPE_CHECKING:
    from greensched.context import Context as Context
    from greensched.device.buffers import Buffer as Buffer
    from greensched.device.buffers import PinnedBuffer as PinnedBuffer
    from greensched.device.device import Device as Device
    from greensched.device.launch import LaunchConfig as LaunchConfig
    from greensched.device.launch import launch as launch
    from greensched.device.resources import ContextOptions as ContextOptions
    from greensched.device.resources import DeviceResources as DeviceResources
    from greensched.device.resources import SMResource as SMResource
    from greensched.device.resources import WorkqueueResource as WorkqueueResource
    from greensched.device.resources import WorkqueueResourceOptions as WorkqueueResourceOptions
    from greensched.device.splitting import SMResourceOptions as SMResourceOptions
    from greensched.device.streams import Event as Event
    from greensched.device.streams import Stream as Stream
    from greensched.errors import *  # noqa: F403  every error is public
    from greensched.execution.bound_launch import BoundLaunch as BoundLaunch
    from greensched.execution.call_context import CallContext as CallContext
    from greensched.execution.call_context import call_context as call_context
    from greensched.execution.call_context import current_call as current_call
    from greensched.execution.call_context import register_call_hook as register_call_hook
    from greensched.execution.graphs import Graph as Graph
    from greensched.execution.jobs import Job as Job
    from greensched.execution.prefetch import Prefetcher as Prefetcher
    from greensched.kernels import Kernel as Kernel
    from greensched.kernels import Program as Program
    from greensched.leasing.latency import LatencyCurve as LatencyCurve
    from greensched.leasing.partition import Partition as Partition
    from greensched.leasing.pool_state import CloseReport as CloseReport
    from greensched.leasing.pool_state import PoolState as PoolState
    from greensched.leasing.pool_statistics import LeaseInfo as LeaseInfo
    from greensched.leasing.pool_statistics import PoolStatistics as PoolStatistics
    from greensched.leasing.prepared_executors import ExecutorInfo as ExecutorInfo
    from greensched.leasing.preview import SplitPreview as SplitPreview
    from greensched.leasing.sync import SyncPartition as SyncPartition
    from greensched.leasing.sync import SyncPool as SyncPool
    from greensched.observability.snapshot import Snapshot as Snapshot
    from greensched.observability.trace import Trace as Trace
    from greensched.pool import Pool as Pool
    from greensched.records import Cancelled as Cancelled
    from greensched.records import Done as Done
    from greensched.records import Drained as Drained
    from greensched.records import Expired as Expired
    from greensched.records import Granted as Granted
    from greensched.records import Lent as Lent
    from greensched.records import Lost as Lost
    from greensched.records import Queued as Queued
    from greensched.records import Reclaimed as Reclaimed
    from greensched.records import Record as Record
    from greensched.records import Refused as Refused
    from greensched.records import Released as Released
    from greensched.records import Requested as Requested
    from greensched.records import Resized as Resized
    from greensched.records import Submitted as Submitted
    from greensched.scheduling.histogram import Durations as Durations
    from greensched.scheduling.services import ServiceClass as ServiceClass
    from greensched.scheduling.statistics import ServiceStatistics as ServiceStatistics
    from greensched.typing import ALL as ALL
    from greensched.typing import REST as REST
    from greensched.typing import CacheConfig as CacheConfig
    from greensched.typing import ContextFlags as ContextFlags

    __version__: str

#: The public names of each module.
_NAMES = {
    "context": "Context",
    "device.buffers": "Buffer PinnedBuffer",
    "device.device": "Device",
    "device.launch": "LaunchConfig launch",
    "device.resources": (
        "ContextOptions DeviceResources SMResource WorkqueueResource WorkqueueResourceOptions"
    ),
    "device.splitting": "SMResourceOptions",
    "device.streams": "Event Stream",
    "execution.bound_launch": "BoundLaunch",
    "execution.call_context": "CallContext call_context current_call register_call_hook",
    "execution.graphs": "Graph",
    "execution.jobs": "Job",
    "execution.prefetch": "Prefetcher",
    "kernels": "Kernel Program",
    "leasing.latency": "LatencyCurve",
    "leasing.partition": "Partition",
    "leasing.pool_state": "CloseReport PoolState",
    "leasing.pool_statistics": "LeaseInfo PoolStatistics",
    "leasing.prepared_executors": "ExecutorInfo",
    "leasing.preview": "SplitPreview",
    "leasing.sync": "SyncPartition SyncPool",
    "observability.snapshot": "Snapshot",
    "observability.trace": "Trace",
    "pool": "Pool",
    "records": (
        "Cancelled Done Drained Expired Granted Lent Lost Queued Reclaimed Record Refused Released "
        "Requested Resized Submitted"
    ),
    "scheduling.histogram": "Durations",
    "scheduling.services": "ServiceClass",
    "scheduling.statistics": "ServiceStatistics",
    "typing": "ALL CacheConfig ContextFlags REST",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and value.__module__ == errors.__name__ and name[0] != "_"
}
globals().update(_ERRORS)

__all__ = ["__version__", *_MODULES, *_ERRORS]  # noqa: PLE0604  names that `__getattr__` loads


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value = version("greensched")
        except PackageNotFoundError:  # `hasattr` and `getattr` expect AttributeError
            raise AttributeError("greensched has no __version__: it is not installed") from None
    elif name in ("typing", "driver", "kernels"):
        return import_module(f"greensched.{name}")
    elif name in _MODULES:
        value = getattr(import_module(f"greensched.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'greensched' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "errors", "kernels", "typing"})
