"""The supervisor of a fleet: an actor that starts, replaces and ends its pools for all programs.

It runs on the head node, whose loss ends the Ray cluster anyway, and outlives the program that
started it. Ray restarts the processes of pools; the supervisor decides how many pools there are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayError

from greensched.errors import NoPool
from greensched.integrations.ray import gpus, protocol
from greensched.integrations.ray.pool_actor import LAST_S, SENDING_S, pool_actor

logger = logging.getLogger("greensched")

#: The Ray namespace of the actors' names, where any program of the cluster finds them.
NAMESPACE = "greensched"
#: Seconds between two looks at the cluster.
PERIOD = 0.5
#: Seconds in which a pool's process must reply; otherwise the pool is away.
REPLY_S = 1.0
#: Seconds for which a GPU must be free before it gets a pool, because a program may want it. One
#: that replaces a lost GPU gets its pool at once.
SPARE_S = 1.0
#: Seconds in which the replacement of a pool may open, before the pool on a draining node is
#: closed: five times what an actor takes to start on an idle node.
READY_S = 10.0
#: Seconds that jobs on a draining node have if the node has no deadline.
DRAIN_S = 30.0
#: How many seconds before a node's deadline its pool is closed; then the last outcomes are sent.
MARGIN_S = 2.0
#: Seconds without a message from a program after which it counts as dead: longer than its loop
#: should ever be blocked, because the fleet ends with its last program.
UNUSED_S = 10.0


class Membership(NamedTuple):
    """The pools of a fleet: actors by name. `version` grows with every change.

    Pools that are `leaving` are on draining nodes: they get a job only if no other pool can.
    """

    version: int
    pools: Mapping[str, Any]
    is_stopped: bool = False
    leaving: frozenset[str] = frozenset()


class Supervisor:
    """The supervisor of one fleet. The constructor does nothing else.

    Args:
        name: The name of the fleet.
        make: Makes a pool; pickled, so that only pools import its modules.
        wanted: The number of pools. None: one on each GPU of the cluster.
        detached: Whether the pools outlive all programs.
    """

    def __init__(self, name: str, make: bytes, wanted: int | None, detached: bool) -> None:
        self._name, self._make, self._wanted, self._detached = name, make, wanted, detached
        self._pools: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}
        #: Pools on draining nodes, and the tasks that close them.
        self._leaving: dict[str, asyncio.Task[None]] = {}
        #: When each program last sent a message.
        self._programs: dict[str, float] = {}
        self._spare_since: float | None = None
        #: Pools that were lost with their GPU and not replaced.
        self._lost = 0
        self._version = 0
        self._changed = asyncio.Event()
        self._is_stopped = False
        self._filling = asyncio.Lock()
        self._tending: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    # -- called by programs ------------------------------------------------------------------------

    async def join(self, program: str) -> Membership:
        """Add a program, and start missing pools, unless the fleet is stopped.

        Raises:
            NoPool: There are not enough free GPUs, or none for a first pool.
        """
        self._programs[program] = time.monotonic()
        async with self._filling:
            if self._is_stopped:
                return self._membership()
            if self._tending is None:
                self._pools = await asyncio.to_thread(find_pools, self._name)
                self._tending = asyncio.create_task(self._tend())
            missing = max(await self._missing(), 0 if self._pools else 1)
            await asyncio.to_thread(gpus.check_free, missing)
            await self._start(missing)
        self._programs[program] = time.monotonic()  # that may have taken long
        return self._membership()

    async def members(self, program: str, version: int) -> Membership | None:
        """Return the pools once they differ from a version, or after a heartbeat.

        Returns:
            None if the program is unknown: it must join again.
        """
        if program not in self._programs:
            return None
        self._programs[program] = time.monotonic()
        if version == self._version:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), protocol.HEARTBEAT)
        return self._membership()

    async def leave(self, program: str) -> None:
        """Remove a program. The last one ends the fleet, unless the fleet is detached."""
        self._programs.pop(program, None)
        if not self._programs and not (self._detached and self._pools):
            await self.stop(0)

    async def stop(self, grace: float) -> None:
        """Close every pool, then exit. Queued jobs fail, and leases may end within the grace."""
        self._is_stopped = True
        self._notify()
        async with self._filling:  # a pool that starts meanwhile would be left behind
            if self._tending is not None:
                self._tending.cancel()
            await asyncio.gather(*(self._end(name, grace) for name in [*self._pools]))
        self._ending = asyncio.create_task(self._exit())

    async def _exit(self) -> None:
        """End the process once Ray has sent the replies."""
        handle = ray.get_runtime_context().current_actor
        await asyncio.sleep(SENDING_S)
        await asyncio.to_thread(ray.kill, handle, no_restart=True)

    # -- pools -------------------------------------------------------------------------------------

    def _membership(self) -> Membership:
        leaving = frozenset(self._leaving)
        return Membership(self._version, dict(self._pools), self._is_stopped, leaving)

    def _notify(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _missing(self) -> int:
        """Return how many pools are missing, not counting leaving ones; negative: too many."""
        wanted = self._wanted
        if wanted is None:
            wanted = await asyncio.to_thread(gpus.count)
        return wanted - (len(self._pools) - len(self._leaving))

    async def _start(self, number: int) -> list[Any]:
        new = []
        for _ in range(number):
            place = next(n for n in range(len(self._pools) + 1) if self._key(n) not in self._pools)
            name = self._key(place)
            new.append(await asyncio.to_thread(pool_actor, name, self._make, NAMESPACE))
            self._pools[name] = new[-1]
        if new:
            self._notify()
        return new

    def _key(self, place: int) -> str:
        return f"{self._name}/{place}"

    async def _end(self, name: str, grace: float) -> None:
        """Close a pool, and end its process permanently."""
        handle = self._pools.get(name)
        if handle is None:  # it was dropped meanwhile
            return
        with suppress(RayError, TimeoutError):  # the pool is away, or has ended already
            await asyncio.wait_for(handle.stop.remote(grace), grace + LAST_S + REPLY_S)
        await asyncio.to_thread(ray.kill, handle, no_restart=True)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._pools.pop(name, None)
        self._nodes.pop(name, None)
        self._leaving.pop(name, None)
        self._notify()

    # -- the cluster -------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Keep the number of pools right, and end the fleet once no program uses it."""
        while self._programs or self._detached:
            await asyncio.sleep(PERIOD)
            now = time.monotonic()
            silent = [
                program for program, heard in self._programs.items() if now - heard > UNUSED_S
            ]
            for program in silent:
                del self._programs[program]
            try:
                await self._look()
            except Exception as error:  # else nothing would end the fleet
                logger.warning("the fleet %r does not change: %s", self._name, error)
        logger.warning("the fleet %r ends: its last program has not been heard of", self._name)
        self._tending = None
        await self.stop(0)

    async def _look(self) -> None:
        """Replace pools on draining nodes, drop surplus ones, and start missing ones."""
        handles = dict(self._pools)
        replies = await asyncio.gather(*map(self._reply, handles, handles.values()))
        away = [name for name, replied in zip(handles, replies, strict=True) if not replied]
        async with self._filling:
            for name, deadline in (await self._draining()).items():
                self._leaving[name] = asyncio.create_task(self._retire(name, deadline))
                self._notify()
            missing = await self._missing()
            if self._wanted is None:
                surplus = away[: max(0, -missing)]  # their GPUs are lost; Ray would ask for others
                for name in surplus:
                    await self._end(name, 0)
                self._lost += len(surplus)
                missing = await self._spare(missing) if not away else 0
                self._lost = max(0, self._lost - missing)
            await self._start(max(0, missing))

    async def _reply(self, name: str, handle: Any) -> bool:
        """Return whether a pool's process replies. Forget a pool that Ray has given up."""
        try:
            reply = handle.health.options(concurrency_group="control").remote()
            self._nodes[name] = (await asyncio.wait_for(reply, REPLY_S)).node
        except ActorDiedError:
            self._forget(name)
        except (RayError, TimeoutError):
            return False
        return True

    async def _spare(self, missing: int) -> int:
        """Return how many of the missing pools can have a free GPU now."""
        free = await asyncio.to_thread(gpus.free) if missing > 0 else 0
        if free <= 0:
            self._spare_since = None
            return 0
        if self._spare_since is None:
            self._spare_since = time.monotonic()
        is_spare = time.monotonic() - self._spare_since >= SPARE_S
        return min(free, missing, missing if is_spare else self._lost)

    async def _draining(self) -> dict[str, float]:
        """Return the pools on newly draining nodes, each with the seconds that it has left."""
        deadlines = await asyncio.to_thread(gpus.draining)
        now = time.time()
        return {
            name: max(0.0, deadlines[node] - now) if deadlines[node] else DRAIN_S
            for name, node in self._nodes.items()
            if node in deadlines and name not in self._leaving
        }

    async def _retire(self, name: str, seconds: float) -> None:
        """Close a pool on a draining node, once its possible replacement is open."""
        ends = time.monotonic() + seconds - MARGIN_S
        async with self._filling:  # the replacement is started under this lock
            others = [self._pools[key] for key in self._pools.keys() - self._leaving.keys()]
        opened = asyncio.gather(*(handle.open.remote() for handle in others))
        with suppress(RayError, TimeoutError):  # there may be no GPU for the replacement
            await asyncio.wait_for(opened, min(READY_S, seconds / 4))
        await self._end(name, max(0.0, ends - time.monotonic()))


def find_pools(fleet: str) -> dict[str, Any]:
    """Return the pools of a fleet by name. Blocks on Ray."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    pools = {}
    for actor in actors:
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"{fleet}/"):
            with suppress(ValueError):  # it has ended meanwhile
                pools[actor["name"]] = ray.get_actor(actor["name"], NAMESPACE)
    return pools


def find_supervisor(name: str, make: bytes | None, wanted: int | None, *, detached: bool) -> Any:
    """Return the supervisor of a fleet; start it if `make` is given. Blocks on Ray.

    Raises:
        NoPool: Ray is not connected, or there is neither a supervisor nor `make`.
    """
    if not ray.is_initialized():
        raise NoPool("Ray is not connected: call ray.init(...) first")
    if make is None:
        try:
            return ray.get_actor(name, NAMESPACE)
        except ValueError:
            raise NoPool(
                f"the fleet {name!r} has no pool: start one with make= on a cluster with GPUs"
            ) from None
    return (
        ray.remote(Supervisor)
        .options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
            max_restarts=-1,
        )
        .remote(name, make, wanted, detached)
    )
