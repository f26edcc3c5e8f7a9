"""The progress of copies, reported on the loop's thread, and what a cancellation leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

import greensched
from greensched import Buffer, Job, Partition
from greensched.device.staging import CHUNK, PART
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import until

IS_VERSIONED = False

LARGE = np.arange(5 * CHUNK // 4 + 100, dtype=np.float32)
SMALL = np.arange(100, dtype=np.float32)
EMPTY = np.empty(0, np.float32)

Copy = Callable[[Partition, Buffer, np.ndarray, Any], Job[Any]]
COPIES: dict[str, Copy] = {
    "upload": lambda p, _, array, tell: p.upload(array, progress=tell),
    "download": lambda p, buffer, _, tell: p.download(buffer, progress=tell),
    "copy": lambda p, buffer, array, tell: p.copy(buffer, array, progress=tell),
    "copy on the device": lambda p, buffer, _, tell: p.copy(buffer, buffer, progress=tell),
}


def close(result: object) -> None:
    if isinstance(result, Buffer):
        result.close()


@pytest.mark.parametrize("array", [LARGE, SMALL, EMPTY], ids=["large", "small", "empty"])
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_progress_is_told_on_the_loops_thread(
    backend: Backend, copy: Copy, array: np.ndarray
) -> None:
    """Progress never decreases, has one total, and is complete before the job's result."""

    async def main() -> None:
        told: list[tuple[int, int]] = []
        threads = set()

        def tell(done: int, total: int) -> None:
            told.append((done, total))
            threads.add(threading.get_ident())

        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(array) as buffer:
                close(await copy(p, buffer, array, tell))
                assert told[-1] == (array.nbytes, array.nbytes)
        assert told == sorted(set(told))
        assert {total for _, total in told} == {array.nbytes}
        assert threads == {threading.get_ident()}

    backend.run(main)


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_progress_comes_while_the_copy_runs(backend: Backend, copy: Copy) -> None:
    """A large copy from or to an array reports progress before it is complete."""

    async def main() -> None:
        seen: list[int] = []
        begun = anyio.Event()

        def tell(done: int, total: int) -> None:
            seen.append(done)
            begun.set()

        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(np.resize(LARGE, 20 * CHUNK // 4)) as buffer:
                array = await p.download(buffer)
                job = copy(p, buffer, array, tell)
                await begun.wait()
                close(await job)
                assert seen[-1] == array.nbytes
                if copy is not COPIES["copy on the device"]:
                    assert seen[0] < array.nbytes

    backend.run(main)


def test_a_long_copy_on_the_device_is_told_of_in_parts(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy within a device with a progress callback runs in parts and arrives whole."""

    async def main() -> None:
        told: list[int] = []
        array = np.arange(PART // 8 + 1000, dtype=np.float64)
        async with backend.pool() as pool, pool.partition(8) as p:
            parts, driver = [], p.context.driver
            submit = driver.copy
            monkeypatch.setattr(driver, "copy", lambda *a: (parts.append(a[2]), submit(*a)))
            with await p.upload(array) as a, await p.empty_like(a) as b:
                await p.copy(b, a, progress=lambda done, _: told.append(done))
                assert parts == [PART, array.nbytes - PART]
                assert told[-1] == array.nbytes
                assert set(told) <= {PART, array.nbytes}
                np.testing.assert_array_equal(await p.download(b), array)

    backend.run(main)


@pytest.mark.parametrize("array", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_what_progress_raises_fails_the_job(
    backend: Backend, copy: Copy, array: np.ndarray
) -> None:
    """The job fails with the callback's error, and the partition goes on."""

    async def main() -> None:
        def stop(done: int, total: int) -> None:
            raise RuntimeError("that will do")

        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(array) as buffer:
                used = pool._manager.device_pools[0].memory._used
                job = copy(p, buffer, array, stop)
                with pytest.raises(RuntimeError, match="that will do"):
                    await job
                assert job.done()
                await p.copy(buffer, array)
                np.testing.assert_array_equal(await p.download(buffer), array)
                memory = pool._manager.device_pools[0].memory

                def is_back() -> bool:
                    memory.reap()
                    return memory._used <= used

                await until(is_back)

    backend.run(main)


def test_a_stopped_download_leaves_the_rest_of_its_array_alone(backend: Backend) -> None:
    """Nothing is written after the place where it stopped."""

    async def main() -> None:
        out = np.full(20 * CHUNK // 4, -1, np.float32)
        half = threading.Event()

        def stop(done: int, total: int) -> None:
            half.set()
            raise RuntimeError("enough")

        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(np.ones_like(out)) as buffer:
                with pytest.raises(RuntimeError, match="enough"):
                    await p.download(buffer, out, progress=stop)
                assert half.is_set()
                before = out.copy()
                assert before[0] == 1
                assert before[-1] == -1
                await p.copy(buffer, np.zeros_like(out))
                np.testing.assert_array_equal(out, before)

    backend.run(main)


def test_what_is_no_callback_is_refused(backend: Backend) -> None:
    """`progress` must be callable and not a coroutine function."""

    async def later(done: int, total: int) -> None: ...

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            for wrong in (7, later):
                with pytest.raises(greensched.InvalidRequest, match="bytes done"):
                    p.upload(SMALL, progress=wrong)  # type: ignore[arg-type]
            assert p._open_lease().launch_stream.issued == p._open_lease().launch_stream.submitted

    backend.run(main)


def test_a_cancelled_await_leaves_the_copy_going(backend: Backend) -> None:
    """The array stays in use until the job is done, which can be awaited again."""

    async def main() -> None:
        out = np.full_like(LARGE, -1)
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(LARGE) as buffer:
                with await Gate.closed(p) as gate:
                    job = p.download(buffer, out)
                    with anyio.move_on_after(0.01) as scope:
                        await job
                    assert scope.cancelled_caught
                    assert not job.done()
                    assert (out == -1).all()  # the device never writes it
                    gate.open()
                assert await job is out
                np.testing.assert_array_equal(out, LARGE)

    backend.run(main)


def test_a_block_left_by_a_cancellation_keeps_the_array_until_the_job_is_done(
    backend: Backend,
) -> None:
    """The cancelled await returns at once; after the job nothing touches the array."""

    async def main() -> None:
        source, jobs = LARGE.copy(), []
        async with backend.pool() as pool, pool.partition(8) as keeper:
            buffer = await keeper.empty_like(source)
            with anyio.CancelScope() as scope:
                async with pool.partition(8) as p:
                    gate = await Gate.closed(p)
                    jobs.append(p.copy(buffer, source))
                    scope.cancel()
                    await anyio.sleep(1)
            assert not jobs[0].done()
            with gate:
                gate.open()
                await jobs[0]
            source[:] = -1
            np.testing.assert_array_equal(await keeper.download(buffer), LARGE)
            buffer.close()

    backend.run(main)


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_progress_callback_may_ask_for_the_result(backend: Backend, copy: Copy) -> None:
    """At the last progress callback the job is done, with its result."""

    async def main() -> None:
        results: list[object] = []

        def tell(done: int, nbytes: int) -> None:
            if job.done():
                results.append(job.result())

        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(SMALL) as buffer:
                job = copy(p, buffer, SMALL, tell)
                result = await job
                assert len(results) == 1
                assert results[0] is result
                close(result)

    backend.run(main)
