"""greensched: an asyncio-first scheduler for CUDA green contexts.

Importing it loads neither CUDA nor numpy; each name is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greensched.device.buffers import Buffer as Buffer
    from greensched.device.buffers import PinnedBuffer as PinnedBuffer
    from greensched.device.device import Context as Context
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
    from greensched.leasing.preview import SplitPreview as SplitPreview
    from greensched.leasing.status import CloseReport as CloseReport
    from greensched.leasing.status import PoolState as PoolState
    from greensched.leasing.status import PoolStatistics as PoolStatistics
    from greensched.leasing.sync import SyncPartition as SyncPartition
    from greensched.leasing.sync import SyncPool as SyncPool
    from greensched.pool import Pool as Pool
    from greensched.scheduling.services import ServiceClass as ServiceClass
    from greensched.scheduling.statistics import ServiceStatistics as ServiceStatistics
    from greensched.typing import ALL as ALL
    from greensched.typing import REST as REST
    from greensched.typing import CacheConfig as CacheConfig
    from greensched.typing import ContextFlags as ContextFlags

#: Where each public name lives.
_EXPORTS = {
    "ALL": "typing",
    "BoundLaunch": "execution.bound_launch",
    "Buffer": "device.buffers",
    "CacheConfig": "typing",
    "CallContext": "execution.call_context",
    "CloseReport": "leasing.status",
    "Context": "device.device",  # which `Context.device` needs
    "ContextFlags": "typing",
    "ContextOptions": "device.resources",
    "Device": "device.device",
    "DeviceResources": "device.resources",
    "Event": "device.streams",
    "Prefetcher": "execution.prefetch",
    "Graph": "execution.graphs",
    "Job": "execution.jobs",
    "Kernel": "kernels",
    "LatencyCurve": "leasing.latency",
    "LaunchConfig": "device.launch",
    "Partition": "leasing.partition",
    "PinnedBuffer": "device.buffers",
    "SplitPreview": "leasing.preview",
    "Pool": "pool",
    "PoolState": "leasing.status",
    "PoolStatistics": "leasing.status",
    "Program": "kernels",
    "REST": "typing",
    "SMResource": "device.resources",
    "SMResourceOptions": "device.splitting",
    "ServiceClass": "scheduling.services",
    "ServiceStatistics": "scheduling.statistics",
    "Stream": "device.streams",
    "SyncPartition": "leasing.sync",
    "SyncPool": "leasing.sync",
    "WorkqueueResource": "device.resources",
    "WorkqueueResourceOptions": "device.resources",
    "register_call_hook": "execution.call_context",
    "call_context": "execution.call_context",
    "current_call": "execution.call_context",
    "launch": "device.launch",
}

__all__ = [*_EXPORTS]  # noqa: PLE0604  names of this module, loaded when asked for


def __getattr__(name: str) -> Any:
    """Load a public name from its module, or an error by its own name."""
    if name in ("errors", "typing", "driver", "kernels"):
        return import_module(f"greensched.{name}")
    module = import_module(f"greensched.{_EXPORTS.get(name, 'errors')}")
    try:
        value = getattr(module, name)
    except AttributeError:
        raise AttributeError(f"module 'greensched' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    errors = import_module("greensched.errors")
    mine = (
        n
        for n, v in vars(errors).items()
        if isinstance(v, type) and v.__module__ == errors.__name__
    )
    return sorted({*__all__, *mine, "errors", "kernels", "typing"})
