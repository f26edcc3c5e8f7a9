"""Transfers: arrays of every layout arrive, and buffers order work across partitions."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest

import greensched
from greensched import BufferClosed, InvalidArray, LaunchConfig
from greensched.device.allocators import PinnedAllocator
from greensched.device.staging import CHUNK
from greensched.device.staging_ring import SLOT, SLOTS, StagingSlot
from greensched.kernels import fill
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import still_waits, turns, until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=1, block=8)
BIG = (CHUNK * 2 + SLOT) // 8
RNG = np.random.default_rng(7)


def layouts() -> dict[str, npt.NDArray[np.generic]]:
    """Return arrays of every kind of layout; the large ones take several chunks."""
    cube = RNG.random((20, 30, 40))
    large = RNG.random((BIG // 100, 100))
    return {
        "contiguous": cube,
        "fortran": np.asfortranarray(cube),
        "strided": cube[::2, 1::3, ::-1],
        "transposed": cube.T,
        "broadcast": np.broadcast_to(RNG.random(7), (5, 7)),
        "read-only": _read_only(RNG.random(9)),
        "scalar": np.float64(3.5) * np.ones(()),
        "one": np.ones(1),
        "zero size": np.empty((3, 0, 2)),
        "a slot": RNG.random(SLOT // 8),
        "a slot and one": RNG.random(SLOT // 8 + 1),
        "a chunk": RNG.random(CHUNK // 8),
        "chunks": RNG.random(BIG),
        "chunks, strided": np.repeat(RNG.random(BIG), 2)[::2],
        "chunks, fortran": np.asfortranarray(large),
        "chunks, rows": large[::2, ::-1],
        "one long row": RNG.random((1, BIG)),
        "long elements": np.resize(np.frombuffer(RNG.bytes(2 * CHUNK + 2), f"V{CHUNK + 1}"), 4)[
            ::3
        ],
        "one long element": np.frombuffer(RNG.bytes(CHUNK + 1), f"V{CHUNK + 1}").reshape(()),
    }


def _read_only(array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("layout", layouts())
def test_every_layout_arrives(backend: Backend, layout: str) -> None:
    """An array of any order, strides and size returns unchanged from the device."""
    array = layouts()[layout]

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(array) as buffer:
                assert (buffer.shape, buffer.dtype) == (array.shape, array.dtype)
                assert (buffer.size, buffer.nbytes) == (array.size, array.nbytes)
                out = await p.download(buffer)
                np.testing.assert_array_equal(out, array)
                into = np.full_like(array, 9, order="F", subok=False)
                assert await p.download(buffer, out=into) is into
                np.testing.assert_array_equal(into, array)
                if array.ndim:
                    spread = np.empty((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
                    view = spread[..., ::2]
                    await p.download(buffer, out=view)
                    np.testing.assert_array_equal(view, array)

    backend.run(main)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_is_filled(backend: Backend) -> None:
    """A download fills a matrix like any other array."""

    async def main() -> None:
        array = RNG.random((1, BIG))
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(np.asmatrix(array)) as buffer:
                out = np.asmatrix(np.zeros_like(array))
                assert await p.download(buffer, out) is out
                np.testing.assert_array_equal(out, array)

    backend.run(main)


@pytest.mark.parametrize(
    "dtype",
    [
        "?",
        "i1",
        "u2",
        "i8",
        "f2",
        "f4",
        "c8",
        "c16",
        "M8[ns]",
        "S5",
        "U3",
        "V7",
        [("a", "f4"), ("b", "i2", (3,))],
    ],
)
def test_every_dtype_arrives(backend: Backend, dtype: npt.DTypeLike) -> None:
    """Arrays of any dtype of plain bytes, structured ones included, return unchanged."""
    array = np.frombuffer(RNG.bytes(np.dtype(dtype).itemsize * 50), np.dtype(dtype))

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(array) as buffer:
                out = await p.download(buffer)
                assert out.dtype == array.dtype
                assert out.tobytes() == array.tobytes()

    backend.run(main)


def test_what_is_no_array_is_refused(backend: Backend) -> None:
    """Objects, foreign byte order and bad shapes raise InvalidArray with the reason."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with pytest.raises(InvalidArray, match="big-endian"):
                p.upload(np.zeros(3, ">f4"))
            with pytest.raises(InvalidArray, match="Python objects"):
                p.upload(np.array([object()]))
            with pytest.raises(InvalidArray, match="Python objects"):
                p.empty(3, object)
            for shape in (-1, (2, -3), 1.5, "3", True):
                with pytest.raises(InvalidArray, match="shape"):
                    p.empty(shape)  # type: ignore[arg-type]

    backend.run(main)


def test_where_a_download_cannot_go_is_refused(backend: Backend) -> None:
    """`out` must be a writable array of the same shape and dtype."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(np.zeros((2, 3))) as buffer:
                for out, said in (
                    (np.zeros((3, 2)), "3, 2"),
                    (np.zeros((2, 3), np.float32), "float32"),
                    (_read_only(np.zeros((2, 3))), "read-only"),
                    ([[0.0] * 3] * 2, "list"),
                ):
                    with pytest.raises(InvalidArray, match=said):
                        p.download(buffer, out=out)  # type: ignore[arg-type]

    backend.run(main)


def test_closed_buffer_is_refused(backend: Backend) -> None:
    """A closed buffer, or one of a closed pool, raises BufferClosed; `close` is idempotent."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition(8) as p:
                b, kept = await p.empty(4), await p.empty(4)
                b.close()
                b.close()
                for use in (lambda: p.download(b), lambda: p.copy(b, kept), lambda: p.run(id, b)):
                    with pytest.raises(BufferClosed):
                        use()
        with pytest.raises(BufferClosed):
            kept.check(0)

    backend.run(main)


def test_copy_fills_an_existing_buffer(backend: Backend) -> None:
    """`copy` takes a buffer or an array of the same shape and dtype, and nothing else."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            for size in (100, BIG):
                source = RNG.random(size)
                with await p.empty(size, np.float64) as a, await p.empty_like(a) as b:
                    p.copy(a, source)
                    p.copy(b, a)
                    np.testing.assert_array_equal(await p.download(b), source)
                    for other in (np.zeros(size + 1), np.zeros(size, np.float32)):
                        with pytest.raises(InvalidArray):
                            p.copy(a, other)

    backend.run(main)


def test_small_upload_reads_its_array_at_once(backend: Backend) -> None:
    """An array of at most 64 KiB may change as soon as `upload` has returned."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await Gate.closed(p) as gate:
                array = np.ones(100)
                job = p.upload(array)
                array.fill(5)
                gate.open()
            with await job as buffer:
                np.testing.assert_array_equal(await p.download(buffer), np.ones(100))

    backend.run(main)


@pytest.mark.parametrize("size", [100, BIG])
def test_another_partition_waits_for_the_writer(backend: Backend, size: int) -> None:
    """A reader on another partition sees everything that was submitted before it."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as a, pool.partition(8) as b:
            with await a.upload(np.zeros(size)) as buffer:
                with await Gate.closed(a) as gate:
                    a.copy(buffer, np.ones(size))
                    read = b.download(buffer)
                    await still_waits(read)
                    gate.open()
                np.testing.assert_array_equal(await read, np.ones(size))

    backend.run(main)


def test_another_partition_waits_for_the_readers(backend: Backend) -> None:
    """A writer on another partition waits for the readers."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as a, pool.partition(8) as b:
            with await a.upload(np.zeros(100)) as buffer:
                with await Gate.closed(a) as gate:
                    read = a.download(buffer)
                    write = b.copy(buffer, np.ones(100))
                    await still_waits(write)
                    gate.open()
                np.testing.assert_array_equal(await read, np.zeros(100))
                np.testing.assert_array_equal(await b.download(buffer), np.ones(100))

    backend.run(main)


def test_memory_is_given_back_behind_its_last_user(backend: Backend) -> None:
    """A buffer that is closed in use is freed when its work is done."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            memory = p._open_lease().device_memory.memory
            with await p.upload(np.zeros(100)) as kept:
                used = memory.used_bytes
                with await Gate.closed(p) as gate:
                    extra = p.copy(kept, kept)
                    kept.close()
                    memory.reap()
                    assert memory.used_bytes == used
                    gate.open()
                await extra

            await until(lambda: memory.reap() is None and memory.used_bytes == 0)

    backend.run(main)


@pytest.mark.fault("C5")
def test_running_out_of_memory_fails_one_job(backend: Backend) -> None:
    """OutOfMemory has the requested, free and total bytes; the pool stays usable."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with pytest.raises(greensched.OutOfMemory) as refused:
                await p.empty(10**13, np.uint8)
            assert refused.value.asked == 10**13
            assert refused.value.free is not None
            assert refused.value.total is not None
            assert 0 < refused.value.free <= refused.value.total
            with await p.upload(np.ones(5)) as buffer:
                np.testing.assert_array_equal(await p.download(buffer), np.ones(5))

    backend.run(main)


def test_forgotten_buffer_warns_and_is_given_back(backend: Backend) -> None:
    """A collected buffer that was not closed warns, and its memory is freed."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            buffer = await p.empty(1000)
            with pytest.warns(ResourceWarning, match="never closed") as seen:
                del buffer
                await until(lambda: len(seen) > 0)  # a thread of ours may still let go of it

    backend.run(main)


def test_pinned_memory_is_shared_with_the_device(backend: Backend) -> None:
    """`empty_pinned` gives zeroed host memory as a numpy array with a device address."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty_pinned((3, 4), np.int32) as pinned:
                assert pinned.array.shape == (3, 4)
                assert not pinned.array.any()
                assert pinned.address
            with pytest.raises(BufferClosed):
                pinned.check(0)

    backend.run(main)


@pytest.mark.fault("F10")
def test_pinned_memory_is_used_again_once_its_work_is_done(backend: Backend) -> None:
    """A buffer that is closed in use is reused after its work, and is zeroed."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            await p.prepare(LaunchConfig(grid=1, block=32), fill)
            first = await p.empty_pinned(2000, np.float32)
            address = first.address
            first.array[:] = 7.0
            async with pool.partition(8) as held:
                with await Gate.closed(held) as gate:
                    job = held.launch(LaunchConfig(grid=1, block=32), fill, first, 1.0, 2000)
                    await turns()
                    first.close()
                    other = await p.empty_pinned(2000, np.float32)
                    assert other.address != address
                    gate.open()
                await job
            with other, await p.empty_pinned(2000, np.float32) as again:
                assert again.address == address
                assert not again.array.any()

    backend.run(main)


def test_pinned_memory_may_be_asked_for_by_many_at_once(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread at a time looks for free pinned memory."""
    reap = PinnedAllocator._reap_locked
    unlocked = []

    def watched(memory: PinnedAllocator) -> None:
        if not memory._lock.locked():
            unlocked.append(memory)
        reap(memory)

    monkeypatch.setattr(PinnedAllocator, "_reap_locked", watched)

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, pool.partition(8) as q:
            for job in [partition.empty_pinned(4) for partition in (p, q) * 5]:
                (await job).close()

    backend.run(main)
    assert not unlocked


def test_a_download_that_cannot_be_delivered_fails(backend: Backend) -> None:
    """If the host cannot fill `out`, that job fails and no other."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as other:
            with await other.upload(np.ones(64)) as buffer:
                slots = other._open_lease().device_memory.slots
                for see in (True, False):
                    with pytest.raises(ValueError, match="read-only"):
                        async with pool.partition(8) as p:
                            out = np.zeros(64)
                            with await Gate.closed(p) as gate:
                                job = p.download(buffer, out)
                                _read_only(out)
                                bystander = other.copy(buffer, buffer)
                                gate.open()
                            if see:
                                await job
                    await bystander
                assert len(list(iter(slots.take, None))) == SLOTS

    backend.run(main)


def test_a_download_is_whole_for_every_thread(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that asks for a download during its delivery waits for all of it."""
    asked = threading.Event()
    found = []

    class Announcing:
        """A lock that reports when a second thread comes for it."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if self._lock.locked():
                asked.set()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(np.ones(64)) as buffer, await Gate.closed(p) as gate:
                job = p.download(buffer)
                job._finalizing = Announcing()  # type: ignore[assignment]
                thread = threading.Thread(target=lambda: found.append(job.result().copy()))

                def slowly(
                    slot: StagingSlot, like: npt.NDArray[np.generic]
                ) -> npt.NDArray[np.generic]:
                    thread.start()
                    assert asked.wait()
                    return place(slot, like)

                place = StagingSlot.place
                monkeypatch.setattr(StagingSlot, "place", slowly)
                gate.open()
                await job
                thread.join()

    backend.run(main)
    np.testing.assert_array_equal(found[0], np.ones(64))


@pytest.mark.real_time(why="the loop spins until the device is done")
def test_leaving_a_block_delivers_its_downloads(backend: Backend) -> None:
    """After a block `out` is filled, even if the loop has not run since."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as other:
            with await other.upload(np.ones(64)) as buffer:
                for _ in range(50):
                    out = np.zeros(64)
                    async with pool.partition(8) as p:
                        job = p.download(buffer, out)
                        while not p._open_lease().launch_stream.reached(job._ticket):
                            pass  # no turn of the loop in between
                    assert out.all()

    backend.run(main)


def test_a_library_is_told_of_the_writer(backend: Backend) -> None:
    """The array interface names the writer's stream until it is done, and is refused before."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            large = np.ones(SLOT + 1, np.uint8)
            with await p.upload(large) as buffer:
                assert buffer.__cuda_array_interface__["stream"] is None
                with await Gate.closed(p):
                    job = p.copy(buffer, large)
                    with pytest.raises(greensched.WouldBlock, match="await"):
                        _ = buffer.__cuda_array_interface__
                await job
                assert buffer.__cuda_array_interface__["stream"] is None
            with await p.empty(8) as small:
                with await Gate.closed(p):
                    await until(lambda: p._open_lease().all_submitted)
                    job = p.copy(small, np.ones(8, np.float32))
                    assert small.__cuda_array_interface__["stream"] == p.__cuda_stream__()[1]
                await job
                assert small.__cuda_array_interface__["stream"] is None

    backend.run(main)


def test_a_library_is_ordered_behind_every_writer(backend: Backend) -> None:
    """If a bound launch and another stream wrote, the named stream waits for both."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as q, pool.partition(8) as keeper:
            buffer = await keeper.empty(8)
            p = await pool.partition(8).__aenter__()
            await p.prepare(CONFIG, fill)
            await q.prepare(CONFIG, fill)
            stream = p.stream
            with await Gate.closed(q) as behind, await Gate.closed(p) as before:
                # The submit threads may not have noted it yet, though the device is past it.
                await until(lambda: p._open_lease().all_submitted and q._open_lease().all_submitted)
                p.bind(CONFIG, fill, buffer, 1.0, 8)()
                job = q.launch(CONFIG, fill, buffer, 2.0, 8)
                p._granted_lease().end()
                assert buffer.__cuda_array_interface__["stream"] == stream.__cuda_stream__()[1]
                before.open()
                await still_waits(job)
                assert not stream.is_done
                behind.open()
                await job
                await until(lambda: stream.is_done)
            await p.__aexit__(None, None, None)
            buffer.close()

    backend.run(main)
