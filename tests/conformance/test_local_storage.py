"""Objects kept with a partition's SMs: made once, on the executor's thread, and closed with it."""

from __future__ import annotations

import logging
import threading
from functools import partial

import anyio
import pytest

import greensched
from greensched import ALL, Pool
from greensched.execution import local_storage
from helpers.backend import Backend
from helpers.waiting import until

IS_VERSIONED = False


class Things:
    """Makes objects, and records the thread and context of each making and closing."""

    def __init__(self, pool: Pool) -> None:
        self.driver = pool.devices[0].driver
        self.made: list[tuple[int, object]] = []
        self.closed: list[Thing] = []
        self.where_closed: set[tuple[int, object]] = set()

    def here(self) -> tuple[int, object]:
        return threading.get_ident(), self.driver.current()

    def make(self) -> Thing:
        return Thing(self)

    def make_another(self) -> Thing:
        return Thing(self)


class Thing:
    def __init__(self, things: Things) -> None:
        self.things = things
        things.made.append(things.here())

    def close(self) -> None:
        self.things.closed.append(self)
        self.things.where_closed.add(self.things.here())


def test_it_is_made_once_for_the_same_sms(backend: Backend) -> None:
    """Every lease of the same SMs gets the same object, which is made once."""

    async def main() -> None:
        async with backend.pool() as pool:
            things, seen = Things(pool), set()
            for _ in range(3):
                async with pool.partition(ALL) as p:
                    seen.update([await p.local(things.make), await p.local(things.make)])
            assert len(seen) == len(things.made) == 1

    backend.run(main)


def test_other_sms_and_other_functions_have_their_own(backend: Backend) -> None:
    """Two partitions share no object, nor do two functions."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partitions(8, 8) as (a, b):
            things = Things(pool)
            mine = [await p.local(f) for p in (a, b) for f in (things.make, things.make_another)]
            assert len(set(mine)) == 4

    backend.run(main)


def test_it_is_made_and_closed_on_the_executors_thread(backend: Backend) -> None:
    """Where calls of the partition run, with its SMs current; closed with the pool, newest first.

    While the executor lives nothing is closed.
    """

    async def main() -> None:
        async with backend.pool() as pool:
            things = Things(pool)
            async with pool.partition(16) as p:
                called = await p.run(things.here)
                assert called[1] == p.context.handle
                first, second = await p.local(things.make), await p.local(things.make_another)
            assert not things.closed
        assert things.made == [called, called]
        assert things.closed == [second, first]
        assert things.where_closed == {called}

    backend.run(main)


def test_two_tasks_ask_at_once(backend: Backend) -> None:
    """A second request during the making gets the same object."""
    seen = set()

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            things = Things(pool)

            async def ask() -> None:
                seen.add(await p.local(things.make))

            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(ask)
        assert len(seen) == len(things.made) == 1

    backend.run(main)


def test_it_is_given_at_once_the_second_time(backend: Backend) -> None:
    """An existing object needs no thread and no wait: the job is done at once."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            things = Things(pool)
            made = await p.local(things.make)
            job = p.local(things.make)
            assert job.done()
            assert job.result() is made
            assert await job is made

    backend.run(main)


def test_a_factory_that_fails_keeps_nothing(backend: Backend) -> None:
    """Its error is raised at the await; other objects stay, and the next call tries again."""
    tries: list[int] = []

    def make() -> str:
        tries.append(len(tries))
        if len(tries) < 3:
            raise LookupError(str(len(tries)))
        return "made"

    async def main() -> None:
        async with backend.pool() as pool:
            things = Things(pool)
            async with pool.partition(ALL) as p:
                kept = await p.local(things.make)
                with pytest.raises(LookupError, match="1"):
                    await p.local(make)
                with pytest.raises(LookupError, match="2"):
                    await p.local(make)
            async with pool.partition(ALL) as p:
                assert await p.local(make) == "made"
                assert await p.local(things.make) is kept
        assert things.closed == [kept]

    backend.run(main)


def test_an_unseen_failure_is_raised_at_the_end(backend: Backend) -> None:
    """A factory's failure that was not retrieved is raised at the block's end."""

    async def main() -> None:
        async with backend.pool() as pool:
            with pytest.raises(ZeroDivisionError):
                async with pool.partition(8) as p:
                    p.local(lambda: 1 / 0)

    backend.run(main)


@pytest.mark.real_time(why="a running call waits for the loop")
def test_a_cancellation_leaves_it_made(backend: Backend) -> None:
    """A cancelled await returns at once; the factory finishes, and the next await has its value."""
    began, may_return = threading.Event(), threading.Event()
    made: list[object] = []

    def make() -> object:
        began.set()
        assert may_return.wait()
        made.append(object())
        return made[-1]

    async def main() -> None:
        async with backend.pool() as pool:
            async with anyio.create_task_group() as tasks:

                async def use() -> None:
                    async with pool.partition(ALL) as p:
                        await p.local(make)

                tasks.start_soon(use)
                await until(began.is_set)
                tasks.cancel_scope.cancel()
            assert not made
            may_return.set()
            async with pool.partition(ALL) as p:
                assert await p.local(make) is made[0]
        assert len(made) == 1

    backend.run(main)


def test_nonsense_is_refused(backend: Backend) -> None:
    """Objects that are not functions, coroutine functions, and unhashable ones are refused."""

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]  # as of a list

        def __call__(self) -> None: ...

    async def coroutine() -> None: ...

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            for wrong in (None, 3, "make", coroutine, Unhashable()):
                with pytest.raises(greensched.InvalidRequest):
                    p.local(wrong)  # type: ignore[arg-type]  # it is wrong
        with pytest.raises(greensched.PartitionClosed):
            p.local(object)

    backend.run(main)


def test_a_new_function_each_time_is_reported(backend: Backend) -> None:
    """Beyond 64 objects a call is refused: it passes a new function each time."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            for number in range(local_storage.MAX_VALUES):
                assert await p.local(partial(int, number)) == number
            with pytest.raises(greensched.InvalidRequest, match="the same function each time"):
                await p.local(partial(int, -1))

    backend.run(main)


def test_a_close_that_fails_is_logged(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """The other objects and the pool are still closed."""

    class Stubborn:
        def close(self) -> None:
            raise OSError("stuck")

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            things = Things(pool)
            await p.local(things.make)
            await p.local(Stubborn)
            await p.local(object)  # which has no close
        assert len(things.closed) == 1

    with caplog.at_level(logging.ERROR, "greensched"):
        backend.run(main)
    assert "stuck" in caplog.text
    caplog.clear()
