"""Buffers and kept arrays, while another thread changes the users of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from greensched import Buffer, Pool


class Track:
    """A stream whose work is done."""

    owner = None
    stream = SimpleNamespace(context=SimpleNamespace(device_id=0))

    def reached(self, ticket: int) -> bool:
        return True

    def has_submitted(self, ticket: int) -> bool:
        return True


class User:
    """A bound launch that closes another one, as another thread could, whatever it is asked."""

    def __init__(self, buffer: Buffer, other: User | None = None) -> None:
        self.track: Any = Track()
        self._buffer, self._other = buffer, other

    def last_use(self) -> tuple[Any, int]:
        self._end_other()
        return self.track, 1

    def use_elsewhere(self, track: object, ticket: int) -> None:
        self._end_other()

    def look_again(self) -> None:
        self._end_other()

    def share(self) -> None:
        self._end_other()

    def _end_other(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            self._buffer.unbind(other, 1)


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(
    "act",
    [
        lambda buffer, stream: buffer.bind(User(buffer), write=True),
        lambda buffer, stream: buffer.record_use(stream, 1, write=True),
        lambda buffer, stream: buffer.dependencies(stream, write=True),
        lambda buffer, stream: buffer.close(),
    ],
    ids=["bind", "use", "order", "close"],
)
def test_a_bound_launch_ends_while_a_buffer_goes_through_its_users(
    act: Callable[[Buffer, Any], object], writes: bool
) -> None:
    """If another thread closes one user, all other users still get the call."""
    buffer = Buffer(SimpleNamespace(device_id=0), 0, (8,), np.dtype(np.float32))  # type: ignore[arg-type]  # no memory
    last = User(buffer)
    for user in (User(buffer, last), User(buffer), last):
        buffer.bind(user, write=writes)
    act(buffer, User(buffer).track)
    buffer.close()


class Emptied(deque[Any]):
    """A collection that another thread empties after its length was read."""

    def __bool__(self) -> bool:
        return True


def test_what_is_kept_may_be_released_by_another_thread() -> None:
    """A poll that finds nothing to release goes on."""
    errors: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: errors.append(said))
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            p._open_lease().launch_stream.kept = Emptied()
            (await p.empty(8)).close()
            p._open_lease().launch_stream.kept = deque()

    asyncio.run(main())
    assert not errors
