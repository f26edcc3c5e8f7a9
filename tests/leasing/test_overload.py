"""Thousands of waiters: each turn of the loop serves a bounded number.

Turns are counted, never timed: a turn ends where what was scheduled in it runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import greensched
from greensched import ALL, LaunchConfig, Pool
from greensched.driver import simulated
from greensched.driver.simulated import Crash
from greensched.execution.completion_poller import RESUMED_AT_ONCE
from greensched.kernels import spin
from greensched.leasing.manager import AT_ONCE
from helpers.waiting import until

ONE = LaunchConfig(grid=1, block=1)
MANY = 4 * AT_ONCE


class Turns:
    """Counts the turns of a loop, and how many tasks ended in each."""

    def __init__(self) -> None:
        self._number = 0
        self._is_marked = False
        self.ended = Counter[int]()
        self.errors = Counter[str]()

    def _next(self) -> None:
        self._number += 1
        self._is_marked = False

    async def waiter(self, wait: Callable[[], Awaitable[Any]]) -> None:
        try:
            await wait()
        except Exception as error:
            self.errors[type(error).__name__] += 1
        finally:
            self.ended[self._number] += 1
            if not self._is_marked:
                self._is_marked = True
                asyncio.get_running_loop().call_soon(self._next)


async def queue(pool: Pool, turns: Turns, **options: Any) -> list[asyncio.Task[None]]:
    """Start many tasks that wait for SMs that are all held."""

    async def wait() -> None:
        async with pool.partition(8, **options):
            raise AssertionError("nothing is free")

    tasks = [asyncio.create_task(turns.waiter(wait)) for _ in range(MANY)]
    await until(lambda: pool.statistics().waiting == MANY)
    return tasks


def serve(act: Callable[[Pool, Any], Awaitable[None]], **options: Any) -> Turns:
    """Call a function while many tasks wait; return how the tasks ended."""
    clock, turns = simulated.VirtualClock(), Turns()
    driver = simulated.open("h20", clock=clock, faults=[Crash("spin")])

    async def main() -> None:
        pool = Pool(driver=driver, max_waiting=MANY, prepare=[spin])
        await pool.open()
        held = pool.partition_nowait(ALL)
        async with held:
            tasks = await queue(pool, turns, **options)
            await asyncio.gather(act(pool, held), *tasks, return_exceptions=True)
        await pool.aclose()

    with suppress(greensched.DeviceLost, greensched.PoolClosed):  # of the block that holds all
        clock.run(main)
    return turns


async def close(pool: Pool, _: Any) -> None:
    await pool.aclose(grace=1.0)


async def lose(_: Pool, held: Any) -> None:
    await held.launch(ONE, spin, 1000)


async def nothing(_: Pool, __: Any) -> None:
    """Let deadlines pass."""


@pytest.mark.fault("B7")
@pytest.mark.parametrize(
    ("act", "error", "options"),
    [
        (close, "PoolClosed", {}),
        (lose, "DeviceLost", {}),
        (nothing, "DeadlineExceeded", {"deadline": 1.0}),
    ],
    ids=["closed", "lost", "expired"],
)
def test_the_end_of_many_waiters_takes_many_turns(
    act: Callable[..., Awaitable[None]], error: str, options: dict[str, Any]
) -> None:
    """Thousands of tasks are resumed, at most some hundreds in one turn."""
    turns = serve(act, **options)
    assert turns.errors == {error: MANY}
    assert max(turns.ended.values()) <= AT_ONCE
    assert len(turns.ended) >= MANY // AT_ONCE


def test_many_tasks_that_await_one_job_take_many_turns() -> None:
    """A job with thousands of waiters resumes a bounded number in a turn."""
    clock, turns = simulated.VirtualClock(), Turns()
    driver = simulated.open("h20", clock=clock)

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            job = p.launch(ONE, spin, 10**9)

            async def wait() -> None:
                await job

            tasks = [asyncio.create_task(turns.waiter(wait)) for _ in range(4 * RESUMED_AT_ONCE)]
            await asyncio.sleep(0.5)
            await asyncio.gather(*tasks)

    clock.run(main)
    assert not turns.errors
    assert max(turns.ended.values()) <= 2 * RESUMED_AT_ONCE


def test_a_closed_loops_waiters_are_taken_over_in_turns() -> None:
    """Thousands of requests of a closed loop leave the queue, and the pool goes on at once."""
    driver = simulated.open("h20")

    async def leave(pool: Pool) -> None:
        async def wait() -> None:
            async with pool.partition(8):
                raise AssertionError("nothing is free")

        left.extend(asyncio.create_task(wait()) for _ in range(MANY))
        await until(lambda: pool.statistics().waiting == MANY)

    async def main() -> None:
        async with Pool(driver=driver, max_waiting=MANY) as pool:
            async with pool.partition(ALL):
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=lambda: loop.run_until_complete(leave(pool)))
                thread.start()
                await until(lambda: not thread.is_alive())
                loop.close()
                assert pool.statistics().waiting == MANY - AT_ONCE
                await until(lambda: pool.statistics().waiting == 0)
            async with pool.partition(ALL):
                pass

    left = list[Any]()
    asyncio.run(main())
    for task in left:
        task._log_destroy_pending = False
    driver.close()
