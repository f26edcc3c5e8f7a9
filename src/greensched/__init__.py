"""greensched: an asyncio-first scheduler for CUDA green contexts.

Importing it loads neither CUDA nor numpy; each name is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greensched.bound import Bound as Bound
    from greensched.buffers import Buffer as Buffer
    from greensched.buffers import PinnedBuffer as PinnedBuffer
    from greensched.calls import Call as Call
    from greensched.calls import around_calls as around_calls
    from greensched.calls import call_of as call_of
    from greensched.calls import current_call as current_call
    from greensched.curves import LatencyCurve as LatencyCurve
    from greensched.device import Context as Context
    from greensched.device import Device as Device
    from greensched.errors import *  # noqa: F403  every error is public
    from greensched.feeding import Feed as Feed
    from greensched.graphs import Graph as Graph
    from greensched.jobs import Job as Job
    from greensched.kernels import Kernel as Kernel
    from greensched.kernels import Program as Program
    from greensched.launcher import LaunchConfig as LaunchConfig
    from greensched.launcher import launch as launch
    from greensched.partition import Partition as Partition
    from greensched.planning.services import ServiceClass as ServiceClass
    from greensched.planning.statistics import ServiceStatistics as ServiceStatistics
    from greensched.plans import Plan as Plan
    from greensched.pool import Pool as Pool
    from greensched.resources import ContextOptions as ContextOptions
    from greensched.resources import DeviceResources as DeviceResources
    from greensched.resources import SMResource as SMResource
    from greensched.resources import WorkqueueResource as WorkqueueResource
    from greensched.resources import WorkqueueResourceOptions as WorkqueueResourceOptions
    from greensched.splitting import SMResourceOptions as SMResourceOptions
    from greensched.standing import CloseReport as CloseReport
    from greensched.standing import PoolState as PoolState
    from greensched.standing import PoolStatistics as PoolStatistics
    from greensched.stream import Event as Event
    from greensched.stream import Stream as Stream
    from greensched.sync import SyncPartition as SyncPartition
    from greensched.sync import SyncPool as SyncPool
    from greensched.typing import ALL as ALL
    from greensched.typing import REST as REST
    from greensched.typing import CacheConfig as CacheConfig
    from greensched.typing import ContextFlags as ContextFlags

#: Where each public name lives.
_ROOMS = {
    "ALL": "typing",
    "Bound": "bound",
    "Buffer": "buffers",
    "CacheConfig": "typing",
    "Call": "calls",
    "CloseReport": "standing",
    "Context": "device",  # which it needs for `Context.device`, and is above its own room
    "ContextFlags": "typing",
    "ContextOptions": "resources",
    "Device": "device",
    "DeviceResources": "resources",
    "Event": "stream",
    "Feed": "feeding",
    "Graph": "graphs",
    "Job": "jobs",
    "Kernel": "kernels",
    "LatencyCurve": "curves",
    "LaunchConfig": "launcher",
    "Partition": "partition",
    "PinnedBuffer": "buffers",
    "Plan": "plans",
    "Pool": "pool",
    "PoolState": "standing",
    "PoolStatistics": "standing",
    "Program": "kernels",
    "REST": "typing",
    "SMResource": "resources",
    "SMResourceOptions": "splitting",
    "ServiceClass": "planning.services",
    "ServiceStatistics": "planning.statistics",
    "Stream": "stream",
    "SyncPartition": "sync",
    "SyncPool": "sync",
    "WorkqueueResource": "resources",
    "WorkqueueResourceOptions": "resources",
    "around_calls": "calls",
    "call_of": "calls",
    "current_call": "calls",
    "launch": "launcher",
}

__all__ = [*_ROOMS]  # noqa: PLE0604  names of this module, loaded when asked for


def __getattr__(name: str) -> Any:
    """Loads a public name: from its room, or an error by its own name."""
    if name in ("errors", "typing", "driver", "kernels"):
        return import_module(f"greensched.{name}")
    room = import_module(f"greensched.{_ROOMS.get(name, 'errors')}")
    try:
        value = getattr(room, name)
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
