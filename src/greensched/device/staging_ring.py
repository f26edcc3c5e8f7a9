"""Copies between arrays and device memory, through pinned staging.

The device reads and writes host memory at full speed only where it is pinned, and a copy from
other memory blocks the caller; so everything goes through pinned memory of ours. Small arrays
take one slot of a ring shared by the device, copied by whoever asks. Large ones go in chunks
(`staging`), by a thread of the lane's own: no loop ever copies more than a slot.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from greensched.device.buffers import dtype_of
from greensched.device.foreign_arrays import DeviceOperand, is_on_device
from greensched.device.streams import StreamOwner, TicketedStream
from greensched.driver.types import HostMemory
from greensched.errors import InvalidArray

#: A slot: what a loop may copy itself. 64 KiB take some 6 us at 10 GB/s.
SLOT = 64 << 10
#: Slots of a device: as many small copies can be under way; more take the way of large ones.
SLOTS = 64

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class StagingSlot:
    """A piece of pinned memory for one small copy."""

    __slots__ = ("address", "bytes")

    def __init__(self, memory: HostMemory, index: int) -> None:
        start = index * SLOT
        self.address = memory.address + start
        self.bytes: Bytes = np.frombuffer(memory.view, np.uint8)[start : start + SLOT]


class StagingRing:
    """The ring of slots of one device. Thread-safe."""

    def __init__(self, primary: StreamOwner) -> None:
        self._primary = primary
        with primary.entered():
            self._memory = primary.driver.allocate_host(SLOT * SLOTS)
        self._free = [StagingSlot(self._memory, i) for i in range(SLOTS)]
        self._used: deque[tuple[TicketedStream, int, StagingSlot]] = deque()
        self._lock = threading.Lock()

    def take(self) -> StagingSlot | None:
        """A slot nobody uses; None: all are under way."""
        with self._lock:
            while self._used and self._used[0][0].reached(self._used[0][1]):
                self._free.append(self._used.popleft()[2])
            return self._free.pop() if self._free else None

    def put(self, slot: StagingSlot, track: TicketedStream, ticket: int) -> None:
        """The slot is free again once a ticket is reached."""
        self._used.append((track, ticket, slot))

    def put_now(self, slot: StagingSlot) -> None:
        """The slot is free again."""
        self._free.append(slot)

    def close(self) -> None:
        """Ends the pinned memory. May block."""
        self._free.clear()
        self._used.clear()
        with self._primary.entered():
            self._primary.driver.free_host(self._memory)


def stage_in(slot: StagingSlot, array: Array) -> None:
    """Copies a small array into a slot, in C order."""
    place = slot.bytes[: array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(place, array, casting="no")


def stage_out(slot: StagingSlot, out: Array) -> Array:
    """Copies a small array out of its slot."""
    place = slot.bytes[: out.nbytes].view(out.dtype).reshape(out.shape)
    np.copyto(out, place, casting="no")
    return out


def pieces(array: Array, limit: int, offset: int = 0) -> Iterator[tuple[int, Array]]:
    """Views of an array of at most `limit` bytes each, with their offsets in its C order.

    Whatever the strides, no piece copies anything.
    """
    array = np.asarray(array)  # of a subclass rows may be no rows: a matrix's are matrices
    if array.nbytes <= limit:
        yield offset, array
    elif array.ndim:
        row = array.nbytes // len(array)
        step = max(1, limit // row)
        for start in range(0, len(array), step):
            part = array[start, ...] if row > limit else array[start : start + step]
            yield from pieces(part, limit, offset + start * row)
    else:  # a single element that is larger: its bytes
        yield from pieces(array.reshape(1).view(np.uint8), limit, offset)


def source_array(array: object) -> Array:
    """What is to be uploaded, as numpy sees it, without a copy where it is an array already.

    Raises:
        InvalidArray: not an array, an array of Python objects or of foreign byte order, or one
            that lives on a device.
    """
    if is_on_device(array):
        raise InvalidArray(f"{type(array).__name__} is in device memory already")
    try:
        found = np.asarray(array)
    except (TypeError, ValueError) as error:
        raise InvalidArray(f"{type(array).__name__} is no array: {error}") from None
    dtype_of(found.dtype)
    return found


def target_array(buffer: DeviceOperand, out: object) -> Array:
    """Where a download goes: `out`, or a new array.

    Raises:
        InvalidArray: `out` is no array, is read-only, or differs in shape or dtype.
    """
    if out is None:
        return np.empty(buffer.shape, buffer.dtype)
    if not isinstance(out, np.ndarray):
        raise InvalidArray(f"out must be a numpy array, and is {type(out).__name__}")
    if not out.flags.writeable:
        raise InvalidArray("out is read-only")
    check_alike(out, buffer, "out")
    return out


def check_alike(array: Array, buffer: DeviceOperand, what: str) -> None:
    """Refuses an array that is not as its buffer."""
    if array.shape != buffer.shape or array.dtype != buffer.dtype:
        raise InvalidArray(
            f"{what} is {array.dtype} {array.shape}, and the buffer is "
            f"{buffer.dtype} {buffer.shape}"
        )
