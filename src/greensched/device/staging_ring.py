"""Copies between arrays and device memory, through pinned staging.

The device accesses host memory at full speed only if it is pinned, and a copy from other memory
blocks the caller. So every copy goes through pinned memory. A small array takes one slot of the
device's ring, and is copied on the calling thread. A large one goes in chunks (`staging`), on an
executor's thread. So no loop ever copies more than a slot.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from greensched.context import Context
from greensched.device.buffers import dtype_of
from greensched.device.foreign_arrays import DeviceOperand, is_on_device
from greensched.device.tickets import TicketedStream
from greensched.driver.types import HostMemory
from greensched.errors import InvalidArray

#: Bytes of a slot, the most that a loop's thread copies. 64 KiB take about 6 us at 10 GB/s.
SLOT = 64 << 10
#: Slots of a device, for simultaneous small copies; further ones use `staging`.
SLOTS = 64

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class StagingSlot:
    """A piece of pinned memory for one small copy."""

    __slots__ = ("_bytes", "address")

    def __init__(self, memory: HostMemory, index: int) -> None:
        start = index * SLOT
        self.address = memory.address + start
        self._bytes: Bytes = np.frombuffer(memory.view, np.uint8)[start : start + SLOT]

    def place(self, like: Array) -> Array:
        """Return the beginning of the slot as an array of the shape and dtype of another."""
        return self._bytes[: like.nbytes].view(like.dtype).reshape(like.shape)


class StagingRing:
    """The ring of slots of one device. Thread-safe."""

    def __init__(self, primary: Context) -> None:
        self._primary = primary
        with primary.entered():
            self._memory = primary.driver.allocate_host(SLOT * SLOTS)
        self._free = [StagingSlot(self._memory, i) for i in range(SLOTS)]
        self._used: deque[tuple[TicketedStream, int, StagingSlot]] = deque()
        self._lock = threading.Lock()

    def take(self) -> StagingSlot | None:
        """Return a free slot, or None if all are in use."""
        with self._lock:
            while self._used and self._used[0][0].reached(self._used[0][1]):
                self._free.append(self._used.popleft()[2])
            return self._free.pop() if self._free else None

    def release_after(self, slot: StagingSlot, stream: TicketedStream, ticket: int) -> None:
        """Free the slot once a ticket is reached."""
        self._used.append((stream, ticket, slot))

    def release(self, slot: StagingSlot) -> None:
        self._free.append(slot)

    def close(self) -> None:
        """Free the pinned memory. May block."""
        self._free.clear()
        self._used.clear()
        with self._primary.entered():
            self._primary.driver.free_host(self._memory)


def pieces(array: Array, limit: int, offset: int = 0) -> Iterator[tuple[int, Array]]:
    """Yield views of an array of at most `limit` bytes each, with their offsets in its C order.

    No piece is a copy, whatever the strides.
    """
    array = np.asarray(array)  # because indexing a subclass, such as a matrix, may keep dimensions
    if array.nbytes <= limit:
        yield offset, array
    elif array.ndim:
        row = array.nbytes // len(array)
        step = max(1, limit // row)
        for start in range(0, len(array), step):
            part = array[start, ...] if row > limit else array[start : start + step]
            yield from pieces(part, limit, offset + start * row)
    else:  # one element exceeds the limit: yield its bytes
        yield from pieces(array.reshape(1).view(np.uint8), limit, offset)


def source_array(array: object) -> Array:
    """Return an array to upload as a numpy array, copied only if it is not one already.

    Raises:
        InvalidArray: Not an array, or one with Python objects or foreign byte order, or in device
            memory.
    """
    if is_on_device(array):
        raise InvalidArray(
            f"{type(array).__name__} is in device memory already: pass it to the kernel as it is"
        )
    try:
        converted = np.asarray(array)
    except (TypeError, ValueError) as error:
        raise InvalidArray(f"{type(array).__name__} is not an array: {error}") from None
    dtype_of(converted.dtype)
    return converted


def target_array(buffer: DeviceOperand, out: object) -> Array:
    """Return the target of a download: `out`, or a new array.

    Raises:
        InvalidArray: `out` is not an array, is read-only, or differs in shape or dtype.
    """
    if out is None:
        return np.empty(buffer.shape, buffer.dtype)
    if not isinstance(out, np.ndarray):
        raise InvalidArray(f"out is {type(out).__name__}: give a numpy array")
    if not out.flags.writeable:
        raise InvalidArray("out is read-only: give a writable array")
    check_alike(out, buffer, "out")
    return out


def check_alike(array: Array, buffer: DeviceOperand, what: str) -> None:
    """Check that an array has its buffer's shape and dtype.

    Raises:
        InvalidArray: It has another shape or dtype.
    """
    if array.shape != buffer.shape or array.dtype != buffer.dtype:
        raise InvalidArray(
            f"{what} is {array.dtype} {array.shape}, but the buffer is "
            f"{buffer.dtype} {buffer.shape}"
        )
