"""Which pools of a fleet there are: found, begun, reached, and replaced, for one program."""

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

#: Where the actors' names are, so that any program of the cluster finds them.
NAMESPACE = "greensched"
#: Seconds between two attempts to reach a pool that is away. A call to one costs 1 ms.
PING = 0.05
#: The same, of one that is there and does not open.
UNWELL = 1.0
#: Seconds between two looks for new GPUs and new pools.
LOOK = 1.0
#: The same, while a pool is away.
AWAY = 0.1
#: Seconds for which there must be more GPUs than pools, all of these being there, until one more is
#: begun: Ray counts the GPUs of a lost node for some time (15 s, Ray 2.60).
SURPLUS = 30.0


class PoolRegistry:
    """The pools of a fleet, each with an actor, and with a line from here while it is there.

    Args:
        name, make, pools, detached: as of `Fleet`.
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
        #: Those that are there.
        self.lines: dict[str, PoolConnection] = {}
        #: The most SMs of one lease, and the node, of each pool, also while it is away.
        self.most: dict[str, int] = {}
        self._nodes: dict[str, str] = {}
        #: Pools that were begun instead of one on a lost node.
        self._instead: dict[str, str] = {}
        self._caring: dict[str, asyncio.Task[None]] = {}
        self._first: dict[str, asyncio.Future[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._surplus = 0.0
        self._news = asyncio.Event()
        self.is_open = False

    # -- beginning and end -------------------------------------------------------------------------

    async def open(self) -> None:
        """Begins what is not there, and waits until all of it is; see `Fleet.__aenter__`."""
        try:
            await self._take_up(begin=True)
            if not self.handles:
                raise NoPool(
                    f"there is no pool of the fleet {self._name!r}: start one with make=, where "
                    "Ray has GPUs"
                )
            await asyncio.gather(*self._first.values())
        except BaseException:
            self.close()
            raise
        self.is_open = True
        self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Ends every line. Idempotent."""
        self.is_open = False
        for task in (*self._caring.values(), self._watching):
            if task is not None:
                task.cancel()
        for line in self.lines.values():
            line.hang_up()
        self.lines.clear()
        self._tell()

    async def stop(self, grace: float) -> None:
        """Ends every line, and every pool."""
        handles, self.handles = [*self.handles.values()], {}
        self.close()
        stops = [handle.stop.remote(grace) for handle in handles]
        for stop in stops:
            with suppress(RayError):  # away, or at its end already
                await stop
        for handle in handles:
            await asyncio.to_thread(ray.kill, handle, no_restart=True)

    async def change(self) -> None:
        """Waits until another pool is there, or all is over."""
        await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # -- which there are ---------------------------------------------------------------------------

    async def _take_up(self, *, begin: bool, more: int = 0) -> list[str]:
        """Takes up pools that are new here, and begins those that GPUs lack, or so many more."""
        found = await asyncio.to_thread(self._find, begin, more)
        for name, handle in found.items():
            self.handles[name] = handle
            self._first[name] = asyncio.get_running_loop().create_future()
            self._caring[name] = asyncio.create_task(self._care(name, handle))
        return [*found]

    def _find(self, begin: bool, more: int) -> dict[str, Any]:
        """Actors of the fleet that are new here, by name; on a thread, for it blocks on Ray."""
        if not ray.is_initialized():
            raise NoPool("Ray is not connected: call ray.init(...) first")
        named = ray.util.list_named_actors(all_namespaces=True)
        there = {one["name"] for one in named if one["namespace"] == NAMESPACE}
        there = {name for name in there if name.startswith(f"{self._name}/")}
        found = {}
        for name in there - self.handles.keys():
            with suppress(ValueError):  # gone since
                found[name] = ray.get_actor(name, NAMESPACE)
        if self._make is not None and begin:
            wanted = gpus.count() if self._wanted is None else self._wanted
            lacks = more or max(0, wanted - len(there))
            if lacks:
                gpus.check_free(lacks)
            names = (f"{self._name}/{n}" for n in range(len(there) + lacks))
            for name in [name for name in names if name not in there][:lacks]:
                found[name] = actor(name, self._make, NAMESPACE, detached=self._detached)
        return found

    async def _watch(self) -> None:
        """Goes on looking for new GPUs, and new pools; sooner where a pool is away."""
        while True:
            is_away = len(self.lines) < len(self.handles)
            await asyncio.sleep(AWAY if is_away else LOOK)
            try:
                if is_away:
                    await self._replace()
                await self._take_up(begin=await self._lacks_pools())
            except (GreenschedError, RayError) as error:
                logger.warning("the fleet %r does not grow: %s", self._name, error)

    async def _replace(self) -> None:
        """Begins pools on GPUs that have joined, instead of those on nodes that are gone.

        Ray would start these again, but learns of a lost node late. The one that is first stays.
        """
        away = {name: self._nodes[name] for name in self._nodes.keys() - self.lines.keys()}
        away = {name: node for name, node in away.items() if name not in self._instead.values()}
        if self._make is None or not away:
            return
        lost = await asyncio.to_thread(gpus.gone, {*away.values()})
        old = [name for name, node in away.items() if node in lost]
        has = len(self.handles) - len(old)
        new = min(len(old), await asyncio.to_thread(gpus.count, lost) - has)
        if old and new > 0 and await asyncio.to_thread(gpus.free) >= new:
            names = await self._take_up(begin=True, more=new)
            self._instead.update(zip(names, old, strict=False))

    async def _give_up(self, name: str) -> None:
        """Has Ray not start a pool again that another stands for."""
        handle = self.handles.get(name)
        if handle is not None and name not in self.lines:
            await asyncio.to_thread(ray.kill, handle, no_restart=True)

    async def _lacks_pools(self) -> bool:
        """Whether there have been more GPUs than pools for long, and no pool that is away."""
        if self._make is None or self._wanted is not None or not self.handles:
            return False  # the last: somebody has stopped the fleet
        count = await asyncio.to_thread(gpus.count)
        if count <= len(self.handles) or len(self.lines) < len(self.handles):
            self._surplus = 0.0
            return False
        self._surplus += LOOK
        return self._surplus >= SURPLUS

    # -- each of them ------------------------------------------------------------------------------

    async def _care(self, name: str, handle: Any) -> None:
        """Keeps a line to one pool, as long as Ray keeps its actor."""
        while (line := await self._reach(name, handle)) is not None:
            self.lines[name] = line
            self.most[name], self._nodes[name] = line.most, line.node
            if name in self._instead:
                await self._give_up(self._instead.pop(name))
            if not self._first[name].done():
                self._first[name].set_result(None)
            self._tell()
            await asyncio.wait([line.broken])
            del self.lines[name]
            logger.warning("%s is away: %s", name, line.broken.result())
        del self.handles[name]
        self.most.pop(name, None)
        self._nodes.pop(name, None)

    async def _reach(self, name: str, handle: Any) -> PoolConnection | None:
        """Tries to reach a pool until it answers; None: Ray has given its actor up."""
        while True:
            key = uuid.uuid4().hex
            try:
                facts = await handle.hello.remote(key, protocol.PROTOCOL)
                check_apart(facts, self.lines.values())
            except RayTaskError as error:
                self._refuse(name, error.cause)
                await asyncio.sleep(UNWELL)
            except InvalidRequest as error:
                self._refuse(name, error)
                await asyncio.sleep(UNWELL)
            except RayActorError as error:
                if await asyncio.to_thread(_is_given_up, name):
                    self._refuse(name, PoolLost(name, str(error).splitlines()[0]))
                    return None
                await asyncio.sleep(PING)
            else:
                return PoolConnection(handle, key, facts, self._code)

    def _refuse(self, name: str, error: BaseException) -> None:
        """A pool cannot be: who starts the fleet is told; later, the log."""
        first = self._first[name]
        if first.done():
            logger.warning("%s cannot be used: %s", name, error)
        else:
            first.set_exception(error)
            first.exception()  # several may fail, and one is raised


def _is_given_up(name: str) -> bool:
    """Whether Ray will not start an actor again. Blocks on Ray."""
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return True
    return False
