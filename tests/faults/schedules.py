"""Random programs on the real pool, in random schedules, in virtual time.

    make schedules                                # programs from seed 0 on, a million steps
    make schedules STEPS=1 ARGS="--seed 4711"     # that one again

A seed decides everything: the device, the classes, the policy, the tasks and what they do, kernel
times, driver calls that are slow or fail, kernels that fault or hang, cancellations, the closing of
the pool, and the schedule. Of what is ready, an asyncio loop runs any callback next, and trio any
task; a thread of the library runs while another waits or is in a driver call. asyncio promises to
run callbacks in the order in which they became ready; the library must not need it, because a
thread or a timer makes them ready in any order.

Between two steps of a loop, what must always hold is checked: `Checks.before_step`. What must hold
in the end is in `Checks.at_end`. A program that breaks a rule prints the line that repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast
from unittest import mock

import anyio
import anyio.abc
import numpy as np
import trio
from tests.faults.every_call import Hung, limited

import greensched
from greensched import (
    ALL,
    REST,
    Buffer,
    GreenschedError,
    LaunchConfig,
    Partition,
    Pool,
    PoolState,
    ServiceClass,
    current_call,
    launch,
)
from greensched.driver import simulated
from greensched.driver.blocking import DRIVER_CALLS, Blocking
from greensched.driver.simulated import Crash, Fail, Fault, Hang, Span
from greensched.driver.simulated.device_models import DeviceModel
from greensched.driver.simulated.faults import FaultScript
from greensched.kernels import fill, saxpy, spin
from greensched.scheduling.cells import DeviceCells
from greensched.scheduling.requests import LONG_LEASE_S
from helpers.devices import SMALL_DEVICE
from helpers.small_executors import at_most

CONFIG = LaunchConfig(grid=1, block=32)
#: Items of small arrays, and of those that a thread copies.
SMALL, LARGE = 64, 32_768
#: Seconds of virtual time: the longest kernel, what work that hangs takes to be told, and what a
#: program without and with work that hangs may take.
LONGEST, HANG_AFTER, PATIENCE, PATIENCE_WITH_HANG = 0.010, 0.1, 600.0, 0.5
#: Statuses of a failed call, by what they mean for the pool.
MILD = ("INVALID_VALUE", "OUT_OF_MEMORY", "INVALID_RESOURCE_CONFIGURATION", "INVALID_CONTEXT")
#: Driver calls that a thread of the library makes for one item at most, once it has begun: most to
#: make an executor. And those of them that put work on a stream, of which an item has one.
CALLS_OF_AN_ITEM = 100
WORK = ("launch", "launch_graph", "copy", "copy_to_device", "copy_to_host", "copy_peer")
#: Calls that the library makes under a lock of its threads, which virtual time does not know of.
UNDER_A_LOCK = ("load_code", "get_kernel")
Backend = Literal["asyncio", "trio"]
#: The name of the thread of a second loop.
SECOND = "second loop"


# -- what a seed draws -------------------------------------------------------------------------


@dataclass
class Program:
    """What a seed draws."""

    seed: int
    rng: random.Random
    backend: Backend
    devices: list[DeviceModel]
    options: dict[str, Any]
    faults: list[Fault]
    #: How often a blocking driver call takes longer.
    slowness: float
    tasks: int
    actions: int
    #: Seconds until a task closes the pool beside the others; None: the last one does.
    closes_after: float | None
    grace: float
    #: A second loop, of asyncio, on a thread of its own: it ends, or closes over leases.
    second_loop: Literal["none", "ends", "closes"]
    #: The most executors of a device that requests can wait for; None: the library's.
    executors: int | None

    @property
    def hangs(self) -> bool:
        """Whether a kernel hangs, if it runs."""
        return any(isinstance(fault, Hang) for fault in self.faults)

    @property
    def is_passing(self) -> bool:
        """Whether all that fails is one query, by no fault of the device."""
        return all(
            isinstance(fault, Fail)
            and fault.call.startswith("query")
            and fault.status == "OUT_OF_MEMORY"
            and fault.last is None
            for fault in self.faults
        )

    @property
    def statuses(self) -> set[str]:
        """The statuses that fail calls, and with which kernels end."""
        return {str(fault.status) for fault in self.faults if isinstance(fault, (Fail, Crash))}


def model(rng: random.Random) -> DeviceModel:
    """Draw a device of two to eight cells."""
    gpcs = tuple(rng.choice([8, 16]) for _ in range(rng.randint(2, 4)))
    return replace(SMALL_DEVICE, gpcs=gpcs)


def classes(rng: random.Random) -> list[ServiceClass]:
    """Draw service classes."""
    known = [
        ServiceClass("a", priority=rng.choice([0, 1]), weight=rng.choice([0.5, 2])),
        ServiceClass("reserved", reserve=8, latency=0.1),
        ServiceClass("lends", reserve=8, max_wait_for_reserve=0.05),
        ServiceClass("yields", preemptible=True, checkpoint_interval=0.02),
        ServiceClass("capped", cap=8, max_waiting=rng.choice([None, 1])),
        ServiceClass("shared", shared=True, latency=0.2),
        ServiceClass("metered", quota=8),
    ]
    return rng.sample(known, rng.choice([0, 0, 1, 2, 3]))


def faults(rng: random.Random) -> list[Fault]:
    """Draw what fails: mostly nothing, or one thing."""
    draw = rng.random()
    if draw < 0.5:
        return []
    if draw < 0.65:
        return [Crash(rng.choice(["spin", "fill"]), rng.randint(1, 20))]
    if draw < 0.8:
        return [Hang(rng.choice(["spin", "fill"]), rng.randint(1, 20))]
    call = rng.choice(
        [*DRIVER_CALLS, "launch", "launch", "allocate", "create_green", "query_stream"]
    )
    status = rng.choice([*MILD, *MILD, "ILLEGAL_ADDRESS", "DEINITIALIZED"])
    nth = 1 + int(rng.expovariate(0.1))
    return [Fail(call, nth, status, rng.choice([None, None, nth + 3, 10**9]))]


def draw(seed: int) -> Program:
    """Draw the program of a seed."""
    rng = random.Random(seed)
    hang_after = rng.choice([None, HANG_AFTER])
    program = Program(
        seed=seed,
        rng=rng,
        backend=rng.choice(["asyncio", "trio"]),
        devices=[model(rng)] * rng.choice([1, 1, 1, 2]),
        options={
            "services": classes(rng),
            "policy": rng.choice(["fifo", "fair", "deadline", "sized"]),
            "placement": rng.choice(["spread", "pack"]),
            "hang_after": hang_after,
            "prepare": rng.choice([[], [spin, fill, saxpy]]),
            **({"max_waiting": rng.randint(1, 4)} if rng.random() < 0.3 else {}),
        },
        faults=faults(rng),
        slowness=rng.choice([0.0, 0.05, 0.3]),
        tasks=rng.randint(2, 8),
        actions=rng.randint(1, 8),
        closes_after=rng.expovariate(30) if rng.random() < 0.15 else None,
        grace=rng.choice([0.0, 0.001, 0.2]),
        second_loop=rng.choice(["none", "none", "ends", "closes"]),
        executors=rng.choice([None, None, rng.randint(1, 12)]),
    )
    if program.backend == "trio":
        program.second_loop = "none"
    if program.hangs:
        program.options["hang_after"] = HANG_AFTER
    return program


@contextmanager
def few_executors(program: Program) -> Iterator[None]:
    """Have pools that open make executors over some sets of cells in advance, as many as drawn."""

    def some(cells: DeviceCells, _: int) -> list[int]:
        masks = [mask for mask in range(1, cells.full_mask + 1) if cells.possible(mask)]
        return program.rng.sample(masks, min(len(masks), program.executors or 0))

    with mock.patch.object(DeviceCells, "menu", some):
        yield


# -- schedules ---------------------------------------------------------------------------------


class AnyOrder(deque[Any]):
    """The ready callbacks of an asyncio loop, of which any is the next."""

    def __init__(self, rng: random.Random, before_step: Callable[[], None]) -> None:
        super().__init__()
        self._rng = rng
        self._before_step = before_step

    def popleft(self) -> Any:
        """Take any of them."""
        self._before_step()
        if len(self) > 1:
            self.rotate(self._rng.randrange(len(self)))
        return super().popleft()


class AnyOrderClock(simulated.VirtualClock):
    """A virtual clock whose loops run what is ready in any order, and tell each step."""

    def __init__(self, seed: int, before_step: Callable[[], None]) -> None:
        super().__init__(seed)
        self._before_step = before_step

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Make a loop."""
        loop: Any = super().new_event_loop()
        loop._ready = AnyOrder(random.Random(self.seed), self._before_step)
        return cast("asyncio.AbstractEventLoop", loop)

    def threads_in_calls(self) -> int:
        """Count the library's threads that wait in a driver call."""
        return sum(
            not participant.loop and "Mailbox" not in participant.ready.__qualname__
            for participant in self._participants
        )


class Steps(trio.abc.Instrument):
    """Tells each step of a task of trio."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._before_step = before_step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Tell a step."""
        self._before_step()


@contextmanager
def trio_in_any_order(seed: int) -> Iterator[None]:
    """Have trio shuffle the tasks that are ready by a seed, as its own tests do."""
    run: Any = trio._core._run
    before, state = run._ALLOW_DETERMINISTIC_SCHEDULING, run._r.getstate()
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(seed)
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before
        run._r.setstate(state)


class SlowScript(FaultScript):
    """A script that also makes some blocking calls slow, so that other threads run meanwhile."""

    def __init__(self, rng: random.Random, slowness: float, faults: Sequence[Fault]) -> None:
        super().__init__(faults)
        self._rng = rng
        self._slowness = slowness

    def call(self, name: str) -> tuple[int | None, float]:
        """Count a call, as the script that this one extends."""
        status, seconds = super().call(name)
        traits = DRIVER_CALLS.get(name)
        if traits is None or traits.blocking is not Blocking.MAY or name in UNDER_A_LOCK:
            return status, seconds
        if self._rng.random() < self._slowness:
            seconds += self._rng.expovariate(10_000)
        return status, seconds


# -- what must hold ----------------------------------------------------------------------------


class Checks:
    """What must hold between steps and in the end. Keeps the first five things that did not."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.pool: Pool | None = None
        self.driver: simulated.SimulatedDriver
        self.clock: AnyOrderClock
        self.steps = 0
        self.wrong: list[str] = []
        #: What happened, for the comparison of two runs.
        self.history: list[str] = []
        self.kinds: Counter[str] = Counter()
        self._spans: list[Span] = []
        #: Of each job, how often its done callback was called.
        self.told: dict[object, int] = {}
        #: The most driver calls that may be made, and of work, since the device is lost.
        self._most_calls: tuple[int, int] | None = None

    def broken(self, what: str) -> None:
        """Note that a rule does not hold."""
        if len(self.wrong) < 5:
            self.wrong.append(f"step {self.steps}: {what}")

    def before_step(self) -> None:
        """Check what must hold between two steps of a loop."""
        self.steps += 1
        pool = self.pool
        manager = None if pool is None else pool._lifecycle.granting
        if pool is None or manager is None or self.wrong:
            return
        if not manager.lock.acquire(blocking=False):
            self.broken("the manager's lock is held where another thread waits")
            return
        try:
            self._check_cells(manager.scheduler.allocator)
            self._check_first(manager)
        finally:
            manager.lock.release()
        if self._most_calls is None and pool.fault is not None:
            (calls, work), busy = self._calls(), self.clock.threads_in_calls()
            self._most_calls = calls + CALLS_OF_AN_ITEM * busy, work + busy

    def _calls(self) -> tuple[int, int]:
        calls = self.driver.script.calls
        modes = calls["exchange_capture_mode"]  # of a thread that starts: no device is asked
        return calls.total() - modes, sum(calls[name] for name in WORK)

    def _check_cells(self, allocator: Any) -> None:
        """Each cell is free or of one grant; shared grants have all, beside none of others."""
        for number, cells in enumerate(allocator.devices):
            held, free = 0, allocator.free_masks[number]
            for grant in allocator.grants[number]:
                if grant.is_shared:
                    others = (each.class_state for each in allocator.grants[number])
                    if not all(state.shared or state.rules.shared for state in others):
                        self.broken(f"shared and exclusive on device {number}")
                elif held & grant.mask:
                    self.broken(f"granted twice: {held & grant.mask:b} of device {number}")
                else:
                    held |= grant.mask
            if free != cells.full_mask & ~held:
                self.broken(f"of device {number}, {held:b} is granted and {free:b} is free")

    def _check_first(self, manager: Any) -> None:
        """The first request of all does not wait where an executor of its size is free."""
        queue, allocator = manager.scheduler.queue, manager.scheduler.allocator
        is_plain = not (allocator.is_limited or allocator.may_share or queue.policy.size)
        if not (queue.waiting and is_plain and queue.reservation is None):
            return
        request = min(map(queue.place, queue.firsts()))[-1]
        part, *more = request.parts
        if more or part.named or request.class_state.sizes:
            return
        for device in request.devices:
            cells, free = allocator.devices[device], allocator.free_masks[device]
            for mask in manager.device_pools[device].executors:
                sms = 0 if mask & ~free else cells.sm_count(mask)
                if part.least <= sms <= max(part.most, cells.cells_for(part.least) * cells.size):
                    self.broken(f"{request} waits, and {mask:b} of device {device} is free")

    def span(self, span: Span) -> None:
        """Note what ran."""
        if span.kind == "kernel":
            self._spans.append(span)

    def check_spans(self) -> None:
        """No SM ran kernels of two green contexts at once, where no class shares."""
        if any(each.shared for each in self.program.options["services"]):
            return
        running: list[Span] = []
        for span in sorted(self._spans, key=lambda one: one.start):
            running = [one for one in running if one.end > span.start]
            for one in running:
                if one.device == span.device and one.green != span.green and one.sms & span.sms:
                    self.broken(f"two kernels at once on {one.sms & span.sms:b}: {one}, {span}")
                    return
            running.append(span)

    def raised(self, kind: str, error: BaseException, *allowed: type[BaseException]) -> None:
        """Judge what a task got: one of the allowed errors, or the consequence of a fault."""
        self.history.append(f"{kind}: {type(error).__name__}")
        if not self._is_right(error, allowed):
            trace = "".join(traceback.format_exception(error))
            self.broken(f"{kind} got {type(error).__name__}: {error}\n{trace}")

    def _is_right(self, error: BaseException, allowed: tuple[type[BaseException], ...]) -> bool:
        program, pool = self.program, self.pool
        if isinstance(error, allowed):
            return True
        if isinstance(error, greensched.WouldDeadlock):  # a lease that was forgotten still counts
            return self.kinds["forgotten"] > 0
        if isinstance(error, greensched.Closed):
            return pool is not None and pool.state is not PoolState.OPEN
        if isinstance(error, greensched.DeviceHung):
            return program.hangs
        if isinstance(error, (greensched.DeviceLost, greensched.DeviceFault)):
            return not program.is_passing and tells(error, program.statuses)
        if isinstance(error, GreenschedError):
            return tells(error, program.statuses)
        return False

    def at_end(self, report: greensched.CloseReport | None) -> None:
        """Check a pool that was closed: nothing waits, is held or alive, and the counts add up."""
        pool, program = self.pool, self.program
        assert pool is not None
        for job, times in self.told.items():
            if times != 1:
                self.broken(f"{job} was told {times} times")
        if report is None:
            return
        s = pool.statistics()
        if s.waiting or s.requested != s.granted + s.cancelled + s.expired:
            self.broken(f"counts of requests: {s}")
        lost = pool.fault is not None
        if lost and self._most_calls is not None:
            for made, most in zip(self._calls(), self._most_calls, strict=True):
                if made > most:
                    self.broken(f"{made - most} driver calls too many since the device is lost")
        if lost or report.abandoned or program.faults:
            return
        if pool.state is not PoolState.CLOSED:
            self.broken(f"closed, and {pool.state}")
        if s.leases or s.sms_leased or s.sms_draining:
            self.broken(f"held after the end: {s}")
        if self.driver.live():
            self.broken(f"alive after the end: {dict(self.driver.live())}")


def tells(error: BaseException, statuses: set[str]) -> bool:
    """Return whether an error, its cause or context names one of the statuses."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        seen.append(one)
        one = getattr(one, "cause", None) or one.__cause__ or one.__context__
    return any(status in str(each) for status in statuses for each in seen)


# -- what tasks do -----------------------------------------------------------------------------


@dataclass
class Task:
    """One task of a program: its generator, and what the tasks share."""

    pool: Pool
    rng: random.Random
    program: Program
    checks: Checks
    #: Buffers that any lease may use, their value, and the job that fills them.
    common: list[tuple[Buffer, float, Any]]

    def size(self) -> Any:
        """Draw a size."""
        draw = self.rng.random()
        total = self.program.devices[0].sm_count
        if draw < 0.1:
            return ALL
        least = self.rng.randint(1, total)
        return (least, self.rng.randint(least, total)) if draw < 0.4 else least

    def options(self) -> dict[str, Any]:
        """Draw the options of a lease."""
        rng, options = self.rng, dict[str, Any]()
        services = self.program.options["services"]
        if services and rng.random() < 0.6:
            options["service"] = rng.choice(services).name
        if rng.random() < 0.2:
            options["deadline"] = rng.expovariate(50)
        if rng.random() < 0.2:
            options["duration"] = rng.expovariate(100)
        if len(self.program.devices) > 1 and rng.random() < 0.3:
            options["device"] = rng.randrange(2)
        return options

    def ns(self) -> int:
        """Draw a kernel's nanoseconds."""
        return int(min(self.rng.expovariate(1 / 200e-6), LONGEST) * 1e9)

    def spins(self, p: Partition) -> Awaitable[None]:
        """Launch a kernel, whose job must tell its callback once."""
        return self.noted(p.launch(CONFIG, spin, self.ns()))

    def noted(self, job: Any) -> Any:
        """Count how often a job is told, where its loop outlives it."""
        if threading.current_thread().name == SECOND:
            return job
        told, key = self.checks.told, f"{job!r} {len(self.checks.told)}"
        told[key] = 0

        def tell(_: object) -> None:
            told[key] += 1

        job.add_done_callback(tell)
        return job

    async def pause(self) -> None:
        """Let other tasks run, or time pass."""
        if self.rng.random() < 0.5:
            await anyio.sleep(0)
        else:
            await anyio.sleep(self.rng.expovariate(2_000))

    # -- the kinds -----------------------------------------------------------------------------

    async def launches(self) -> None:
        """Launch some kernels, and await some."""
        async with self.pool.partition(self.size(), **self.options()) as p:
            for _ in range(self.rng.randint(0, 5)):
                job = self.spins(p)
                if self.rng.random() < 0.5:
                    await job

    async def through_the_pool(self) -> None:
        """Use the methods that lease for one call."""
        if self.rng.random() < 0.5:
            await self.pool.launch(CONFIG, spin, self.ns(), sms=self.size(), **self.options())
        elif await self.pool.run(len, (1, 2), sms=self.size(), **self.options()) != 2:
            self.checks.broken("a call returned another value")

    async def nested(self) -> None:
        """Ask for SMs while holding some."""
        async with self.pool.partition(8, **self.options()) as p:
            self.spins(p)
            await self.pause()
            async with self.pool.partition(self.size(), deadline=0.05) as q:
                await self.spins(q)

    async def joint(self) -> None:
        """Take several partitions at once."""
        sizes = self.rng.choice([(8, REST), (8, 8), (REST,), (8, (8, 16))])
        async with self.pool.partitions(*sizes, **self.options()) as several:
            for p in several:
                self.spins(p)
            await self.pause()

    async def nowait(self) -> None:
        """Take what is free now."""
        options = self.options()
        options.pop("deadline", None)
        async with self.pool.partition_nowait(self.size(), **options) as p:
            await self.spins(p)

    async def elastic(self) -> None:
        """Come to checkpoints, and be idle between."""
        async with self.pool.partition((8, 64), **self.options()) as p:
            for _ in range(self.rng.randint(1, 4)):
                self.spins(p)
                await p.checkpoint()
                if self.rng.random() < 0.3:
                    async with p.idle():
                        await self.pause()

    async def copies(self) -> None:
        """Upload, compute, and download what must be right."""
        items = self.rng.choice([SMALL, SMALL, LARGE])
        value = float(self.rng.randint(1, 100))
        async with self.pool.partition(self.size(), **self.options()) as p:
            array = np.full(items, value, np.float32)
            with await p.upload(array) as x, await p.upload(array) as y:
                job = self.noted(p.launch(CONFIG, saxpy, 2.0, x, y, items))
                found = await p.download(y)
                if job.exception() is None and not (found == 3 * value).all():
                    self.checks.broken(f"{found} is not {3 * value}")
                if self.rng.random() < 0.3:
                    self.spins(p)  # the buffers are freed behind it

    async def handed_over(self) -> None:
        """Leave a buffer for another lease, or read one of another's."""
        if self.common and self.rng.random() < 0.6:
            buffer, value, job = self.common.pop()
            with buffer:
                async with self.pool.partition(8, device=buffer.device_id) as p:
                    found = await p.download(buffer)
                    if job.exception() is None and not (found == value).all():
                        self.checks.broken(f"{found} is not {value}")
            return
        value = float(self.rng.randint(1, 100))
        async with self.pool.partition(self.size(), **self.options()) as p:
            buffer = await p.empty(SMALL)
            self.spins(p)
            try:
                job = self.noted(p.launch(CONFIG, fill, buffer, value, SMALL))
            except BaseException:
                buffer.close()
                raise
            self.common.append((buffer, value, job))

    async def calls(self) -> None:
        """Call functions on the partition's thread; keep a value there."""
        async with self.pool.partition(self.size(), **self.options()) as p:
            self.spins(p)
            if await p.run(sum, (1, 2)) != 3:
                self.checks.broken("a call returned another value")
            await p.local(dict)

    async def bound(self) -> None:
        """Launch again and again what was bound."""
        async with self.pool.partition(self.size(), **self.options()) as p:
            await p.prepare(CONFIG, spin)
            again = p.bind(CONFIG, spin, self.ns())
            for _ in range(self.rng.randint(1, 20)):
                again()
            if self.rng.random() < 0.5:
                await p.drain()
                await again.submit()

    async def graphs(self) -> None:
        """Capture a graph, and launch it."""
        async with self.pool.partition(self.size(), **self.options()) as p:
            await p.prepare(CONFIG, fill)
            with await p.empty(SMALL) as x, await p.capture(filled, x, 7.0) as graph:
                job = self.noted(graph.launch(p))
                found = await p.download(x)
                if job.exception() is None and not (found == 7).all():
                    self.checks.broken(f"{found} is not 7")

    async def forgotten(self) -> None:
        """Take a lease, and never leave it."""
        p = self.pool.partition(8)
        await p.__aenter__()
        self.spins(p)

    async def keeps(self) -> None:
        """Keep a lease for so long that it may never end."""
        async with self.pool.partition(self.size(), **self.options()) as p:
            self.spins(p)
            await anyio.sleep(self.rng.choice([1.0, LONG_LEASE_S + 1]))

    async def fails(self) -> None:
        """Raise in a block with work."""
        try:
            async with self.pool.partition(self.size(), **self.options()) as p:
                self.spins(p)
                raise Intended
        except Intended:
            pass

    async def reconfigures(self) -> None:
        """Give the classes other rules."""
        services = [
            service
            for service in self.program.options["services"]
            if not service.reserve or self.rng.random() < 0.7
        ]
        self.pool.reconfigure(services=services)
        await self.pause()
        self.pool.reconfigure(services=self.program.options["services"])

    async def looks(self) -> None:
        """Read what a pool says of itself."""
        self.pool.statistics().as_dict()
        self.pool.snapshot()
        repr(self.pool)
        await self.pause()


class Intended(Exception):
    """Raised by a task in its block."""


def filled(x: Buffer, value: float) -> None:
    call = current_call()
    assert call is not None
    launch(call.stream, CONFIG, fill, x, value, SMALL)


#: How often each kind is drawn, and the errors that its own arguments may lead to.
TIMES = (greensched.DeadlineExceeded, greensched.DeadlineImpossible, greensched.QueueFull)
NEVER = (greensched.TooManySMs, greensched.InvalidRequest)
KINDS: dict[Callable[[Task], Awaitable[None]], tuple[int, tuple[type[BaseException], ...]]] = {
    Task.launches: (20, TIMES),
    Task.through_the_pool: (6, TIMES),
    Task.nested: (6, (*TIMES, greensched.WouldDeadlock)),
    Task.joint: (8, TIMES),
    Task.nowait: (8, (greensched.WouldBlock, *TIMES)),
    Task.elastic: (10, TIMES),
    Task.copies: (10, TIMES),
    Task.handed_over: (6, TIMES),
    Task.calls: (4, TIMES),
    Task.bound: (4, TIMES),
    Task.graphs: (3, TIMES),
    Task.forgotten: (2, TIMES),
    Task.keeps: (1, TIMES),
    Task.fails: (3, TIMES),
    Task.reconfigures: (1, ()),
    Task.looks: (2, ()),
}


# -- running -----------------------------------------------------------------------------------


async def act(task: Task, scopes: dict[int, anyio.CancelScope], number: int) -> None:
    """Do what a task does, each in a scope that may be cancelled."""
    program, checks = task.program, task.checks
    kinds, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    for _ in range(program.actions):
        (kind,) = task.rng.choices(kinds, weights)
        checks.kinds[kind.__name__] += 1
        with anyio.CancelScope() as scope:
            scopes[number] = scope
            try:
                with anyio.fail_after(PATIENCE_WITH_HANG if program.hangs else PATIENCE):
                    await kind(task)
            except Exception as error:
                late = (TimeoutError,) if program.hangs else ()
                checks.raised(kind.__name__, error, *KINDS[kind][1], *NEVER, *late)
            finally:
                scopes.pop(number, None)
        await task.pause()


async def cancels(rng: random.Random, scopes: dict[int, anyio.CancelScope]) -> None:
    """Cancel tasks at random moments."""
    while True:
        await anyio.sleep(rng.choice([0.0, rng.expovariate(500)]) or 1e-6)
        for _ in range(rng.randint(0, 5)):
            await anyio.sleep(0)
        if scopes and rng.random() < 0.5:
            scopes[rng.choice(sorted(scopes))].cancel()


async def acts(program: Program, checks: Checks, rng: random.Random, *more: Any) -> None:
    """Run tasks, and others that cancel them or do more, until the tasks have ended."""
    assert checks.pool is not None
    common, scopes = list[tuple[Buffer, float, Any]](), dict[int, anyio.CancelScope]()
    async with anyio.create_task_group() as others:
        others.start_soon(cancels, random.Random(rng.random()), scopes)
        async with anyio.create_task_group() as tasks:
            for number in range(program.tasks):
                task = Task(checks.pool, random.Random(rng.random()), program, checks, common)
                tasks.start_soon(act, task, scopes, number, name=f"task {number}")
            for each in more:
                tasks.start_soon(each)
        others.cancel_scope.cancel()
    for buffer, _, _ in common:
        buffer.close()


async def beside(program: Program, checks: Checks, seed: float) -> None:
    """Run tasks in a second loop on a thread of its own, until it has closed."""
    clock, rng, go = checks.clock, random.Random(seed), threading.Event()

    async def hold(sms: int) -> None:
        assert checks.pool is not None
        async with checks.pool.partition(sms) as p:
            p.launch(CONFIG, spin, 100_000)
            await asyncio.sleep(PATIENCE)

    async def leave() -> None:
        for _ in range(rng.randint(1, 4)):
            held.append(asyncio.ensure_future(hold(rng.choice([8, 8, 16]))))
        await asyncio.sleep(rng.expovariate(2_000))

    def loop() -> None:
        second = clock.new_event_loop()
        second.set_exception_handler(lambda *_: None)
        main = acts(program, checks, rng) if program.second_loop == "ends" else leave()
        second.run_until_complete(main)
        go.wait()  # no real time decides when it closes
        second.close()
        held.clear()

    held, before = list[asyncio.Future[None]](), set(clock._participants)
    thread = threading.Thread(target=loop, name=SECOND, daemon=True)
    thread.start()
    while not (began := set(clock._participants) - before):
        pass
    while began & set(clock._participants):  # noqa: ASYNC110  it leaves them without an event
        await anyio.sleep(0.001)
    go.set()
    thread.join()


async def run_program(program: Program, checks: Checks) -> None:
    """Run a program to its end."""
    if program.backend == "trio":
        trio.lowlevel.add_instrument(Steps(checks.before_step))
    rng = program.rng
    pool = checks.pool = Pool(driver=checks.driver, **program.options)
    try:
        if program.executors is None:
            await pool.open()
        else:
            with few_executors(program):
                await at_most(pool, program.executors).open()
    except GreenschedError as error:
        checks.raised("open", error)
        checks.at_end(None)
        return
    report: greensched.CloseReport | None = None

    async def close() -> None:
        nonlocal report
        try:
            report = await pool.aclose(grace=program.grace)
        except GreenschedError as error:
            checks.raised("close", error)

    async def close_later(seconds: float) -> None:
        await anyio.sleep(seconds)
        await close()

    more: list[Callable[[], Awaitable[None]]] = []
    if program.closes_after is not None:
        more.append(partial(close_later, program.closes_after))
    if program.second_loop != "none":
        more.append(partial(beside, program, checks, rng.random()))
    await acts(program, checks, rng, *more)
    if report is None:
        await close()
    await anyio.sleep(1)  # what is told in a next turn
    checks.at_end(report)


def run(seed: int) -> Checks:
    """Run the program of a seed; return what was found."""
    program = draw(seed)
    checks = Checks(program)
    clock = checks.clock = AnyOrderClock(seed, checks.before_step)
    driver = checks.driver = simulated.open(program.devices, clock=clock)
    script = SlowScript(random.Random(seed), program.slowness, program.faults)
    driver.script = driver.machine.script = script
    driver.on_span(checks.span)
    before = set(threading.enumerate())
    gc.collect()
    gc.disable()  # what a collection finds depends on what ran before
    try:
        with trio_in_any_order(seed), limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clock.run(run_program, program, checks, backend=program.backend)
    except (Exception, Hung) as error:
        checks.broken("".join(traceback.format_exception(error)) + stacks())
    finally:
        gc.enable()
        driver.close()
    checks.check_spans()
    for thread in set(threading.enumerate()) - before:
        if not checks.wrong:
            thread.join(10)
            if thread.is_alive():
                checks.broken(f"the thread {thread.name} did not end")
    checks.history += [f"{one.name} {one.sms:x} {one.start} {one.end}" for one in checks._spans]
    return checks


def stacks() -> str:
    """Return where each thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    each = (
        f"{names.get(ident)}:\n{''.join(traceback.format_stack(f)[-8:])}" for ident, f in frames
    )
    return "\n".join(each)


def main(arguments: list[str]) -> int:
    """Run programs; return 1 if one broke a rule."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.schedules")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--steps", type=int, default=1, help="run programs until so many")
    chosen = parser.parse_args(arguments)
    logging.getLogger("greensched").setLevel(logging.CRITICAL + 1)
    began, seed, steps, wrong = time.monotonic(), chosen.seed, 0, list[int]()
    kinds: Counter[str] = Counter()
    while steps < chosen.steps:
        checks = run(seed)
        steps, kinds = steps + checks.steps, kinds + checks.kinds
        if checks.wrong:
            wrong.append(seed)
            print(*checks.wrong[:1], f'make schedules STEPS=1 ARGS="--seed {seed}"', sep="\n")
        seed += 1
        if checks.wrong or not seed % 1000:
            print(f"seed {seed}: {steps} steps, {len(wrong)} wrong", flush=True)
    rate = steps / (time.monotonic() - began)
    print(", ".join(f"{number} {kind}" for kind, number in kinds.most_common()))
    print(
        f"{seed - chosen.seed} programs from seed {chosen.seed} on, {steps} steps, {rate:.0f}/s, "
        f"{len(wrong)} wrong{f': {wrong[:20]}' if wrong else ''}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
