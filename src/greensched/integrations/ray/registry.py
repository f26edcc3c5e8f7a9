"""One program's view of a fleet: connections to its pools, and the supervisor's reports."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from greensched import Pool
from greensched.errors import NoPool, PoolClosed
from greensched.integrations.ray import protocol
from greensched.integrations.ray.connection import PoolConnection
from greensched.integrations.ray.supervisor import Membership, find_supervisor

logger = logging.getLogger("greensched")

#: Seconds between attempts to reach a pool or supervisor that is away. A call costs 1 ms.
RECONNECT = 0.05
#: The same for a pool whose process runs but does not open.
RETRY_OPEN = 1.0
#: Seconds in which the supervisor must end the pools; a program does not wait longer for it.
END_S = 15.0


class PoolRegistry:
    """The pools of a fleet: an actor for each, and a connection while it can be reached.

    Args:
        name, make, pools, detached: As for `Fleet`.
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
        self._program = uuid.uuid4().hex
        self._supervisor: Any = None
        self.handles: dict[str, Any] = {}
        #: The connections to the pools that are not away.
        self.connections: dict[str, PoolConnection] = {}
        #: The most SMs of one lease, for each pool, including pools that are away.
        self.most: dict[str, int] = {}
        #: The names of pools on draining nodes.
        self.leaving: frozenset[str] = frozenset()
        self._maintaining: dict[str, asyncio.Task[None]] = {}
        self._first: dict[str, asyncio.Future[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.is_open = False

    # -- open and close ----------------------------------------------------------------------------

    async def open(self) -> None:
        """Join the fleet, and wait until all pools are connected; see `Fleet.__aenter__`."""
        try:
            self._update(membership := await self._join())
            self._following = asyncio.create_task(self._follow(membership.version))
            is_waiting = True
            while is_waiting:  # a pool may end, and another take its place
                await asyncio.gather(*self._first.values())
                is_waiting = not all(first.done() for first in self._first.values())
        except BaseException:
            await asyncio.shield(self.aclose())
            raise
        self.is_open = True

    async def aclose(self) -> None:
        """Close every connection, and leave the fleet. Idempotent."""
        await self._detach(lambda supervisor: supervisor.leave.remote(self._program), END_S)

    async def stop(self, grace: float) -> None:
        """Close every connection and every pool."""
        await self._detach(lambda supervisor: supervisor.stop.remote(grace), grace + END_S)

    async def _detach(self, call: Callable[[Any], Awaitable[None]], seconds: float) -> None:
        """Close every connection, and make a last call to the supervisor."""
        self.close()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        try:
            async with asyncio.timeout(seconds):
                await call(supervisor)
        except RayError:
            pass  # the supervisor has ended
        except TimeoutError:
            logger.warning("the fleet %r has not ended in %g s", self._name, seconds)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self.is_open = False
        for task in (*self._maintaining.values(), self._following):
            if task is not None:
                task.cancel()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        for first in self._first.values():
            self._fail_first(first, PoolClosed("this fleet", "stopped"))
        self._notify()

    async def wait_for_change(self) -> None:
        """Wait until a pool connects, or the fleet is closed."""
        await self._news.wait()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # -- the supervisor ----------------------------------------------------------------------------

    async def _join(self) -> Membership:
        """Find the supervisor, or start it, and join. Raises as `Fleet.__aenter__`."""
        make = None if self._make is None else cloudpickle.dumps(self._make)
        while True:
            with suppress(RayActorError):  # the supervisor is ending
                self._supervisor = await asyncio.to_thread(
                    find_supervisor, self._name, make, self._wanted, detached=self._detached
                )
                try:
                    membership: Membership = await self._supervisor.join.remote(self._program)
                except RayTaskError as error:
                    raise error.cause from None
                if not membership.is_stopped:
                    return membership
            await asyncio.sleep(RECONNECT)

    async def _follow(self, version: int) -> None:
        """Follow the pools until the fleet is stopped. Its calls show that this program runs."""
        while True:
            try:
                membership = await self._supervisor.members.remote(self._program, version)
                if membership is None:  # it was restarted, or heard nothing for too long
                    membership = await self._join()
            except ActorDiedError:  # Ray restarts it, unless the fleet was stopped
                membership = Membership(version, {}, is_stopped=True)
            except (RayError, NoPool) as error:
                logger.warning("the fleet %r has no supervisor now: %s", self._name, error)
                await asyncio.sleep(RETRY_OPEN)
                continue
            if membership.is_stopped:
                self.close()
                return
            version = membership.version
            self._update(membership)

    def _update(self, membership: Membership) -> None:
        """Connect to new pools, and drop pools that have ended."""
        self.leaving = membership.leaving
        for name in self.handles.keys() - membership.pools.keys():
            self._maintaining.pop(name).cancel()
            first = self._first.pop(name)
            if not first.done():
                first.set_result(None)
            del self.handles[name]
            self.most.pop(name, None)
            connection = self.connections.pop(name, None)
            if connection is not None:
                connection.fail("it was closed, or its GPU was lost")
        for name in membership.pools.keys() - self.handles.keys():
            self.handles[name] = handle = membership.pools[name]
            self._first[name] = asyncio.get_running_loop().create_future()
            self._maintaining[name] = asyncio.create_task(self._maintain(name, handle))

    # -- one pool ----------------------------------------------------------------------------------

    async def _maintain(self, name: str, handle: Any) -> None:
        """Keep a connection to one pool."""
        while True:
            connection = await self._connect(name, handle)
            self.connections[name] = connection
            self.most[name] = connection.most
            if not self._first[name].done():
                self._first[name].set_result(None)
            self._notify()
            while not connection.closed.done():
                await asyncio.wait([connection.closed], timeout=protocol.HEARTBEAT)
                connection.beat()
            del self.connections[name]
            logger.warning("%s is away: %s", name, connection.closed.result())

    async def _connect(self, name: str, handle: Any) -> PoolConnection:
        """Connect to a pool; try until it replies."""
        while True:
            key = uuid.uuid4().hex
            try:
                info = await handle.hello.remote(key, protocol.PROTOCOL)
            except RayTaskError as error:
                self._reject(name, error.cause)
                await asyncio.sleep(RETRY_OPEN)
            except RayError:
                await asyncio.sleep(RECONNECT)
            else:
                return PoolConnection(handle, key, info, self._code)

    def _reject(self, name: str, error: BaseException) -> None:
        """Report that a pool cannot be used: at first to `open`, later in the log."""
        if not self._fail_first(self._first[name], error):
            logger.warning("%s cannot be used: %s", name, error)

    def _fail_first(self, first: asyncio.Future[None], error: BaseException) -> bool:
        """Report to `open`, if it waits for this pool."""
        if first.done():
            return False
        first.set_exception(error)
        first.exception()  # marks it as retrieved: several may fail, but `open` raises only one
        return True
