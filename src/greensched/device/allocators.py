"""A device's memory, and pinned memory for it: where buffers are from, and go back to.

Rules, all entered by any thread:

1. Device memory comes from one stream-ordered pool of ours that never shrinks. Growing it may
   block, so `would_grow` is asked first, and where it would, a thread of ours allocates.
2. What is closed while the device still uses it waits in `_closed` until every ticket is reached.
   Device memory is then freed on a stream of its own, and counts as available when that stream
   has done so; pinned memory is ready for the next who wants some.
3. Pinned memory is given back to the driver at the end only: cuMemHostUnregister waits until
   nothing runs on the device any more (seen on an H200, driver 580), whoever runs it.
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
from greensched.device.buffers import Buffer, MemoryQuota, PinnedBuffer, Use
from greensched.device.streams import Stream, StreamOwner, TicketedStream
from greensched.device.tickets import PAGE, TicketMemory
from greensched.driver.interface import Driver
from greensched.driver.types import HostMemory
from greensched.errors import BufferClosed, CUDAError, OutOfMemory, too_late

logger = logging.getLogger("greensched")

#: cuMemAllocFromPoolAsync hands out multiples of 512 bytes (seen; the manual says 256 at least).
GRAIN = 512
#: The host's memory in all: no more can ever be pinned.
_HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Memory:
    """What both kinds are: a device's, until it is closed, or a fault ends its use."""

    def __init__(self, primary: StreamOwner) -> None:
        self.device = primary.device_ordinal
        self.is_closed = False
        self.fault: BaseException | None = None
        self._primary = primary
        self._driver = primary.driver
        self._lock = threading.Lock()

    def _check(self) -> None:
        if self.is_closed:
            raise BufferClosed("the memory of this device")
        if self.fault is not None:
            raise too_late(self.fault)


class DeviceAllocator(_Memory):
    """One device's memory: a pool of ours, and what waits to be given back to it. May block."""

    def __init__(self, primary: StreamOwner, words: TicketMemory) -> None:
        super().__init__(primary)
        with ExitStack() as undo:
            self._pool = self._driver.create_memory_pool(self.device)
            undo.callback(self._driver.destroy_memory_pool, self._pool)
            self._janitor = words.create_track(primary)
            undo.pop_all()
        self._used = 0
        self._reserved = 0
        self._live: dict[int, int] = {}
        self._closed: deque[tuple[int, int, tuple[Use, ...]]] = deque()
        self._freed: deque[tuple[int, int]] = deque()
        #: Whether each other device that asked can reach this memory.
        self._guests: dict[int, bool] = {}
        #: Up to which ticket tracks of other devices use this memory.
        self._visits: dict[TicketedStream, int] = {}

    # -- taking ----------------------------------------------------------------------------------

    def would_grow(self, nbytes: int) -> bool:
        """Whether an allocation may block because the pool must grow for it."""
        self.reap()
        return self._used + _rounded(nbytes) > self._reserved

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        track: TicketedStream,
        ticket: int,
        allowance: MemoryQuota | None = None,
    ) -> Buffer:
        """A buffer usable by work on `track` from now on, and by others behind `ticket`.

        It counts against the allowance until it is closed.

        Raises:
            OutOfMemory: with what was asked, free and there in all; nothing is lost.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if allowance is not None:
            allowance.take(nbytes)
        try:
            address = self._take(nbytes, track.stream) if nbytes else 0
        except BaseException:
            if allowance is not None:
                allowance.give(nbytes)
            raise
        buffer = Buffer(self, address, shape, dtype)
        buffer.allowance = allowance
        if address:
            buffer.note(track, ticket, write=True)
        return buffer

    def _take(self, nbytes: int, stream: Stream) -> int:
        """The lock is not held while the driver may block: what is asked for counts as used."""
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
        """Has the pool take so much of the device now; it never gives it back. Blocks.

        Raises:
            OutOfMemory: as `allocate`.
        """
        if nbytes:
            janitor = self._janitor.stream
            self.give_back(self._take(nbytes, janitor), nbytes, ())
            self.reap()
            janitor.sync()
            self.reap()

    # -- other devices ---------------------------------------------------------------------------

    def admits(self, device: int) -> bool | None:
        """Whether another device can reach this memory; None: nobody asked yet. Never blocks."""
        return self._guests.get(device)

    def admit(self, device: int) -> bool:
        """Lets another device reach this memory, if it can. The first time may block."""
        found = self._guests.get(device)
        if found is None:
            found = self._driver.can_access_peer(device, self.device)
            if found:
                self._driver.share_memory_pool(self._pool, device)
            self._guests[device] = found
        return found

    def visit(self, track: TicketedStream, ticket: int) -> None:
        """Work of another device uses this memory up to a ticket."""
        with self._lock:  # loops of several threads come here
            pending = self._visits.items()
            self._visits = {who: up_to for who, up_to in pending if not who.reached(up_to)}
            self._visits[track] = ticket

    @property
    def is_visited(self) -> bool:
        """Whether work of another device still uses it."""
        with self._lock:
            return not all(track.reached(ticket) for track, ticket in self._visits.items())

    # -- giving back -----------------------------------------------------------------------------

    def give_back(self, address: int, nbytes: int, uses: tuple[Use, ...]) -> None:
        """Notes what is not wanted any more. Called by destructors: it only appends."""
        self._closed.append((address, nbytes, uses))

    def reap(self) -> None:
        """Frees what nobody uses any more. Does not block."""
        if self.fault is not None or not (self._closed or self._freed):
            return
        with self._lock:
            if self.is_closed:
                return
            self._free_unused()
            while self._freed and self._janitor.reached(self._freed[0][0]):
                self._used -= self._freed.popleft()[1]

    def _free_unused(self) -> None:
        ready = []
        for _ in range(len(self._closed)):
            address, nbytes, uses = self._closed.popleft()
            if all(track.reached(ticket) for track, ticket in uses):
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
                    self._driver.free(address, self._janitor.stream.handle)
                    del self._live[address]
                    freed += _rounded(ready.pop()[1])
        except CUDAError as error:  # not for whoever came by; a fault is for the sweep to find
            logger.warning("device memory could not be given back yet: %s", error)
            self._closed.extend((address, nbytes, ()) for address, nbytes in ready)
        if freed:
            ticket = self._janitor.issue()
            self._janitor.mark(ticket)
            self._freed.append((ticket, freed))

    def close(self) -> None:
        """Ends the pool and every buffer of it; no work may be left on the device. May block."""
        with self._lock:
            self.is_closed = True
        run_all(
            (
                self._free_everything,
                self._janitor.stream.sync,
                self._janitor.close,
                lambda: self._driver.destroy_memory_pool(self._pool),
            )
        )

    def _free_everything(self) -> None:
        janitor = self._janitor.stream.handle
        with self._primary.entered():
            run_all(partial(self._driver.free, address, janitor) for address in self._live)
        self._live.clear()

    @property
    def used_bytes(self) -> int:
        """Bytes in use, or on their way back."""
        return self._used


class PinnedAllocator(_Memory):
    """Pinned host memory of one device, registered once and used again and again."""

    def __init__(self, primary: StreamOwner) -> None:
        super().__init__(primary)
        self._live: list[HostMemory] = []
        #: What is ready for the next, by its size: a power of two.
        self._free: dict[int, list[HostMemory]] = {}
        self._closed: deque[tuple[HostMemory, tuple[Use, ...]]] = deque()

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> PinnedBuffer:
        """Zeroed. May block.

        Raises:
            OutOfMemory: the host has less in all, or at the moment.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > _HOST_BYTES:  # before anybody tries to pin it, page by page
            raise _no_room(nbytes)
        size = max(PAGE, 1 << (nbytes - 1).bit_length())
        with self._lock:
            self._check()
            self._reap()
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
        """Notes what is not wanted any more. Called by destructors: it only appends."""
        self._closed.append((host, uses))

    def _reap(self) -> None:
        """With the lock held: the threads of several lanes come here."""
        for _ in range(len(self._closed)):
            host, uses = self._closed.popleft()
            if all(track.reached(ticket) for track, ticket in uses):
                self._free.setdefault(host.nbytes, []).append(host)
            else:
                self._closed.append((host, uses))

    def close(self) -> None:
        """Gives all of it back to the driver; no work may be left on the device. May block."""
        with self._lock:
            self.is_closed = True
            self._free.clear()
        with self._primary.entered():
            run_all(partial(self._driver.free_host, host) for host in self._live)
        self._live.clear()


def allocate_pinned(driver: Driver, nbytes: int) -> HostMemory:
    """Pinned memory. May block, and needs a current context.

    Raises:
        OutOfMemory: with what was asked, free and there in all, of the host's memory.
    """
    try:
        return driver.allocate_host(nbytes)
    except OutOfMemory as error:
        raise _no_room(nbytes) from error


def _no_room(nbytes: int) -> OutOfMemory:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return OutOfMemory("allocate_host", nbytes, free, _HOST_BYTES)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN
