"""Blocking callables: their thread, context and order, and what a cancellation leaves behind."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, Partition
from greensched.execution.completion_poller import MAX_WAITERS
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import turns, until

IS_VERSIONED = False


def test_a_callable_runs_on_the_partitions_own_thread(backend: Backend) -> None:
    """All calls of a partition run on one thread, which is not the loop's."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as a, pool.partition(8) as b:
            mine = threading.get_ident()
            first = [await a.run(threading.get_ident) for _ in range(3)]
            other = await b.run(threading.get_ident)
            assert len({mine, other, *first}) == 3

    backend.run(main)


def test_arguments_and_results_pass_through(backend: Backend) -> None:
    """Positional and keyword arguments arrive, results return, and errors are raised at await."""

    def call(*args: object, **kwargs: object) -> tuple[object, ...]:
        return args, kwargs

    def fail() -> None:
        raise LookupError("why")

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            assert await p.run(call, 1, two=2) == ((1,), {"two": 2})
            with pytest.raises(LookupError, match="why"):
                await p.run(fail)

    backend.run(main)


def test_a_call_sees_the_context_variables_of_its_caller(backend: Backend) -> None:
    """A call sees the caller's context variables of its submission; its changes stay inside."""
    request = ContextVar("request", default="none")
    served = dict[str, tuple[list[str], str]]()

    def answer(*_: object) -> str:
        seen = request.get()
        request.set("of an earlier call")
        return seen

    async def serve(p: Partition, name: str) -> None:
        request.set(name)
        with await p.upload(np.zeros(4, np.float32)) as buffer:
            jobs = [p.run(answer), p.run(answer, buffer), p.run(answer)]
            request.set("later")
            served[name] = [await job for job in jobs], request.get()

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve, p, "a")
                tasks.start_soon(serve, p, "b")
            assert served == {name: ([name] * 3, "later") for name in "ab"}
            assert await p.run(answer) == "none"

    backend.run(main)


def test_the_green_context_is_current_inside_and_restored_after(backend: Backend) -> None:
    """In a call the partition's context is current; afterwards the previous one is."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            driver, context = pool.devices[0].driver, p.context

            def inside() -> bool:
                return context.is_current

            def spoil() -> None:
                driver.set_current(None)
                driver.set_current(pool.devices[0].primary.handle)
                raise LookupError

            assert await p.run(inside)
            with pytest.raises(LookupError):
                await p.run(spoil)
            assert await p.run(inside)
            assert driver.current() is None  # the loop's thread never had one

    backend.run(main)


def test_calls_of_a_partition_run_one_after_another(backend: Backend) -> None:
    """Calls run in the order of submission, never two at once."""
    order: list[int] = []

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            jobs = [p.run(order.append, number) for number in range(50)]
            for job in jobs:
                await job
        assert order == list(range(50))

    backend.run(main)


def test_a_call_begins_behind_what_was_submitted(backend: Backend) -> None:
    """The call's stream waits for earlier copies, but the call may begin before."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            stream = p._open_lease().executor.call_stream.stream
            with await p.upload(np.zeros(100)) as buffer:
                with await Gate.closed(p) as gate:
                    p.copy(buffer, np.ones(100))
                    job = p.run(stream.record)
                    await until(lambda: job._value is not None)
                    event = job._value
                    assert not event.is_done
                    gate.open()
                await job
                assert event.is_done
                event.close()

    backend.run(main)


def test_a_call_is_done_behind_what_was_submitted(backend: Backend) -> None:
    """A call without work on its stream returns at once, and its job ends after earlier copies."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(np.zeros(100)) as buffer:
                with await Gate.closed(p) as gate:
                    p.copy(buffer, np.ones(100))
                    jobs = [p.run(int), p.run(int)]
                    await until(lambda: all(job._value is not None for job in jobs))
                    await turns()
                    assert not any(job.done() for job in jobs)
                    gate.open()
                for job in jobs:
                    assert await job == 0
                assert await p.run(int) == 0

    backend.run(main)


def test_a_cancelled_await_is_forgotten(backend: Backend) -> None:
    """Cancelled awaits of one job leave nothing; an await that continues gets the value."""
    values: list[int] = []

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            lease = p._open_lease()
            with await p.upload(np.zeros(100)) as buffer:
                with await Gate.closed(p) as gate:
                    p.copy(buffer, np.ones(100))
                    job = p.run(lambda: 7)

                    async def wait() -> None:
                        values.append(await job)

                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(wait)
                        for _ in range(5 * MAX_WAITERS):
                            async with anyio.create_task_group() as cancelled:
                                cancelled.start_soon(wait)
                                await turns(2)
                                cancelled.cancel_scope.cancel()
                        watch = lease.poller.pending[lease.executor.call_stream]
                        assert 1 <= len(watch.entries) <= MAX_WAITERS
                        gate.open()
            assert values == [7]

    backend.run(main)


@pytest.mark.real_time(why="a running call waits for the loop")
def test_no_thread_counts_as_busy_after_a_lease_has_drained(backend: Backend) -> None:
    """The poller counts the thread that ends a lease as busy only until it has ended it."""
    may_return = threading.Event()

    async def main() -> None:
        async with backend.pool() as pool:
            with pytest.raises(ZeroDivisionError):
                async with pool.partition(8) as p:
                    poller = p._open_lease().poller
                    p.run(may_return.wait)
                    raise ZeroDivisionError
            busy = poller._thread_work
            may_return.set()
            await until(lambda: not pool.statistics().leases)
            assert (busy, poller._thread_work) == (2, 0), "the call, and the last ticket"

    backend.run(main)


@pytest.mark.real_time(why="a running call waits for the loop")
def test_a_cancelled_call_runs_to_its_end_and_holds_its_sms(backend: Backend) -> None:
    """A cancelled await returns at once; the SMs are free when the call returns."""
    may_return = threading.Event()
    began = threading.Event()

    def call() -> None:
        began.set()
        may_return.wait()

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:

            async def use() -> None:
                async with pool.partition(16) as p:
                    await p.run(call)

            tasks.start_soon(use)
            await until(began.is_set)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await until(lambda: pool.statistics().sms_draining == 16)
                with pytest.raises(greensched.WouldBlock):
                    pool.partition_nowait(ALL)
                may_return.set()
                async with pool.partition(ALL):
                    pass

    backend.run(main)


def test_buffers_in_a_call_are_kept_in_order(backend: Backend) -> None:
    """A call waits for its buffers, and they are freed only after it returns."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as a, pool.partition(8) as b:
            memory = a._open_lease().device_memory.memory
            buffer = await a.upload(np.zeros(100, np.float32))
            with await Gate.closed(a) as gate:
                a.copy(buffer, np.ones(100, np.float32))
                job = b.run(lambda given: given.shape, buffer)
                buffer.close()
                memory.reap()
                assert memory.used_bytes
                await turns()
                assert not job.done()
                gate.open()
            assert await job == (100,)
            await until(lambda: memory.reap() is None and memory.used_bytes == 0)

    backend.run(main)


@pytest.mark.real_time(why="two running calls wait for each other")
def test_two_partitions_call_at_the_same_time(backend: Backend) -> None:
    """Calls of different partitions run concurrently."""
    meet = threading.Barrier(2)

    async def use(p: Partition) -> None:
        await p.run(meet.wait)

    async def main() -> None:
        async with backend.pool() as pool, pool.partitions(8, 8) as (a, b):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(use, a)
                tasks.start_soon(use, b)

    backend.run(main)


@pytest.mark.real_time(why="a running call waits for the loop")
def test_an_upload_does_not_wait_for_a_call(backend: Backend) -> None:
    """Copies and launches of a partition proceed while one of its calls runs."""
    uploaded = threading.Event()

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            job = p.run(uploaded.wait, 10)
            with await p.upload(np.ones(2_000_000)):
                uploaded.set()
            assert await job is True

    backend.run(main)
