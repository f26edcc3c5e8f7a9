"""Waiting for something to be the case."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

#: Virtual time passes only while nothing is ready, so now and then a waiting test is not.
PAUSE_EVERY = 50


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks run, and time pass, until something is the case."""
    with anyio.fail_after(20):
        turn = 0
        while not condition():
            turn += 1
            await anyio.sleep(0.0005 if turn % PAUSE_EVERY == 0 else 0)


async def turns(number: int = 20) -> None:
    """Lets other tasks run for a while, and no time pass."""
    for _ in range(number):
        await anyio.sleep(0)


async def still_waits(work: Awaitable[object]) -> None:
    """Checks that something is not over within 10 ms, and gives up waiting for it."""
    with anyio.move_on_after(0.01) as scope:
        await work
    assert scope.cancelled_caught
