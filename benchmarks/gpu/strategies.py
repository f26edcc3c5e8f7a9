"""Ways to put two users on one GPU: plain streams, priority streams, a fixed split, and a pool.

A *place* is where one user's work runs. A user is the same program on every place: `request` makes
one request and waits for it, `begin` launches one kernel and waits for its start, `keep_busy` works
without pause. One event loop drives both users everywhere, so every strategy pays the same for
Python.

On plain streams launches are packed once, the stream writes a word behind each piece, and a loop
polls the word in every turn: the cheapest that can be written.
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

#: Pieces that a busy user keeps in flight, so that the GPU never waits for the host.
DEPTH = 2


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch of a user's work."""

    kernel: Kernel
    config: LaunchConfig
    args: tuple[Any, ...]


Work = Sequence[Launch]


@dataclass(slots=True)
class Progress:
    """When the pieces of a busy user were seen to be done, in seconds of the host."""

    at: list[float] = field(default_factory=list)
    #: The numbers of SMs that the user had, where they change.
    sms: set[int] = field(default_factory=set)

    def rate(self) -> float:
        """Return pieces a second, from the first done to the last; 0: there were no two."""
        return (len(self.at) - 1) / (self.at[-1] - self.at[0]) if len(self.at) > 1 else 0.0


class Place(Protocol):
    """Where one user's work runs."""

    async def request(self) -> None: ...
    async def begin(self) -> float: ...
    async def keep_busy(self, until: float, done: Progress) -> None: ...


class OnStream:
    """A stream, on the SMs of its context.

    Args:
        stream: the stream.
        work: the launches of one request, or of one piece.
        word: the stream writes to it behind each piece.
        started: the kernel sets it as it begins, if the work is one kernel that does.
    """

    def __init__(
        self, stream: Stream, work: Work, word: PinnedBuffer, started: PinnedBuffer | None
    ) -> None:
        loader, driver = stream.context.loader, stream.context.driver
        # Kept whole: a launch reads its parameters in the memory of its plan.
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
        """Make one request, and wait for it."""
        await self._wait(self._submit())

    async def begin(self) -> float:
        """Launch one; return the seconds until its first block was seen to run."""
        assert self._started is not None
        self._started[0] = 0
        asked = time.perf_counter()
        ticket = self._submit()
        while not self._started[0]:  # noqa: ASYNC110  the kernel writes it
            await asyncio.sleep(0)
        took = time.perf_counter() - asked
        await self._wait(ticket)
        return took

    async def keep_busy(self, until: float, done: Progress) -> None:
        """Work without pause until a time."""
        in_flight = deque[int]()
        while time.perf_counter() < until:
            in_flight.append(self._submit())
            if len(in_flight) >= DEPTH:
                await self._wait(in_flight.popleft())
                done.at.append(time.perf_counter())
        while in_flight:
            await self._wait(in_flight.popleft())


class Leased:
    """A lease for each request; a busy user has one lease, with checkpoints.

    Args:
        pool: the pool, which has the class.
        service: the user's class.
        sms: as for `Pool.partition`.
        work, started: as of `OnStream`.
        segment: seconds between two checkpoints of a busy user.
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
        """Launch all, each kind packed once; only the last launch needs a job."""
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
        """Lease, make one request, and return the lease once it is done."""
        async with self._ask() as p:
            await self._all_on(p)

    async def begin(self) -> float:
        """Lease and launch; return the seconds until the first block was seen to run."""
        assert self._started is not None
        word = memoryview(self._started.array)
        word[0] = 0
        asked = time.perf_counter()
        async with self._ask() as p:
            self._all_on(p)
            while not word[0]:  # noqa: ASYNC110  the kernel writes it
                await asyncio.sleep(0)
            return time.perf_counter() - asked

    async def keep_busy(self, until: float, done: Progress) -> None:
        """Work without pause until a time; between segments the SMs may change.

        A checkpoint may divide a piece, between two launches. A segment ends before a launch that,
        as long as the last ones, would not fit into it.
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
    """A lease that is held while it is idle, with bound launches: the cheapest of ours.

    Args:
        p: the lease.
        work, started: as of `OnStream`.
    """

    def __init__(self, p: Partition, work: Work, started: PinnedBuffer | None = None) -> None:
        self._bounds = [p.bind(each.config, each.kernel, *each.args) for each in work]
        self._started = started

    async def request(self) -> None:
        """Make one request, and wait for it."""
        *firsts, last = self._bounds
        for first in firsts:
            first()
        await last.submit()

    async def begin(self) -> float:
        """Launch one; return the seconds until its first block was seen to run."""
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

    async def keep_busy(self, until: float, done: Progress) -> None:
        """Work without pause until a time."""
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


class RawStreams:
    """Streams of a device without a pool, also over parts of its SMs. All calls block.

    Args:
        device: the device; it is not closed.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._groups, self._rest = device.resources.sm.split_evenly(8)
        self._stack = ExitStack()

    def stream(self, *, priority: int = 0) -> Stream:
        """Create a stream on every SM."""
        stream = self.device.create_stream(priority=priority)
        self._stack.callback(stream.close)
        return stream

    def priorities(self) -> tuple[int, int]:
        """Return the least and the most urgent priority."""
        with self.device:
            return self.device.driver.priority_range()

    def split(self, sms: int) -> tuple[Stream, Stream]:
        """Create streams on so many SMs and on all others; `sms` is a multiple of 8.

        The second also has the remainder of the split, if the driver lets it be combined.
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
        """Return the sizes of a first part, at most three quarters of the device."""
        most = 3 * len(self._groups) // 4
        return [8 * n for n in (1, 2, 3, 4, 6, 8, 10, 12) if n <= most]

    def close(self) -> None:
        """Close streams and contexts; they have no work any more."""
        self._stack.close()


async def until(when: float) -> None:
    """Wait to the microsecond: a loop's timers are up to a millisecond late."""
    await asyncio.sleep(max(0.0, when - time.perf_counter() - 0.002))
    while time.perf_counter() < when:  # noqa: ASYNC110  it waits for a time
        await asyncio.sleep(0)


async def blocking(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that may block, on a thread."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def filled(p: Partition, *sizes: int) -> list[Buffer]:
    """Return buffers of float32 with random numbers, the same each time."""
    rng = np.random.default_rng(7)
    return [await p.upload(rng.random(size, dtype=np.float32)) for size in sizes]
