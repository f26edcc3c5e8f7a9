"""A partition's stream used by other code: captures, and work still to be submitted."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import numpy as np
import pytest

import greensched
from greensched import LaunchConfig, Stream
from greensched.device.staging_ring import SLOT
from greensched.execution.lease import BATCH
from greensched.kernels import fill
from greensched.typing import CaptureMode
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import still_waits, until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=4, block=128)


class Left(Exception):
    """A holder leaves."""


class Thing:
    """Another library's array, say."""


def begin(stream: Stream) -> None:
    stream.context.driver.begin_capture(stream.handle, CaptureMode.RELAXED)


def end(stream: Stream) -> None:
    driver = stream.context.driver
    driver.destroy_graph(driver.end_capture(stream.handle))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_capture_left_open_is_dropped(backend: Backend, leaves: bool) -> None:
    """A block that ends in the middle of a capture still returns its SMs."""

    async def main() -> None:
        async with backend.pool() as pool:
            with suppress(Left):
                async with pool.partition(8) as p:
                    (await p.upload(np.ones(8))).close()
                    begin(p.stream)
                    if leaves:
                        raise Left
            await until(lambda: not pool.statistics().leases)

    backend.run(main)


def test_a_stream_is_lent_when_everything_is_on_it(backend: Backend) -> None:
    """The stream is refused while earlier work is not submitted, which would come later."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(np.zeros(SLOT + 1, np.uint8)) as large:
                with await Gate.closed(p):
                    job = p.copy(large, np.ones(SLOT + 1, np.uint8))
                    for use in (lambda: p.stream, p.__cuda_stream__):
                        with pytest.raises(greensched.WouldBlock, match="await"):
                            use()
                await job
                assert p.stream.__cuda_stream__() == p.__cuda_stream__()

    backend.run(main)


@pytest.mark.parametrize("is_own", [True, False], ids=["its stream", "a library's stream"])
def test_sms_are_released_once_work_of_libraries_is_done(backend: Backend, is_own: bool) -> None:
    """A lease's end waits for all work on the streams of its green context."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition(8) as p:
                word = await p.empty_pinned(1, np.uint32)
            with word:
                with suppress(Left):
                    async with pool.partition(8) as p:
                        stream = p.stream if is_own else await p.run(p.context.create_stream)
                        p.context.driver.wait_value(stream.handle, word.address, 1)
                        raise Left
                try:
                    await still_waits(until(lambda: not pool.statistics().leases))
                finally:
                    word.array[0] = 1
                await until(lambda: not pool.statistics().leases)
                if not is_own:
                    async with pool.partition(8) as p:
                        await p.run(stream.close)

    backend.run(main)


@pytest.mark.parametrize("stays", [True, False], ids=["in the lease", "after the lease"])
def test_what_is_kept_lives_until_the_work_is_done(backend: Backend, stays: bool) -> None:
    """`keep_alive` keeps an object until earlier device work is done, and no longer."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition(8) as p:
                with await Gate.closed(p) as gate:
                    kept = Thing()
                    alive = weakref.ref(kept)
                    job = p.keep_alive(kept)
                    del kept
                    gc.collect()
                    assert alive() is not None
                    assert not job.done()
                    gate.open()
                    if stays:
                        await job
                        await until(lambda: alive() is None)
            assert alive() is None

    backend.run(main)


def test_nothing_is_kept_where_nothing_can_be_submitted(backend: Backend) -> None:
    """`keep_alive` is refused while the stream is capturing, and after the lease."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition(8) as p:
                begin(p.stream)
                with pytest.raises(greensched.InvalidRequest, match="capturing"):
                    p.keep_alive(Thing())
                end(p.stream)
            with pytest.raises(greensched.PartitionClosed):
                p.keep_alive(Thing())

    backend.run(main)


@pytest.mark.fault("C17")
def test_waiting_for_room_leaves_a_capture_alone(backend: Backend) -> None:
    """`ready` after bound launches writes its ticket into no capture."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b:
                await p.prepare(CONFIG, fill)
                bound = p.bind(CONFIG, fill, b, 1.0, 8)
                for _ in range(BATCH):
                    bound()
                begin(p.stream)
                with pytest.raises(greensched.InvalidRequest, match="capturing"):
                    await p.drain()
                end(p.stream)
                await p.drain()

    backend.run(main)


@pytest.mark.fault("C17")
def test_nothing_is_ordered_behind_a_capture(backend: Backend) -> None:
    """Work on a buffer of a capturing partition is refused, and the capture stays valid."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, pool.partition(8) as q:
            with await p.empty(8) as b:
                await p.prepare(CONFIG, fill)
                await q.prepare(CONFIG, fill)
                bound = q.bind(CONFIG, fill, b, 2.0, 8)
                stream = p.stream
                with await Gate.closed(p):
                    p.launch(CONFIG, fill, b, 1.0, 8)
                    begin(stream)
                    for use in (
                        lambda: q.launch(CONFIG, fill, b, 2.0, 8),
                        lambda: q.copy(b, np.ones(8, np.float32)),
                        bound,
                    ):
                        with pytest.raises(greensched.InvalidRequest, match="capturing"):
                            use()
                    end(stream)
                    job = q.launch(CONFIG, fill, b, 2.0, 8)
                await job

    backend.run(main)


@pytest.mark.fault("C17")
def test_a_call_may_capture_while_others_go_on(backend: Backend) -> None:
    """Work on a call's buffer is not refused because the call is capturing."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, pool.partition(8) as q:
            with await p.empty(8) as b:
                await p.prepare(CONFIG, fill)
                await q.prepare(CONFIG, fill)
                stream = p._open_lease().executor.call_stream.stream
                began: list[bool] = []

                def capture(_: object) -> None:
                    begin(stream)
                    began.append(True)
                    end(stream)
                    begin(stream)  # left open: it is dropped

                call = p.run(capture, b)
                jobs = [p.launch(CONFIG, fill, b, 1.0, 8), q.launch(CONFIG, fill, b, 2.0, 8)]
                await call
                assert began
                for job in jobs:
                    await job

    backend.run(main)
