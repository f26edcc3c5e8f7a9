"""Memory of the simulated machine: blocks with bounds, at addresses that are never reused.

Device addresses are above all possible host addresses, so that the two cannot be confused. Pinned
host memory has the same address on both sides, as under unified addressing.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from greensched.errors import DriverMisuse, OutOfMemory

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

#: Above the 47 bits of a user-space address on x86-64 and AArch64 Linux.
FIRST_DEVICE_ADDRESS = 1 << 50
#: cuMemAlloc aligns to at least 256 bytes; cuMemAllocAsync was observed to align to 512.
ALIGNMENT = 512
#: The step by which a stream-ordered pool grows: an assumption, of the size observed with drivers.
POOL_STEP = 32 << 20
#: Fresh device memory up to this size is filled with 0xFF (NaN, -1), so that reads of unwritten
#: memory show. For more, the host would pay for pages that are never touched.
POISON_LIMIT = 1 << 20

#: The device memory of a green context, the part that only the primary context's end frees, and
#: the memory of a stream. Measured on an H200: 4.93, 4.0, and 0.53 or 0.47 MiB
#: (docs/measurements/h200-580/stuck-and-lost.json).
GREEN_BYTES = int(4.93 * 2**20)
LOST_BYTES = 4 << 20
STREAM_BYTES = 1 << 19


@dataclass(slots=True, eq=False)
class Block:
    """A range of bytes at an address. `device` is None for pinned host memory."""

    base: int
    nbytes: int
    device: int | None
    data: Bytes
    pool: MemoryPool | None = None


@dataclass(slots=True, eq=False)
class MemoryPool:
    """A stream-ordered pool. Freed memory stays reserved until the pool ends.

    `peers` are the other devices with access to it.
    """

    device: int
    owner: object
    used: int = 0
    reserved: int = 0
    alive: bool = True
    peers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class DeviceMemory:
    """Counts one device's memory: the bytes of pools and of contexts."""

    total: int
    pools: int = 0
    contexts: int = 0

    @property
    def free(self) -> int:
        """Bytes that belong neither to pools nor to contexts."""
        return self.total - self.pools - self.contexts

    def check(self, nbytes: int, call: str, asked: int) -> None:
        """Raise OutOfMemory if fewer bytes are free."""
        if nbytes > self.free:
            raise OutOfMemory(call, asked, self.free, self.total)

    def take(self, nbytes: int, call: str, asked: int) -> None:
        """Take bytes for a pool, or raise OutOfMemory and take nothing."""
        self.check(nbytes, call, asked)
        self.pools += nbytes

    def open(self, nbytes: int, call: str) -> None:
        """Take bytes for a context or a stream, or raise OutOfMemory and take nothing."""
        self.check(nbytes, call, nbytes)
        self.contexts += nbytes

    def close(self, nbytes: int) -> None:
        """Free the bytes of a context or stream, unless the primary's end has freed them."""
        self.contexts = max(0, self.contexts - nbytes)


@dataclass(slots=True)
class AddressSpace:
    """All live blocks, found by any address inside them. Any thread may use it."""

    _lock: threading.RLock = field(default_factory=threading.RLock)
    _bases: list[int] = field(default_factory=list)
    _blocks: dict[int, Block] = field(default_factory=dict)
    _next: int = FIRST_DEVICE_ADDRESS

    def new_device_block(self, nbytes: int, device: int, pool: MemoryPool) -> Block:
        """Make a block at a fresh device address, or raise OutOfMemory."""
        try:
            data: Bytes = np.zeros(nbytes, np.uint8)
        except MemoryError:
            raise OutOfMemory("simulated device memory (the host's is full)", nbytes) from None
        if nbytes <= POISON_LIMIT:
            data.fill(0xFF)
        with self._lock:
            block = Block(self._next, nbytes, device, data, pool)
            self._next += -(-(nbytes + 1) // ALIGNMENT) * ALIGNMENT  # leaves a gap to the next
            return self._add(block)

    def new_host_block(self, nbytes: int) -> Block:
        """Make a block of zeroed pinned host memory, or raise OutOfMemory."""
        try:
            data: Bytes = np.zeros(nbytes, np.uint8)
        except MemoryError:
            raise OutOfMemory("allocate_host", nbytes) from None
        return self._add(Block(data.ctypes.data, nbytes, None, data))

    def _add(self, block: Block) -> Block:
        with self._lock:
            insort(self._bases, block.base)
            self._blocks[block.base] = block
        return block

    def remove(self, address: int, what: str, *, pinned: bool) -> Block:
        """Remove the block at an address, of pinned memory or of a pool.

        Raises:
            DriverMisuse: There is no such block.
        """
        with self._lock:
            block = self._blocks.get(address)
            if block is None:
                raise DriverMisuse(f"{what}: {address:#x} is no live allocation (freed twice?)")
            if pinned is not (block.device is None):
                kind = "device memory" if pinned else "pinned memory"
                raise DriverMisuse(f"{what}: {address:#x} is {kind}")
            del self._blocks[address]
            del self._bases[bisect_left(self._bases, address)]
        return block

    def find(self, address: int, nbytes: int, what: str) -> Block:
        """Return the live block that contains all of [address, address + nbytes).

        Raises:
            DriverMisuse: There is no such block.
        """
        with self._lock:
            at = bisect_right(self._bases, address)
            block = self._blocks[self._bases[at - 1]] if at else None
        if block is None or address + nbytes > block.base + block.nbytes:
            raise DriverMisuse(
                f"{what}: {nbytes} bytes at {address:#x} lie in no live allocation "
                "(freed, or out of bounds)"
            )
        return block

    def bytes_at(self, address: int, nbytes: int, what: str) -> Bytes:
        """Return a writable view of some bytes. Raises as `find`."""
        block = self.find(address, nbytes, what)
        offset = address - block.base
        return block.data[offset : offset + nbytes]

    def to_end(self, address: int, device: int, what: str) -> Bytes:
        """Return a writable view from an address to the end of its allocation, for a kernel.

        Raises:
            DriverMisuse: As for `find`, or the memory belongs to another device.
        """
        block = self.find(address, 0, what)
        if block.device not in (None, device):
            raise DriverMisuse(f"{what}: {address:#x} is memory of device {block.device}")
        return block.data[address - block.base :]
