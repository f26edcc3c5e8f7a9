"""Bound launches, where other threads use their buffers or end their lease at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from greensched import (
    BoundLaunch,
    Buffer,
    BufferClosed,
    InvalidRequest,
    LaunchConfig,
    Partition,
    PartitionClosed,
    Pool,
)
from greensched.device.launch import PreparedLaunch
from greensched.execution.lease import Lease
from greensched.kernels import saxpy

CONFIG = LaunchConfig(grid=1, block=8)


def bound_on_a_partition(
    test: Callable[[Partition, BoundLaunch, Buffer, Buffer], Awaitable[object]],
) -> None:
    """Run a test with a bound launch and the two buffers that it uses."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition((8, 64)) as p:
            with await p.empty(8) as x, await p.empty(8) as y:
                await p.prepare(CONFIG, saxpy)
                await test(p, p.bind(CONFIG, saxpy, 1.0, x, y, 8), x, y)

    asyncio.run(main())


class OtherStream:
    """A stream of another thread that uses a buffer; counts how often it is asked for."""

    def __init__(self, when_asked: Callable[[], object] = lambda: None) -> None:
        self.asked = 0
        self.has_submitted_all = True
        self._when_asked = when_asked

    def has_submitted(self, ticket: int) -> bool:
        self.asked += 1
        self._when_asked()
        return self.has_submitted_all

    def reached(self, ticket: int) -> bool:
        return True


def use(bound: BoundLaunch, stream: Any) -> None:
    bound.use_elsewhere(stream, 1)


def test_a_use_during_the_ordering_is_not_lost() -> None:
    """A use that another thread adds while a launch is ordered behind others defers that launch."""

    async def test(_: Partition, bound: BoundLaunch, *__: Buffer) -> None:
        issued = bound.track.issued
        use(bound, OtherStream())
        bound()
        assert bound.track.issued == issued  # at once
        use(bound, OtherStream(lambda: use(bound, OtherStream())))
        bound()
        assert bound.track.issued > issued  # ordered anew, by the submit thread

    bound_on_a_partition(test)


def test_a_refused_launch_is_ordered_when_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deferred launch that could not be submitted leaves the uses for the next one."""

    def refuse(*_: object, **__: object) -> None:
        raise InvalidRequest("a stream is capturing")

    async def test(_: Partition, bound: BoundLaunch, *__: Buffer) -> None:
        other = OtherStream()
        other.has_submitted_all = False
        use(bound, other)
        with monkeypatch.context() as patch:
            patch.setattr(Lease, "submit", refuse)
            with pytest.raises(InvalidRequest):
                bound()
        other.has_submitted_all = True
        bound()
        assert other.asked == 2

    bound_on_a_partition(test)


def test_a_buffer_closed_behind_its_check_is_refused_by_the_next_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffer that another thread closes while a launch checks the others is not launched on."""

    async def test(_: Partition, bound: BoundLaunch, x: Buffer, y: Buffer) -> None:
        check = Buffer.check

        def close_first(buffer: Buffer, device_id: int) -> None:
            check(buffer, device_id)
            if buffer is y:
                x.close()

        bound.look_again()
        monkeypatch.setattr(Buffer, "check", close_first)
        bound()
        for _ in range(2):
            with pytest.raises(BufferClosed):
                bound()

    bound_on_a_partition(test)


def test_a_launch_closed_while_it_moves_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound launch that a device fault closes at a checkpoint launches nothing any more."""

    async def test(_: Partition, bound: BoundLaunch, *__: Buffer) -> None:
        with_stream = PreparedLaunch.with_stream

        def close_first(prepared: PreparedLaunch, stream: Any) -> PreparedLaunch:
            bound.close()
            return with_stream(prepared, stream)

        monkeypatch.setattr(PreparedLaunch, "with_stream", close_first)
        bound.move()
        assert bound.is_closed
        with pytest.raises(PartitionClosed):
            bound()

    bound_on_a_partition(test)
