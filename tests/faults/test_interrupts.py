"""Ctrl-C at random moments of a program: fifty in `make faults`, fewer in `make test`.

A moment is a number of driver calls, so that no clock decides; a seed draws it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from faults.cases import rounds
from greensched import LaunchConfig, Pool, PoolState
from greensched.driver import simulated
from greensched.kernels import fill
from helpers.devices import SMALL_DEVICE

ONE = LaunchConfig(grid=1, block=1)


async def in_a_loop(pool: Pool) -> None:
    async with pool:
        for _ in range(5):
            async with pool.partition(8) as p:
                with await p.upload(np.ones(8, np.float32)) as x:
                    p.launch(ONE, fill, x, 2.0, 8)
                    await p.download(x)


def run_in_a_loop(pool: Pool) -> None:
    asyncio.run(in_a_loop(pool))


def run_without_a_loop(pool: Pool) -> None:
    with pool.sync:
        for _ in range(5):
            with pool.sync.partition(8) as p, p.upload(np.ones(8, np.float32)) as x:
                p.launch(ONE, fill, x, 2.0, 8)
                p.download(x)


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """A shell's background jobs, whose children may run the tests, ignore SIGINT."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def interrupted(program: Callable[[Pool], None], moment: float) -> tuple[Pool, bool]:
    """Run a program, with a Ctrl-C once it has made a share of its driver calls."""
    driver = simulated.open([SMALL_DEVICE])
    program(Pool(driver=driver))
    calls = moment * driver.script.calls.total()
    driver.close()
    driver = simulated.open([SMALL_DEVICE])
    pool, main, call = Pool(driver=driver), threading.get_ident(), driver.script.call
    sent, seen = threading.Lock(), False  # the lock is taken by the one call that sends

    def interrupt(name: str) -> tuple[int | None, float]:
        answer = call(name)
        if driver.script.calls.total() >= calls and sent.acquire(blocking=False):
            signal.pthread_kill(main, signal.SIGINT)
        return answer

    driver.script.call = interrupt  # type: ignore[method-assign]
    try:
        program(pool)
    except KeyboardInterrupt:
        seen = True
    del driver.script.call
    assert pool.state in (PoolState.CLOSED, PoolState.CLOSING, PoolState.NEW)
    asyncio.run(pool.aclose(0))  # where a thread closes it, until it has
    driver.close()
    assert not driver.live()
    return pool, seen


@pytest.mark.fault("D10", "I3")
@pytest.mark.parametrize("program", [run_in_a_loop, run_without_a_loop])
def test_interrupts_at_random_moments_leave_a_closed_pool(
    program: Callable[[Pool], None], record_property: Callable[[str, object], None]
) -> None:
    """As `async with` and as `pool.sync`, whatever the program does then."""
    rng, seen, number = random.Random(1), 0, rounds(50)
    for _ in range(number):
        pool, was_seen = interrupted(program, rng.random())
        seen += was_seen
        assert pool.state in (PoolState.CLOSED, PoolState.NEW)
    record_property("count", f"{number} of {number} interrupts")
    assert seen > number / 2
