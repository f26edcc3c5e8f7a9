"""A fleet: one pool for each GPU of a Ray cluster, and jobs that go to one of them."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.experimental import get_object_locations

from greensched import Pool
from greensched.errors import (
    DeviceFault,
    GreenschedError,
    InvalidRequest,
    NoPool,
    Poisoned,
    PoolClosed,
    PoolLost,
    QueueFull,
)
from greensched.integrations.ray import gpus, wire
from greensched.integrations.ray.choosing import check_apart, check_feasible, choose
from greensched.integrations.ray.host import Health, actor
from greensched.integrations.ray.line import Line
from greensched.integrations.ray.session import Session
from greensched.integrations.ray.wire import Wish
from greensched.integrations.ray.within import answered_within, until, value_of
from greensched.typing import Size

T = TypeVar("T")

logger = logging.getLogger("greensched")

#: Where the actors' names are, so that any program of the cluster finds them.
NAMESPACE = "greensched"
#: Seconds between two attempts to reach a pool that is away. A call to one costs 1 ms.
PING = 0.05
#: The same, of one that is there and does not open.
UNWELL = 1.0
#: Seconds between two looks for new GPUs and new pools.
LOOK = 1.0
#: Seconds for which there must be more GPUs than pools, all of these being there, until one more is
#: begun. Ray counts the GPUs of a dead node until it misses its heartbeats (15 s, Ray 2.60), while
#: the pool that was there may be on another already.
SURPLUS = 30.0
#: Seconds for a pool's process to say how it is.
ANSWER = 1.0
#: Milliseconds for the owner of an object to say where it is.
LOCATING_MS = 200
#: A job that so many pools were lost with is not tried again: it may be what ends them.
MOST_LOSSES = 3
#: What a pool says when it can do no more; another may.
SPOILT = (Poisoned, DeviceFault, PoolClosed, PoolLost)


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
        self._make, self._pools, self._detached = make, pools, detached
        self._functions = wire.Functions()
        self._chance = random.Random()
        self._handles: dict[str, Any] = {}
        self._lines: dict[str, Line] = {}
        #: The most SMs of one lease, by pool, also while it is away.
        self._most: dict[str, int] = {}
        self._caring: dict[str, asyncio.Task[None]] = {}
        self._first: dict[str, asyncio.Future[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._surplus = 0.0
        self._news: asyncio.Event | None = None

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
        if self._news is not None:
            raise InvalidRequest("this fleet was entered already: make another")
        self._news = asyncio.Event()
        try:
            await self._take_up(begin=True)
            if not self._handles:
                raise NoPool(
                    f"there is no pool of the fleet {self.name!r}: start one with make=, where "
                    "Ray has GPUs"
                )
            await asyncio.gather(*self._first.values())
        except BaseException:
            self._close()
            raise
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Leaves the fleet: this program's jobs are cancelled. Pools that it began end with it."""
        self._close()

    def _close(self) -> None:
        tasks = [*self._caring.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        for line in self._lines.values():
            line.hang_up()
        self._lines.clear()
        self._tell()

    async def stop(self, grace: float = 5.0) -> None:
        """Ends the pools, for every program: who waits is told, what runs has the grace to end."""
        handles, self._handles = [*self._handles.values()], {}
        self._close()
        stops = [handle.stop.remote(grace) for handle in handles]
        for stop in stops:
            with suppress(RayError):  # away, or at its end already
                await stop
        for handle in handles:
            await asyncio.to_thread(ray.kill, handle, no_restart=True)

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
        cost: float | None = None,
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
        cost: float | None = None,
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
        cost: float | None = None,
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
            sms, service, cost: as of `Pool.partition`.
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
            PoolLost, Poisoned: its pool was lost with it, and it may have run.
            InvalidRequest: what can never be, or cannot be sent.
            Others: what the job raised, and what `Pool.partition` does.
        """
        needed, left = wire.least(sms), until(deadline)
        if idempotent and deadline is None:
            raise InvalidRequest("idempotent=True is tried again until its deadline: give one")
        async with answered_within(deadline):
            work = await wire.packed(self._functions, job, args)
            held = await _held(work)

            def letter(line: Line) -> wire.Run:
                return wire.Run(line.next_number(), work, Wish(sms, left(), service, cost))

            _, value = await self._serve(letter, needed, held, left, may_repeat=idempotent)
            return value

    def partition(
        self,
        sms: Size,
        *,
        deadline: float | None = None,
        service: str | None = None,
        cost: float | None = None,
    ) -> Session:
        """A lease of SMs of one pool for several jobs, to be used with `async with`.

        Its SMs are this program's until the block ends, the program does, or the pool is lost.
        Arguments as of `submit`; `deadline` is for the grant alone.

        Raises:
            InvalidSize: what can never be right.
        """
        needed = wire.least(sms)

        async def opened() -> tuple[Line, int, int]:
            left = until(deadline)
            number = 0

            def letter(line: Line) -> wire.Open:
                nonlocal number
                number = line.next_number()
                return wire.Open(number, Wish(sms, left(), service, cost))

            async with answered_within(deadline):
                line, count = await self._serve(letter, needed, {}, left, may_repeat=True)
            return line, number, count

        return Session(opened, self._functions)

    async def _serve(
        self,
        letter: Callable[[Line], wire.Run | wire.Open],
        sms: int,
        held: dict[str, int],
        left: Callable[[], float | None],
        *,
        may_repeat: bool,
    ) -> tuple[Line, Any]:
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
    ) -> Line:
        """A pool, now or once there is one."""
        while True:
            if self._news is None or self._watching is None or self._watching.cancelled():
                raise PoolClosed("this fleet", "not open: use it with `async with`")
            check_feasible(sms, self._most.values())
            lines = [line for name, line in self._lines.items() if name not in full]
            if (line := choose(lines, sms, held, self._chance)) is not None:
                return line
            if full:
                raise min(full.values(), key=lambda error: error.retry_after)
            if not waits:
                raise NoPool(
                    f"none of the {len(self._handles)} pools of the fleet {self.name!r} with "
                    f"{sms} SMs is there now: Ray may be replacing them. With a deadline, jobs wait"
                )
            await self._news.wait()

    # -- questions ---------------------------------------------------------------------------------

    def pools(self) -> dict[str, wire.Snapshot]:
        """What each pool that is there last said of itself, by name. Never waits."""
        lines = self._lines.items()
        return {name: line.snapshot._replace(is_open=line.is_open) for name, line in lines}

    async def health(self) -> dict[str, Health | None]:
        """How each pool's process is, by name; None: it does not answer within a second."""

        async def ask(handle: Any) -> Health | None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(ANSWER):
                    asked = handle.health.options(concurrency_group="control").remote()
                    return await asked  # type: ignore[no-any-return]  # Ray's
            return None

        names = [*self._handles]
        found = await asyncio.gather(*(ask(self._handles[name]) for name in names))
        return dict(zip(names, found, strict=True))

    # -- pools -------------------------------------------------------------------------------------

    async def _take_up(self, *, begin: bool) -> None:
        """Takes up pools that are new here, and begins those that GPUs lack."""
        for name, handle in (await asyncio.to_thread(self._find, begin)).items():
            self._handles[name] = handle
            self._first[name] = asyncio.get_running_loop().create_future()
            self._caring[name] = asyncio.create_task(self._care(name, handle))

    def _find(self, begin: bool) -> dict[str, Any]:
        """Actors of the fleet that are new here, by name; on a thread, for it blocks on Ray."""
        if not ray.is_initialized():
            raise NoPool("Ray is not connected: call ray.init(...) first")
        named = ray.util.list_named_actors(all_namespaces=True)
        there = {one["name"] for one in named if one["namespace"] == NAMESPACE}
        there = {name for name in there if name.startswith(f"{self.name}/")}
        found = {}
        for name in there - self._handles.keys():
            with suppress(ValueError):  # gone since
                found[name] = ray.get_actor(name, NAMESPACE)
        if self._make is not None and begin:
            wanted = gpus.count() if self._pools is None else self._pools
            new = sorted({f"{self.name}/{n}" for n in range(wanted)} - there)
            new = new[: max(0, wanted - len(there))]
            if new:
                gpus.check_free(len(new))
            for name in new:
                found[name] = actor(name, self._make, NAMESPACE, detached=self._detached)
        return found

    async def _watch(self) -> None:
        """Goes on looking for new GPUs, and new pools."""
        while True:
            await asyncio.sleep(LOOK)
            try:
                await self._take_up(begin=await self._lacks_pools())
            except (GreenschedError, RayError) as error:
                logger.warning("the fleet %r does not grow: %s", self.name, error)

    async def _lacks_pools(self) -> bool:
        """Whether there have been more GPUs than pools for long, and no pool that is away."""
        if self._make is None or self._pools is not None:
            return False
        count = await asyncio.to_thread(gpus.count)
        if count <= len(self._handles) or len(self._lines) < len(self._handles):
            self._surplus = 0.0
            return False
        self._surplus += LOOK
        return self._surplus >= SURPLUS

    async def _care(self, name: str, handle: Any) -> None:
        """Keeps a line to one pool, as long as Ray keeps its actor."""
        while (line := await self._reach(name, handle)) is not None:
            self._lines[name], self._most[name] = line, line.most
            if not self._first[name].done():
                self._first[name].set_result(None)
            self._tell()
            await asyncio.wait([line.broken])
            del self._lines[name]
            logger.warning("%s is away: %s", name, line.broken.result())
        del self._handles[name]
        self._most.pop(name, None)

    async def _reach(self, name: str, handle: Any) -> Line | None:
        """Tries to reach a pool until it answers; None: Ray has given its actor up."""
        while True:
            key = uuid.uuid4().hex
            try:
                facts = await handle.hello.remote(key, wire.PROTOCOL)
                line = Line(handle, key, facts, self._functions.code)
                check_apart(line, self._lines.values())
            except RayTaskError as error:
                self._refuse(name, error.cause)
                await asyncio.sleep(UNWELL)
            except InvalidRequest as error:
                self._refuse(name, error)
                await asyncio.sleep(UNWELL)
            except RayActorError as error:
                if await asyncio.to_thread(_is_given_up, name):
                    self._refuse(name, PoolLost(name, str(error)))
                    return None
                await asyncio.sleep(PING)
            else:
                return line

    def _refuse(self, name: str, error: BaseException) -> None:
        """A pool cannot be: who starts the fleet is told; later, the log."""
        first = self._first[name]
        if first.done():
            logger.warning("%s cannot be used: %s", name, error)
        else:
            first.set_exception(error)
            first.exception()  # several may fail, and one is raised

    def _tell(self) -> None:
        """Whoever waits for a pool looks again."""
        if self._news is not None:
            self._news.set()
            self._news = asyncio.Event()


async def _held(work: wire.Packed) -> dict[str, int]:
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


def _is_given_up(name: str) -> bool:
    """Whether Ray will not start an actor again. Blocks on Ray."""
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return True
    return False
