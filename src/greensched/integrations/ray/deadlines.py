"""Answers: what they hold, and by when they must be here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ray.exceptions import RayError

from greensched.errors import FleetTimeout, InvalidRequest, PoolLost
from greensched.integrations.ray import protocol
from greensched.integrations.ray.protocol import Outcome


async def value_of(outcome: Outcome, pool: str) -> Any:
    """What a job returned, fetched if it is large, or what it raised.

    Raises:
        PoolLost: it is large, and went away with its pool.
    """
    if outcome.error:
        raise protocol.raised(outcome, pool)
    if outcome.handle is not None:
        return outcome.handle
    if outcome.ref is not None:
        try:
            return await outcome.ref
        except RayError as error:
            raise PoolLost(pool, f"its result is gone: {error}") from error
    return protocol.unpacked(outcome.value)


@asynccontextmanager
async def answered_within(deadline: float | None) -> AsyncIterator[None]:
    """A block that ends by `FleetTimeout` after so many seconds."""
    scope = asyncio.timeout(deadline)
    try:
        async with scope:
            yield
    except TimeoutError:
        if deadline is None or not scope.expired():
            raise
        raise FleetTimeout(deadline) from None


def until(deadline: float | None) -> Callable[[], float | None]:
    """A deadline as seconds that are left, whenever it is asked.

    Raises:
        InvalidRequest: it is no number of seconds.
    """
    if deadline is None:
        return lambda: None
    if type(deadline) not in (int, float) or not deadline > 0:
        raise InvalidRequest(f"deadline={deadline!r}: seconds, more than 0, or None")
    loop = asyncio.get_running_loop()
    ends = loop.time() + deadline
    return lambda: max(0.0, ends - loop.time())
