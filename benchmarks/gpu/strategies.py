"""Ways to put two users on one GPU: plain streams, priority streams, a fixed split, and a pool.

A *place* is where one user's work runs. A user is the same program on every place: `request` does
one request of his and waits for it, `begin` launches one kernel and waits for its start, `churn`
works without pause. One event loop drives both users everywhere, so that what Python costs is in
every arm alike.

What is written by hand is the cheapest that can be: launches packed once, a word that the stream
writes behind each piece, and a loop that looks at the word in every turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from greensched import (
    BoundLaunch,
    Buffer,
    ContextOptions,
    Device,
    Job,
    Kernel,
    LaunchConfig,
    Partition,
    PinnedBuffer,
    Pool,
    Stream,
)
from greensched.device.arguments import KernelArguments
from greensched.device.launch import PreparedLaunch

#: Pieces that who works without pause keeps in flight, so that the GPU never waits for the host.
DEPTH = 2


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch of a user's work."""

    kernel: Kernel
    config: LaunchConfig
    args: tuple[Any, ...]


Work = Sequence[Launch]


@dataclass(slots=True)
class Done:
    """When pieces of who works without pause were seen to be done, in seconds of the host."""

    at: list[float] = field(default_factory=list)
    #: SMs that he was seen to have, where they change.
    sms: set[int] = field(default_factory=set)

    def rate(self) -> float:
        """Pieces a second, from the first that was done to the last; 0: there were no two."""
        return (len(self.at) - 1) / (self.at[-1] - self.at[0]) if len(self.at) > 1 else 0.0


class Place(Protocol):
    """Where one user's work runs."""

    async def request(self) -> None: ...
    async def begin(self) -> float: ...
    async def churn(self, until: float, done: Done) -> None: ...


class OnStream:
    """A stream of one's own, whatever SMs its context has.

    Args:
        stream: where.
        work: what one request, or one piece, is.
        word: written by the stream behind each piece.
        started: set by the kernel of a work that is one, as it begins.
    """

    def __init__(
        self, stream: Stream, work: Work, word: PinnedBuffer, started: PinnedBuffer | None
    ) -> None:
        loader, driver = stream.context.loader, stream.context.driver
        # Kept whole: a launch reads its parameters where its plan has them.
        self._plans = []
        for launch in work:
            arguments = KernelArguments(launch.kernel, stream.context.device_id)
            arguments.fill(launch.args)
            with stream.context.entered(wait=True):
                handle = loader.load(launch.kernel)
            self._plans.append(
                PreparedLaunch(stream, launch.config, launch.kernel, handle, arguments)
            )
        self._launches = [plan.launch for plan in self._plans]
        self._mark = driver.bind_mark(stream.handle, word.address)
        self._word = memoryview(word.array)
        self._started = None if started is None else memoryview(started.array)
        self._submitted = 0

    def _submit(self) -> int:
        for launch in self._launches:
            launch()
        self._submitted += 1
        self._mark(self._submitted)
        return self._submitted

    async def _wait(self, ticket: int) -> None:
        while self._word[0] < ticket:  # noqa: ASYNC110  the stream writes it
            await asyncio.sleep(0)

    async def request(self) -> None:
        """Does one, and waits for it."""
        await self._wait(self._submit())

    async def begin(self) -> float:
        """Launches one; seconds until its first block was seen to run."""
        assert self._started is not None
        self._started[0] = 0
        asked = time.perf_counter()
        ticket = self._submit()
        while not self._started[0]:  # noqa: ASYNC110  the kernel writes it
            await asyncio.sleep(0)
        took = time.perf_counter() - asked
        await self._wait(ticket)
        return took

    async def churn(self, until: float, done: Done) -> None:
        """Does one after another until a time."""
        in_flight = deque[int]()
        while time.perf_counter() < until:
            in_flight.append(self._submit())
            if len(in_flight) >= DEPTH:
                await self._wait(in_flight.popleft())
                done.at.append(time.perf_counter())
        while in_flight:
            await self._wait(in_flight.popleft())


class Leased:
    """A lease of a pool for each request; who works without pause has one, with checkpoints.

    Args:
        pool: whose classes say who is who.
        service: on whose behalf.
        sms: as for `Pool.partition`.
        work, started: as of `OnStream`.
        segment: seconds between two checkpoints of who works without pause.
    """

    def __init__(
        self,
        pool: Pool,
        service: str,
        sms: int | tuple[int, int],
        work: Work,
        started: PinnedBuffer | None = None,
        segment: float = 0.010,
    ) -> None:
        self._ask = partial(pool.partition, sms, service=service)
        self._work = work
        self._started = started
        self._segment = segment

    def _all_on(self, p: Partition) -> Job[None]:
        """All of it, each kind packed once; what comes before the last needs no job of its own."""
        *firsts, last = self._work
        if not firsts:
            return p.launch(last.config, last.kernel, *last.args)
        bounds: dict[int, BoundLaunch] = {}
        for each in self._work:
            if id(each) not in bounds:
                bounds[id(each)] = p.bind(each.config, each.kernel, *each.args)
        for each in firsts:
            bounds[id(each)]()
        return bounds[id(last)].submit()

    async def request(self) -> None:
        """Leases, does one, and gives back once it is done."""
        async with self._ask() as p:
            await self._all_on(p)

    async def begin(self) -> float:
        """Leases and launches; seconds from asking until the first block was seen to run."""
        assert self._started is not None
        word = memoryview(self._started.array)
        word[0] = 0
        asked = time.perf_counter()
        async with self._ask() as p:
            self._all_on(p)
            while not word[0]:  # noqa: ASYNC110  the kernel writes it
                await asyncio.sleep(0)
            return time.perf_counter() - asked

    async def churn(self, until: float, done: Done) -> None:
        """Does one after another until a time; between segments its SMs may change.

        A piece may be cut by a checkpoint, between two launches. A segment is ended where the next
        launch, as long as the last ones were, would not fit into it.
        """
        async with self._ask() as p:
            bounds = [p.bind(each.config, each.kernel, *each.args) for each in self._work]
            done.sms.add(p.sm_count)
            in_flight = deque[tuple[int, Job[None]]]()

            async def ended() -> None:
                index, job = in_flight.popleft()
                await job
                if index == len(bounds) - 1:
                    done.at.append(time.perf_counter())

            looked, launched, each, index = time.perf_counter(), 0, 0.0, 0
            while (now := time.perf_counter()) < until:
                needed = now - looked + each * (len(in_flight) + 1)
                if launched and needed > self._segment:
                    while in_flight:
                        await ended()
                    done.sms.add(await p.checkpoint())
                    now = time.perf_counter()
                    each, looked, launched = (now - looked) / launched, now, 0
                in_flight.append((index, bounds[index].submit()))
                launched, index = launched + 1, (index + 1) % len(bounds)
                if len(in_flight) >= DEPTH:
                    await ended()
            while in_flight:
                await ended()


class Held:
    """A lease that is held while it is idle, with launches packed once: what costs least of ours.

    Args:
        p: the lease.
        work, started: as of `OnStream`.
    """

    def __init__(self, p: Partition, work: Work, started: PinnedBuffer | None = None) -> None:
        self._bounds = [p.bind(each.config, each.kernel, *each.args) for each in work]
        self._started = started

    async def request(self) -> None:
        """Does one, and waits for it."""
        *firsts, last = self._bounds
        for first in firsts:
            first()
        await last.submit()

    async def begin(self) -> float:
        """Launches one; seconds until its first block was seen to run."""
        assert self._started is not None
        word = memoryview(self._started.array)
        word[0] = 0
        asked = time.perf_counter()
        job = self._bounds[-1].submit()
        while not word[0]:  # noqa: ASYNC110  the kernel writes it
            await asyncio.sleep(0)
        took = time.perf_counter() - asked
        await job
        return took

    async def churn(self, until: float, done: Done) -> None:
        """Does one after another until a time."""
        *firsts, last = self._bounds
        in_flight = deque[Job[None]]()
        while time.perf_counter() < until:
            for first in firsts:
                first()
            in_flight.append(last.submit())
            if len(in_flight) >= DEPTH:
                await in_flight.popleft()
                done.at.append(time.perf_counter())
        while in_flight:
            await in_flight.popleft()


class Raw:
    """A device without a pool: its streams, and contexts over parts of its SMs. All calls block.

    Args:
        device: whose; it stays its owner's.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._groups, self._rest = device.resources.sm.split_evenly(8)
        self._stack = ExitStack()

    def stream(self, *, priority: int = 0) -> Stream:
        """One on every SM."""
        stream = self.device.create_stream(priority=priority)
        self._stack.callback(stream.close)
        return stream

    def priorities(self) -> tuple[int, int]:
        """(least, most) urgent."""
        with self.device:
            return self.device.driver.priority_range()

    def split(self, sms: int) -> tuple[Stream, Stream]:
        """Streams on so many SMs and on all others; `sms` is a multiple of 8.

        The second has what the cut left over as well, where the driver lets it be combined.
        """
        count = sms // 8
        others = self._groups[count:]
        whole = others if self._rest is None else [*others, self._rest]
        return self._on(self._groups[:count]), self._on(whole, others)

    def _on(self, *choices: list[Any]) -> Stream:
        *better, last = choices
        for resources in better:
            try:
                return self._stream_over(resources)
            except Exception:  # this driver does not combine them
                continue
        return self._stream_over(last)

    def _stream_over(self, resources: list[Any]) -> Stream:
        context = self.device.create_context(ContextOptions(resources=resources))
        self._stack.callback(context.close)
        stream = context.create_stream()
        self._stack.callback(stream.close)
        return stream

    @property
    def sizes(self) -> list[int]:
        """SMs that a first part can have, at most three quarters of the device."""
        most = 3 * len(self._groups) // 4
        return [8 * n for n in (1, 2, 3, 4, 6, 8, 10, 12) if n <= most]

    def close(self) -> None:
        """Ends streams and contexts; they have no work any more."""
        self._stack.close()


async def until(when: float) -> None:
    """Waits to the microsecond: a loop's timers are up to a millisecond late."""
    await asyncio.sleep(max(0.0, when - time.perf_counter() - 0.002))
    while time.perf_counter() < when:  # noqa: ASYNC110  the time is what it waits for
        await asyncio.sleep(0)


async def blocking(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls what may block on a thread."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def filled(p: Partition, *sizes: int) -> list[Buffer]:
    """Buffers of float32 with random numbers, the same each time."""
    rng = np.random.default_rng(7)
    return [await p.upload(rng.random(size, dtype=np.float32)) for size in sizes]
