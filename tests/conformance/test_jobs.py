"""Jobs: their results and order, how they are awaited, and what happens when a block ends."""

from __future__ import annotations

import gc
import weakref

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, Job, LaunchConfig
from greensched.kernels import fill, saxpy
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import still_waits, turns, until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=4, block=128)


@pytest.mark.fault("D9")
@pytest.mark.runs_device_code
def test_a_launch_gives_the_right_answer(backend: Backend) -> None:
    """Upload, launch and download give the right numbers."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            a = np.arange(1000, dtype=np.float32)
            with await p.upload(a) as x, await p.upload(np.ones_like(a)) as y:
                p.launch(CONFIG, saxpy, 2.0, x, y, x.size)
                out = await p.download(y)
            np.testing.assert_array_equal(out, 2 * a + 1)

    backend.run(main)


@pytest.mark.runs_device_code
def test_work_happens_in_the_order_of_submission(backend: Backend) -> None:
    """Launches and copies run in the order of submission, even for a kernel's first use."""
    found: list[list[float]] = []

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, pool.partition(8) as other:
            for q in (p, other):  # the kernels are loaded for p by its first use, in between
                with await q.empty(64) as b:
                    q.launch(CONFIG, fill, b, 1.0, b.size)
                    first = q.download(b)
                    q.copy(b, np.full(64, 5, np.float32))
                    second = q.download(b)
                    q.launch(CONFIG, saxpy, 2.0, b, b, b.size)
                    third = q.download(b)
                    q.launch(CONFIG, fill, b, 7.0, b.size)
                    jobs = first, second, third, q.download(b)
                    found.append([(await job)[-1] for job in jobs])

    backend.run(main)
    assert found == [[1.0, 5.0, 15.0, 7.0]] * 2  # here, because a failed launch ends the block


def test_a_job_can_be_awaited_by_many_and_often(backend: Backend) -> None:
    """Any number of tasks may await a job, any number of times, and all get its result."""

    async def main() -> None:
        results: list[float] = []

        async def wait_for(job: Job[greensched.Buffer]) -> None:
            results.append((await job).size)

        async with backend.pool() as pool, pool.partition(8) as p:
            with await Gate.closed(p) as gate:
                job = p.upload(np.zeros(10))
                async with anyio.create_task_group() as tasks:
                    for _ in range(5):
                        tasks.start_soon(wait_for, job)
                    await turns()
                    assert not job.done()
                    assert not results
                    gate.open()
            assert job.done()
            assert await job is await job is job.result()
            (await job).close()
        assert results == [10] * 5

    backend.run(main)


def test_cancelling_an_awaiter_never_cancels_the_job(backend: Backend) -> None:
    """A cancelled await leaves its job as it is: others still get its result."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await Gate.closed(p) as gate:
                job = p.upload(np.ones(10))
                with anyio.move_on_after(0.01) as scope:
                    await job
                assert scope.cancelled_caught
                gate.open()
            with await job as buffer:
                np.testing.assert_array_equal(await p.download(buffer), np.ones(10))

    backend.run(main)


def test_asking_a_job_too_early_is_reported(backend: Backend) -> None:
    """`result()` and `exception()` never wait; before the end they raise WouldBlock."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await Gate.closed(p):
                job = p.empty(10)
                for ask in (job.result, job.exception):
                    with pytest.raises(greensched.WouldBlock):
                        ask()
                assert "running" in repr(job)
            with await job:
                assert job.exception() is None
                assert "done" in repr(job)

    backend.run(main)


def test_leaving_the_block_waits_for_jobs_left_behind(backend: Backend) -> None:
    """A normal end of the block waits for all submitted work."""

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            gates: list[Gate] = []
            left: list[bool] = []

            async def leave() -> None:
                async with pool.partition(8) as p:
                    gates.append(await Gate.closed(p))
                    job = p.empty(10)
                left.append(job.done())
                job.result().close()

            tasks.start_soon(leave)
            await until(lambda: bool(gates))
            await turns()
            assert not left
            with gates[0]:
                gates[0].open()
                await until(lambda: bool(left))
            assert left == [True]

    backend.run(main)


def test_unseen_failure_is_raised_at_the_end(backend: Backend) -> None:
    """The first failure of a job that was not awaited is raised at the block's end."""

    def fail(why: str) -> None:
        raise LookupError(why)

    async def main() -> None:
        async with backend.pool() as pool:
            with pytest.raises(LookupError, match="unseen"):
                async with pool.partition(8) as p:
                    seen = p.run(fail, "seen")
                    with pytest.raises(LookupError, match="seen"):
                        await seen
                    p.run(fail, "unseen")
            async with pool.partition(8) as p:  # seen: nothing is raised
                with pytest.raises(LookupError):
                    await p.run(fail, "once")
            with pytest.raises(ZeroDivisionError):  # the body's own error goes first
                async with pool.partition(8) as p:
                    p.run(fail, "unseen")
                    raise ZeroDivisionError

    backend.run(main)


def test_a_failure_that_was_seen_is_not_kept(backend: Backend) -> None:
    """Once its failure was retrieved, a job's arguments are released before the lease ends."""

    class Request:
        pass

    def refuse(_: Request) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            requests = [Request() for _ in range(5)]
            kept = [weakref.ref(request) for request in requests]
            while requests:
                with pytest.raises(ZeroDivisionError):
                    await p.run(refuse, requests.pop())
            await p.run(lambda: None)  # behind which the worker holds the last no longer
            await until(lambda: gc.collect() >= 0 and not any(ref() for ref in kept))

    backend.run(main)


@pytest.mark.fault("A9")
def test_leaving_by_an_exception_does_not_wait(backend: Backend) -> None:
    """An exception leaves the block at once; the SMs are free when the device is done."""

    async def main() -> None:
        async with backend.pool() as pool:
            with pytest.raises(ZeroDivisionError):
                async with pool.partition(16) as p:
                    gate = await Gate.closed(p)
                    raise ZeroDivisionError
            with gate:
                assert pool.statistics().sms_draining == 16
                with pytest.raises(greensched.WouldBlock):
                    pool.partition_nowait(ALL)
                gate.open()
                async with pool.partition(ALL) as p:
                    assert p.sm_count == pool.devices[0].sm_count

    backend.run(main)


def test_jobs_in_flight_are_bounded(backend: Backend) -> None:
    """At the limit submitting raises WouldBlock, and `ready()` waits for room."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(4) as b:
                with await Gate.closed(p) as gate:
                    number = 0
                    with pytest.raises(greensched.WouldBlock, match="drain"):
                        while number < 10_000:
                            p.copy(b, b)
                            number += 1
                    assert 32 <= number <= 1000
                    await still_waits(p.drain())
                    gate.open()
                await p.drain()
                await p.copy(b, b)

    backend.run(main)


BAD_ARGUMENTS = [
    ("takes 3 arguments", (1.0,)),
    ("takes 3 arguments", ()),
    ("argument 1", (None, "one", 8)),
    ("argument 2", (None, 1.0, 1.5)),
    ("argument 2", (None, 1.0, -1)),
    ("argument 2", (None, 1.0, 2**64)),
    ("argument 0", (0, 1.0, 8)),
    ("argument 0", (np.zeros(8), 1.0, 8)),
]


@pytest.mark.parametrize(("said", "args"), BAD_ARGUMENTS)
def test_wrong_arguments_are_refused_before_anything_is_submitted(
    backend: Backend, said: str, args: tuple[object, ...]
) -> None:
    """Arguments of the wrong number or kind raise, and say which and what it should be."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b:
                given = (b, *args[1:]) if args and args[0] is None else args
                with pytest.raises(greensched.ArgumentMismatch, match=said):
                    p.launch(CONFIG, fill, *given)
                await p.launch(CONFIG, fill, b, 1.0, b.size)
                with pytest.raises(greensched.ArgumentMismatch, match=said):
                    p.launch(CONFIG, fill, *given)

    backend.run(main)


def test_a_buffer_of_another_dtype_is_refused(backend: Backend) -> None:
    """A pointer parameter takes a buffer of its own dtype only."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with (
                await p.empty(8, np.float64) as b,
                pytest.raises(greensched.ArgumentMismatch, match="float64"),
            ):
                p.launch(CONFIG, fill, b, 1.0, b.size)

    backend.run(main)


@pytest.mark.fault("C6")
@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("grid.x", {"grid": 2**31, "block": 1}),
        ("grid.y", {"grid": (1, 65536), "block": 1}),
        ("grid.z", {"grid": (1, 1, 65536), "block": 1}),
        ("block.x", {"grid": 1, "block": 1025}),
        ("block.z", {"grid": 1, "block": (1, 1, 65)}),
        ("threads of a block", {"grid": 1, "block": (32, 33)}),
        ("shmem_size", {"grid": 1, "block": 1, "shmem_size": 10**9}),
    ],
)
def test_geometry_beyond_the_device_is_refused(
    backend: Backend, said: str, options: dict[str, object]
) -> None:
    """A grid, block or shared memory beyond the device raises, and says which and the limit."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b, pytest.raises(greensched.InvalidLaunch, match=said):
                p.launch(LaunchConfig(**options), fill, b, 1.0, b.size)  # type: ignore[arg-type]

    backend.run(main)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "8", (1, 2, 3, 4), ()])
def test_what_is_no_geometry_is_refused(bad: object) -> None:
    """The constructor refuses a grid or block that is not one to three positive ints."""
    with pytest.raises(greensched.InvalidLaunch, match="grid"):
        LaunchConfig(grid=bad, block=1)  # type: ignore[arg-type]
    with pytest.raises(greensched.InvalidLaunch, match="block"):
        LaunchConfig(grid=1, block=bad)  # type: ignore[arg-type]


def test_pool_launch_and_run_lease_do_and_return(backend: Backend) -> None:
    """`pool.launch` and `pool.run` lease SMs, do the work, wait, and return the SMs."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition(8) as p:
                b = await p.empty(8)
            with b:
                await pool.launch(CONFIG, fill, b, 1.0, b.size, sms=16)
                assert await pool.run(divmod, 7, 2, sms=8) == (3, 1)
            s = pool.statistics()
            assert (s.granted, s.sms_free) == (3, s.sms_total)

    backend.run(main)


@pytest.mark.fault("A8")
def test_what_a_cancelled_job_gives_is_nobodys(backend: Backend) -> None:
    """A buffer of a cancelled upload is freed silently, because no caller could close it."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            memory = p._open_lease().device_memory.memory
            before = memory.used_bytes
            with await Gate.closed(p):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await p.upload(np.ones(1000))
            await p.drain()
            gc.collect()
            with await p.upload(np.ones(10)):  # which finds what was given back
                await until(lambda: memory.would_grow(0) or memory.used_bytes <= before + 512)

    backend.run(main)


def test_a_call_may_hand_its_buffers_to_a_library(backend: Backend) -> None:
    """In a call, the array interface of its arguments names the call's own stream."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            runs = p._open_lease().executor.call_stream
            with await p.upload(np.ones(10)) as buffer:
                named = await p.run(lambda b: b.__cuda_array_interface__["stream"], buffer)
                assert named == runs.stream.__cuda_stream__()[1]
                assert buffer.__cuda_array_interface__["stream"] is None

    backend.run(main)
