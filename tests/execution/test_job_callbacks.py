"""Jobs in asyncio's functions for futures, and their done callbacks on asyncio and trio."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

import greensched
from greensched import Job, LaunchConfig, Partition, Pool
from greensched.driver import simulated
from greensched.kernels import spin
from helpers.gate import Gate
from helpers.waiting import until

ONE = LaunchConfig(grid=1, block=1)
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
tag: ContextVar[str] = ContextVar("tag", default="unset")


@asynccontextmanager
async def partition() -> AsyncIterator[Partition]:
    async with Pool(driver=simulated.open("h200")) as pool, pool.partition(8) as p:
        await p.prepare(ONE, spin)
        yield p


def fail() -> None:
    raise ValueError("of the job")


def test_asyncio_wait_takes_jobs() -> None:
    """`asyncio.wait` returns the jobs themselves, and a timeout leaves no callback."""

    async def main() -> None:
        async with partition() as p:
            with await Gate.closed(p) as gate:
                jobs: list[Any] = [p.launch(ONE, spin, 1000) for _ in range(2)]
                done, pending = await asyncio.wait(jobs, timeout=0.01)
                assert (done, pending) == (set(), set(jobs))
                assert not jobs[0]._callbacks
                gate.open()
                done, pending = await asyncio.wait(jobs)
                assert (done, pending) == (set(jobs), set())
                done, _ = await asyncio.wait(jobs)
                assert done == set(jobs), "of what is done already"

    asyncio.run(main())


def test_asyncio_wait_ends_with_the_first_failure() -> None:
    """A failed job ends the wait, and `exception` retrieves its failure."""

    async def main() -> None:
        async with partition() as p, partition() as q:
            with await Gate.closed(q):
                held: Any = q.launch(ONE, spin, 1000)
                failed: Any = p.run(fail)
                done, pending = await asyncio.wait(
                    [held, failed], return_when=asyncio.FIRST_EXCEPTION
                )
                assert (done, pending) == ({failed}, {held})
                assert isinstance(failed.exception(), ValueError)
                assert not failed.cancelled()

    asyncio.run(main())


def test_asyncio_takes_jobs_as_awaitables() -> None:
    """`gather`, `as_completed`, `ensure_future`, `wait_for` and `shield` take jobs."""

    async def main() -> None:
        async with partition() as p:
            numbers = [p.run(lambda n=n: n) for n in range(3)]  # type: ignore[misc]
            assert await asyncio.gather(*numbers) == [0, 1, 2]
            assert sorted([await one for one in asyncio.as_completed(numbers)]) == [0, 1, 2]
            assert await asyncio.ensure_future(numbers[1]) == 1
            assert await asyncio.shield(numbers[2]) == 2
            assert await asyncio.wait_for(p.run(lambda: 3), 10) == 3
            with pytest.raises(ValueError, match="of the job"):
                await asyncio.gather(p.run(fail))

    asyncio.run(main())


def test_jobs_are_awaited_on_another_loop() -> None:
    """`asyncio.wait` on a loop of another thread is woken there."""
    found: list[int] = []

    async def elsewhere(job: Any) -> None:
        (done,), _ = await asyncio.wait([job])
        found.append(done.result())

    async def main() -> None:
        async with partition() as p:
            event = threading.Event()
            job = p.run(lambda: [event.wait(), 7][1])
            thread = threading.Thread(target=lambda: asyncio.run(elsewhere(job)))
            thread.start()
            event.set()
            await until(lambda: not thread.is_alive())
            assert found == [7]

    asyncio.run(main())


@BACKENDS
def test_callbacks_run_on_the_loop(backend: str) -> None:
    """Each is called once, in order, on the loop's thread, in a copy of its context."""

    async def main() -> None:
        async with partition() as p:
            seen: list[tuple[str, int, str]] = []

            def note(name: str) -> Any:
                return lambda job: seen.append((name, threading.get_ident(), tag.get()))

            with await Gate.closed(p) as gate:
                job = p.launch(ONE, spin, 1000)
                for name in ("first", "second"):
                    tag.set(name)
                    job.add_done_callback(note(name))
                tag.set("later")
                await anyio.sleep(0.01)
                assert not seen
                gate.open()
                await job
            job.add_done_callback(note("third"))
            assert len(seen) < 3, "never called at once"
            await until(lambda: len(seen) == 3)
            here = threading.get_ident()
            assert seen[:2] == [("first", here, "first"), ("second", here, "second")]
            assert seen[2] == ("third", here, "later")

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_removed_callback_is_not_called(backend: str) -> None:
    """All occurrences of the callback are removed, and the others stay."""

    async def main() -> None:
        async with partition() as p:
            seen: list[Job[None]] = []
            other: list[Job[None]] = []
            with await Gate.closed(p) as gate:
                job = p.launch(ONE, spin, 1000)
                job.add_done_callback(seen.append)
                job.add_done_callback(other.append)
                job.add_done_callback(seen.append)
                assert job.remove_done_callback(seen.append) == 2
                assert job.remove_done_callback(seen.append) == 0
                gate.open()
            await until(lambda: other == [job])
            assert not seen
            job.add_done_callback(seen.append)
            assert job.remove_done_callback(seen.append) == 1
            await anyio.sleep(0.01)
            assert not seen

    anyio.run(main, backend=backend)


@pytest.mark.fault("D12")
@BACKENDS
def test_what_a_callback_raises_is_logged(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loop, the poller and the other callbacks go on."""

    async def main() -> None:
        async with partition() as p:
            seen: list[Job[None]] = []
            job = p.launch(ONE, spin, 1000)
            job.add_done_callback(lambda _: fail())
            job.add_done_callback(seen.append)
            await until(lambda: seen == [job])
            await p.launch(ONE, spin, 1000)

    with caplog.at_level(logging.ERROR, "greensched"):
        anyio.run(main, backend=backend)
    assert "done callback" in caplog.text


@BACKENDS
def test_a_callback_hears_of_a_lost_device(backend: str) -> None:
    """A job that a lost device cannot end is done with that exception."""

    async def main() -> None:
        driver = simulated.open("h200", faults=[simulated.Crash("spin")])
        pool = Pool(driver=driver)
        await pool.open()
        found: list[BaseException | None] = []
        with pytest.raises(greensched.DeviceLost):
            async with pool.partition(8) as p:
                await p.prepare(ONE, spin)
                job = p.launch(ONE, spin, 1000)
                job.add_done_callback(lambda job: found.append(job.exception()))
                await until(lambda: bool(found))
                assert isinstance(found[0], greensched.DeviceLost)
        await pool.aclose(0)

    anyio.run(main, backend=backend)


def test_a_thread_without_a_loop_cannot_add_one() -> None:
    """It raises, and the job is not affected."""

    async def main() -> None:
        async with partition() as p:
            job = p.launch(ONE, spin, 1000)
            with pytest.raises(greensched.NoLoop):
                await p.run(job.add_done_callback, print)
            await job

    asyncio.run(main())
