"""`pool.sync`: the same for threads without a loop. Its loop is always asyncio's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, LaunchConfig, Partition, Pool, PoolState
from greensched.kernels import fill
from greensched.leasing.sync import SyncPartition
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.interrupts import interrupted_when

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=16, block=32)


@contextmanager
def opened(backend: Backend, **options: object) -> Iterator[Pool]:
    """Open and close a pool without a loop, and check that no thread is left."""
    before = set(threading.enumerate())
    pool = backend.pool(**options)  # type: ignore[arg-type]  # a pool's
    with pool.sync:
        yield pool
    assert pool.state is PoolState.CLOSED
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {
        name for name in left if not name.startswith("greensched")
    }  # those end by themselves


def in_threads(*functions: Callable[[], object]) -> list[object]:
    """Call functions at once, each on a thread of its own."""
    with ThreadPoolExecutor(len(functions)) as threads:
        return [future.result(20) for future in [threads.submit(f) for f in functions]]


def test_a_call_sees_the_context_variables_of_its_thread(backend: Backend) -> None:
    """`run` sees the context variables of the calling thread."""
    request = ContextVar("request", default="none")

    def serve(name: str) -> str:
        request.set(name)
        with pool.sync.partition(8) as p:
            return p.run(request.get)

    with opened(backend) as pool:
        assert in_threads(lambda: serve("a"), lambda: serve("b")) == ["a", "b"]


@pytest.mark.runs_device_code
def test_a_program_without_a_loop(backend: Backend) -> None:
    """Each call of a partition waits and returns its value."""
    with opened(backend) as pool, pool.sync.partition(16) as p:
        assert p.sm_count == 16
        assert p.device_id == p.device.ordinal == 0
        assert p.run(divmod, 17, 5) == (3, 2)
        p.prepare(CONFIG, fill)
        with p.empty(100) as x, p.empty_like(x) as y, p.empty_pinned(4) as pinned:
            p.launch(CONFIG, fill, x, 3.0, 100)
            p.copy(y, x)
            out = np.zeros(100, np.float32)
            assert p.download(y, out) is out
            assert (out == 3).all()
            assert pinned.array.sum() == 0
        with p.upload(np.arange(5)) as z:
            assert (p.download(z) == np.arange(5)).all()


def test_local_is_the_executors(backend: Backend) -> None:
    """An object kept with an executor is the same for tasks and for threads."""
    with opened(backend) as pool:
        with pool.sync.partition(ALL) as p:
            first = p.local(object)
        with pool.sync.partition(ALL) as p:
            assert p.local(object) is first


def test_joint_leases(backend: Backend) -> None:
    """Several leases of one request are entered and left together."""
    with opened(backend) as pool, pool.sync.partitions(8, 16) as (a, b):
        assert (a.sm_count, b.sm_count) == (8, 16)
        assert pool.statistics().sms_leased == 24


def test_work_that_overlaps_is_a_coroutine(backend: Backend) -> None:
    """`call` runs an async function on the pool's loop, with the thread's lease."""

    async def pipeline(p: Partition, n: int) -> float:
        jobs = [p.run(float, i) for i in range(n)]
        return sum([await job for job in jobs])

    with opened(backend) as pool, pool.sync.partition(8) as p:
        assert pool.sync.call(pipeline, p.partition, 10) == 45


# -- what goes wrong --------------------------------------------------------------------------


def test_errors_are_those_of_an_await(backend: Backend) -> None:
    """Impossible requests, WouldBlock and failed jobs raise in the calling thread."""

    def fail() -> None:
        raise LookupError("why")

    with opened(backend, max_waiting=0) as pool:
        with pytest.raises(greensched.InvalidSize):
            pool.sync.partition(-1)
        with pytest.raises(greensched.TooManySMs), pool.sync.partition(10_000):
            pass
        with pool.sync.partition(8) as p:
            with pytest.raises(LookupError, match="why"):
                p.run(fail)
            with pytest.raises(greensched.QueueFull):
                in_threads(lambda: pool.sync.partition(ALL).__enter__())
        with pytest.raises(greensched.PartitionClosed):
            p.run(fail)
        with pytest.raises(ZeroDivisionError), pool.sync.partition(8):
            raise ZeroDivisionError
        with pool.sync.partition(ALL):
            pass


def test_a_deadline_passes(backend: Backend) -> None:
    """A thread whose wait for SMs passes its deadline raises."""
    with opened(backend) as pool, pool.sync.partition(ALL):

        def ask() -> None:
            with pool.sync.partition(8, deadline=0.01):
                pass

        with pytest.raises(greensched.DeadlineExceeded):
            in_threads(ask)


def test_a_thread_that_holds_what_it_waits_for(backend: Backend) -> None:
    """A thread whose own lease makes its request impossible is refused; another waits."""
    with opened(backend) as pool:
        asked = threading.Event()

        def other() -> int:
            asked.set()
            with pool.sync.partition(ALL) as p:
                return p.sm_count

        with ThreadPoolExecutor(1) as thread:
            with pool.sync.partition(8):
                with pytest.raises(greensched.WouldDeadlock), pool.sync.partition(ALL):
                    pass
                waits = thread.submit(other)
                assert asked.wait()
            assert waits.result(10) > 8


def test_a_checkpoint_gives_back_and_takes_up(backend: Backend) -> None:
    """A thread's elastic lease gives SMs to a waiting thread and gets them back later."""
    with opened(backend) as pool, pool.sync.partition((8, ALL), duration=10.0) as p:
        whole, may_end = p.sm_count, threading.Event()

        def other() -> None:
            with pool.sync.partition(16, near=x):
                may_end.wait()

        with p.empty(4) as x, ThreadPoolExecutor(1) as thread:
            asked = thread.submit(other)
            while p.checkpoint() == whole:
                assert not asked.done()
            assert p.sm_count <= whole - 16
            may_end.set()
            asked.result(20)
            assert p.checkpoint(1.0, deadline=2.0) == whole


def test_arguments() -> None:
    """A thread's lease takes the same arguments as a task's."""
    shared = {name for name in vars(SyncPartition).keys() & vars(Partition) if name[0] != "_"}
    assert "checkpoint" in shared
    for name in shared:
        mine, theirs = getattr(SyncPartition, name), getattr(Partition, name)
        if callable(mine):
            assert [*signature(mine).parameters] == [*signature(theirs).parameters], name


def test_tasks_of_one_call(backend: Backend) -> None:
    """Tasks that a call starts hold SMs separately and wait for each other."""

    async def lease(pool: Pool) -> int:
        async with pool.partition(ALL) as p:
            await asyncio.sleep(0)
            return p.sm_count

    async def leases(pool: Pool) -> list[int]:
        return await asyncio.gather(*(lease(pool) for _ in range(3)))

    with opened(backend) as pool:
        assert len(set(pool.sync.call(leases, pool))) == 1
        with pool.sync.partition(8), pytest.raises(greensched.WouldDeadlock):
            pool.sync.call(lease, pool)  # itself it is the thread's


def test_before_and_after(backend: Backend) -> None:
    """A pool that is not open is refused; opening and closing are idempotent."""
    pool = backend.pool()
    with pytest.raises(greensched.PoolClosed), pool.sync.partition(8):
        pass
    pool.sync.open()
    pool.sync.open()
    assert pool.is_ready
    with pytest.raises(greensched.InvalidRequest):
        pool.sync.close(grace=-1)
    assert pool.is_ready
    assert not pool.sync.close(grace=1).abandoned
    pool.sync.close()
    with pytest.raises(greensched.PoolClosed):
        pool.sync.open()
    with pytest.raises(greensched.PoolClosed), pool.sync.partition(8):
        pass


def test_not_on_a_loops_thread(backend: Backend) -> None:
    """On a thread with a running loop it is refused, and the error says what to do."""

    async def main() -> None:
        async with backend.pool() as pool:
            for wrong in (pool.sync.open, pool.sync.partition(8).__enter__, pool.sync.close):
                with pytest.raises(greensched.LoopWouldBlock):
                    wrong()

    backend.run(main)


@pytest.mark.real_time(why="a thread the clock does not know waits for the loop")
def test_beside_a_loop(backend: Backend) -> None:
    """Threads may use a pool that a loop has opened; their leases end with their blocks."""
    done = []

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8):

            def work() -> None:
                with pool.sync.partition(8) as p:
                    done.append(p.run(abs, -7))

            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(anyio.to_thread.run_sync, work)
            assert done == [7] * 8

    backend.run(main)


# -- threads ----------------------------------------------------------------------------------


def test_many_threads(backend: Backend) -> None:
    """Each thread gets its lease in turn, and nothing is leased afterwards."""
    with opened(backend) as pool:

        def work(number: int) -> Callable[[], int]:
            def use() -> int:
                with pool.sync.partition(32) as p:
                    return p.run(abs, -number)

            return use

        assert in_threads(*(work(number) for number in range(12))) == list(range(12))
        assert pool.statistics().leases == 0
        assert pool.statistics().granted == 12


# -- an interrupt -----------------------------------------------------------------------------


@pytest.mark.fault("D10")
def test_an_interrupt_leaves_the_queue(backend: Backend) -> None:
    """A thread that is interrupted while it waits for SMs leaves the queue."""
    with opened(backend) as pool, ThreadPoolExecutor(1) as thread:
        held, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with pool.sync.partition(8):
                held.set()
                may_end.wait()

        holder = thread.submit(hold)
        assert held.wait()
        with interrupted_when(lambda: pool.statistics().waiting == 1):
            with pool.sync.partition(ALL):
                pass
        assert pool.statistics().waiting == 0
        assert pool.statistics().cancelled == 1
        may_end.set()
        holder.result(10)


@pytest.mark.fault("D10")
@pytest.mark.real_time(why="work that is held up waits for a thread the clock does not know")
def test_an_interrupt_ends_the_lease(backend: Backend) -> None:
    """A thread that is interrupted while it waits for work continues; its SMs return later."""
    with opened(backend) as pool:
        gates: list[Gate] = []

        async def close_gate(p: Partition) -> None:
            gates.append(await Gate.closed(p))

        with interrupted_when(lambda: bool(gates) and pool.statistics().sms_leased > 0):
            with pool.sync.partition(16) as p, p.upload(np.zeros(10)) as x:
                pool.sync.call(close_gate, p.partition)
                p.download(x)
        assert pool.statistics().sms_draining == 16
        with gates[0]:
            gates[0].open()
            with pool.sync.partition(ALL):
                pass
