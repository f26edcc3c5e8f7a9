"""A fleet: one pool for each GPU of a Ray cluster, and jobs that go to one of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, overload

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
from greensched.integrations.ray.deadlines import answered_within, until, value_of
from greensched.integrations.ray.pool_actor import Health
from greensched.integrations.ray.protocol import LeaseSpec
from greensched.integrations.ray.registry import PoolRegistry
from greensched.integrations.ray.session import Session
from greensched.typing import Size

T = TypeVar("T")

#: Seconds for a pool's process to say how it is.
ANSWER = 1.0
#: Milliseconds for the owner of an object to say where it is.
LOCATING_MS = 200
#: A job that so many pools were lost with is not tried again: it may be what ends them.
MOST_LOSSES = 3
#: What a pool says when it can do no more; another may.
SPOILT = (DeviceLost, DeviceFault, PoolClosed, PoolLost)


class Fleet:
    """The pools of a Ray cluster, for one program on one asyncio loop. Use it with `async with`.

    Making one touches neither Ray nor a loop. `ray.init` is the program's.

    Args:
        name: the fleet's: every program that gives the same uses the same pools.
        make: makes a pool in the process of each GPU, given `devices=`: a `functools.partial` of
            `Pool` with options, or a function of yours. None: the pools must be there already.
        pools: how many; None: one for each GPU of the cluster, and for each that joins.
        detached: they outlive this program, until `stop`. Else they end with it.
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
            raise InvalidRequest(f"name={name!r}: a word, without slashes")
        if pools is not None and (type(pools) is not int or pools < 1):
            raise InvalidRequest(f"pools={pools!r}: a number of pools, at least 1, or None")
        self.name = name
        self._functions = protocol.Functions()
        self._chance = random.Random()
        self._members = PoolRegistry(name, make, pools, detached, self._functions.code)
        self._is_entered = False

    # -- its life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Starts the pools that are not there, and waits until each is open.

        Cancelled meanwhile, pools that it began are ended with this program, or stay if detached.

        Raises:
            NoPool: there are not enough free GPUs, or none; or `make=None`, and no pools.
            VersionSkew: the pools there are speak another version.
            InvalidRequest: two pools are on one GPU, or Ray gave one no whole GPU.
            Others: as `Pool.open`, of the first pool that cannot be.
        """
        if self._is_entered:
            raise InvalidRequest("this fleet was entered already: make another")
        self._is_entered = True
        await self._members.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Leaves the fleet: this program's jobs are cancelled. Pools that it began end with it."""
        self._members.close()

    async def stop(self, grace: float = 5.0) -> None:
        """Ends the pools, for every program: who waits is told, what runs has the grace to end."""
        await self._members.stop(grace)

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
        """Runs a job on SMs of one GPU of the fleet, and waits for its result.

        The pool is chosen here: where the arguments are, else where less is to do. A cancellation
        reaches it: what is queued leaves the queue, what runs is left to its end as in a pool, and
        so does the end of this process, some seconds later.

        Args:
            job: a coroutine function, awaited with the partition first (`async def job(p, x)`), on
                the loop of its pool, which it must not block; or a blocking one, called as by
                `p.run`. It is sent to each pool once.
            args: arrays, and whatever can be pickled. Arrays from 1 MiB on, and `ObjectRef`s, go
                by Ray's object store, and are read-only there.
            sms, service, duration: as of `Pool.partition`.
            deadline: seconds until the answer is here. Where there is none, nothing is waited for
                but the job: without a pool that could take it, it is refused at once.
            idempotent: it may run more than once: tried again if its pool is lost, until the
                deadline, which it needs. Else it runs once at most.

        Returns:
            What the job returned; arrays from 1 MiB on are read-only. A job that returns an
            `ObjectRef`, by `ray.put`, leaves the value where it is: await it, or give it to
            another job, which then goes there.

        Raises:
            TooManySMs: no pool of the fleet is as large. Nothing was sent.
            QueueFull: every pool that could take it is full; `retry_after` is the shortest.
            NoPool: none is there now.
            NotAnswered: the deadline passed; it may have run.
            PoolLost, DeviceLost: its pool was lost with it, and it may have run.
            InvalidRequest: what can never be, or cannot be sent.
            Others: what the job raised, and what `Pool.partition` does.
        """
        needed, left = protocol.least(sms), until(deadline)
        if idempotent and deadline is None:
            raise InvalidRequest("idempotent=True is tried again until its deadline: give one")
        async with answered_within(deadline):
            work = await protocol.packed(self._functions, job, args)
            held = await _held(work)

            def letter(line: PoolConnection) -> protocol.Run:
                return protocol.Run(
                    line.next_number(), work, LeaseSpec(sms, left(), service, duration)
                )

            _, value = await self._serve(letter, needed, held, left, may_repeat=idempotent)
            return value

    def partition(
        self,
        sms: Size,
        *,
        deadline: float | None = None,
        service: str | None = None,
        duration: float | None = None,
    ) -> Session:
        """A lease of SMs of one pool for several jobs, to be used with `async with`.

        Its SMs are this program's until the block ends, the program does, or the pool is lost.
        Arguments as of `submit`; `deadline` is for the grant alone.

        Raises:
            InvalidSize: what can never be right.
        """
        needed = protocol.least(sms)

        async def opened() -> tuple[PoolConnection, int, int]:
            left = until(deadline)
            number = 0

            def letter(line: PoolConnection) -> protocol.Open:
                nonlocal number
                number = line.next_number()
                return protocol.Open(number, LeaseSpec(sms, left(), service, duration))

            async with answered_within(deadline):
                line, count = await self._serve(letter, needed, {}, left, may_repeat=True)
            return line, number, count

        return Session(opened, self._functions)

    async def _serve(
        self,
        letter: Callable[[PoolConnection], protocol.Run | protocol.Open],
        sms: int,
        held: dict[str, int],
        left: Callable[[], float | None],
        *,
        may_repeat: bool,
    ) -> tuple[PoolConnection, Any]:
        """Asks one pool after another, until one has done it or no other may be asked."""
        full: dict[str, QueueFull] = {}
        losses = 0
        while True:
            line = await self._choose(sms, held, full, waits=left() is not None)
            has_begun = True
            try:
                outcome = await line.ask(letter(line), sms)
                has_begun = outcome.has_begun
                return line, await value_of(outcome, line.name)
            except QueueFull as error:
                if has_begun:
                    raise
                full[line.name] = error
            except SPOILT:
                losses += has_begun
                if (has_begun and not may_repeat) or losses >= MOST_LOSSES:
                    raise
                line.is_spoilt = True

    async def _choose(
        self, sms: int, held: dict[str, int], full: dict[str, QueueFull], *, waits: bool
    ) -> PoolConnection:
        """A pool, now or once there is one."""
        while True:
            if not self._members.is_open:
                raise PoolClosed("this fleet", "not open: use it with `async with`")
            check_feasible(sms, self._members.most.values())
            lines = [one for name, one in self._members.lines.items() if name not in full]
            if (line := choose(lines, sms, held, self._chance)) is not None:
                return line
            if full:
                raise min(full.values(), key=lambda error: error.retry_after)
            if not waits:
                raise NoPool(
                    f"no pool of the fleet {self.name!r} with {sms} SMs is there now: Ray may be "
                    "replacing it. With a deadline, jobs wait for it"
                )
            await self._members.change()

    # -- questions ---------------------------------------------------------------------------------

    def pools(self) -> dict[str, protocol.Snapshot]:
        """What each pool that is there last said of itself, by name. Never waits."""
        lines = self._members.lines.items()
        return {name: line.snapshot._replace(is_open=line.is_open) for name, line in lines}

    async def health(self) -> dict[str, Health | None]:
        """How each pool's process is, by name; None: it does not answer within a second."""

        async def ask(handle: Any) -> Health | None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(ANSWER):
                    asked = handle.health.options(concurrency_group="control").remote()
                    return await asked  # type: ignore[no-any-return]  # Ray's
            return None

        handles = dict(self._members.handles)
        found = await asyncio.gather(*map(ask, handles.values()))
        return dict(zip(handles, found, strict=True))


async def _held(work: protocol.Packed) -> dict[str, int]:
    """Bytes of a job's arguments by the node that has them, of those in Ray's object store."""
    held: Counter[str] = Counter()
    if work.refs:
        refs = [ref for _, ref in work.refs]
        with suppress(RayError):  # its owner is gone: the job will tell
            found = await asyncio.to_thread(get_object_locations, refs, LOCATING_MS)
            for where in found.values():
                for node in where["node_ids"]:
                    held[node] += where["object_size"] or 0
    return held
