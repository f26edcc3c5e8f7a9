"""The hot path, operation by operation, as a row of ever longer prefixes of each.

For `benchmarks.micro.profile`, which times them. Each calls the library's own functions in the
order of the path; the last one is the public call itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, ByHand, arguments, by_hand
from greensched import Partition, Pool
from greensched.device.launch import PreparedLaunch
from greensched.driver.interface import Driver
from greensched.execution import launches
from greensched.execution.jobs import Job
from greensched.execution.submission import Channel
from greensched.kernels import saxpy

Do = Callable[[], Awaitable[Any]]
Finish = Callable[[Any], Awaitable[object]]


async def nothing(_: object = None) -> None:
    """Of an operation nothing, and nothing is left to do."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of an operation.

    Attributes:
        stage: what it does more than the prefix before it.
        do: does it once.
        finish: told what that gave; does the rest of the operation, beside the stopwatch.
    """

    stage: str
    do: Do
    finish: Finish = nothing


@dataclass(frozen=True, slots=True)
class Operation:
    """A public call, by its prefixes, and what one writes instead of it without greensched."""

    name: str
    prefixes: Sequence[Prefix]
    by_hand: Prefix


@asynccontextmanager
async def operations(driver: Driver) -> AsyncIterator[list[Operation]]:
    """The operations, each on a lane of its own, and raw calls on one more."""
    async with (
        Pool([0], driver=driver, prepare=[saxpy]) as pool,
        by_hand(driver, pool) as hand,
        pool.partition(SMS) as p,
        pool.partition(SMS) as q,  # a lease that has called a function launches another way
    ):
        # A buffer that a bound launch uses makes others look after their order: each has its own.
        async with pool.partition(SMS) as r:
            third = await r.empty(ITEMS)
        with await p.empty(ITEMS) as first, await p.empty(ITEMS) as second, third:
            yield [
                *_bound(p, arguments(first), hand),
                _launch(p, arguments(second), hand),
                _lease(pool, arguments(third), hand),
                _run(q),
            ]


def _bound(p: Partition, values: tuple[object, ...], hand: ByHand) -> list[Operation]:
    """`bound()` and `bound.submit()`."""
    bound = p.bind(CONFIG, saxpy, *values)

    async def called() -> None:
        bound()

    async def submitted() -> Any:
        return bound.submit()

    async def settle(_: Any) -> None:
        await bound.submit()

    launch, *rest = _submission(bound._channel, bound._plan, settle)
    checks = "thread, capture, room in the queue"
    return [
        Operation("bound()", [launch, Prefix(checks, called, settle)], _raw_launch(hand)),
        Operation(
            "bound.submit()", [launch, *rest, Prefix(checks, submitted, settle)], _raw_pair(hand)
        ),
    ]


def _launch(p: Partition, values: tuple[object, ...], hand: ByHand) -> Operation:
    """`p.launch` with every check."""
    channel = p._ready()
    plan, track = channel.lane.plan(saxpy, CONFIG), channel.track
    assert plan is not None, "the pool has prepared it"
    fire, pack = plan.fire, plan.arguments.pack

    async def packed() -> Any:
        ticket = track.issued + 1
        assert pack(values, track, ticket)
        return channel.submit_now(fire, saxpy.name, ticket)

    async def looked_up() -> Any:
        return launches.launch(channel, CONFIG, saxpy, values)

    async def launched() -> Any:
        return p.launch(CONFIG, saxpy, *values)

    async def settle(_: Any) -> None:
        await p.launch(CONFIG, saxpy, *values)

    return Operation(
        "p.launch(...)",
        [
            *_submission(channel, plan, settle),
            Prefix("4 arguments checked, noted, packed", packed, settle),
            Prefix("the kernel's plan looked up", looked_up, settle),
            Prefix("thread, room, open and not poisoned", launched, settle),
        ],
        _raw_pair(hand),
    )


def _submission(channel: Channel, plan: PreparedLaunch, settle: Finish) -> list[Prefix]:
    """What every launch that is a job ends in: the two calls of the driver, and the job."""
    fire, track = plan.fire, channel.track

    async def launched() -> None:
        fire()

    async def marked() -> None:
        fire()
        track.mark(track.issue())

    async def submitted() -> Any:
        return channel.submit_now(fire, saxpy.name, track.issued + 1)

    return [
        Prefix("the driver: cuLaunchKernel", launched, settle),
        Prefix("the driver: cuStreamWriteValue32, the ticket", marked, settle),
        Prefix("a Job; refusals caught; watched", submitted, settle),
    ]


def _lease(pool: Pool, values: tuple[object, ...], hand: ByHand) -> Operation:
    """Lease, launch, await, return."""
    semaphore = asyncio.Semaphore(1)

    async def asked() -> None:
        pool.partition(SMS)

    async def granted() -> Partition:
        return await pool.partition(SMS).__aenter__()

    async def launched() -> Partition:
        p = await pool.partition(SMS).__aenter__()
        p.launch(CONFIG, saxpy, *values)
        return p

    async def awaited() -> Partition:
        p = await pool.partition(SMS).__aenter__()
        await p.launch(CONFIG, saxpy, *values)
        return p

    async def returned() -> None:
        async with pool.partition(SMS) as p:
            await p.launch(CONFIG, saxpy, *values)

    async def give_back(p: Partition) -> None:
        await p.__aexit__(None, None, None)

    async def raw() -> None:
        async with semaphore:
            hand.pack_and_launch()
            hand.record()
            await hand.poll()

    return Operation(
        "lease, launch, await, return",
        [
            Prefix("pool.partition(16): the wish", asked),
            Prefix("granted: a parked lease is taken", granted, give_back),
            Prefix("p.launch(...)", launched, give_back),
            Prefix("await, of a job that is done", awaited, give_back),
            Prefix("returned: it is parked again", returned),
        ],
        Prefix("semaphore, raw launch, event, polled", raw),
    )


def _run(p: Partition) -> Operation:
    """`await p.run(f)`, of a function that does nothing."""
    channel = p._ready()
    holding, runs = channel.holding, channel.lane.runs
    crew, completion = holding.crew, holding.completion
    loop = asyncio.get_running_loop()

    async def there_and_back(item: Callable[[], object]) -> None:
        future = loop.create_future()

        def do() -> None:
            try:
                item()
            finally:  # a thread says what its item failed with; nobody waits for ever
                loop.call_soon_threadsafe(future.set_result, None)

        crew._worker.submit(do)
        await future

    def entered() -> None:
        with crew.lane.context.entered(wait=True):
            pass

    def ticketed() -> None:
        with crew.lane.context.entered(wait=True):
            pass
        crew._has_nothing(runs)
        runs.mark_here(runs.issue())

    async def hop() -> None:
        await there_and_back(_empty)

    async def in_context() -> None:
        await there_and_back(entered)

    async def with_ticket() -> None:
        await there_and_back(ticketed)

    async def by_crew() -> None:
        ticket = runs.issue()
        job: Job[None] = Job(runs, ticket, "nothing", holding.failed)
        completion.watch(runs)
        crew.run(_empty, job, completion)
        await job

    async def whole() -> None:
        await p.run(_empty)

    async def thread() -> None:
        await asyncio.to_thread(_empty)

    return Operation(
        "await p.run(f)",
        [
            Prefix("to the lane's thread and back", hop),
            Prefix("the green context made current, and left", in_context),
            Prefix("its stream asked, the ticket written", with_ticket),
            Prefix("a Job, watched; GIL let go of; all woken at once", by_crew),
            Prefix("checks, buffers, what integrations put around", whole),
        ],
        Prefix("asyncio.to_thread", thread),
    )


def _empty() -> None:
    pass


def _raw_launch(hand: ByHand) -> Prefix:
    async def raw() -> None:
        hand.launch()

    return Prefix("raw launch, packed once", raw, _polled(hand))


def _raw_pair(hand: ByHand) -> Prefix:
    async def raw() -> None:
        hand.launch()
        hand.mark()

    return Prefix("raw launch, packed once, and mark", raw, _polled(hand))


def _polled(hand: ByHand) -> Finish:
    async def finish(_: Any) -> None:
        hand.record()
        await hand.poll()

    return finish
