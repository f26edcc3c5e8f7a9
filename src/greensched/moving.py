"""Memory and copies of a lease: each a step, checked here and handed to the channel.

Small arrays (at most a slot, `transfer.SLOT`) are staged on the caller's thread and copied without
waiting; large ones are copied by the lane's mover, in chunks, so that the loop never does it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from greensched import transfer
from greensched.buffers import Buffer, PinnedBuffer, dtype_of
from greensched.channel import Channel
from greensched.errors import InvalidArray
from greensched.jobs import Job
from greensched.transfer import Slot

Array = npt.NDArray[Any]

#: Of numpy 1; numpy 2 has 64. Source: numpy, NPY_MAXDIMS.
MOST_DIMENSIONS = 32
#: Sizes are signed 64-bit numbers, in numpy and in the driver's copies.
MOST_BYTES = 2**63 - 1


def empty(channel: Channel, shape: object, dtype: npt.DTypeLike) -> Job[Buffer]:
    """See `Partition.empty`."""
    wanted, found = shape_and_dtype(shape, dtype)
    memory, track = channel.site.memory, channel.track
    return channel.submit(
        "empty",
        lambda ticket: memory.allocate(wanted, found, track, ticket),
        may_block=memory.would_grow(_nbytes(wanted, found)),
    )


def empty_pinned(channel: Channel, shape: object, dtype: npt.DTypeLike) -> Job[PinnedBuffer]:
    """See `Partition.empty_pinned`."""
    wanted, found = shape_and_dtype(shape, dtype)
    pinned = channel.site.pinned
    return channel.submit("empty_pinned", lambda _: pinned.allocate(wanted, found), may_block=True)


def upload(channel: Channel, array: npt.ArrayLike) -> Job[Buffer]:
    """See `Partition.upload`."""
    memory, track = channel.site.memory, channel.track
    source = transfer.source_array(array)
    grows = memory.would_grow(source.nbytes)
    slot, source = _staged(channel, source)

    def step(ticket: int) -> Buffer:
        try:
            buffer = memory.allocate(source.shape, source.dtype, track, ticket)
        except BaseException:
            if slot is not None:
                channel.site.slots.put_now(slot)
            raise
        try:
            _fill(channel, buffer, source, slot, ticket)
        except BaseException:
            buffer.close()
            raise
        return buffer

    large = slot is None and source.nbytes > 0
    return channel.submit("upload", step, may_block=large or grows)


def download(channel: Channel, buffer: Buffer, out: Array | None) -> Job[Array]:
    """See `Partition.download`."""
    _check_buffer(buffer, channel)
    target = transfer.target_array(buffer, out)
    slots, track = channel.site.slots, channel.track
    slot = slots.take() if 0 < target.nbytes <= transfer.SLOT else None
    if slot is None:

        def whole(_: int) -> Array:
            if target.nbytes:
                channel.lane.chunks.download(buffer.address, target)
            return target

        return channel.submit("download", whole, [(buffer, False)], may_block=target.nbytes > 0)

    def begin(_: int) -> Array:
        device = channel.lane.device
        with device.primary.entered():
            device.driver.copy_to_host(
                slot.address, buffer.address, target.nbytes, track.stream.handle
            )
        return target

    job = channel.submit("download", begin, [(buffer, False)])
    job.finish_with(
        lambda: transfer.stage_out(slot, target),
        lambda: slots.put_now(slot),
    )
    channel.holding.finish_later(job)
    return job


def copy(channel: Channel, dst: Buffer, src: Buffer | Array) -> Job[None]:
    """See `Partition.copy`."""
    _check_buffer(dst, channel)
    if isinstance(src, Buffer):
        return _copy_on_device(channel, dst, src)
    source = transfer.source_array(src)
    transfer.check_alike(source, dst, "src")
    slot, source = _staged(channel, source)
    return channel.submit(
        "copy",
        lambda ticket: _fill(channel, dst, source, slot, ticket),
        [(dst, True)],
        may_block=slot is None and source.nbytes > 0,
    )


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


def _check_buffer(buffer: object, channel: Channel) -> None:
    if not isinstance(buffer, Buffer):
        hint = ": did you forget `await`?" if hasattr(buffer, "__await__") else ""
        raise InvalidArray(f"a Buffer is needed, and this is a {type(buffer).__name__}{hint}")
    buffer.check(channel.ordinal)


def _staged(channel: Channel, source: Array) -> tuple[Slot | None, Array]:
    """A small array in a slot, read here and now; where every slot is under way, a copy of it.

    A large one as it is: that is read while the job is done.
    """
    if not 0 < source.nbytes <= transfer.SLOT:
        return None, source
    slot = channel.site.slots.take()
    if slot is None:
        return None, source.copy()
    transfer.stage_in(slot, source)
    return slot, source


def _fill(channel: Channel, buffer: Buffer, source: Array, slot: Slot | None, ticket: int) -> None:
    if slot is None:
        if source.nbytes:
            channel.lane.chunks.upload(source, buffer.address)
        return
    device, slots, track = channel.lane.device, channel.site.slots, channel.track
    try:
        with device.primary.entered():
            device.driver.copy_to_device(
                buffer.address, slot.address, source.nbytes, track.stream.handle
            )
    finally:
        slots.put(slot, track, ticket)


def _copy_on_device(channel: Channel, dst: Buffer, src: Buffer) -> Job[None]:
    src.check(channel.ordinal)
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise InvalidArray(f"{src!r} does not fit {dst!r}")
    device, track = channel.lane.device, channel.track

    def step(_: int) -> None:
        if dst.nbytes and dst is not src:
            with device.primary.entered():
                device.driver.copy(dst.address, src.address, dst.nbytes, track.stream.handle)

    return channel.submit("copy", step, [(src, False), (dst, True)])
