"""Memory and copies of a lease: each a step, checked here and handed to the lease.

Small arrays (at most a slot, `transfer.SLOT`) are staged on the caller's thread and copied without
waiting; large ones are copied by the lane's mover, in chunks, so that the loop never does it. So
are copies from or to another device, until it is known that the hardware has a way between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from greensched.device import staging_ring
from greensched.device.buffers import Buffer, PinnedBuffer, dtype_of
from greensched.device.foreign_arrays import (
    DeviceOperand,
    ForeignArray,
    as_foreign_array,
    is_on_device,
)
from greensched.device.staging import Moved
from greensched.device.staging_ring import StagingSlot
from greensched.errors import InvalidArray
from greensched.execution.jobs import Job
from greensched.execution.lease import DeviceMemory, Lease
from greensched.execution.progress import ProgressCallback, ProgressReporter
from greensched.typing import DeviceArray, T

Array = npt.NDArray[Any]

#: Of an array. Source: numpy, NPY_MAXDIMS of 1 and 2.
MOST_DIMENSIONS = 32 if np.__version__.startswith("1.") else 64
#: Sizes are signed 64-bit numbers, in numpy and in the driver's copies.
MOST_BYTES = 2**63 - 1


def empty(lease: Lease, shape: object, dtype: npt.DTypeLike) -> Job[Buffer]:
    """See `Partition.empty`."""
    wanted, found = shape_and_dtype(shape, dtype)
    memory, track, allowance = lease.device_memory.memory, lease.launch_stream, lease.quota
    return lease.submit(
        "empty",
        lambda ticket: memory.allocate(wanted, found, track, ticket, allowance),
        may_block=memory.would_grow(_nbytes(wanted, found)),
    )


def empty_pinned(lease: Lease, shape: object, dtype: npt.DTypeLike) -> Job[PinnedBuffer]:
    """See `Partition.empty_pinned`."""
    wanted, found = shape_and_dtype(shape, dtype)
    pinned = lease.device_memory.pinned
    return lease.submit("empty_pinned", lambda _: pinned.allocate(wanted, found), may_block=True)


def upload(lease: Lease, array: npt.ArrayLike, tell: ProgressCallback | None) -> Job[Buffer]:
    """See `Partition.upload`."""
    if is_on_device(array):
        return _duplicate(lease, _on_device(array, lease), tell)
    memory, track, allowance = lease.device_memory.memory, lease.launch_stream, lease.quota
    source = staging_ring.source_array(array)
    progress = _progress(lease, tell, source.nbytes)
    grows = memory.would_grow(source.nbytes)
    slot, source = _staged(lease, source)

    def step(ticket: int) -> Buffer:
        try:
            buffer = memory.allocate(source.shape, source.dtype, track, ticket, allowance)
        except BaseException:
            if slot is not None:
                lease.device_memory.slots.release(slot)
            raise
        try:
            _fill(lease, buffer, source, slot, ticket, _moved(progress))
        except BaseException:
            buffer.close()
            raise
        return buffer

    large = slot is None and source.nbytes > 0
    job = lease.submit("upload", step, may_block=large or grows)
    if progress is not None:
        _finish(lease, job, lambda buffer: _told(progress, buffer))
    return job


def _duplicate(lease: Lease, source: DeviceOperand, tell: ProgressCallback | None) -> Job[Buffer]:
    """A copy of a device array, made by the device."""
    memory, track, allowance = lease.device_memory.memory, lease.launch_stream, lease.quota
    progress = _progress(lease, tell, source.nbytes)
    device = lease.executor.device

    def step(ticket: int) -> Buffer:
        buffer = memory.allocate(source.shape, source.dtype, track, ticket, allowance)
        try:
            if source.nbytes:
                with device.primary.entered():
                    device.driver.copy(
                        buffer.address, source.address, source.nbytes, track.stream.handle
                    )
        except BaseException:
            buffer.close()
            raise
        return buffer

    grows = memory.would_grow(source.nbytes)
    job = lease.submit("upload", step, [(source, False)], may_block=grows)
    if progress is not None:
        _finish(lease, job, lambda buffer: _told(progress, buffer))
    return job


def download(
    lease: Lease, given: Buffer | DeviceArray, out: Array | None, tell: ProgressCallback | None
) -> Job[Array]:
    """See `Partition.download`."""
    buffer = _on_device(given, lease)
    target = staging_ring.target_array(buffer, out)
    progress = _progress(lease, tell, target.nbytes)
    slots, track = lease.device_memory.slots, lease.launch_stream
    slot = slots.take() if 0 < target.nbytes <= staging_ring.SLOT else None
    if slot is None:

        def whole(_: int) -> Array:
            if target.nbytes:
                lease.executor.chunks.download(buffer.address, target, _moved(progress))
            return target

        job = lease.submit("download", whole, [(buffer, False)], may_block=target.nbytes > 0)
        if progress is not None:
            _finish(lease, job, lambda _: progress.finish())
        return job

    def begin(_: int) -> Array:
        device = lease.executor.device
        with device.primary.entered():
            device.driver.copy_to_host(
                slot.address, buffer.address, target.nbytes, track.stream.handle
            )
        return target

    def end(_: Array) -> None:
        staging_ring.stage_out(slot, target)
        if progress is not None:
            progress.finish()

    job = lease.submit("download", begin, [(buffer, False)])
    _finish(lease, job, end, lambda: slots.release(slot))
    return job


def copy(
    lease: Lease,
    into: Buffer | DeviceArray,
    src: Buffer | DeviceArray | Array,
    tell: ProgressCallback | None,
) -> Job[None]:
    """See `Partition.copy`."""
    dst = _known(into)
    if isinstance(dst, ForeignArray) and dst.is_read_only:
        raise InvalidArray(f"{dst!r} is read-only")
    if is_on_device(src):
        progress = _progress(lease, tell, (near := _known(src)).nbytes)
        job = _copy_buffer(lease, dst, near, progress)
    else:
        dst.check(lease.ordinal)
        source = staging_ring.source_array(src)
        staging_ring.check_alike(source, dst, "src")
        progress = _progress(lease, tell, source.nbytes)
        slot, source = _staged(lease, source)
        job = lease.submit(
            "copy",
            lambda ticket: _fill(lease, dst, source, slot, ticket, _moved(progress)),
            [(dst, True)],
            may_block=slot is None and source.nbytes > 0,
        )
    if progress is not None:
        _finish(lease, job, lambda _: progress.finish())
    return job


def shape_and_dtype(shape: object, dtype: npt.DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Checked.

    Raises:
        InvalidArray: a shape that is none or beyond all memory, or a dtype that cannot be.
    """
    numbers = shape if isinstance(shape, tuple) else (shape,)
    for number in numbers:
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 0:
            raise InvalidArray(f"{shape!r} is no shape: whole numbers, none below 0")
    wanted, found = tuple(int(number) for number in numbers), dtype_of(dtype)
    if len(wanted) > MOST_DIMENSIONS:
        raise InvalidArray(f"{len(wanted)} dimensions are more than numpy has")
    if _nbytes(wanted, found) > MOST_BYTES:
        raise InvalidArray(f"shape {shape!r} of {found} has more bytes than can be counted")
    return wanted, found


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def _known(array: object) -> DeviceOperand:
    """A buffer, or what of another library is used like one."""
    if isinstance(array, Buffer):
        return array
    try:
        found = as_foreign_array(array)
    except InvalidArray as error:
        raise InvalidArray(f"a Buffer is needed, and this {type(array).__name__} {error}") from None
    if found is None:
        hint = ": did you forget `await`?" if hasattr(array, "__await__") else ""
        raise InvalidArray(
            "a Buffer is needed, or an array of a device, and this is a "
            f"{type(array).__name__}{hint}"
        )
    return found


def _on_device(array: object, lease: Lease) -> DeviceOperand:
    """One that can be used here."""
    found = _known(array)
    found.check(lease.ordinal)
    return found


def _staged(lease: Lease, source: Array) -> tuple[StagingSlot | None, Array]:
    """A small array in a slot, read here and now; where every slot is under way, a copy of it.

    A large one as it is: that is read while the job is done.
    """
    if not 0 < source.nbytes <= staging_ring.SLOT:
        return None, source
    slot = lease.device_memory.slots.take()
    if slot is None:
        return None, source.copy()
    staging_ring.stage_in(slot, source)
    return slot, source


def _fill(
    lease: Lease,
    buffer: DeviceOperand,
    source: Array,
    slot: StagingSlot | None,
    ticket: int,
    moved: Moved,
) -> None:
    if slot is None:
        if source.nbytes:
            lease.executor.chunks.upload(source, buffer.address, moved)
        return
    device, slots, track = lease.executor.device, lease.device_memory.slots, lease.launch_stream
    try:
        with device.primary.entered():
            device.driver.copy_to_device(
                buffer.address, slot.address, source.nbytes, track.stream.handle
            )
    finally:
        slots.release_after(slot, track, ticket)


def _copy_buffer(
    lease: Lease, dst: DeviceOperand, src: DeviceOperand, progress: ProgressReporter | None
) -> Job[None]:
    far = _neighbour(lease, dst, src)
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise InvalidArray(f"{src!r} does not fit {dst!r}")
    uses = [(src, False), (dst, True)]
    if not dst.nbytes or dst is src:
        return lease.submit("copy", lambda _: None, uses)
    may_block = progress is not None
    if far is not None:
        may_block = may_block or not far.memory.peer_enabled(lease.ordinal)
        stream = lease.launch_stream
        far.memory.record_peer_use(stream, stream.issued + 1)  # the ticket that it will be given
    moved = _moved(progress)

    def step(_: int) -> None:
        with lease.executor.device.primary.entered():
            if far is not None and not far.memory.enable_peer(lease.ordinal):
                _copy_by_host(lease, far, dst, src, moved)
            elif progress is not None:
                lease.executor.chunks.in_parts(copy_part, dst.nbytes, moved)
            else:
                copy_part(0, dst.nbytes)

    copy_part = _copier(lease, dst, src, far)
    return lease.submit("copy", step, uses, may_block=may_block)


def _neighbour(lease: Lease, *buffers: DeviceOperand) -> DeviceMemory | None:
    """The other device of the pool that one of two buffers belongs to; None: both are of this one.

    Raises:
        WrongDevice: neither is of this device, or one is of a device outside the pool.
    """
    elsewhere: list[Buffer] = []
    for buffer in buffers:
        if isinstance(buffer, ForeignArray) or buffer.device_id == lease.ordinal:
            buffer.check(lease.ordinal)
        else:
            buffer.check(buffer.device_id)
            elsewhere.append(buffer)
    if not elsewhere:
        return None
    far = lease.device_memory.neighbours.get(elsewhere[0].device_id)
    if len(elsewhere) == 2 or far is None or elsewhere[0].memory is not far.memory:
        elsewhere[0].check(lease.ordinal)
    return far


def _copier(
    lease: Lease, dst: DeviceOperand, src: DeviceOperand, far: DeviceMemory | None
) -> Callable[[int, int], None]:
    """What submits a part of a copy that the device makes itself."""
    driver, stream = lease.executor.device.driver, lease.launch_stream.stream.handle
    if far is None:
        return lambda offset, nbytes: driver.copy(
            dst.address + offset, src.address + offset, nbytes, stream
        )
    near, other = (device.primary.handle for device in (lease.executor.device, far.device))
    is_near = dst.device_id == lease.ordinal
    into, out_of = (near, other) if is_near else (other, near)
    return lambda offset, nbytes: driver.copy_peer(
        dst.address + offset, into, src.address + offset, out_of, nbytes, stream
    )


def _copy_by_host(
    lease: Lease, far: DeviceMemory, dst: DeviceOperand, src: DeviceOperand, moved: Moved
) -> None:
    """Where the hardware has no way between the two."""
    chunks = lease.executor.chunks
    go = chunks.copy_from_peer if dst.device_id == lease.ordinal else chunks.copy_to_peer
    go(far.staging, src.address, dst.address, dst.nbytes, moved)


# -- telling how far it is ----------------------------------------------------------------------


def _progress(lease: Lease, tell: ProgressCallback | None, nbytes: int) -> ProgressReporter | None:
    return None if tell is None else ProgressReporter(tell, nbytes, lease.poller.loop)


def _moved(progress: ProgressReporter | None) -> Moved:
    return (lambda _: None) if progress is None else progress.advance


def _told(progress: ProgressReporter, buffer: Buffer) -> None:
    try:
        progress.finish()
    except BaseException:
        buffer.close()
        raise


def _finish(
    lease: Lease,
    job: Job[T],
    finish: Callable[[T], object],
    drop: Callable[[], object] = lambda: None,
) -> None:
    """What the host does when the device is done, before anybody has the job's value."""
    job._set_finalizer(finish, drop)
    lease.finish_later(job)
