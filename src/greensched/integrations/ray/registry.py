"""The pools of a fleet: discovered, started, connected and replaced, for one program."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from greensched import Pool
from greensched.errors import GreenschedError, InvalidRequest, NoPool, PoolLost
from greensched.integrations.ray import gpus, protocol
from greensched.integrations.ray.balancing import check_apart
from greensched.integrations.ray.connection import PoolConnection
from greensched.integrations.ray.pool_actor import actor

logger = logging.getLogger("greensched")

#: The Ray namespace of the actors' names, where any program of the cluster finds them.
NAMESPACE = "greensched"
#: Seconds between two attempts to connect to a pool that is away. A call costs 1 ms.
RECONNECT = 0.05
#: The same, for a pool that runs and does not open.
RETRY_OPEN = 1.0
#: Seconds between two discoveries of new GPUs and new pools.
DISCOVER = 1.0
#: The same while a pool is away.
DISCOVER_AWAY = 0.1
#: Seconds with more GPUs than pools, none of which is away, before another pool is started: Ray
#: counts the GPUs of a lost node for some time (15 s, Ray 2.60).
SPARE = 30.0


class PoolRegistry:
    """The pools of a fleet: an actor for each, and a connection while it can be reached.

    Args:
        name, make, pools, detached: as for `Fleet`.
        code: the functions of this program, by digest.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Pool] | None,
        pools: int | None,
        detached: bool,
        code: Mapping[bytes, bytes],
    ) -> None:
        self._name, self._make, self._wanted, self._detached = name, make, pools, detached
        self._code = code
        self.handles: dict[str, Any] = {}
        #: The connections to pools that are not away.
        self.connections: dict[str, PoolConnection] = {}
        #: The most SMs of one lease, and the node, of each pool, including those that are away.
        self.most: dict[str, int] = {}
        self._nodes: dict[str, str] = {}
        #: Pools on lost nodes, by the names of those that were started to replace them.
        self._replacements: dict[str, str] = {}
        self._maintaining: dict[str, asyncio.Task[None]] = {}
        self._first: dict[str, asyncio.Future[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._spare = 0.0
        self._news = asyncio.Event()
        self.is_open = False

    # -- open and close ----------------------------------------------------------------------------

    async def open(self) -> None:
        """Start missing pools, and wait until all are connected; see `Fleet.__aenter__`."""
        try:
            await self._discover(start=True)
            if not self.handles:
                raise NoPool(
                    f"the fleet {self._name!r} has no pool: start one with make= on a cluster "
                    "with GPUs"
                )
            await asyncio.gather(*self._first.values())
        except BaseException:
            self.close()
            raise
        self.is_open = True
        self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self.is_open = False
        for task in (*self._maintaining.values(), self._watching):
            if task is not None:
                task.cancel()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self._notify()

    async def stop(self, grace: float) -> None:
        """Close every connection and every pool."""
        handles, self.handles = [*self.handles.values()], {}
        self.close()
        stops = [handle.stop.remote(grace) for handle in handles]
        for stop in stops:
            with suppress(RayError):  # it is away, or has ended already
                await stop
        for handle in handles:
            await asyncio.to_thread(ray.kill, handle, no_restart=True)

    async def wait_for_change(self) -> None:
        """Wait until a pool connects, or the fleet is closed."""
        await self._news.wait()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # -- discovery ---------------------------------------------------------------------------------

    async def _discover(self, *, start: bool, more: int = 0) -> list[str]:
        """Register new pools, and start missing ones, or `more`; return their names."""
        found = await asyncio.to_thread(self._find, start, more)
        for name, handle in found.items():
            self.handles[name] = handle
            self._first[name] = asyncio.get_running_loop().create_future()
            self._maintaining[name] = asyncio.create_task(self._maintain(name, handle))
        return [*found]

    def _find(self, start: bool, more: int) -> dict[str, Any]:
        """Return new actors of the fleet by name. Blocks on Ray."""
        if not ray.is_initialized():
            raise NoPool("Ray is not connected: call ray.init(...) first")
        named = ray.util.list_named_actors(all_namespaces=True)
        names_there = {one["name"] for one in named if one["namespace"] == NAMESPACE}
        names_there = {name for name in names_there if name.startswith(f"{self._name}/")}
        found = {}
        for name in names_there - self.handles.keys():
            with suppress(ValueError):  # it has ended since
                found[name] = ray.get_actor(name, NAMESPACE)
        if self._make is not None and start:
            wanted = gpus.count() if self._wanted is None else self._wanted
            lacks = more or max(0, wanted - len(names_there))
            if lacks:
                gpus.check_free(lacks)
            names = (f"{self._name}/{n}" for n in range(len(names_there) + lacks))
            for name in [name for name in names if name not in names_there][:lacks]:
                found[name] = actor(name, self._make, NAMESPACE, detached=self._detached)
        return found

    async def _watch(self) -> None:
        """Discover new GPUs and pools repeatedly, more often while a pool is away."""
        while True:
            is_away = len(self.connections) < len(self.handles)
            await asyncio.sleep(DISCOVER_AWAY if is_away else DISCOVER)
            try:
                if is_away:
                    await self._replace()
                await self._discover(start=await self._has_spare_gpus())
            except (GreenschedError, RayError) as error:
                logger.warning("the fleet %r does not grow: %s", self._name, error)

    async def _replace(self) -> None:
        """Start pools on GPUs that have joined, to replace those on lost nodes.

        Ray would restart the latter, but detects a lost node late. Whichever runs first stays.
        """
        away = {name: self._nodes[name] for name in self._nodes.keys() - self.connections.keys()}
        away = {
            name: node for name, node in away.items() if name not in self._replacements.values()
        }
        if self._make is None or not away:
            return
        lost = await asyncio.to_thread(gpus.gone, {*away.values()})
        old = [name for name, node in away.items() if node in lost]
        has = len(self.handles) - len(old)
        new = min(len(old), await asyncio.to_thread(gpus.count, lost) - has)
        if old and new > 0 and await asyncio.to_thread(gpus.free) >= new:
            names = await self._discover(start=True, more=new)
            self._replacements.update(zip(names, old, strict=False))

    async def _abandon(self, name: str) -> None:
        """Keep Ray from restarting a pool that was replaced."""
        handle = self.handles.get(name)
        if handle is not None and name not in self.connections:
            await asyncio.to_thread(ray.kill, handle, no_restart=True)

    async def _has_spare_gpus(self) -> bool:
        """Say whether there have long been more GPUs than pools, and no pool is away."""
        if self._make is None or self._wanted is not None or not self.handles:
            return False  # without handles, the fleet was stopped
        count = await asyncio.to_thread(gpus.count)
        if count <= len(self.handles) or len(self.connections) < len(self.handles):
            self._spare = 0.0
            return False
        self._spare += DISCOVER
        return self._spare >= SPARE

    # -- one pool ----------------------------------------------------------------------------------

    async def _maintain(self, name: str, handle: Any) -> None:
        """Keep a connection to one pool as long as Ray keeps its actor."""
        while (connection := await self._connect(name, handle)) is not None:
            self.connections[name] = connection
            self.most[name], self._nodes[name] = connection.most, connection.node
            if name in self._replacements:
                await self._abandon(self._replacements.pop(name))
            if not self._first[name].done():
                self._first[name].set_result(None)
            self._notify()
            await asyncio.wait([connection.closed])
            del self.connections[name]
            logger.warning("%s is away: %s", name, connection.closed.result())
        del self.handles[name]
        self.most.pop(name, None)
        self._nodes.pop(name, None)

    async def _connect(self, name: str, handle: Any) -> PoolConnection | None:
        """Connect to a pool, trying until it replies; None if Ray has given its actor up."""
        while True:
            key = uuid.uuid4().hex
            try:
                info = await handle.hello.remote(key, protocol.PROTOCOL)
                check_apart(info, self.connections.values())
            except RayTaskError as error:
                self._reject(name, error.cause)
                await asyncio.sleep(RETRY_OPEN)
            except InvalidRequest as error:
                self._reject(name, error)
                await asyncio.sleep(RETRY_OPEN)
            except RayActorError as error:
                if await asyncio.to_thread(_is_given_up, name):
                    self._reject(name, PoolLost(name, str(error).splitlines()[0]))
                    return None
                await asyncio.sleep(RECONNECT)
            else:
                return PoolConnection(handle, key, info, self._code)

    def _reject(self, name: str, error: BaseException) -> None:
        """Report that a pool cannot be used: to `open` at first, to the log later."""
        first = self._first[name]
        if first.done():
            logger.warning("%s cannot be used: %s", name, error)
        else:
            first.set_exception(error)
            first.exception()  # marked as retrieved: several may fail, and `open` raises one


def _is_given_up(name: str) -> bool:
    """Say whether Ray has given an actor up. Blocks on Ray."""
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return True
    return False
