"""Bound launches while other threads use their buffers or end their lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
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
    WrongThread,
)
from greensched.device.launch import PreparedLaunch
from greensched.execution import launch_cache
from greensched.execution.lease import Lease
from greensched.kernels import fill, saxpy
from helpers.gate import Gate

CONFIG = LaunchConfig(grid=1, block=8)


def bound_on_a_partition(
    test: Callable[[BoundLaunch, Buffer, Buffer, Partition], Awaitable[object]],
) -> None:
    """Run a test with a bound launch, its buffers, and another partition."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool:
            async with pool.partition(8) as p, pool.partition(8) as q:
                with await p.empty(8) as x, await p.empty(8) as y:
                    await p.prepare(CONFIG, saxpy)
                    await test(p.bind(CONFIG, saxpy, 1.0, x, y, 8), x, y, q)

    asyncio.run(main())


def is_deferred(bound: BoundLaunch) -> bool:
    """Launch, and return whether the submit thread did it."""
    issued = bound.track.issued
    bound()
    return bound.track.issued > issued


def test_a_use_during_the_ordering_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A use that another thread adds while a launch is being ordered defers that launch."""

    async def test(bound: BoundLaunch, _: Buffer, __: Buffer, q: Partition) -> None:
        other = q._open_lease().launch_stream
        driver = other.stream.context.driver

        def use_again(_: object) -> bool:
            bound.use_elsewhere(other, other.issued)
            return False

        with await Gate.closed(q) as gate:
            job = q.empty(8)
            bound.use_elsewhere(other, other.issued)
            assert not is_deferred(bound)
            bound.use_elsewhere(other, other.issued)
            monkeypatch.setattr(driver, "is_capturing", use_again)
            assert is_deferred(bound)
            monkeypatch.undo()
            gate.open()
            (await job).close()

    bound_on_a_partition(test)


def test_a_refused_launch_is_ordered_when_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deferred launch that failed leaves its dependencies to the next one."""

    def refuse(*_: object, **__: object) -> None:
        raise InvalidRequest("a stream is capturing")

    async def test(bound: BoundLaunch, _: Buffer, __: Buffer, q: Partition) -> None:
        other = q._open_lease().launch_stream
        ticket = other.issue()  # not submitted yet
        bound.use_elsewhere(other, ticket)
        with monkeypatch.context() as patch:
            patch.setattr(Lease, "submit", refuse)
            with pytest.raises(InvalidRequest):
                bound()
        assert bound.track.submitted == bound.track.issued
        assert is_deferred(bound)
        other.mark(ticket)

    bound_on_a_partition(test)


def test_a_buffer_closed_behind_its_check_is_refused_by_the_next_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffer that is closed while a launch checks others is not used later."""

    async def test(bound: BoundLaunch, x: Buffer, y: Buffer, _: Partition) -> None:
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
    """A bound launch that a device fault closes at a checkpoint stays closed."""

    async def test(bound: BoundLaunch, *_: object) -> None:
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


def test_no_other_thread_may_launch() -> None:
    """A bound launch may be called on its loop's thread only."""

    async def test(bound: BoundLaunch, *_: object) -> None:
        for launch in (bound, bound.submit):
            with pytest.raises(WrongThread):
                await asyncio.to_thread(launch)
        await bound.submit()

    bound_on_a_partition(test)


def test_an_executor_keeps_few_prepared_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each geometry of a kernel is prepared, and the oldest are dropped beyond a limit."""
    monkeypatch.setattr(launch_cache, "MAX_LAUNCHES", 3)

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            with await p.upload(np.ones(8, np.float32)) as x, await p.empty(8) as y:
                cache = p._open_lease().executor.cache
                for blocks in range(1, 9):
                    config = LaunchConfig(grid=blocks, block=8)
                    p.launch(config, fill, y, 0.0, 8)
                    await p.launch(config, saxpy, 2.0, x, y, 8)
                    assert len(cache.launches) <= 3
                    np.testing.assert_array_equal(await p.download(y), np.full(8, 2))

    asyncio.run(main())
