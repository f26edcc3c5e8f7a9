"""Graphs: captured once for each set of SMs, and launched in order with all other work."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, Buffer, LaunchConfig, Partition, Pool, current_call, launch
from greensched.device.streams import Stream
from greensched.driver.simulated import SimulatedDriver, Span
from greensched.kernels import fill, saxpy, smids
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import still_waits, until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=4, block=128)
SIZE = 64


def here() -> Stream:
    call = current_call()
    assert call is not None
    return call.stream


def copied(target: Buffer, source: Buffer) -> None:
    """Copy on the call's stream, which moves bytes on every driver."""
    stream = here()
    driver = stream.context.driver
    driver.copy(target.address, source.address, source.nbytes, stream.handle)


def added(x: Buffer, y: Buffer) -> None:
    launch(here(), CONFIG, saxpy, 1.0, x, y, SIZE)


class Copying:
    """A function to capture that records where it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.error: Exception | None = None

    def __call__(self, target: Buffer, source: Buffer) -> None:
        call = current_call()
        assert call is not None
        self.calls.append((call.sm_count, threading.get_ident()))
        if self.error is not None:
            raise self.error
        copied(target, source)


async def pair(p: Partition) -> tuple[Buffer, Buffer]:
    return await p.upload(np.zeros(SIZE, np.float32)), await p.upload(np.ones(SIZE, np.float32))


def executables(pool: Pool) -> int:
    """Return the number of executable graphs, if the driver counts them."""
    driver = pool.devices[0].driver
    return driver.live()["executable graph"] if isinstance(driver, SimulatedDriver) else 0


# -- capturing and launching ----------------------------------------------------------------------


def test_a_graph_does_its_work_at_each_launch(backend: Backend) -> None:
    """Capturing runs nothing; each launch uses the present values, in order."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            target, source = await pair(p)
            with target, source, await p.capture(copied, target, source) as graph:
                assert (await p.download(target)).tolist() == [0] * SIZE
                for value in (1, 2, 3):
                    p.copy(source, np.full(SIZE, value, np.float32))
                    graph.launch(p)
                    assert (await p.download(target)).tolist() == [value] * SIZE

    backend.run(main)


def test_a_thousand_launches_between_jobs(backend: Backend) -> None:
    """Between other jobs, the word of the tickets only grows."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            target, source = await pair(p)
            with target, source, await p.capture(copied, target, source) as graph:
                await p.prepare(CONFIG, fill)
                track, seen = p._open_lease().launch_stream, 0
                for number in range(1000):
                    job = graph.launch(p)
                    if number % 20 == 0:
                        other = p.launch(CONFIG, fill, source, 2.0, SIZE)
                        await job
                        assert job._ticket <= track.word[0]
                        await other
                    assert seen <= track.word[0] <= track.issued
                    seen = track.word[0]
                await job
                assert track.word[0] == track.issued == job._ticket
                assert executables(pool) <= 1

    backend.run(main)


@pytest.mark.runs_device_code
def test_it_runs_on_the_sms_of_the_lease(backend: Backend) -> None:
    """A graph runs on the lease's SMs only, wherever it was captured before."""
    none = np.zeros(64, np.uint32)

    def step(seen: Buffer) -> None:
        call = current_call()
        assert call is not None
        config = LaunchConfig(grid=2 * call.sm_count, block=1024)
        launch(call.stream, config, smids, seen, 100_000)

    async def main() -> None:
        async with backend.pool("h20", prepare=[smids]) as pool, pool.partitions(16, 32) as several:
            with await several[0].upload(none) as seen, await several[0].upload(none) as again:
                with await several[0].capture(step, seen) as graph:
                    for p in (*several, *several):
                        for buffer in (seen, again):
                            p.copy(buffer, none)
                        launched = graph.launch(p)
                        config = LaunchConfig(grid=2 * p.sm_count, block=1024)
                        p.launch(config, smids, again, 100_000)
                        mine, expected = await p.download(seen), await p.download(again)
                        await launched
                        assert np.unpackbits(mine.view(np.uint8)).sum() == p.sm_count
                        np.testing.assert_array_equal(mine, expected)

    backend.run(main)


def test_it_is_captured_once_for_each_set_of_sms(backend: Backend) -> None:
    """The executor's thread captures it once, and the next lease of the same SMs reuses it."""

    async def main() -> None:
        async with backend.pool() as pool:
            step = Copying()
            async with pool.partition(ALL) as p:
                target, source = await pair(p)
                graph, most = await p.capture(step, target, source), p.sm_count
                worker = await p.run(threading.get_ident)
                assert step.calls == [(most, worker)]
                await graph.launch(p)
            for _ in range(2):
                async with pool.partition(8) as p:
                    jobs = [graph.launch(p), graph.launch(p)]
                    p.copy(source, np.full(SIZE, 5, np.float32))
                    jobs.append(graph.launch(p))
                    for job in jobs:
                        await job
                    assert (await p.download(target)).tolist() == [5] * SIZE
                    p.copy(source, np.ones(SIZE, np.float32))
            async with pool.partition(ALL) as p:
                await graph.launch(p)
                assert (await p.download(target)).tolist() == [1] * SIZE
            assert [sms for sms, _ in step.calls] == [most, 8]
            assert step.calls[0][1] != step.calls[1][1]
            for owned in (graph, target, source):
                owned.close()

    backend.run(main)


def test_it_follows_a_checkpoint(backend: Backend) -> None:
    """If a checkpoint moves the lease, the graph is captured for the new SMs."""

    async def main() -> None:
        async with backend.pool() as pool:
            step = Copying()
            async with anyio.create_task_group() as tasks, pool.partition((8, 1024)) as p:
                target, source = await pair(p)
                graph = await p.capture(step, target, source)
                await graph.launch(p)

                async def other() -> None:
                    async with pool.partition(8):
                        pass

                tasks.start_soon(other)
                await until(lambda: pool.statistics().waiting == 1)
                fewer = await p.checkpoint()
                await graph.launch(p)
                assert [sms for sms, _ in step.calls][1:] == [fewer]
                for owned in (graph, target, source):
                    owned.close()

    backend.run(main)


def test_what_it_returns_lives_as_long(backend: Backend) -> None:
    """Memory that the captured function returns is kept while the graph may use it."""

    class Scratch: ...

    made: list[weakref.ref[Scratch]] = []

    def step(target: Buffer, source: Buffer) -> Scratch:
        copied(target, source)
        scratch = Scratch()
        made.append(weakref.ref(scratch))
        return scratch

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            target, source = await pair(p)
            graph = await p.capture(step, target, source)
            await graph.launch(p)
            gc.collect()
            assert made[0]() is not None
            graph.close()
            await p.run(int)
            gc.collect()
            assert made[0]() is None
            target.close()
            source.close()

    backend.run(main)


# -- the buffers ----------------------------------------------------------------------------------


def test_its_arguments_are_kept_in_order(backend: Backend) -> None:
    """A launch and other partitions' work on its arguments are ordered with each other."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, pool.partition(8) as q:
            target, source = await pair(p)
            with target, source, await p.capture(copied, target, source) as graph:
                await graph.launch(q)
                with await Gate.closed(p) as gate:
                    job = graph.launch(p)
                    read = q.download(target)
                    await still_waits(read)
                    gate.open()
                    await read
                    await job
                with await Gate.closed(q) as gate:
                    written = q.copy(source, np.full(SIZE, 4, np.float32))
                    job = graph.launch(p)
                    await still_waits(job)
                    gate.open()
                    await job
                    await written
                assert (await p.download(target)).tolist() == [4] * SIZE

    backend.run(main)


def test_what_kernels_only_read_is_shared(backend: Backend) -> None:
    """Kernel arguments in a capture are read or written as their parameters say."""

    async def main() -> None:
        async with backend.pool(prepare=[saxpy]) as pool, pool.partitions(8, 8) as (p, q):
            y, x = await pair(p)
            other, also = await pair(q)
            with x, y, other, also, await p.capture(lambda: added(x, y)) as graph:
                await graph.launch(p)
                with await Gate.closed(p) as gate:
                    job = graph.launch(p)
                    await q.launch(CONFIG, saxpy, 1.0, x, other, SIZE)  # beside it
                    writes = q.launch(CONFIG, saxpy, 1.0, other, x, SIZE)
                    await still_waits(writes)
                    gate.open()
                    await job
                    await writes

    backend.run(main)


def test_memory_is_not_given_back_under_a_launch(backend: Backend) -> None:
    """A closed buffer outlives the launch in flight; later launches are refused."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            target, source = await pair(p)
            with await p.capture(copied, target, source) as graph:
                with await Gate.closed(p) as gate:
                    job = graph.launch(p)
                    source.close()
                    with pytest.raises(greensched.BufferClosed):
                        graph.launch(p)
                    gate.open()
                    await job
                assert (await p.download(target)).tolist() == [1] * SIZE
            target.close()

    backend.run(main)


class Shown:
    """An array of another library, written on a stream of its own."""

    def __init__(self, buffer: Buffer, stream: Stream) -> None:
        self.__cuda_array_interface__ = buffer.__cuda_array_interface__ | {"stream": stream.address}


def test_an_array_of_another_library_is_waited_for_at_each_launch(backend: Backend) -> None:
    """Its producer is not in the capture, and every launch runs after it."""

    async def main() -> None:
        async with backend.pool(prepare=[fill]) as pool, pool.partition(8) as p:
            theirs = await p.run(p.context.device.create_stream)
            x = await p.empty(SIZE)
            word = await p.empty_pinned(1, np.uint32)
            array = Shown(x, theirs)
            driver = theirs.context.driver
            driver.wait_value(theirs.handle, word.address, 1)
            try:
                graph = await p.capture(lambda: launch(here(), CONFIG, fill, array, 1.0, SIZE))
                job = graph.launch(p)
                await still_waits(job)
            finally:  # or the stream would never end
                word.array[0] = 1
            await job
            await graph.launch(p)
            for owned in (graph, x, word):
                owned.close()
            await p.run(theirs.close)

    backend.run(main)


# -- what cannot be captured ----------------------------------------------------------------------


def spoil_and_go_on(target: Buffer, source: Buffer) -> None:
    copied(target, source)
    with pytest.raises(greensched.CUDAError):
        here().sync()


def spoil(target: Buffer, source: Buffer) -> None:
    copied(target, source)
    here().sync()


def nothing(target: Buffer, source: Buffer) -> None: ...


def end(target: Buffer, source: Buffer) -> None:
    copied(target, source)
    stream = here()
    driver = stream.context.driver
    driver.destroy_graph(driver.end_capture(stream.handle))


def fail(target: Buffer, source: Buffer) -> None:
    copied(target, source)
    raise LookupError("its own")


def spoil_and_fail(target: Buffer, source: Buffer) -> None:
    spoil_and_go_on(target, source)
    raise LookupError("its own")


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (nothing, greensched.InvalidCapture, "nothing"),
        (spoil, greensched.InvalidCapture, "waited"),
        (spoil_and_go_on, greensched.InvalidCapture, "waited"),
        (end, greensched.InvalidCapture, "ended"),
        (fail, LookupError, "its own"),
        (spoil_and_fail, LookupError, "its own"),
    ],
)
def test_what_cannot_be_captured_leaves_nothing(
    backend: Backend, function: Callable[..., None], kind: type[Exception], said: str
) -> None:
    """The job fails with the reason, the capture ends, and the next one succeeds."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            target, source = await pair(p)
            with target, source:
                with pytest.raises(kind, match=said):
                    await p.capture(function, target, source)
                assert executables(pool) == 0
                with await p.capture(copied, target, source) as graph:
                    await graph.launch(p)
                assert (await p.download(target)).tolist() == [1] * SIZE

    backend.run(main)


def test_it_may_fail_on_other_sms(backend: Backend) -> None:
    """The launch fails once with the reason, and the next launch captures again."""

    async def main() -> None:
        async with backend.pool() as pool:
            step = Copying()
            async with pool.partition(ALL) as p:
                target, source = await pair(p)
                graph = await p.capture(step, target, source)
            async with pool.partition(8) as p:
                step.error = LookupError("not here")
                jobs = [graph.launch(p), graph.launch(p)]
                for job in jobs:
                    with pytest.raises(LookupError, match="not here"):
                        await job
                step.error = None
                await graph.launch(p)
                assert (await p.download(target)).tolist() == [1] * SIZE
            with pytest.raises(LookupError, match="not here"):
                async with pool.partition(16) as p:
                    step.error = LookupError("not here")
                    graph.launch(p)
            for owned in (graph, target, source):
                owned.close()

    backend.run(main)


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_it_uses_the_same_buffers_everywhere(backend: Backend, *, is_busy: bool) -> None:
    """Other buffers than the first time would not be kept alive: such a capture is refused.

    A second launch succeeds, also while its thread's stream is busy.
    """
    used: list[Buffer] = []

    async def main() -> None:
        async with backend.pool(prepare=[saxpy]) as pool, pool.partitions(8, 8) as (p, q):
            y, x = await pair(p)
            used[:] = [x, y]
            with x, y, await q.empty_pinned(1, np.uint32) as word:

                def hold() -> None:
                    stream = here()
                    stream.context.driver.wait_value(stream.handle, word.address, 1)

                with await p.capture(lambda: added(*used)) as graph:
                    await graph.launch(p)
                    try:
                        held = q.run(hold) if is_busy else None
                        used.reverse()  # what was read is written now
                        with pytest.raises(greensched.InvalidCapture, match="same buffers"):
                            await graph.launch(q)
                        assert held is None or not held.done()
                        used.reverse()
                        launched = graph.launch(q)
                    finally:
                        word.array[0] = 1
                    await launched

    backend.run(main)


def tell_of_looks(driver: Any, monkeypatch: pytest.MonkeyPatch, tell: Callable[[], None]) -> None:
    """Report what this thread does before and after it queries an event."""
    exchange, loop = driver.exchange_capture_mode, threading.get_ident()

    def looking(mode: Any) -> Any:
        if threading.get_ident() == loop:
            tell()
        return exchange(mode)

    monkeypatch.setattr(driver, "exchange_capture_mode", looking)


@pytest.mark.real_time("a thread waits for the loop")
def test_a_loop_that_sleeps_meanwhile_leaves_a_capture_alone(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event would invalidate the capture and look like a device fault."""
    driver, looked = backend.driver(), threading.Event()
    tell_of_looks(driver, monkeypatch, looked.set)

    async def main() -> None:
        pool = Pool(driver=driver, devices=[0], prepare=[saxpy])
        async with pool, pool.partition(8) as p:
            with await p.empty_pinned(1, np.uint32) as word:
                y, x = await pair(p)

                def hold() -> None:
                    driver.wait_value(here().handle, word.address, 1)

                def slow() -> None:
                    for _ in range(2):
                        looked.clear()
                        assert looked.wait()
                    word.array[0] = 1
                    added(y, x)

                with y, x:
                    held = p.run(hold)
                    with await p.capture(slow) as graph:
                        await held
                        looked.set()
                        await graph.launch(p)

    backend.run(main)


@pytest.mark.real_time("work waits for the loop")
def test_an_event_that_went_into_a_capture_is_not_asked_about(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Querying an event that was recorded into a capture would invalidate the capture."""
    driver, looks = backend.driver(), list[None]()
    tell_of_looks(driver, monkeypatch, lambda: looks.append(None))

    async def main() -> None:
        pool = Pool(driver=driver, devices=[0])
        async with pool, pool.partition(8) as p:
            with await p.empty_pinned(1, np.uint32) as word:
                track = p._open_lease().executor.call_stream
                stream = track.stream.handle
                held = p.run(lambda: driver.wait_value(here().handle, word.address, 1))
                await until(lambda: track.submitted == track.issued)
                driver.begin_capture(stream, greensched.typing.CaptureMode.RELAXED)
                driver.record_event(track.event.handle, stream)
                looks.clear()
                await until(lambda: len(looks) > 2)  # it asked another one, or none
                driver.destroy_graph(driver.end_capture(stream))
                word.array[0] = 1
                await held

    backend.run(main)


def test_nonsense_is_refused(backend: Backend) -> None:
    """Only blocking functions are captured, and a graph is launched on partitions only."""

    async def coroutine() -> None: ...

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            for wrong in (None, 3, coroutine):
                with pytest.raises(greensched.InvalidRequest):
                    p.capture(wrong)  # type: ignore[arg-type]  # it is wrong
            target, source = await pair(p)
            with target, source, await p.capture(copied, target, source) as graph:
                for other in (None, p.stream, pool):
                    with pytest.raises(greensched.InvalidRequest, match="Partition"):
                        graph.launch(other)  # type: ignore[arg-type]  # it is wrong

    backend.run(main)


# -- its end --------------------------------------------------------------------------------------


def test_nothing_is_launched_too_late(backend: Backend) -> None:
    """Launches after the lease, `close` or the pool are refused; earlier ones are done."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition(16) as p:
                target, source = await pair(p)
                graph, kept = [await p.capture(copied, target, source) for _ in range(2)]
                with await Gate.closed(p) as gate:
                    job = graph.launch(p)
                    graph.close()
                    graph.close()
                    with pytest.raises(greensched.Closed, match="graph"):
                        graph.launch(p)
                    gate.open()
                    await job
                assert (await p.download(target)).tolist() == [1] * SIZE
            with pytest.raises(greensched.PartitionClosed):
                kept.launch(p)
            async with pool.partition(16) as p:
                target.close()
                source.close()
        with pytest.raises(greensched.PartitionClosed):
            kept.launch(p)
        kept.close()

    backend.run(main)


def test_a_closed_graph_gives_its_memory_back(backend: Backend) -> None:
    """At once if it is not running, and else when the executor's thread next works."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            target, source = await pair(p)
            with target, source:
                graph = await p.capture(copied, target, source)
                await graph.launch(p)
                graph.close()
                await until(lambda: executables(pool) == 0)
                graph = await p.capture(copied, target, source)
                with await Gate.closed(p) as gate:
                    graph.launch(p)
                    graph.close()
                    gate.open()
                await p.download(target)
                other = await p.capture(copied, target, source)
                assert executables(pool) <= 1
                other.close()

    backend.run(main)


def test_a_forgotten_graph_is_reported(backend: Backend) -> None:
    """It warns and is closed; one that only a cancelled task would get is closed silently."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            target, source = await pair(p)
            with target, source:
                with pytest.warns(ResourceWarning, match="Graph of copied") as told:
                    graph = await p.capture(copied, target, source)
                    await graph.launch(p)
                    del graph
                    await until(lambda: len(told) == 1)  # the thread that made it lets go, too
                job = p.capture(copied, target, source)
                await p.run(int)
                assert job.done()
                del job
                gc.collect()
                with await p.capture(copied, target, source):
                    assert executables(pool) <= 2

    backend.run(main)


def test_a_graph_is_of_one_device(backend: Backend) -> None:
    """A partition of another device refuses it before anything is captured."""

    async def main() -> None:
        async with backend.pair() as pool:
            async with pool.partition(8, device=0) as p, pool.partition(8, device=1) as q:
                target, source = await pair(p)
                with target, source, await p.capture(copied, target, source) as graph:
                    assert graph.device_id == 0
                    with pytest.raises(greensched.WrongDevice):
                        graph.launch(q)
                    await graph.launch(p)

    backend.run(main)


def test_a_capture_of_the_users_own_keeps_graphs_out(backend: Backend) -> None:
    """No graph is launched while the partition's stream is capturing."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            target, source = await pair(p)
            with target, source, await p.capture(copied, target, source) as graph:
                stream = p.stream
                driver = stream.context.driver
                driver.begin_capture(stream.handle, greensched.typing.CaptureMode.RELAXED)
                with pytest.raises(greensched.InvalidRequest, match="capturing"):
                    graph.launch(p)
                driver.destroy_graph(driver.end_capture(stream.handle))
                await graph.launch(p)

    backend.run(main)


def test_it_takes_the_time_of_its_work(backend: Backend) -> None:
    """On a simulated device a launch takes one launch latency and its kernels' time."""
    if not backend.is_simulated:
        pytest.skip("how long kernels take is exact on simulated devices alone")
    spans: list[Span] = []

    async def main() -> None:
        async with backend.pool(prepare=[saxpy]) as pool, pool.partition(16) as p:
            driver = pool.devices[0].driver
            assert isinstance(driver, SimulatedDriver)
            y, x = await pair(p)
            with x, y, await p.capture(lambda: (added(x, y), added(x, y))) as graph:
                driver.on_span(spans.append)
                await graph.launch(p)
                driver.on_span(None)
        first, second, whole = (span for span in spans if span.kind in ("kernel", "graph"))
        assert first.sms == second.sms
        assert first.sms.bit_count() == 16
        assert whole.start == first.start < first.end == second.start < second.end == whole.end

    backend.run(main)
