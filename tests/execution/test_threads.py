"""Loops in several threads share a pool: nothing is lost, and nothing is granted twice."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from typing import Any

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, Job, LaunchConfig, Partition, Pool, WouldBlock
from greensched.driver import simulated
from greensched.driver.simulated import Span
from greensched.execution.executor import DEPTH
from greensched.kernels import spin
from helpers.gate import Gate
from helpers.waiting import until

ONE = LaunchConfig(grid=1, block=1)
#: Whole device of the preset used here.
EVERY_SM = 132
WORKERS = 6
SIZES = (1, 8, 8, 8, 16, 16, 24, 32, (8, 48))
KERNEL_NS = 20_000
#: What a closed loop leaves behind at work: it is still there when others go on.
LONG_NS = 200_000_000
SEED = 20261130


class Left(Exception):
    """The error by which a holder leaves with a kernel in flight."""


class Account:
    """The SMs that are held now, by the streams of the holders."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.double: list[str] = []
        self.most = 0
        self._lock = threading.Lock()
        self._held: dict[Partition, tuple[str, int]] = {}
        self._union = 0

    def take(self, loop: str, p: Partition) -> None:
        sms = sms_of(p)
        with self._lock:
            if sms & self._union:
                self.double.append(f"{sms:x} of {self._union:x} by {loop}")
            self._held[p] = (loop, sms)
            self._union |= sms
            self.most = max(self.most, len(self._held))

    def give(self, p: Partition) -> None:
        with self._lock:
            loop, sms = self._held.pop(p)
            self._union &= ~sms
            self.ended[loop] += 1

    def forget(self, loop: str) -> None:
        """Note that a closing loop's SMs are available to others."""
        with self._lock:
            for p in [p for p, (whose, _) in self._held.items() if whose == loop]:
                self._union &= ~self._held.pop(p)[1]

    @property
    def leases(self) -> int:
        return self.ended.total()


def sms_of(p: Partition) -> int:
    """Return the SMs of a partition's stream, from the driver, as a bit mask."""
    return p._open_lease().launch_stream.stream.handle.sms  # type: ignore[attr-defined,no-any-return]


async def lease(pool: Pool, account: Account, loop: str, rng: random.Random) -> None:
    """One lease: its work is awaited, waited for by the end of the block, or left behind."""
    size = ALL if rng.random() < 0.005 else rng.choice(SIZES)
    async with pool.partition(size) as p:
        account.take(loop, p)
        what = rng.random()
        if what < 0.8:
            job = p.launch(ONE, spin, KERNEL_NS)
            if what < 0.3:
                await job
        account.give(p)
        if what < 0.5:
            raise Left


async def work(
    pool: Pool, account: Account, loop: str, rng: random.Random, enough: Callable[[], bool]
) -> None:
    while not enough():
        with suppress(Left):
            await lease(pool, account, loop, rng)


class Doomed:
    """A loop that is closed with leases held, requests queued and work in flight.

    As by a crash: its tasks are not cancelled.
    """

    HELD = 3

    def __init__(self, pool: Pool, account: Account, leases: int) -> None:
        self.leases = leases
        self.closed = threading.Event()
        self.queued = 0
        self.in_flight = 0
        self._pool = pool
        self._account = account
        self._held: list[Partition] = []
        self._tasks: list[asyncio.Task[None]] = []

    def run(self) -> None:
        """Run on the thread."""
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending!"
        loop.run_until_complete(self._main())
        self._account.forget("doomed")
        loop.close()
        self.closed.set()

    async def _main(self) -> None:
        account, pool = self._account, self._pool
        rngs = [random.Random(f"{SEED} doomed {i}") for i in range(WORKERS)]
        enough = lambda: account.ended["doomed"] >= self.leases  # noqa: E731
        await asyncio.gather(*(work(pool, account, "doomed", rng, enough) for rng in rngs))
        self._start(self._hold())
        await until(lambda: bool(self._held))
        for _ in range(self.HELD):
            self._start(self._wait_for_all())
        completion = pool._manager.current_poller()
        await until(lambda: completion.waiting == self.HELD)
        self.queued = completion.waiting
        jobs = [p.launch(ONE, spin, LONG_NS) for p in self._held]
        self.in_flight = sum(not job.done() for job in jobs)

    def collect(self) -> None:
        """Drop the tasks as the collector does, silently."""
        self._tasks.clear()
        self._held.clear()
        gc.collect()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))

    async def _hold(self) -> None:
        # Together: a task that held one and waited for the next could wait for ALL of another loop.
        async with self._pool.partitions(*[16] * self.HELD) as held:
            for p in held:
                self._account.take("doomed", p)
                await p.prepare(ONE, spin)
            self._held += held
            await asyncio.get_running_loop().create_future()

    async def _wait_for_all(self) -> None:
        async with self._pool.partition(ALL):
            raise AssertionError("granted to a closed loop")


def overlaps(spans: list[Span]) -> int:
    """Return pairs of kernels of different green contexts that shared an SM at one time."""
    found, running = 0, list[Span]()
    for span in sorted((s for s in spans if s.kind == "kernel"), key=lambda s: s.start):
        running = [r for r in running if r.end > span.start]
        found += sum(bool(r.sms & span.sms) and r.green != span.green for r in running)
        running.append(span)
    return found


@pytest.mark.fault("B10", "D7")
@pytest.mark.parametrize(("survivor", "leases"), [("asyncio", 10_000), ("trio", 2_000)])
def test_two_loops_share_a_pool_and_one_is_closed(survivor: str, leases: int) -> None:
    """In 10,000 leases by two loops, one of which closes, no SM is lost or granted twice."""
    driver = simulated.open("h200")
    spans: list[Span] = []
    driver.on_span(spans.append)
    account, pool = Account(), Pool(driver=driver)
    doomed = Doomed(pool, account, leases // 3)
    thread = threading.Thread(target=doomed.run, name="the doomed loop")

    async def main() -> None:
        await pool.open()
        thread.start()
        enough = lambda: doomed.closed.is_set() and account.leases >= leases  # noqa: E731
        async with anyio.create_task_group() as tasks:
            for i in range(WORKERS):
                rng = random.Random(f"{SEED} survivor {i}")
                tasks.start_soon(work, pool, account, survivor, rng, enough)
        async with pool.partition(ALL) as p:
            assert p.sm_count == EVERY_SM
        s = pool.statistics()
        assert (s.sms_free, s.sms_leased, s.sms_draining) == (EVERY_SM, 0, 0)
        assert (s.leases, s.waiting, s.requested) == (0, 0, s.granted + s.cancelled)
        assert s.cancelled <= Doomed.HELD  # what the closed loop had in the queue
        assert not (await pool.aclose()).abandoned

    anyio.run(main, backend=survivor)
    thread.join()
    doomed.collect()
    print(
        f"{account.leases} leases (seed {SEED}): {dict(account.ended)}, at most {account.most} at "
        f"once; the closed loop left {Doomed.HELD} held, {doomed.in_flight} jobs in flight, "
        f"{doomed.queued} queued; {len(spans)} operations, {overlaps(spans)} overlaps"
    )
    assert not thread.is_alive()
    assert account.leases >= leases
    assert account.ended["doomed"] >= leases // 3
    assert account.ended[survivor] >= leases // 3
    assert (doomed.in_flight, doomed.queued) == (Doomed.HELD, Doomed.HELD)
    assert account.most >= 4
    assert not account.double
    assert sum(span.end - span.start >= LONG_NS for span in spans) == Doomed.HELD
    assert not overlaps(spans)
    assert not driver.live()


# -- one thing at a time ----------------------------------------------------------------------


@pytest.mark.fault("D6")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_loop_after_another(backend: str) -> None:
    """A pool outlives the loop that opened it, and the next loop has all its SMs."""
    driver = simulated.open("h200")
    pool = Pool(driver=driver)

    async def leave_something(p_ended: list[Job[Any]]) -> None:
        await pool.open()
        with pytest.raises(Left):
            async with pool.partition(16) as p:
                p_ended.append(p.run(int))
                p_ended.append(p.launch(ONE, spin, KERNEL_NS))
                raise Left

    async def go_on() -> None:
        async with pool.partition(ALL) as p:
            assert p.sm_count == EVERY_SM
            await p.launch(ONE, spin, KERNEL_NS)

    for _ in range(3):
        jobs: list[Job[Any]] = []
        anyio.run(leave_something, jobs, backend=backend)
        anyio.run(go_on, backend=backend)
        assert all(job.done() for job in jobs)
    anyio.run(pool.aclose, backend=backend)
    assert not driver.live()


def in_thread(main: Callable[[], Awaitable[Any]], **options: Any) -> threading.Thread:
    """Run an async function on a loop of its own, in a thread of its own."""
    thread = threading.Thread(target=lambda: anyio.run(main, **options))
    thread.start()
    return thread


@pytest.mark.fault("D7")
def test_each_loop_hears_on_its_own_thread() -> None:
    """Grants, results and the pool's end reach every loop on its own thread."""
    pool, each = Pool(driver="simulated:h200"), 40
    debug = {"backend_options": {"debug": True}}
    served, refused = Counter[int](), list[int]()

    async def serve() -> None:
        me = threading.get_ident()
        while True:
            async with pool.partition(ALL) as p:
                await p.launch(ONE, spin, KERNEL_NS)
                assert await p.run(threading.get_ident) != me
                served[me] += 1

    async def serve_until_closed() -> None:
        with pytest.raises(greensched.PoolClosed):
            await serve()
        refused.append(threading.get_ident())

    async def main() -> None:
        await pool.open()
        threads = [in_thread(serve_until_closed, **debug) for _ in range(2)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_until_closed)
            await until(lambda: len(served) == 3 and min(served.values()) >= each)
            await pool.aclose()
        await until(lambda: not any(thread.is_alive() for thread in threads))

    anyio.run(main, **debug)
    assert set(refused) == set(served)


def test_opened_and_closed_by_two_loops_at_once() -> None:
    """Loops that open and close a pool together see one opening and one end."""
    driver = simulated.open("h200")
    pool, meet, reports = Pool(driver=driver), threading.Barrier(3), []

    async def main() -> None:
        meet.wait()
        await pool.open()
        async with pool.partition(16):
            pass
        meet.wait()
        reports.append(await pool.aclose())

    threads = [in_thread(main) for _ in range(3)]
    for thread in threads:
        thread.join()
    assert len(reports) == 3
    assert all(report is reports[0] for report in reports)
    assert not reports[0].abandoned
    assert not driver.live()


def test_closing_waits_for_another_loops_lease() -> None:
    """`aclose` on one loop waits, within its grace, for another loop's work."""
    pool, held, go = Pool(driver="simulated:h200"), threading.Event(), threading.Event()
    told: list[str] = []

    async def hold() -> None:
        async with pool.partition(16) as p:
            held.set()
            await until(go.is_set)
            with await p.upload(np.ones(8)) as b:
                told.append(f"held {(await p.download(b)).sum()}")

    async def close() -> None:
        report = await pool.aclose(grace=20)
        told.append(f"closed {report.abandoned}")

    async def main() -> None:
        await pool.open()
        thread = in_thread(hold)
        await until(held.is_set)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            await until(lambda: pool.state is greensched.PoolState.CLOSING)
            go.set()
        await until(lambda: not thread.is_alive())

    anyio.run(main)
    assert told == ["held 8.0", "closed ()"]


def test_a_job_may_be_awaited_on_another_loop() -> None:
    """A job's result and its failure reach every waiting task, on any loop."""
    pool, results = Pool(driver="simulated:h200"), list[Any]()

    async def main() -> None:
        async with pool, pool.partition(16) as p:
            gate = await Gate.closed(p)
            upload, failing = p.upload(np.ones(10)), p.run(divmod, 1, 0)

            async def wait() -> None:
                results.append((await upload).size)
                with pytest.raises(ZeroDivisionError):
                    await failing
                results.append("failed")

            threads = [in_thread(wait), in_thread(wait, backend="trio")]
            gate.open()
            await until(lambda: not any(thread.is_alive() for thread in threads))
            (await upload).close()
            gate._word.close()

    anyio.run(main)
    assert sorted(results, key=str) == [10, 10, "failed", "failed"]


def test_buffers_keep_their_order_across_loops() -> None:
    """A reader on another loop's partition sees earlier writes."""
    pool = Pool(driver="simulated:h200")
    shared: list[greensched.Buffer] = []
    reading, done = threading.Event(), list[float]()

    async def read() -> None:
        async with pool.partition(16) as p:
            job = p.download(shared[0])
            assert not job.done()
            reading.set()
            done.append(float((await job).sum()))

    async def main() -> None:
        async with pool, pool.partition(16) as p:
            with await p.upload(np.zeros(10)) as buffer:
                shared.append(buffer)
                gate = await Gate.closed(p)
                p.copy(buffer, np.ones(10))
                thread = in_thread(read)
                await until(reading.is_set)
                gate.open()
                await until(lambda: not thread.is_alive())
            gate._word.close()

    anyio.run(main)
    assert done == [10.0]


def test_without_a_loop_waiting_is_refused() -> None:
    """Requests and awaits on a thread without a loop raise, and take nothing."""
    pool, refused = Pool(driver="simulated:h200"), list[str]()

    async def main() -> None:
        async with pool, pool.partition(16) as p:
            gate = await Gate.closed(p)
            job = p.upload(np.ones(10))
            coroutine = pool.partition(8).__aenter__()

            def use() -> None:
                for call in (
                    lambda: pool.partition_nowait(8),
                    lambda: coroutine.send(None),
                    lambda: next(job.__await__()),
                ):
                    with pytest.raises(greensched.GreenschedError, match="no asyncio or trio loop"):
                        call()
                    refused.append("told")

            thread = threading.Thread(target=use)
            thread.start()
            await until(lambda: not thread.is_alive())
            assert pool.statistics().requested == 1
            gate.open()
            (await job).close()
            gate._word.close()

    anyio.run(main)
    assert refused == ["told"] * 3


def test_a_green_context_is_current_on_one_thread_only() -> None:
    """Entering a context that is current on another thread raises."""
    refused: list[str] = []

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(16) as p:
            context = p.context

            def second() -> None:
                with pytest.raises(greensched.GreenschedError, match="another thread"):
                    context.__enter__()
                refused.append("told")
                assert not context.is_current

            def first() -> bool:
                with context:
                    thread = threading.Thread(target=second)
                    thread.start()
                    thread.join()
                    return context.is_current

            assert await p.run(first)

    anyio.run(main)
    assert refused == ["told"]


# -- the wrong thread ---------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["launch", "upload", "run", "ready"])
def test_a_partition_is_for_its_own_thread(use: str) -> None:
    """A partition on another thread than its loop's raises WrongThread with its name."""
    said: list[BaseException | None] = []

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(16) as p:
            calls: dict[str, Callable[[], Any]] = {
                "launch": lambda: p.launch(ONE, spin, 1),
                "upload": lambda: p.upload(np.ones(3)),
                "run": lambda: p.run(int),
                "ready": lambda: asyncio.run(p.drain()),  # type: ignore[arg-type]
            }

            def other() -> None:
                try:
                    calls[use]()
                except BaseException as error:
                    said.append(error)
                else:
                    said.append(None)

            thread = threading.Thread(target=other)
            thread.start()
            await until(lambda: bool(said))
            thread.join()

    asyncio.run(main())
    assert isinstance(said[0], greensched.WrongThread), said


def test_a_thread_of_ours_may_meet_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver calls and waits work while another thread imports trio."""
    driver = simulated.open("h200")

    def use() -> None:
        with pytest.raises(greensched.GreenschedError):  # NoLoop, and not AttributeError
            Pool(driver=driver).aclose().send(None)
        device = greensched.Device(0, driver=driver)
        device.close()

    monkeypatch.setitem(sys.modules, "trio", types.ModuleType("trio"))  # as it is at first
    thread_errors: list[BaseException] = []

    def body() -> None:
        try:
            use()
        except BaseException as error:
            thread_errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not thread_errors, thread_errors


@pytest.mark.parametrize("strict", [False, True])
def test_an_event_is_recorded_while_the_worker_has_the_context(strict: bool) -> None:
    """Where an event and a stream may be of two contexts, the worker's call blocks no other thread.

    Else the event must be made where the worker is, and a new one is refused, by name.
    """
    inside, go = threading.Event(), threading.Event()

    async def main() -> None:
        driver = simulated.open("h200", strict_events=strict)
        async with Pool(driver=driver) as pool, pool.partition(16) as p:
            mine = p.context.create_event()
            job = p.run(lambda: (inside.set(), go.wait()))
            await until(inside.is_set)
            try:
                with pytest.raises(greensched.WrongThread) if strict else nullcontext():
                    p.stream.record().close()
                p.stream.record(mine).close()
            finally:
                go.set()
            await job

    asyncio.run(main())


def test_a_green_context_is_current_on_one_thread_at_a_time() -> None:
    """While a call has the context, entering it elsewhere is refused; a call waits its turn."""
    inside, go = threading.Event(), threading.Event()

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(16) as p:
            with p.context, p.context:  # reentrant
                job = p.run(lambda: (inside.set(), go.wait(), p.context.is_current))
                with pytest.raises(greensched.WrongThread, match="leave"):
                    await job
            await until(inside.is_set)
            with pytest.raises(greensched.WrongThread, match="another thread"), p.context:
                pass
            go.set()
            assert (await job)[-1]
            with p.context:
                assert p.context.is_current
            assert not p.context.is_current

    asyncio.run(main())


def test_too_many_calls_in_flight_are_refused() -> None:
    """A call never waits for room: the error says what to await."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            go = threading.Event()
            jobs: list[Job[Any]] = [p.run(go.wait)]
            with pytest.raises(WouldBlock, match="too many calls are in flight"):
                while True:
                    jobs.append(p.run(int))
            assert len(jobs) == DEPTH
            go.set()
            await p.drain()
            assert await p.run(int) == 0

    asyncio.run(main())
