"""On a real GPU: a graph runs on the SMs of its launching partition, and tickets only grow."""

from __future__ import annotations

from contextlib import closing

import anyio
import numpy as np
import pytest

from greensched import Buffer, CUDAError, Device, LaunchConfig, Pool, current_call, launch
from greensched.kernels import saxpy, smids
from greensched.typing import CaptureMode

pytestmark = pytest.mark.gpu

CONFIG = LaunchConfig(grid=64, block=256)
SIZE = 1 << 16
WORDS = 64
LAUNCHES = 1000


def work(seen: Buffer, x: Buffer, y: Buffer) -> None:
    """Record the SMs, and add x to y twice."""
    call = current_call()
    assert call is not None
    everywhere = LaunchConfig(grid=2 * call.sm_count, block=1024)
    launch(call.stream, everywhere, smids, seen, 20_000)
    for _ in range(2):
        launch(call.stream, CONFIG, saxpy, 1.0, x, y, SIZE)


def ids(words: np.ndarray) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))


def test_a_graph_between_jobs_on_two_partitions() -> None:
    """1,000 launches run on their partition's SMs with right results."""

    async def main() -> None:
        async with Pool([0], prepare=[saxpy, smids]) as pool, pool.partitions(16, 32) as several:
            first = several[0]
            x = await first.upload(np.ones(SIZE, np.float32))
            y = await first.upload(np.zeros(SIZE, np.float32))
            seen = await first.upload(np.zeros(WORDS, np.uint32))
            graph = await first.capture(work, seen, x, y)
            assert not (await first.download(y)).any()
            found, added = [], 0
            for p in several:
                p.copy(seen, np.zeros(WORDS, np.uint32))
                track, last = p._open_lease().launch_stream, 0
                for number in range(LAUNCHES):
                    job = graph.launch(p)
                    if number % 10 == 0:
                        await p.launch(CONFIG, saxpy, 1.0, x, y, SIZE)
                        assert job.done()
                        added += 1
                    word = track.word[0]
                    assert last <= word <= track.issued
                    last = word
                    if number % 100 == 99:
                        await job
                added += 2 * LAUNCHES
                assert (await p.download(y) == added).all()
                assert track.word[0] == track.issued
                found.append(ids(await p.download(seen)))
            assert [len(sms) for sms in found] == [p.sm_count for p in several]
            assert not found[0] & found[1]
            for owned in (graph, x, y, seen):
                owned.close()

    anyio.run(main)


def test_an_event_that_went_into_a_capture_was_recorded_nowhere() -> None:
    """Asked it answers 907, waited for 1, and the capture is spoilt; behind it both are 1.

    So does the simulated driver: tests/driver_simulated/test_captures.py.
    """
    with closing(Device(0)) as device, device:
        driver, stream = device.driver, device.create_stream()
        event = stream.record()
        driver.begin_capture(stream.handle, CaptureMode.RELAXED)
        stream.record(event)
        driver.exchange_capture_mode(CaptureMode.RELAXED)
        try:
            with pytest.raises(CUDAError, match="CAPTURED_EVENT"):
                _ = event.is_done
            with pytest.raises(CUDAError, match="INVALID_VALUE"):
                event.sync()
            with pytest.raises(CUDAError, match="INVALIDATED"):
                driver.end_capture(stream.handle)
            with pytest.raises(CUDAError, match="INVALID_VALUE"):
                _ = event.is_done
        finally:
            driver.exchange_capture_mode(CaptureMode.GLOBAL)
        stream.record(event)
        event.sync()
        assert event.is_done
