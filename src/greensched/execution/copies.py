"""Memory and copies of a lease. Each call is checked here, and submitted as one step.

A small array (up to a slot, `staging_ring.SLOT`) is staged on the caller's thread and copied
without waiting. The submit thread copies a large one in chunks, so that the loop never does.
It also copies from and to other devices, until a hardware path between them is known to exist.
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
from greensched.device.tickets import TicketedStream
from greensched.errors import InvalidArray
from greensched.execution.jobs import Job
from greensched.execution.lease import DeviceMemory, Lease
from greensched.execution.progress import ProgressCallback, ProgressReporter
from greensched.typing import DeviceArray

Array = npt.NDArray[Any]

#: Dimensions of an array. Source: numpy, NPY_MAXDIMS of 1 and 2.
MAX_DIMENSIONS = 32 if np.__version__.startswith("1.") else 64
#: Sizes are signed 64-bit numbers, in numpy and in the driver's copies.
MAX_BYTES = 2**63 - 1


# -- memory --------------------------------------------------------------------------------------


def empty(lease: Lease, shape: object, dtype: npt.DTypeLike) -> Job[Buffer]:
    """See `Partition.empty`."""
    checked_shape, checked_dtype = shape_and_dtype(shape, dtype)
    memory, stream, quota = lease.device_memory.memory, lease.launch_stream, lease.quota
    return lease.submit(
        "empty",
        lambda ticket: memory.allocate(checked_shape, checked_dtype, stream, ticket, quota),
        may_block=memory.would_grow(_nbytes(checked_shape, checked_dtype)),
    )


def empty_pinned(lease: Lease, shape: object, dtype: npt.DTypeLike) -> Job[PinnedBuffer]:
    """See `Partition.empty_pinned`."""
    checked_shape, checked_dtype = shape_and_dtype(shape, dtype)
    pinned = lease.device_memory.pinned
    return lease.submit(
        "empty_pinned", lambda _: pinned.allocate(checked_shape, checked_dtype), may_block=True
    )


def allocate_and_fill(
    lease: Lease,
    like: Array | DeviceOperand,
    stream: TicketedStream,
    ticket: int,
    fill: Callable[[Buffer], object],
) -> Buffer:
    """Allocate a buffer like an array for work on a stream, and fill it. Close it on failure."""
    memory = lease.device_memory.memory
    buffer = memory.allocate(like.shape, like.dtype, stream, ticket, lease.quota)
    try:
        fill(buffer)
    except BaseException:
        buffer.close()
        raise
    return buffer


def shape_and_dtype(shape: object, dtype: npt.DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Check a shape and a dtype.

    Raises:
        InvalidArray: The shape is not valid, has more bytes than possible, or memory cannot hold
            the dtype.
    """
    numbers = shape if isinstance(shape, tuple) else (shape,)
    for number in numbers:
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 0:
            raise InvalidArray(f"shape={shape!r}: give whole numbers, each at least 0")
    checked_shape, checked_dtype = tuple(int(number) for number in numbers), dtype_of(dtype)
    if len(checked_shape) > MAX_DIMENSIONS:
        raise InvalidArray(
            f"shape has {len(checked_shape)} dimensions: numpy allows at most {MAX_DIMENSIONS}"
        )
    if _nbytes(checked_shape, checked_dtype) > MAX_BYTES:
        raise InvalidArray(f"shape={shape!r} of {checked_dtype} has more than {MAX_BYTES} bytes")
    return checked_shape, checked_dtype


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


# -- copies from and to the host ------------------------------------------------------------------


def upload(lease: Lease, array: npt.ArrayLike, callback: ProgressCallback | None) -> Job[Buffer]:
    """See `Partition.upload`."""
    if is_on_device(array):
        return _duplicate(lease, _operand_here(array, lease), callback)
    memory, stream = lease.device_memory.memory, lease.launch_stream
    source = staging_ring.source_array(array)
    progress = _reporter(lease, callback, source.nbytes)
    grows = memory.would_grow(source.nbytes)
    staged = _Staged(lease, source)

    def step(ticket: int) -> Buffer:
        def fill(buffer: Buffer) -> None:
            staged.copy_to(buffer, ticket, _advance(progress))

        try:
            return allocate_and_fill(lease, source, stream, ticket, fill)
        finally:
            staged.discard()

    job = lease.submit("upload", step, may_block=staged.is_large or grows)
    _report_end(lease, job, progress)
    return job


def download(
    lease: Lease, array: Buffer | DeviceArray, out: Array | None, callback: ProgressCallback | None
) -> Job[Array]:
    """See `Partition.download`."""
    buffer = _operand_here(array, lease)
    target = staging_ring.target_array(buffer, out)
    progress = _reporter(lease, callback, target.nbytes)
    slots, executor, stream = lease.device_memory.slots, lease.executor, lease.launch_stream
    slot = slots.take() if 0 < target.nbytes <= staging_ring.SLOT else None
    if slot is None:

        def copy_chunks(_: int) -> Array:
            if target.nbytes:
                executor.chunks.download(buffer.address, target, _advance(progress))
            return target

        job = lease.submit("download", copy_chunks, [(buffer, False)], may_block=target.nbytes > 0)
        _report_end(lease, job, progress)
        return job

    def copy_to_slot(_: int) -> Array:
        with executor.device.primary.entered():
            executor.driver.copy_to_host(
                slot.address, buffer.address, target.nbytes, stream.stream.handle
            )
        return target

    def copy_from_slot(_: Array) -> None:
        np.copyto(target, slot.place(target), casting="no")
        if progress is not None:
            progress.finish()

    job = lease.submit("download", copy_to_slot, [(buffer, False)])
    job._set_finalizer(copy_from_slot, lambda: slots.release(slot))
    lease.finish_later(job)
    return job


def copy(
    lease: Lease,
    dst: Buffer | DeviceArray,
    src: Buffer | DeviceArray | Array,
    callback: ProgressCallback | None,
) -> Job[None]:
    """See `Partition.copy`."""
    target = _operand(dst)
    if isinstance(target, ForeignArray) and target.is_read_only:
        raise InvalidArray(f"dst={target!r} is read-only: give a writable array")
    if is_on_device(src):
        operand = _operand(src)
        progress = _reporter(lease, callback, operand.nbytes)
        job = _copy_on_device(lease, target, operand, progress)
    else:
        target.check(lease.ordinal)
        source = staging_ring.source_array(src)
        staging_ring.check_alike(source, target, "src")
        progress = _reporter(lease, callback, source.nbytes)
        staged = _Staged(lease, source)
        job = lease.submit(
            "copy",
            lambda ticket: staged.copy_to(target, ticket, _advance(progress)),
            [(target, True)],
            may_block=staged.is_large,
        )
    _report_end(lease, job, progress)
    return job


class _Staged:
    """A host array on its way to the device.

    A small array is read immediately, into a slot, or into a copy if all slots are in use. A large
    one is read while the job runs.
    """

    __slots__ = ("_array", "_lease", "_slot", "is_large")

    def __init__(self, lease: Lease, array: Array) -> None:
        self._lease = lease
        self._array = array
        self._slot: StagingSlot | None = None
        if 0 < array.nbytes <= staging_ring.SLOT:
            self._slot = lease.device_memory.slots.take()
            if self._slot is None:
                self._array = array.copy()
            else:
                np.copyto(self._slot.place(array), array, casting="no")
        #: Whether copying it blocks.
        self.is_large = self._slot is None and array.nbytes > 0

    def copy_to(self, target: DeviceOperand, ticket: int, advance: Moved) -> None:
        """Submit the copy. The slot is reused once the ticket is reached."""
        executor, nbytes = self._lease.executor, self._array.nbytes
        slot, self._slot = self._slot, None
        if slot is None:
            if nbytes:
                executor.chunks.upload(self._array, target.address, advance)
            return
        stream = executor.launch_stream
        try:
            with executor.device.primary.entered():
                executor.driver.copy_to_device(
                    target.address, slot.address, nbytes, stream.stream.handle
                )
        finally:
            self._lease.device_memory.slots.release_after(slot, stream, ticket)

    def discard(self) -> None:
        """Release the slot, if nothing was copied from it."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._lease.device_memory.slots.release(slot)


# -- copies on the device -------------------------------------------------------------------------


def _duplicate(
    lease: Lease, source: DeviceOperand, callback: ProgressCallback | None
) -> Job[Buffer]:
    """Copy a device array to a new buffer, on the device."""
    executor, stream = lease.executor, lease.launch_stream
    progress = _reporter(lease, callback, source.nbytes)

    def fill(buffer: Buffer) -> None:
        if source.nbytes:
            with executor.device.primary.entered():
                executor.driver.copy(
                    buffer.address, source.address, source.nbytes, stream.stream.handle
                )

    job = lease.submit(
        "upload",
        lambda ticket: allocate_and_fill(lease, source, stream, ticket, fill),
        [(source, False)],
        may_block=lease.device_memory.memory.would_grow(source.nbytes),
    )
    _report_end(lease, job, progress)
    return job


def _copy_on_device(
    lease: Lease, dst: DeviceOperand, src: DeviceOperand, progress: ProgressReporter | None
) -> Job[None]:
    """Copy between two device arrays, one of which may be on another device."""
    peer = _peer_of(lease, dst, src)
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise InvalidArray(f"src={src!r} and dst={dst!r} differ in shape or dtype")
    uses = [(src, False), (dst, True)]
    if not dst.nbytes or dst is src:
        return lease.submit("copy", lambda _: None, uses)
    may_block = progress is not None
    if peer is not None:
        may_block = may_block or not peer.memory.peer_enabled(lease.ordinal)
        stream = lease.launch_stream
        peer.memory.record_peer_use(stream, stream.issued + 1)  # the ticket that it will get
    advance, chunks = _advance(progress), lease.executor.chunks
    copy_part = _part_copier(lease, dst, src, peer)

    def step(_: int) -> None:
        with lease.executor.device.primary.entered():
            if peer is not None and not peer.memory.enable_peer(lease.ordinal):
                # The hardware has no path between the two: copy through host memory.
                is_here = dst.device_id == lease.ordinal
                copy_chunks = chunks.copy_from_peer if is_here else chunks.copy_to_peer
                copy_chunks(peer.staging, src.address, dst.address, dst.nbytes, advance)
            elif progress is not None:
                chunks.in_parts(copy_part, dst.nbytes, advance)
            else:
                copy_part(0, dst.nbytes)

    return lease.submit("copy", step, uses, may_block=may_block)


def _peer_of(lease: Lease, *operands: DeviceOperand) -> DeviceMemory | None:
    """Return the other device of the pool that holds one of two arrays, or None.

    Raises:
        WrongDevice: Neither array is on this device, or one is on a device outside the pool.
    """
    elsewhere: list[Buffer] = []
    for operand in operands:
        if isinstance(operand, ForeignArray) or operand.device_id == lease.ordinal:
            operand.check(lease.ordinal)
        else:
            operand.check(operand.device_id)
            elsewhere.append(operand)
    if not elsewhere:
        return None
    peer = lease.device_memory.neighbours.get(elsewhere[0].device_id)
    if len(elsewhere) == 2 or peer is None or elsewhere[0].memory is not peer.memory:
        elsewhere[0].check(lease.ordinal)
    return peer


def _part_copier(
    lease: Lease, dst: DeviceOperand, src: DeviceOperand, peer: DeviceMemory | None
) -> Callable[[int, int], None]:
    """Return a function that submits the copy of a part by the device itself."""
    driver, stream = lease.executor.driver, lease.launch_stream.stream.handle
    if peer is None:
        return lambda offset, nbytes: driver.copy(
            dst.address + offset, src.address + offset, nbytes, stream
        )
    own, other = (device.primary.handle for device in (lease.executor.device, peer.device))
    to, origin = (own, other) if dst.device_id == lease.ordinal else (other, own)
    return lambda offset, nbytes: driver.copy_peer(
        dst.address + offset, to, src.address + offset, origin, nbytes, stream
    )


def _operand(array: object) -> DeviceOperand:
    """Return a buffer, or another library's array in the form of one."""
    if isinstance(array, Buffer):
        return array
    kind = type(array).__name__
    try:
        operand = as_foreign_array(array)
    except InvalidArray as error:
        raise InvalidArray(f"give a Buffer: this {kind} {error}") from None
    if operand is None:
        hint = ": did you forget `await`?" if hasattr(array, "__await__") else ""
        raise InvalidArray(f"give a Buffer, or an array in device memory, not a {kind}{hint}")
    return operand


def _operand_here(array: object, lease: Lease) -> DeviceOperand:
    """Return an operand on the lease's device."""
    operand = _operand(array)
    operand.check(lease.ordinal)
    return operand


# -- progress -------------------------------------------------------------------------------------


def _reporter(
    lease: Lease, callback: ProgressCallback | None, nbytes: int
) -> ProgressReporter | None:
    return None if callback is None else ProgressReporter(callback, nbytes, lease.poller.loop)


def _advance(progress: ProgressReporter | None) -> Moved:
    return (lambda _: None) if progress is None else progress.advance


def _report_end(lease: Lease, job: Job[Any], progress: ProgressReporter | None) -> None:
    """Report completion before a task gets the job's value. The callback may fail the job."""
    if progress is None:
        return

    def report(value: object) -> None:
        try:
            progress.finish()
        except BaseException:
            if isinstance(value, Buffer):
                value.close()
            raise

    job._set_finalizer(report, lambda: None)
    lease.finish_later(job)
