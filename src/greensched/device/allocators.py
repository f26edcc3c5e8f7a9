"""Allocators of device memory and of pinned host memory. Any thread may call them.

1. Device memory comes from one stream-ordered pool that never shrinks. Growing it may block, so if
   `would_grow` is true, an executor's thread allocates.
2. A buffer closed while the device still uses it waits in `_closed` until its tickets are reached.
   Device memory is then freed on a separate stream, and is available again once that stream has
   freed it; pinned memory is reused.
3. Pinned memory returns to the driver only at the end, because cuMemHostUnregister waits until the
   device is idle (seen on an H200, driver 580), on whatever thread.
4. Destructors only append to a list.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from greensched._cleanup import run_all
from greensched.context import Context
from greensched.device.buffers import Buffer, PinnedBuffer, Use
from greensched.device.quota import MemoryQuota
from greensched.device.streams import Stream
from greensched.device.tickets import PAGE, TicketedStream, TicketMemory
from greensched.driver.interface import Driver
from greensched.driver.types import HostMemory
from greensched.errors import BufferClosed, CUDAError, OutOfMemory

logger = logging.getLogger("greensched")

#: cuMemAllocFromPoolAsync returns multiples of 512 bytes (observed; the manual promises 256).
GRAIN = 512
#: All of the host's memory: no more can ever be pinned.
_HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Allocator:
    """Base of both allocators of a device."""

    def __init__(self, primary: Context) -> None:
        self.device = primary.device
        self.device_id = primary.device_id
        self.health = primary.health
        self.is_closed = False
        self._primary = primary
        self._driver = primary.driver
        self._lock = threading.Lock()

    def _check(self) -> None:
        if self.is_closed:
            raise BufferClosed("the memory of this device")
        self.health.check()


class DeviceAllocator(_Allocator):
    """Allocates device memory from one pool of the driver. May block."""

    def __init__(self, primary: Context, words: TicketMemory) -> None:
        super().__init__(primary)
        with ExitStack() as undo:
            self._pool = self._driver.create_memory_pool(self.device_id)
            undo.callback(self._driver.destroy_memory_pool, self._pool)
            self._free_stream = words.create_stream(primary)
            undo.pop_all()
        self._used = 0
        self._reserved = 0
        self._live: dict[int, int] = {}
        self._closed: deque[tuple[int, int, tuple[Use, ...]]] = deque()
        self._freed: deque[tuple[int, int]] = deque()
        #: For each other device, whether it can access this memory.
        self._peers: dict[int, bool] = {}
        #: The tickets up to which streams of other devices use this memory.
        self._peer_uses: dict[TicketedStream, int] = {}

    # -- allocating --------------------------------------------------------------------------------

    def would_grow(self, nbytes: int) -> bool:
        """Say whether an allocation may block because the pool must grow."""
        self.reap()
        return self._used + _rounded(nbytes) > self._reserved

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        stream: TicketedStream,
        ticket: int,
        quota: MemoryQuota | None = None,
    ) -> Buffer:
        """Allocate a buffer, for work on `stream` from now on and for other work after `ticket`.

        It counts against the quota until it is closed.

        Raises:
            OutOfMemory: Carries the bytes requested, free and total; nothing is lost.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if quota is not None:
            quota.take(nbytes)
        try:
            address = self._take(nbytes, stream.stream) if nbytes else 0
        except BaseException:
            if quota is not None:
                quota.give(nbytes)
            raise
        buffer = Buffer(self, address, shape, dtype)
        buffer.quota = quota
        if address:
            buffer.record_use(stream, ticket, write=True)
        return buffer

    def _take(self, nbytes: int, stream: Stream) -> int:
        """Count the bytes as used first: the lock is not held while the driver may block."""
        size = _rounded(nbytes)
        with self._lock:
            self._check()
            self._used += size
        try:
            with self._primary.entered():
                address = self._allocate(nbytes, stream)
        except BaseException:
            with self._lock:
                self._used -= size
            raise
        with self._lock:
            self._live[address] = nbytes
            if self._used > self._reserved:
                self._reserved = self._driver.reserved_bytes(self._pool)
        return address

    def _allocate(self, nbytes: int, stream: Stream) -> int:
        try:
            return self._driver.allocate(self._pool, nbytes, stream.handle)
        except OutOfMemory as error:
            free, total = self._driver.memory_info()
            unused = max(0, self._reserved - self._used)
            raise OutOfMemory("allocate", nbytes, free + unused, total) from error

    def reserve(self, nbytes: int) -> None:
        """Have the pool take bytes of the device now, permanently. Blocks.

        Raises:
            OutOfMemory: As for `allocate`.
        """
        if nbytes:
            stream = self._free_stream.stream
            self.give_back(self._take(nbytes, stream), nbytes, ())
            self.reap()
            stream.sync()
            self.reap()

    # -- other devices ---------------------------------------------------------------------------

    def peer_enabled(self, device_id: int) -> bool | None:
        """Say whether another device can access this memory; None: unknown yet. Never blocks."""
        return self._peers.get(device_id)

    def enable_peer(self, device_id: int) -> bool:
        """Let another device access this memory, if it can. The first call may block."""
        enabled = self._peers.get(device_id)
        if enabled is None:
            enabled = self._driver.can_access_peer(device_id, self.device_id)
            if enabled:
                self._driver.share_memory_pool(self._pool, device_id)
            self._peers[device_id] = enabled
        return enabled

    def record_peer_use(self, stream: TicketedStream, ticket: int) -> None:
        """Record that work of another device uses this memory up to a ticket."""
        with self._lock:  # loops of several threads call this
            uses = self._peer_uses.items()
            self._peer_uses = {other: up_to for other, up_to in uses if not other.reached(up_to)}
            self._peer_uses[stream] = ticket

    @property
    def is_used_by_peers(self) -> bool:
        """Whether work of another device still uses this memory."""
        with self._lock:
            return not all(stream.reached(ticket) for stream, ticket in self._peer_uses.items())

    # -- freeing -----------------------------------------------------------------------------------

    def give_back(self, address: int, nbytes: int, uses: tuple[Use, ...]) -> None:
        """Queue memory for reuse after its uses. Safe in destructors, because it only appends."""
        self._closed.append((address, nbytes, uses))

    def reap(self) -> None:
        """Free memory whose uses are done. Does not block."""
        if self.health.is_over or not (self._closed or self._freed):
            return
        with self._lock:
            if self.is_closed:
                return
            self._free_unused()
            while self._freed and self._free_stream.reached(self._freed[0][0]):
                self._used -= self._freed.popleft()[1]

    def _free_unused(self) -> None:
        ready = []
        for _ in range(len(self._closed)):
            address, nbytes, uses = self._closed.popleft()
            if all(stream.reached(ticket) for stream, ticket in uses):
                ready.append((address, nbytes))
            else:
                self._closed.append((address, nbytes, uses))
        if not ready:
            return
        freed = 0
        try:
            with self._primary.entered():
                while ready:
                    address, nbytes = ready[-1]
                    self._driver.free(address, self._free_stream.stream.handle)
                    del self._live[address]
                    freed += _rounded(ready.pop()[1])
        except CUDAError as error:  # not the caller's error; the poller's check reports a fault
            logger.warning("device memory could not be given back yet: %s", error)
            self._closed.extend((address, nbytes, ()) for address, nbytes in ready)
        if freed:
            ticket = self._free_stream.issue()
            self._free_stream.mark(ticket)
            self._freed.append((ticket, freed))

    def close(self) -> None:
        """Destroy the pool and all its buffers. The device must be idle. May block."""
        with self._lock:
            self.is_closed = True
        run_all(
            (
                self._free_everything,
                self._free_stream.stream.sync,
                self._free_stream.close,
                lambda: self._driver.destroy_memory_pool(self._pool),
            )
        )

    def _free_everything(self) -> None:
        stream = self._free_stream.stream.handle
        with self._primary.entered():
            run_all(partial(self._driver.free, address, stream) for address in self._live)
        self._live.clear()

    @property
    def used_bytes(self) -> int:
        """Bytes that are in use or not freed yet."""
        return self._used


class PinnedAllocator(_Allocator):
    """Allocates pinned host memory for one device. Each piece is registered once and reused."""

    def __init__(self, primary: Context) -> None:
        super().__init__(primary)
        self._live: list[HostMemory] = []
        #: Free pieces by size, a power of two.
        self._free: dict[int, list[HostMemory]] = {}
        self._closed: deque[tuple[HostMemory, tuple[Use, ...]]] = deque()

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> PinnedBuffer:
        """Allocate a zeroed buffer. May block.

        Raises:
            OutOfMemory: The host has less memory in total, or less is free now.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > _HOST_BYTES:  # refused before the driver tries to pin all pages
            raise _out_of_host_memory(nbytes)
        size = max(PAGE, 1 << (nbytes - 1).bit_length())
        with self._lock:
            self._check()
            self._reap_locked()
            free = self._free.get(size)
            host = free.pop() if free else None
        if host is None:
            with self._primary.entered():
                host = allocate_pinned(self._driver, size)
            self._live.append(host)
        else:
            np.frombuffer(host.view, np.uint8, count=nbytes)[:] = 0
        return PinnedBuffer(self, host, shape, dtype)

    def give_back(self, host: HostMemory, uses: tuple[Use, ...]) -> None:
        """Queue memory for reuse after its uses. Safe in destructors, because it only appends."""
        self._closed.append((host, uses))

    def _reap_locked(self) -> None:
        """Move memory whose uses are done to the free pieces."""
        for _ in range(len(self._closed)):
            host, uses = self._closed.popleft()
            if all(stream.reached(ticket) for stream, ticket in uses):
                self._free.setdefault(host.nbytes, []).append(host)
            else:
                self._closed.append((host, uses))

    def close(self) -> None:
        """Return all memory to the driver. The device must be idle. May block."""
        with self._lock:
            self.is_closed = True
            self._free.clear()
        with self._primary.entered():
            run_all(partial(self._driver.free_host, host) for host in self._live)
        self._live.clear()


def allocate_pinned(driver: Driver, nbytes: int) -> HostMemory:
    """Allocate pinned memory. May block, and needs a current context.

    Raises:
        OutOfMemory: Carries the bytes requested, free and total of the host's memory.
    """
    try:
        return driver.allocate_host(nbytes)
    except OutOfMemory as error:
        raise _out_of_host_memory(nbytes) from error


def _out_of_host_memory(nbytes: int) -> OutOfMemory:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return OutOfMemory("allocate_host", nbytes, free, _HOST_BYTES)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN
