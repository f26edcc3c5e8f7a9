"""Wait for conditions."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import anyio

#: Virtual time advances only while nothing is ready, so every so many turns `until` sleeps.
PAUSE_EVERY = 50
#: So many turns `until` waits. Where calls fail in turn, a condition may never hold.
LIMIT = math.inf


class NeverHeld(AssertionError):
    """A condition did not come to hold within `LIMIT`."""


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run, and time pass, until a condition holds."""
    turn = 0
    while not condition():
        turn += 1
        if turn >= LIMIT:
            raise NeverHeld
        await anyio.sleep(0.0005 if turn % PAUSE_EVERY == 0 else 0)


async def turns(number: int = 20) -> None:
    """Let other tasks run for a while, without time passing."""
    for _ in range(number):
        await anyio.sleep(0)


async def still_waits(work: Awaitable[object]) -> None:
    """Check that an awaitable is not done within 10 ms, and cancel the wait."""
    with anyio.move_on_after(0.01) as scope:
        await work
    assert scope.cancelled_caught
