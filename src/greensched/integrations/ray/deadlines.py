"""The results of jobs, and the deadlines for their replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from ray.exceptions import RayError

from greensched.errors import FleetTimeout, InvalidRequest, PoolLost
from greensched.integrations.ray import protocol
from greensched.integrations.ray.protocol import Outcome


async def result_of(outcome: Outcome, pool: str) -> Any:
    """Return a job's result, fetched if it is large, or raise its error.

    Raises:
        PoolLost: A large result was lost with its pool.
    """
    if outcome.error:
        raise protocol.unpack_error(outcome, pool)
    if outcome.handle is not None:
        return outcome.handle
    if outcome.ref is not None:
        try:
            return await outcome.ref
        except RayError as error:
            raise PoolLost(pool, f"the job's result was lost: {error}") from error
    return protocol.unpack_value(outcome.value)


def reply_within(
    deadline: float | None, was_sent: Callable[[], bool] = lambda: True
) -> AbstractAsyncContextManager[None]:
    """Return a block that raises `FleetTimeout` after this many seconds; None: never.

    `was_sent` says then whether the message was sent to a pool.
    """
    return nullcontext() if deadline is None else _timeout(deadline, was_sent)


@asynccontextmanager
async def _timeout(deadline: float, was_sent: Callable[[], bool]) -> AsyncIterator[None]:
    scope = asyncio.timeout(deadline)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise FleetTimeout(deadline, was_sent=was_sent()) from None


def remaining(deadline: float | None) -> Callable[[], float | None]:
    """Start a deadline now; return a function for the seconds that remain.

    Raises:
        InvalidRequest: The deadline is not a number of seconds above 0.
    """
    if deadline is None:
        return lambda: None
    if type(deadline) not in (int, float) or not deadline > 0:
        raise InvalidRequest(f"deadline={deadline!r}: give seconds from now, above 0, or None")
    loop = asyncio.get_running_loop()
    ends = loop.time() + deadline
    return lambda: max(0.0, ends - loop.time())
