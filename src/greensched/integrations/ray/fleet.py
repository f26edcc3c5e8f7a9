"""A fleet: a pool for each GPU of a Ray cluster, and jobs that run on one of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, overload

from ray.exceptions import RayError
from ray.experimental import get_object_locations

from greensched import Pool
from greensched.errors import (
    DeviceFault,
    DeviceLost,
    InvalidRequest,
    NoPool,
    PoolClosed,
    PoolLost,
    QueueFull,
)
from greensched.integrations.ray import protocol
from greensched.integrations.ray.balancing import check_feasible, choose
from greensched.integrations.ray.connection import PoolConnection
from greensched.integrations.ray.deadlines import remaining, reply_within, result_of
from greensched.integrations.ray.pool_actor import Health
from greensched.integrations.ray.protocol import Message
from greensched.integrations.ray.registry import PoolRegistry
from greensched.integrations.ray.session import Session
from greensched.typing import Size, T

#: Seconds for a pool's process to report its health.
HEALTH_TIMEOUT = 1.0
#: Milliseconds for Ray to locate objects.
LOCATE_MS = 200
#: After a job has lost this many pools it is not retried, because it may be the cause.
MOST_LOSSES = 3
#: Errors of a lost pool; another pool may run the job.
POOL_LOST = (DeviceLost, DeviceFault, PoolClosed, PoolLost)


class Fleet:
    """The pools of a Ray cluster, for one program on one asyncio loop. Use it with `async with`.

    The constructor uses neither Ray nor a loop. The program calls `ray.init` itself.

    Args:
        name: The name of the fleet. All programs that use this name share its pools.
        make: Makes a pool in the process of each GPU from `devices=`: a `functools.partial` of
            `Pool` with options, or a function. None: use existing pools only.
        pools: The number of pools. None: one on each GPU of the cluster, including new ones.
        detached: Whether the pools outlive all programs, until `stop`. Otherwise they end with the
            last program that uses them.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Pool] | None = Pool,
        *,
        pools: int | None = None,
        detached: bool = False,
    ) -> None:
        if type(name) is not str or not name or "/" in name:
            raise InvalidRequest(f"name={name!r}: give a non-empty str without slashes")
        if pools is not None and (type(pools) is not int or pools < 1):
            raise InvalidRequest(f"pools={pools!r}: give a whole number of at least 1, or None")
        self.name = name
        self._functions = protocol.Functions()
        self._chance = random.Random()
        self._registry = PoolRegistry(name, make, pools, detached, self._functions.code)
        self._is_entered = False

    # -- open and close ----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start missing pools, and wait until every pool is open.

        After an error or a cancellation the program has left the fleet.

        Raises:
            NoPool: There are too few free GPUs, or with `make=None` no pools.
            VersionSkew: Existing pools speak another version.
            InvalidRequest: Ray assigned a pool no whole GPU.
            Others: As for `Pool.open`, from the first pool that fails.
        """
        if self._is_entered:
            raise InvalidRequest("this fleet was entered already: make another Fleet")
        self._is_entered = True
        await self._registry.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Leave the fleet; this program's jobs are cancelled.

        The last program ends the pools, unless they are detached, and waits for their end. A
        cancellation ends only the waiting.
        """
        await self._registry.aclose()

    async def stop(self, grace: float = 5.0) -> None:
        """Close the pools for every program, and wait until they are closed.

        Queued jobs fail; running jobs may end within the grace. A cancellation ends only the
        waiting.

        Args:
            grace: Seconds that running jobs have.
        """
        await self._registry.stop(grace)

    # -- jobs --------------------------------------------------------------------------------------

    @overload
    async def submit(
        self,
        job: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: object,
        sms: Size,
        deadline: float | None = None,
        idempotent: bool = False,
        service: str | None = None,
        duration: float | None = None,
    ) -> T: ...
    @overload
    async def submit(
        self,
        job: Callable[..., T],
        /,
        *args: object,
        sms: Size,
        deadline: float | None = None,
        idempotent: bool = False,
        service: str | None = None,
        duration: float | None = None,
    ) -> T: ...
    async def submit(
        self,
        job: Callable[..., Any],
        /,
        *args: object,
        sms: Size,
        deadline: float | None = None,
        idempotent: bool = False,
        service: str | None = None,
        duration: float | None = None,
    ) -> Any:
        """Run a job on SMs of one GPU of the fleet, and wait for its result.

        The job goes to the pool that has most of its arguments, or otherwise to one with less load.
        A cancellation reaches the pool: a queued job leaves the queue, but running kernels run to
        their end. The end of this process has the same effect some seconds later.

        Args:
            job: a coroutine function, awaited with the partition first (`async def job(p, x)`) on
                the loop of the pool, which it must not block; or a blocking function, called as by
                `p.run`. It is sent to each pool once.
            args: Arrays and other picklable objects. Arrays of 1 MiB or more, and `ObjectRef`s, go
                through Ray's object store, and are read-only there.
            sms, service, duration: As for `Pool.partition`.
            deadline: Seconds within which the result must arrive. Without a deadline, a job that no
                pool can take now is refused at once.
            idempotent: Whether the job may run more than once. If so, it is retried if its pool is
                lost, until the deadline, which is required. Otherwise it runs at most once.

        Returns:
            The job's result. Arrays of 1 MiB or more are read-only. A job that returns an
            `ObjectRef` made by `ray.put` leaves the value where it is: await it, or pass it to
            another job, which then runs there.

        Raises:
            TooManySMs: No pool of the fleet is large enough. Nothing was sent.
            QueueFull: Every suitable pool is full; `retry_after` is the shortest of theirs.
            NoPool: No pool can take the job now.
            FleetTimeout: The deadline passed; the job may have run if `was_sent`.
            PoolLost, DeviceLost: The job's pool was lost; the job may have run.
            InvalidRequest: An argument is invalid or cannot be sent.
            Others: Errors of the job, and of `Pool.partition`.
        """
        needed, left = protocol.least_sms(sms), remaining(deadline)
        if idempotent and deadline is None:
            raise InvalidRequest("idempotent=True retries until the deadline: give deadline=")
        was_sent = False
        async with reply_within(deadline, lambda: was_sent):
            work = await protocol.pack_job(self._functions, job, args)
            held = await _held(work) if work.refs else {}

            def message(number: int) -> Message:
                nonlocal was_sent
                was_sent = True
                return Message(
                    "run",
                    number,
                    *work,
                    sms=sms,
                    deadline=left(),
                    service=service,
                    duration=duration,
                )

            _, value = await self._serve(message, needed, held, left, may_repeat=idempotent)
            return value

    def partition(
        self,
        sms: Size,
        *,
        deadline: float | None = None,
        service: str | None = None,
        duration: float | None = None,
    ) -> Session:
        """Lease SMs of one pool for several jobs. Use the result with `async with`.

        The lease lasts until the block or the program ends, or the pool is lost. Arguments are
        those of `submit`; `deadline` is for the grant.

        Raises:
            InvalidSize: `sms` is not a size.
        """
        needed = protocol.least_sms(sms)

        async def opened() -> tuple[PoolConnection, int, int]:
            left = remaining(deadline)
            session = 0

            def message(number: int) -> Message:
                nonlocal session
                session = number
                return Message(
                    "open", number, sms=sms, deadline=left(), service=service, duration=duration
                )

            async with reply_within(deadline, lambda: session > 0):
                connection, count = await self._serve(message, needed, {}, left, may_repeat=True)
            return connection, session, count

        return Session(opened, self._functions)

    async def _serve(
        self,
        message: Callable[[int], Message],
        sms: int,
        held: dict[str, int],
        left: Callable[[], float | None],
        *,
        may_repeat: bool,
    ) -> tuple[PoolConnection, Any]:
        """Send a message to one pool after another until a pool has handled it."""
        full: dict[str, QueueFull] = {}
        losses = 0
        while True:
            connection = await self._choose(sms, held, full, waits=left() is not None)
            has_begun = True
            try:
                outcome = await connection.request(message(connection.next_number()), sms)
                has_begun = outcome.has_begun
                return connection, await result_of(outcome, connection.name)
            except QueueFull as error:
                if has_begun:
                    raise
                full[connection.name] = error
            except POOL_LOST:
                losses += has_begun
                if (has_begun and not may_repeat) or losses >= MOST_LOSSES:
                    raise
                connection.is_lost = True

    async def _choose(
        self, sms: int, held: dict[str, int], full: dict[str, QueueFull], *, waits: bool
    ) -> PoolConnection:
        """Choose a pool. With `waits`, wait until there is a suitable one."""
        while True:
            if not self._registry.is_open:
                raise PoolClosed("this fleet", "not open: use it with `async with`")
            check_feasible(sms, self._registry.most.values())
            connections = [
                connection
                for name, connection in self._registry.connections.items()
                if name not in full
            ]
            leaving = self._registry.leaving
            connection = choose(connections, leaving, sms, held, self._chance)
            if connection is not None:
                return connection
            if full:
                raise min(full.values(), key=lambda error: error.retry_after)
            if not waits:
                raise NoPool(
                    f"no pool of the fleet {self.name!r} can grant {sms} SMs now; Ray may be "
                    "replacing it: give a deadline, and the job waits for a pool"
                )
            await self._registry.wait_for_change()

    # -- state -------------------------------------------------------------------------------------

    def pools(self) -> dict[str, protocol.Snapshot]:
        """Return the last snapshot of each connected pool, by name. Never waits."""
        connections = self._registry.connections.items()
        return {
            name: connection.snapshot._replace(is_open=connection.is_open)
            for name, connection in connections
        }

    async def health(self) -> dict[str, Health | None]:
        """Return the health of each pool's process, by name. Waits for replies, at most 1 s.

        The health of a process that does not reply is None.
        """

        async def request(handle: Any) -> Health | None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(HEALTH_TIMEOUT):
                    reply = handle.health.options(concurrency_group="control").remote()
                    return await reply  # type: ignore[no-any-return]  # Ray is untyped
            return None

        handles = dict(self._registry.handles)
        replies = await asyncio.gather(*map(request, handles.values()))
        return dict(zip(handles, replies, strict=True))


async def _held(work: protocol.Packed) -> dict[str, int]:
    """Return the bytes of a job's arguments in Ray's object store, by node."""
    held: Counter[str] = Counter()
    refs = [ref for _, ref in work.refs]
    with suppress(RayError):  # an object was lost: the job will raise that
        locations = await asyncio.to_thread(get_object_locations, refs, LOCATE_MS)
        for where in locations.values():
            for node in where["node_ids"]:
                held[node] += where["object_size"] or 0
    return held
