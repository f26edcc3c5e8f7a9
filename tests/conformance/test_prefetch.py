"""Feeding a partition: the next array is copied while work on the current one runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from greensched import (
    Buffer,
    InvalidArray,
    InvalidRequest,
    LaunchConfig,
    OutOfMemory,
    PartitionClosed,
)
from greensched.device.staging import CHUNK
from greensched.kernels import saxpy, spin
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import still_waits, until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=8, block=256)
ONE = LaunchConfig(grid=1, block=1)
SIZE = CHUNK // 4 + 1000
BATCHES = 7


def batches(number: int = BATCHES, size: int = SIZE) -> Iterator[np.ndarray]:
    for value in range(number):
        yield np.full(size, value, np.float32)


@pytest.mark.runs_device_code
@pytest.mark.parametrize("way", ["awaited", "left", "bound"])
def test_every_batch_is_worked_on_once(backend: Backend, way: str) -> None:
    """The sum over all batches is right for awaited, unawaited and bound launches."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            with await p.upload(np.zeros(SIZE, np.float32)) as total:
                await p.prepare(CONFIG, saxpy)
                async for x in p.prefetch(batches()):
                    if way == "bound":
                        p.bind(CONFIG, saxpy, 1.0, x, total, x.size)()
                    else:
                        job = p.launch(CONFIG, saxpy, 1.0, x, total, x.size)
                        if way == "awaited":
                            await job
                result = await p.download(total)
        np.testing.assert_array_equal(result, sum(range(BATCHES)))

    backend.run(main)


def test_arrays_arrive_in_order_whatever_they_are(backend: Backend) -> None:
    """Arrays of any layout, dtype and size, empty ones included, arrive whole and in order."""
    given = [
        np.arange(10.0),
        np.ones((3, 4), np.int8)[:, ::2],
        np.empty(0, np.float32),
        np.arange(3 * CHUNK, dtype=np.uint8).reshape(3, CHUNK).T,
        np.float64(2.5) * np.ones(()),
    ]

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            async for nothing in p.prefetch([]):
                raise AssertionError(nothing)
            got = [await p.download(buffer) async for buffer in p.prefetch(given)]
        for one, other in zip(given, got, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype

    backend.run(main)


def test_no_more_than_three_buffers_exist(backend: Backend) -> None:
    """While work on the first array runs, the fourth is not requested."""
    asked: list[int] = []

    def arrays() -> Iterator[np.ndarray]:
        for number, array in enumerate(batches()):
            asked.append(number)
            yield array

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            feed = p.prefetch(arrays())
            with await Gate.closed(p) as gate:
                given = []
                for _ in range(2):
                    given.append(await feed.__anext__())
                    p.launch(ONE, spin, 1)
                    p.copy(given[-1], given[-1])
                await still_waits(feed.__anext__())
                assert asked == [0, 1, 2]
                assert not any(buffer.is_closed for buffer in given)
                gate.open()
            third = await feed.__anext__()  # the one that a cancellation left
            assert given[0].is_closed
            assert not given[1].is_closed
            assert (await p.download(third))[0] == 2
            rest = [(await p.download(buffer))[0] async for buffer in feed]
            assert rest == list(range(3, BATCHES))
            assert third.is_closed

    backend.run(main)


@pytest.mark.parametrize("end", ["break", "raise", "cancel"])
def test_a_feed_given_up_leaves_nothing(backend: Backend, end: str) -> None:
    """Its buffers are closed without a warning, and their memory is free."""

    async def feed(p: Any) -> None:
        async for x in p.prefetch(batches()):
            assert isinstance(x, Buffer)
            if end == "break":
                break
            if end == "raise":
                raise KeyError(end)
            await anyio.sleep_forever()

    async def main() -> None:
        async with backend.pool() as pool:
            with anyio.move_on_after(0.05):
                async with pool.partition(8) as p:
                    with contextlib.suppress(KeyError):
                        await feed(p)
            memory = pool._manager.device_pools[0].memory
            await until(lambda: pool.statistics().leases == 0)

            def is_back() -> bool:
                memory.reap()
                return not memory.used_bytes

            await until(is_back)

    backend.run(main)


def test_a_lease_drains_until_its_copies_are_done(backend: Backend) -> None:
    """The SMs are free after the copy that runs beside the launches."""

    async def main() -> None:
        async with backend.pool() as pool:
            p = await pool.partition(8).__aenter__()
            feed = p.prefetch(batches())
            await feed.__anext__()
            copies = p._open_lease().executor.copy_stream
            assert copies is not None
            word = await p.empty_pinned(1, np.uint32)
            await until(lambda: copies.is_idle)
            driver = copies.stream.context.driver
            driver.wait_value(copies.stream.handle, word.address, 1)
            try:
                await feed.__anext__()
                await still_waits(feed.__anext__())
                p._granted_lease().end()
                await still_waits(p._wait_closed())
                assert pool.statistics().sms_draining == 8
            finally:  # or the stream would never end
                word.array[0] = 1
            await p._wait_closed()
            assert pool.statistics().sms_draining == 0
            with pytest.raises(PartitionClosed):
                await feed.__anext__()
            word.close()

    backend.run(main)


def test_what_goes_wrong_with_a_feed_is_told_where_it_is_iterated(backend: Backend) -> None:
    """Bad arrays, lack of memory and the iterator's own errors are raised by the `async for`."""

    def broken() -> Iterator[np.ndarray]:
        yield np.ones(3)
        raise KeyError("the file ended")

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with pytest.raises(InvalidRequest, match="an iterable of arrays"):
                p.prefetch(7)  # type: ignore[arg-type]
            with pytest.raises(InvalidArray, match="Python objects"):
                async for _ in p.prefetch([np.ones(3), np.array([object()])]):
                    pass
            with pytest.raises(KeyError, match="the file ended"):
                async for _ in p.prefetch(broken()):
                    pass
            huge = np.broadcast_to(np.zeros(1, np.uint8), (1 << 46,))
            with pytest.raises(OutOfMemory) as refused:
                async for _ in p.prefetch([huge]):
                    pass
            assert refused.value.asked == 1 << 46
            assert refused.value.free is not None
            assert [b.size async for b in p.prefetch(batches(2))] == [SIZE, SIZE]

    backend.run(main)
