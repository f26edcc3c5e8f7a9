"""Memory pools, pinned memory, and copies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np

from greensched.driver.simulated.address_space import ALIGNMENT, POOL_STEP, Bytes, MemoryPool
from greensched.driver.simulated.handles import Context, SimulatedStream
from greensched.driver.simulated.machine import Component, check_fault
from greensched.driver.simulated.timeline import InstantOp, Operation, StartResult, Timeline
from greensched.driver.status import from_status
from greensched.driver.types import ContextHandle, HostMemory, MemoryPoolHandle, StreamHandle
from greensched.errors import DriverMisuse, OutOfMemory


class Copy(Operation):
    """A copy over one of the device's engines. Each engine makes one copy at a time."""

    kind = "copy"

    def __init__(self, path: str, nbytes: int, bandwidth: float, body: Callable[[], None]) -> None:
        super().__init__(path)
        self.path = path
        self.nbytes = nbytes
        self.bandwidth = bandwidth
        self.effect = body  # type: ignore[method-assign]  # one call less for each copy

    def begin(self, timeline: Timeline) -> StartResult:
        """Join the queue of its engine."""
        queue = self.stream.device.engines.setdefault(self.path, deque())
        queue.append(self)
        if len(queue) == 1:
            self._move(timeline)
        return StartResult.RUNNING

    def _move(self, timeline: Timeline) -> None:
        """Start on the engine."""
        self.start = timeline.now
        took = math.ceil(self.nbytes / self.bandwidth * 1e9)
        timeline.at(self.start + took, lambda: self._moved(timeline))

    def _moved(self, timeline: Timeline) -> None:
        queue = cast("deque[Copy]", self.stream.device.engines[self.path])
        queue.popleft()
        timeline.end(self)
        if queue:
            queue[0]._move(timeline)


class Memory(Component):
    """Driver calls for memory."""

    # -- pools -----------------------------------------------------------------------------------

    def create_memory_pool(self, device: int) -> MemoryPoolHandle:
        self.machine.usable_device(device, "create_memory_pool")
        self.machine.refuse_during_capture("create_memory_pool")
        self.machine.register(device, "memory pool")
        return MemoryPoolHandle(MemoryPool(device, self.machine))

    def destroy_memory_pool(self, pool: MemoryPoolHandle) -> None:
        """Destroy a memory pool without memory in use."""
        machine = self.machine
        ended = machine.expect(pool, MemoryPool, "destroy_memory_pool")
        device = machine.devices[ended.device]
        with machine.timeline.lock:
            if ended.used and device.fault is None:
                raise DriverMisuse(f"a memory pool ended with {ended.used} bytes in use")
            ended.alive = False
            machine.memory[ended.device].pools -= ended.reserved
        machine.unregister(ended.device, "memory pool")
        check_fault(device, "destroy_memory_pool")

    def can_access_peer(self, device: int, peer: int) -> bool:
        return self._are_linked(device, peer)

    def share_memory_pool(self, pool: MemoryPoolHandle, device: int) -> None:
        memory_pool = self._pool(pool, "share_memory_pool")
        if not self._are_linked(device, memory_pool.device):
            raise from_status(101, "share_memory_pool", detail=f"for device {device}")
        memory_pool.peers.add(device)

    def _are_linked(self, device: int, peer: int) -> bool:
        """Say whether both devices are of one model that has a link between devices."""
        model, peer_model = (self.machine.device(ordinal).model for ordinal in (device, peer))
        return device != peer and model == peer_model and model.peer_bandwidth > 0

    def reserved_bytes(self, pool: MemoryPoolHandle) -> int:
        return self._pool(pool, "reserved_bytes").reserved

    def allocate(self, pool: MemoryPoolHandle, nbytes: int, stream: StreamHandle) -> int:
        machine = self.machine
        source = self._pool(pool, "allocate")
        machine.stream(stream, "allocate")  # the stream's device may not be the pool's
        if nbytes <= 0:
            raise from_status(1, "allocate", detail=f"{nbytes} bytes")
        machine.refuse_during_capture("allocate")
        size = _rounded(nbytes)
        with machine.timeline.lock:
            missing = source.used + size - source.reserved
            if missing > 0:
                machine.refuse_on_event_loop("allocate, where the pool grows,")
                source.reserved += self._grow(source.device, missing, nbytes)
            block = machine.space.new_device_block(nbytes, source.device, source)
            source.used += size
        machine.register(source.device, "allocation")
        return block.base

    def free(self, address: int, stream: StreamHandle) -> None:
        """Invalidate the address now; the pool gets the bytes after the stream's work."""
        target = self.machine.stream(stream, "free")
        block = self.machine.space.remove(address, "free", pinned=False)
        pool = block.pool
        assert pool is not None
        self.machine.unregister(pool.device, "allocation")

        def give_back(_: int) -> None:
            pool.used -= _rounded(block.nbytes)

        self.machine.enqueue(target, lambda: InstantOp("free", give_back), "free")

    def _grow(self, device: int, missing: int, asked: int) -> int:
        memory = self.machine.memory[device]
        try:
            step = max(POOL_STEP, missing)
            memory.take(step, "allocate", asked)
        except OutOfMemory:
            step = missing
            memory.take(step, "allocate", asked)
        return step

    # -- pinned memory -----------------------------------------------------------------------------

    def allocate_host(self, nbytes: int) -> HostMemory:
        """Allocate pinned memory, at the same address on both sides."""
        machine = self.machine
        if nbytes <= 0:
            raise from_status(1, "allocate_host", detail=f"{nbytes} bytes")
        device = machine.current_device("allocate_host")
        machine.refuse_during_capture("allocate_host")
        machine.wait_for_code_changes(device, "allocate_host")
        block = machine.space.new_host_block(nbytes)
        machine.register(device.ordinal, "pinned memory")
        machine.pinned[block.base] = device.ordinal
        return HostMemory(block.base, block.base, nbytes, block.data.data)

    def free_host(self, memory: HostMemory) -> None:
        """Free pinned memory once its device is idle."""
        machine = self.machine
        owner = machine.pinned.get(memory.address)
        if owner is not None:
            machine.wait_until_idle(machine.devices[owner])
        machine.space.remove(memory.address, "free_host", pinned=True)
        device = machine.pinned.pop(memory.address)
        machine.unregister(device, "pinned memory")
        machine.usable_device(device, "free_host")

    def memory_info(self) -> tuple[int, int]:
        memory = self.machine.memory[self.machine.current_device("memory_info").ordinal]
        return memory.free, memory.total

    def memory_device(self, address: int) -> int | None:
        try:
            return self.machine.space.find(address, 0, "memory_device").device
        except DriverMisuse:
            return None

    # -- copies ------------------------------------------------------------------------------------

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: StreamHandle) -> None:
        """Copy over the engine that reads host memory."""
        self._copy("to device", address, host, nbytes, stream)

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: StreamHandle) -> None:
        """Copy over the engine that writes host memory."""
        self._copy("to host", host, address, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: StreamHandle) -> None:
        """Copy inside the device: each byte is read and written."""
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
        """Copy over the link between devices. Refused if a real driver would use the host."""
        copy_stream = self.machine.stream(stream, "copy_peer")
        ends = (target, target_context), (source, source_context)

        def move() -> Callable[[], None]:
            into, out_of = (self._end(*end, nbytes, copy_stream.device.ordinal) for end in ends)
            return lambda: np.copyto(into, out_of)

        self._move(copy_stream, "peer", nbytes, copy_stream.device.model.peer_bandwidth, move)

    def _end(self, address: int, context: ContextHandle, nbytes: int, device: int) -> Bytes:
        """Return one end of a copy between devices on a stream of `device`."""
        owner = self.machine.expect(context, Context, "copy_peer")
        block = self.machine.space.find(address, nbytes, "copy_peer")
        if block.device != owner.device or block.pool is None:
            raise DriverMisuse(f"copy_peer: {address:#x} is no memory of {owner!r}")
        self.machine.usable_device(owner.device, "copy_peer")
        if block.device != device and device not in block.pool.peers:
            raise DriverMisuse(f"copy_peer: device {device} was given no access to {address:#x}")
        return self.machine.space.bytes_at(address, nbytes, "copy_peer")

    def set_bytes(self, address: int, value: int, nbytes: int, stream: StreamHandle) -> None:
        """Fill with one byte value, at the speed of device memory."""
        fill_stream = self.machine.stream(stream, "set_bytes")
        if not 0 <= value <= 0xFF:
            raise DriverMisuse(f"set_bytes: {value} is not a byte: give 0 to 255")

        def fill() -> Callable[[], None]:
            target = self.machine.space.bytes_at(address, nbytes, "set_bytes")
            return lambda: target.fill(value)

        self._move(fill_stream, "set", nbytes, fill_stream.device.model.dram_bandwidth, fill)

    def _copy(self, path: str, target: int, source: int, nbytes: int, stream: StreamHandle) -> None:
        copy_stream = self.machine.stream(stream, f"copy {path}")
        device, model = copy_stream.device.ordinal, copy_stream.device.model
        bandwidth = model.dram_bandwidth / 2 if path == "on device" else model.link_bandwidth

        def move() -> Callable[[], None]:
            into, out_of = (
                self._bytes(end, nbytes, device, f"copy {path}") for end in (target, source)
            )
            return lambda: np.copyto(into, out_of)

        self._move(copy_stream, path, nbytes, bandwidth, move)

    def _move(
        self,
        stream: SimulatedStream,
        path: str,
        nbytes: int,
        bandwidth: float,
        prepare: Callable[[], Callable[[], None]],
    ) -> None:
        """Submit a copy. `prepare` finds the memory, and returns what moves the bytes."""
        self.machine.wait_for_code_changes(stream.device, f"copy {path}")

        def make() -> Copy:
            return Copy(path, nbytes, bandwidth, prepare())

        latency = stream.device.model.copy_latency_ns
        self.machine.enqueue(stream, make, f"copy {path}", latency)

    def _bytes(self, address: int, nbytes: int, device: int, what: str) -> Bytes:
        space = self.machine.space
        block = space.find(address, nbytes, f"{what} (pageable host memory blocks)")
        if block.device not in (None, device):
            raise DriverMisuse(f"{what}: {address:#x} is memory of device {block.device}")
        return space.bytes_at(address, nbytes, what)

    def _pool(self, handle: MemoryPoolHandle, what: str) -> MemoryPool:
        pool = self.machine.expect(handle, MemoryPool, what)
        self.machine.usable_device(pool.device, what)
        return pool


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
