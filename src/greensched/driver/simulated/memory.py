"""Memory of the simulated driver: pools, pinned memory, copies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from greensched.driver.simulated.address_space import ALIGNMENT, POOL_STEP, Bytes, MemoryPool
from greensched.driver.simulated.handles import Context, SimulatedStream
from greensched.driver.simulated.operations import Copy
from greensched.driver.simulated.streams import Streams
from greensched.driver.simulated.timeline import InstantOp
from greensched.driver.status import from_status
from greensched.driver.types import ContextHandle, HostMemory, MemoryPoolHandle, StreamHandle
from greensched.errors import DriverMisuse, OutOfMemory


class Memories(Streams):
    """The verbs for memory."""

    # -- pools -----------------------------------------------------------------------------------

    def create_memory_pool(self, device: int) -> MemoryPoolHandle:
        """A pool that keeps what it has."""
        self._unfaulted(self._device(device), "create_memory_pool")
        self._refuse_capture("create_memory_pool")
        self._born(device, "memory pool")
        return MemoryPoolHandle(MemoryPool(device, self))

    def destroy_memory_pool(self, pool: MemoryPoolHandle) -> None:
        """Ends a pool from which nothing is in use."""
        gone = self._expect(pool, MemoryPool, "destroy_memory_pool")
        faulty = self.devices[gone.device].fault is not None
        with self.timeline.lock:
            if gone.used and not faulty:
                raise DriverMisuse(f"a memory pool ended with {gone.used} bytes in use")
            gone.alive = False
            self.memory[gone.device].pools -= gone.reserved
        self._died(gone.device, "memory pool")
        self._unfaulted(self.devices[gone.device], "destroy_memory_pool")

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Where both are of one model, and that has a link between devices."""
        one, other = (self._device(ordinal).model for ordinal in (device, peer))
        return device != peer and one == other and one.peer_bandwidth > 0

    def share_memory_pool(self, pool: MemoryPoolHandle, device: int) -> None:
        """From here on the device reaches the pool's memory."""
        found = self._pool(pool, "share_memory_pool")
        if not self.can_access_peer(device, found.device):
            raise from_status(101, "share_memory_pool", detail=f"for device {device}")
        found.guests.add(device)

    def reserved_bytes(self, pool: MemoryPoolHandle) -> int:
        """Bytes the pool holds of its device."""
        return self._pool(pool, "reserved_bytes").reserved

    def allocate(self, pool: MemoryPoolHandle, nbytes: int, stream: StreamHandle) -> int:
        """An address in the pool; where the pool must grow, that can block."""
        source = self._pool(pool, "allocate")
        self._stream(stream, "allocate")  # may be of another device than the pool
        if nbytes <= 0:
            raise from_status(1, "allocate", detail=f"{nbytes} bytes")
        self._refuse_capture("allocate")
        size = _rounded(nbytes)
        with self.timeline.lock:
            lacks = source.used + size - source.reserved
            if lacks > 0:
                self._may_block("allocate, where the pool grows,")
                source.reserved += self._grow(source.device, lacks, nbytes)
            block = self.space.new_device_block(nbytes, source.device, source)
            source.used += size
        self._born(source.device, "allocation")
        return block.base

    def free(self, address: int, stream: StreamHandle) -> None:
        """The address is dead to the host at once; the pool has the bytes behind the stream."""
        found = self._stream(stream, "free")
        block = self.space.remove(address, "free", pinned=False)
        pool = block.pool
        assert pool is not None
        self._died(pool.device, "allocation")

        def give_back(_: int) -> None:
            pool.used -= _rounded(block.nbytes)

        self._enqueue(found, lambda: InstantOp("free", give_back), "free")

    def _grow(self, device: int, lacks: int, asked: int) -> int:
        memory = self.memory[device]
        try:
            step = max(POOL_STEP, lacks)
            memory.take(step, "allocate", asked)
        except OutOfMemory:
            step = lacks
            memory.take(step, "allocate", asked)
        return step

    # -- pinned memory -----------------------------------------------------------------------------

    def allocate_host(self, nbytes: int) -> HostMemory:
        """Pinned memory, at the same address on both sides."""
        if nbytes <= 0:
            raise from_status(1, "allocate_host", detail=f"{nbytes} bytes")
        device = self._thread.stack[-1].device
        self._unfaulted(self.devices[device], "allocate_host")
        self._refuse_capture("allocate_host")
        self._behind_changes(self.devices[device], "allocate_host")
        block = self.space.new_host_block(nbytes)
        self._born(device, "pinned memory")
        self._pinned[block.base] = device
        return HostMemory(block.base, block.base, nbytes, block.data.data)

    def free_host(self, memory: HostMemory) -> None:
        """Ends pinned memory, when nothing runs any more."""
        device = self._pinned.get(memory.address)
        if device is not None:
            self._settle(self.devices[device])
        self.space.remove(memory.address, "free_host", pinned=True)
        device = self._pinned.pop(memory.address)
        self._died(device, "pinned memory")
        self._unfaulted(self.devices[device], "free_host")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) of the current context's device."""
        device = self._thread.stack[-1].device
        self._unfaulted(self.devices[device], "memory_info")
        memory = self.memory[device]
        return memory.free, memory.total

    def memory_device(self, address: int) -> int | None:
        """That of the live allocation there."""
        try:
            return self.space.find(address, 0, "memory_device").device
        except DriverMisuse:
            return None

    # -- copies ------------------------------------------------------------------------------------

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: StreamHandle) -> None:
        """Over the engine that reads host memory."""
        self._copy("to device", address, host, nbytes, stream)

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: StreamHandle) -> None:
        """Over the engine that writes host memory."""
        self._copy("to host", host, address, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: StreamHandle) -> None:
        """Inside the device: each byte is read and written."""
        self._copy("on device", target, source, nbytes, stream)

    def copy_peer(
        self,
        target: int,
        target_context: ContextHandle,
        source: int,
        source_context: ContextHandle,
        nbytes: int,
        stream: StreamHandle,
    ) -> None:
        """Over the link between devices; refused where a real driver would go by the host."""
        found = self._stream(stream, "copy_peer")
        ends = (target, target_context), (source, source_context)

        def move() -> Callable[[], None]:
            into, out_of = (self._end(*end, nbytes, found.device.ordinal) for end in ends)
            return lambda: np.copyto(into, out_of)

        self._move(found, "peer", nbytes, found.device.model.peer_bandwidth, move)

    def _end(self, address: int, context: ContextHandle, nbytes: int, device: int) -> Bytes:
        """One end of a copy between devices, which a stream of `device` makes."""
        owner = self._expect(context, Context, "copy_peer")
        block = self.space.find(address, nbytes, "copy_peer")
        if block.device != owner.device or block.pool is None:
            raise DriverMisuse(f"copy_peer: {address:#x} is no memory of {owner!r}")
        self._unfaulted(self.devices[owner.device], "copy_peer")
        if block.device != device and device not in block.pool.guests:
            raise DriverMisuse(f"copy_peer: device {device} was given no access to {address:#x}")
        return self.space.bytes_at(address, nbytes, "copy_peer")

    def set_bytes(self, address: int, value: int, nbytes: int, stream: StreamHandle) -> None:
        """Fills with one byte value, at the speed of device memory."""
        found = self._stream(stream, "set_bytes")
        if not 0 <= value <= 0xFF:
            raise DriverMisuse(f"set_bytes: {value} is no byte")

        def fill() -> Callable[[], None]:
            target = self.space.bytes_at(address, nbytes, "set_bytes")
            return lambda: target.fill(value)

        self._move(found, "set", nbytes, found.device.model.dram_bandwidth, fill)

    def _copy(self, path: str, target: int, source: int, nbytes: int, stream: StreamHandle) -> None:
        found = self._stream(stream, f"copy {path}")
        device, model = found.device.ordinal, found.device.model
        bandwidth = model.dram_bandwidth / 2 if path == "on device" else model.link_bandwidth

        def move() -> Callable[[], None]:
            ends = (self._bytes(a, nbytes, device, f"copy {path}") for a in (target, source))
            into, out_of = ends
            return lambda: np.copyto(into, out_of)

        self._move(found, path, nbytes, bandwidth, move)

    def _move(
        self,
        stream: SimulatedStream,
        path: str,
        nbytes: int,
        rate: float,
        body: Callable[[], Callable[[], None]],
    ) -> None:
        """`body` finds the memory, and returns what moves the bytes."""
        self._behind_changes(stream.device, f"copy {path}")
        latency = stream.device.model.copy_latency_ns
        self._enqueue(stream, lambda: Copy(path, nbytes, rate, body()), f"copy {path}", latency)

    def _bytes(self, address: int, nbytes: int, device: int, what: str) -> Bytes:
        block = self.space.find(address, nbytes, f"{what} (pageable host memory blocks)")
        if block.device not in (None, device):
            raise DriverMisuse(f"{what}: {address:#x} is memory of device {block.device}")
        return self.space.bytes_at(address, nbytes, what)

    def _pool(self, handle: MemoryPoolHandle, what: str) -> MemoryPool:
        pool = self._expect(handle, MemoryPool, what)
        self._unfaulted(self.devices[pool.device], what)
        return pool


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
