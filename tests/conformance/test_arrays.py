"""Device arrays of other libraries as arguments and ends of copies, and buffers used by them.

The libraries are stood in for by views of our own buffers: `Lent` has DLPack, `Shown` the older
protocol. The real ones have tests of their own (tests/integrations).
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import greensched
from greensched import Buffer, Device, InvalidArray, LaunchConfig, Partition, Pool, Stream
from greensched.device import dlpack
from greensched.kernels import fill, saxpy
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=4, block=128)
ONES = np.ones(8, np.float32)


class Lent:
    """A library's array by DLPack, whose producer is the stream that writes the buffer."""

    def __init__(self, buffer: Buffer, **facts: Any) -> None:
        self.buffer = buffer
        self.dtype = buffer.dtype
        self.asked: list[int] = []
        self.device = facts.get("device", (2, buffer.device_id))
        self.capsule = facts.get("capsule")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] | None = None) -> object:
        self.asked.append(stream)
        if self.capsule is not None:
            return self.capsule()
        return self.buffer.__dlpack__(stream=stream, max_version=max_version)


class OldLent(Lent):
    """The same by DLPack without versions."""

    def __dlpack__(self, *, stream: int) -> object:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


class Untyped:
    """Bytes without a dtype, as in a cuda.core Buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._buffer.device_id

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int]) -> object:
        return self._buffer.__dlpack__(stream=stream, max_version=max_version)


class Shown:
    """A library's array by `__cuda_array_interface__`, of which a test changes entries."""

    def __init__(self, buffer: Buffer, **facts: Any) -> None:
        self._buffer = buffer
        self._facts = facts

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._buffer.__cuda_array_interface__ | self._facts


WAYS: list[Callable[[Buffer], Any]] = [Lent, OldLent, Shown]


@asynccontextmanager
async def untouched(pool: Pool, p: Partition) -> AsyncIterator[None]:
    """Check that the block submits nothing and that later work is right."""
    executor = p._open_lease().executor
    before = executor.launch_stream.issued, executor.call_stream.issued
    yield
    assert (executor.launch_stream.issued, executor.call_stream.issued) == before
    with await p.upload(ONES) as b:
        assert (await p.download(b)).tolist() == ONES.tolist()


@asynccontextmanager
async def foreign_stream(p: Partition) -> AsyncIterator[Stream]:
    """Yield a stream of the primary context, as of another library."""
    device = p._open_lease().executor.device
    stream = await p.run(device.create_stream)
    yield stream
    await p.run(stream.sync)
    await p.run(stream.close)


# -- as arguments -----------------------------------------------------------------------------


@pytest.mark.runs_device_code
@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_works_on_it_where_it_lies(backend: Backend, way: Callable[[Buffer], Any]) -> None:
    """A kernel, also as a bound launch, writes into the other library's own memory."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(ONES) as b:
                for _ in range(2):  # a first use goes another way
                    await p.launch(CONFIG, saxpy, 2.0, way(b), way(b), b.size)
                np.testing.assert_array_equal(await p.download(b), 9 * ONES)
                bound = p.bind(CONFIG, saxpy, 1.0, way(b), way(b), b.size)
                bound()
                await bound.submit()
                np.testing.assert_array_equal(await p.download(b), 36 * ONES)
                bound.set(1, b)
                bound.set(2, way(b))
                await bound.submit()
                np.testing.assert_array_equal(await p.download(b), 72 * ONES)
            await pool.launch(CONFIG, fill, *(way(b2 := await p.empty(8)), 3.0, 8), sms=8)
            np.testing.assert_array_equal(await p.download(b2), 3 * ONES)
            b2.close()

    backend.run(main)


@pytest.mark.fault("E7")
@pytest.mark.parametrize("way", WAYS)
def test_its_producer_is_waited_for_on_the_device(
    backend: Backend, way: Callable[[Buffer], Any]
) -> None:
    """Work on an array runs after its producer's stream, and no thread waits."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partitions(8, 8) as (p, q):
            await p.prepare(CONFIG, fill)
            with await q.empty(8) as x, await p.empty(8) as y:
                with await Gate.closed(q) as gate:
                    written = q.copy(x, ONES)
                    array = way(x)
                    jobs = [p.copy(y, array), p.launch(CONFIG, fill, array, 2.0, 8)]
                    bound = p.bind(CONFIG, fill, array, 2.0, 8)
                    jobs.append(bound.submit())
                    assert not any(job.done() for job in jobs)
                    gate.open()
                for job in (written, *jobs):
                    await job
                np.testing.assert_array_equal(await p.download(y), ONES)

    backend.run(main)


def test_an_unknown_stream_is_waited_for(backend: Backend) -> None:
    """Work on an array runs after the stream that it names, which is of another context."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, foreign_stream(p) as theirs:
            with await p.upload(ONES) as x, await p.empty(8) as y:
                word = await p.empty_pinned(1, np.uint32)
                driver = theirs.context.driver
                driver.wait_value(theirs.handle, word.address, 1)
                try:
                    with theirs.context.entered():
                        driver.set_bytes(x.address, 0, x.nbytes, theirs.handle)
                    job = p.copy(y, Shown(x, stream=theirs.address))
                    assert not job.done()
                finally:  # or the stream would never end
                    word.array[0] = 1
                await job
                word.close()
                np.testing.assert_array_equal(await p.download(y), 0 * ONES)

    backend.run(main)


def test_the_default_streams_have_numbers(backend: Backend) -> None:
    """Streams 1 and 2 of an array are the driver's default streams, and None is no stream."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(ONES) as x:
                for stream in (1, 2, None):
                    found = await p.download(Shown(x, stream=stream))
                    np.testing.assert_array_equal(found, ONES)

    backend.run(main)


@pytest.mark.fault("E8")
def test_our_stream_is_what_a_producer_is_reported(backend: Backend) -> None:
    """DLPack's producer gets the stream to which the work goes."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(ONES) as x:
                array = Lent(x)
                await p.download(array)
                assert array.asked == [-1, p.__cuda_stream__()[1]]

    backend.run(main)


def test_it_lives_until_the_job_is_done(backend: Backend) -> None:
    """An array is referenced while work on it is queued or runs, and no longer."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            await p.prepare(CONFIG, fill)
            for way in WAYS:
                with await p.empty(8) as x:
                    with await Gate.closed(p) as gate:
                        gone = weakref.ref(array := way(x))
                        job = p.launch(CONFIG, fill, array, 1.0, 8)
                        del array
                        gc.collect()
                        assert gone() is not None
                        gate.open()
                    await job
                    await until(lambda gone=gone: gone() is None)  # type: ignore[misc]

    backend.run(main)


def test_a_bound_launch_keeps_it_until_its_end(backend: Backend) -> None:
    """A bound launch in flight keeps its arrays after its block, until the device is done."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as q:
            x = await q.empty(8)
            gates = []
            with pytest.raises(ZeroDivisionError):
                async with pool.partition(8) as p:
                    await p.prepare(CONFIG, fill)
                    gates.append(await Gate.closed(p))
                    gone = weakref.ref(array := Lent(x))
                    bound = p.bind(CONFIG, fill, array, 1.0, 8)
                    bound()
                    del array, bound, p
                    raise ZeroDivisionError
            gc.collect()
            assert gone() is not None
            with gates.pop() as gate:
                gate.open()
            await until(lambda: gone() is None)
            x.close()

    backend.run(main)


def test_a_block_that_is_left_lets_go_of_what_was_bound(backend: Backend) -> None:
    """After its block, a bound launch that is done keeps no array."""

    async def main() -> None:
        async with backend.pool(prepare=[fill]) as pool:
            async with pool.partition(8) as p:
                x = await p.empty(8)
            for _ in range(2):
                async with pool.partition(8) as p:
                    gone = weakref.ref(array := Lent(x))
                    await p.bind(CONFIG, fill, array, 1.0, 8).submit()
                    del array
                gc.collect()
                await until(lambda gone=gone: gone() is None)  # type: ignore[misc]
            x.close()

    backend.run(main)


def test_a_bound_launch_refuses_what_it_cannot_take(backend: Backend) -> None:
    """A refused array changes no bound launch and leaves other arguments free."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            await p.prepare(CONFIG, fill)
            with await p.upload(ONES) as x:
                bad = Shown(x, data=(ONES.ctypes.data, False))
                with pytest.raises(InvalidArray, match="which is not device memory"):
                    p.bind(CONFIG, fill, bad, 1.0, 8)
                bound = p.bind(CONFIG, fill, x, 1.0, 8)
                with pytest.raises(InvalidArray, match="which is not device memory"):
                    bound.set(0, bad)
                await bound.submit()

    backend.run(main)


# -- refused ----------------------------------------------------------------------------------


def flagged(buffer: Buffer) -> Callable[[], object]:
    """Return capsules whose memory is read-only."""

    def make() -> object:
        capsule: Any = buffer.__dlpack__(stream=-1, max_version=(1, 1))
        place = dlpack._pointer(capsule, dlpack._name(capsule))
        ctypes.c_uint64.from_address(place + 24).value |= 1
        return capsule

    return make


def consumed(buffer: Buffer) -> Callable[[], object]:
    """Return capsules that were consumed."""

    def make() -> object:
        capsule = buffer.__dlpack__(stream=-1)
        rename(capsule, USED)
        taken.append(capsule)
        return capsule

    return make


#: A capsule keeps the address of its name.
FRESH, USED = b"dltensor", b"used_dltensor"
rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
#: Capsules that are never consumed: their memory would stay exported.
taken: list[object] = []


def give_back_taken() -> None:
    for capsule in taken:
        rename(capsule, FRESH)
    taken.clear()


def refusing() -> object:
    raise BufferError("requires grad")


REFUSED: list[tuple[str, Callable[[Buffer], Any]]] = [
    ("is not in device memory.*p.upload", lambda b: np.ones(8, np.float32)),
    ("is not contiguous", lambda b: Shown(b, strides=(8,))),
    ("masked", lambda b: Shown(b, mask=np.ones(8))),
    ("big-endian", lambda b: Shown(b, typestr=">f4")),
    ("malformed", lambda b: Shown(b, typestr="what")),
    ("stream 0", lambda b: Shown(b, stream=0)),
    ("consumed already", lambda b: Lent(b, capsule=consumed(b))),
    ("not a capsule", lambda b: Lent(b, capsule=lambda: 3)),
    ("not exported by its library: requires grad", lambda b: Lent(b, capsule=refusing)),
]


@pytest.mark.fault("E8")
@pytest.mark.parametrize(("said", "made"), REFUSED, ids=[said for said, _ in REFUSED])
def test_an_array_that_cannot_be_used_is_refused(
    backend: Backend, said: str, made: Callable[[Buffer], Any]
) -> None:
    """The error says what is wrong, for arguments and copies, before anything is queued."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            for _ in range(2):  # also once the kernel was used
                with await p.upload(ONES) as b:
                    async with untouched(pool, p):
                        with pytest.raises(
                            greensched.ArgumentMismatch, match=f"argument 0.*{said}"
                        ):
                            p.launch(CONFIG, fill, made(b), 1.0, 8)
                        with pytest.raises(InvalidArray, match=said):
                            p.download(made(b))
                        with pytest.raises(InvalidArray, match=said):
                            p.copy(made(b), b)
                    give_back_taken()
                await p.prepare(CONFIG, fill)

    backend.run(main)


def test_what_is_only_to_be_read_is_not_written(backend: Backend) -> None:
    """A read-only array is refused where a kernel or copy may write, and may be read."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(ONES) as b, await p.empty(8) as c:
                shown = Shown(b, data=(b.address, True))
                for array in (shown, Lent(b, capsule=flagged(b))):
                    async with untouched(pool, p):
                        with pytest.raises(greensched.ArgumentMismatch, match="read-only"):
                            p.launch(CONFIG, fill, array, 1.0, 8)
                        with pytest.raises(InvalidArray, match="read-only"):
                            p.copy(array, ONES)
                    await p.launch(CONFIG, saxpy, 1.0, array, c, 8)
                    np.testing.assert_array_equal(await p.download(array), ONES)

    backend.run(main)


def test_elements_are_those_of_the_parameter(backend: Backend) -> None:
    """An array of another dtype is refused; bytes without a dtype fit any parameter."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(np.ones(8)) as b, await p.upload(np.zeros(3, np.int8)) as three:
                for way in WAYS:
                    with pytest.raises(greensched.ArgumentMismatch, match="holds float64"):
                        p.launch(CONFIG, fill, way(b), 1.0, 8)
                await p.launch(CONFIG, fill, Untyped(b), 1.0, 16)
                with pytest.raises(greensched.ArgumentMismatch, match="holds int8"):
                    p.launch(CONFIG, fill, Untyped(three), 1.0, 1)

    backend.run(main)


def test_memory_that_is_no_devices_is_refused(backend: Backend) -> None:
    """If an array does not name its device, the driver is asked; host memory is refused."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(ONES) as b:
                array = Shown(b, data=(ONES.ctypes.data, False), stream=None)
                async with untouched(pool, p):
                    for submit in (
                        lambda: p.launch(CONFIG, fill, array, 1.0, 8),
                        lambda: p.download(array),
                    ):
                        with pytest.raises(InvalidArray, match="which is not device memory"):
                            submit()

    backend.run(main)


@pytest.mark.fault("E8")
def test_an_array_of_another_device_is_refused(backend: Backend) -> None:
    """The device comes from the array, or from its address if it names none."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(ONES) as b:
                async with untouched(pool, p):
                    with pytest.raises(greensched.WrongDevice) as refused:
                        p.launch(CONFIG, fill, Lent(b, device=(2, 7)), 1.0, 8)
                    assert (refused.value.has, refused.value.wants) == (7, 0)
        if not backend.is_simulated:
            return
        async with backend.pool("h200x2", devices=[0, 1]) as pool:
            async with pool.partition(8, near=None) as p:
                other = next(i for i in (0, 1) if i != p.device_id)
                async with pool.partitions(greensched.ALL) as (q,):
                    assert q.device_id == other
                    with await q.upload(ONES) as b:
                        with pytest.raises(greensched.WrongDevice):
                            p.download(Shown(b, stream=None))

    backend.run(main)


# -- in copies --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_copies_go_to_it_and_from_it(backend: Backend, way: Callable[[Buffer], Any]) -> None:
    """Each end of a copy may be another library's array, and both report progress."""

    async def main() -> None:
        told: list[tuple[int, int]] = []

        def tell(done: int, of: int) -> None:
            told.append((done, of))

        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as x, await p.empty(8) as y:
                await p.copy(way(x), ONES)
                np.testing.assert_array_equal(await p.download(way(x)), ONES)
                await p.copy(way(y), way(x), progress=tell)
                np.testing.assert_array_equal(await p.download(y), ONES)
                with await p.upload(way(y), progress=tell) as z:  # type: ignore[arg-type]
                    await p.copy(y, 2 * ONES)
                    np.testing.assert_array_equal(await p.download(z), ONES)
                assert told.count((32, 32)) == 2
                with await p.empty(4) as short, pytest.raises(InvalidArray, match="differ"):
                    p.copy(way(x), short)

    backend.run(main)


# -- out --------------------------------------------------------------------------------------


def test_a_takers_stream_waits_for_the_writer(backend: Backend) -> None:
    """A DLPack consumer's stream waits for the buffer's writers, unless it asks not to."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, foreign_stream(p) as theirs:
            with await p.empty(8) as x, await p.empty(8) as y:
                with await Gate.closed(p) as gate:
                    job = p.copy(x, ONES)
                    capsules = [x.__dlpack__(stream=-1)]
                    assert theirs.is_done
                    capsules.append(x.__dlpack__(stream=theirs.address, max_version=(1, 0)))
                    driver = theirs.context.driver
                    with theirs.context.entered():
                        driver.copy(y.address, x.address, x.nbytes, theirs.handle)
                    assert not theirs.is_done
                    gate.open()
                await job
                await until(lambda: theirs.is_done)
                np.testing.assert_array_equal(await p.download(y), ONES)
                capsules.append(x.__dlpack__())
            assert x.is_closed
            del capsules

    backend.run(main)


def test_memory_in_other_hands_is_not_given_back(backend: Backend) -> None:
    """A closed buffer's memory is freed once its DLPack consumer releases it."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            memory = p._open_lease().device_memory.memory
            before = memory.used_bytes
            x = await p.upload(ONES)
            held = [x.__dlpack__(stream=-1), x.__dlpack__(stream=-1, max_version=(1, 1))]
            x.close()
            while held:
                memory.reap()
                assert memory.used_bytes > before
                held.pop()
            memory.reap()
            await until(lambda: memory.reap() or memory.used_bytes == before)
            with pytest.raises(greensched.BufferClosed):
                x.__dlpack__()

    backend.run(main)


def test_a_capsule_may_end_while_an_exception_is_on_its_way(backend: Backend) -> None:
    """A capsule's destructor leaves an exception in flight as it is."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(ONES) as x:
                for _ in range(3):
                    with pytest.raises(ZeroDivisionError):
                        print(x.__dlpack__(stream=-1), 1 / 0)

    backend.run(main)


def test_what_cannot_be_handed_out_says_so(backend: Backend) -> None:
    """DLPack refuses copies, other devices, and dtypes that it does not have."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(ONES) as x, await p.upload(np.zeros(2, "i4,f4")) as pairs:
                assert x.__dlpack_device__() == (2, 0)
                for wrong in ({"copy": True}, {"dl_device": (1, 0)}):
                    with pytest.raises(InvalidArray, match="without a copy"):
                        x.__dlpack__(**wrong)  # type: ignore[arg-type]
                with pytest.raises(InvalidArray, match="no elements"):
                    pairs.__dlpack__(stream=-1)
                with await Gate.closed(p):
                    large = p.upload(np.zeros(1 << 20, np.float32))
                    p.launch(CONFIG, fill, x, 1.0, 8)
                    with pytest.raises(greensched.WouldBlock):
                        x.__dlpack__(stream=-1)
                (await large).close()

    backend.run(main)


def test_a_stream_follows_anybodys(backend: Backend) -> None:
    """`Stream.follow` takes objects with `__cuda_stream__` and refuses others."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, foreign_stream(p) as theirs:
            await p.launch(CONFIG, fill, x := await p.empty(8), 1.0, 8)
            with await Gate.closed(p) as gate:
                theirs.follow(p)
                assert not theirs.is_done
                gate.open()
            theirs.follow(1)
            p.stream.follow(p.stream)
            for wrong in (0, -1, None, "stream", True, Device):
                with pytest.raises(greensched.InvalidRequest, match="is not a stream"):
                    theirs.follow(wrong)  # type: ignore[arg-type]
            for bad in ((1, 3), 3, (0,)):
                strange = type("Strange", (), {"__cuda_stream__": lambda _, bad=bad: bad})()
                with pytest.raises(greensched.InvalidRequest, match="has version"):
                    theirs.follow(strange)
            x.close()

    backend.run(main)


def test_a_device_that_says_which_it_is_is_one_of_ours(backend: Backend) -> None:
    """`Device` and `Pool(devices=...)` take another library's device by its `device_id`."""

    class Theirs:
        device_id = 0

    async def main() -> None:
        async with backend.pool(devices=[Theirs()]) as pool:
            assert [device.ordinal for device in pool.devices] == [0]

    backend.run(main)
    device = Device(Theirs(), driver=backend.driver())
    assert device.ordinal == 0
    device.close()
    strange = type("Strange", (), {"device_id": "0"})()
    with pytest.raises(greensched.InvalidRequest):
        Device(strange, driver=backend.driver())
