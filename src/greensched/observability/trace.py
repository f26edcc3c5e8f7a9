"""`Pool.trace`: a pool's records, written to a Perfetto file as they come.

Watchers must not block, but a disk may, so a thread encodes and writes. The records that wait for
it are bounded; further ones are dropped, and the file says how many.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio

from greensched.errors import InvalidRequest, MissingPackage
from greensched.execution.background import BackgroundTask
from greensched.execution.threads import WorkerThread
from greensched.leasing.pool_lifecycle import PoolLifecycle
from greensched.observability.lease_history import TracedDevice
from greensched.records import Record

if TYPE_CHECKING:
    from greensched.observability.perfetto_writer import PerfettoWriter

logger = logging.getLogger("greensched")

#: The most records that wait for the thread: about 20 MiB.
MOST_PENDING = 65_536
#: How many records the thread encodes before it writes them.
BATCH = 512


class Trace:
    """Writes what happens in a pool to a file while its block is open. Made by `Pool.trace`."""

    def __init__(self, lifecycle: PoolLifecycle, path: str | os.PathLike[str]) -> None:
        if importlib.util.find_spec("perfetto") is None:
            raise MissingPackage("a trace", "perfetto", "trace")
        self.path = Path(path)
        #: Records that are missing in the file, because the disk was slower than the pool.
        self.dropped = 0
        self._lifecycle = lifecycle
        self._pending = deque[Record]()
        self._is_scheduled = False
        self._thread: WorkerThread | None = None
        self._file: int | None = None
        self._writer: PerfettoWriter
        #: Why writing stopped.
        self._error: OSError | None = None

    async def __aenter__(self) -> Self:
        manager = self._lifecycle.manager()
        manager.check()
        if self._thread is not None:
            raise InvalidRequest("this trace was used already: call pool.trace() again")
        self._devices = [
            TracedDevice.of(device_pool.device, device_pool.cells)
            for device_pool in manager.device_pools
        ]
        self._time = manager.driver.time
        self._thread = WorkerThread(manager.driver, "greensched trace", relaxed=False)
        opening = BackgroundTask(self._open)
        self._thread.submit(opening.run)
        try:
            await opening.wait()
            self._lifecycle.watch(self._take)
        except BaseException:
            self._thread.submit(self._close)
            self._thread.dismiss()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._thread is not None
        ending = BackgroundTask(self._end)
        self._thread.submit(ending.run)
        self._thread.dismiss()
        if kind is GeneratorExit:  # perhaps from garbage collection, which cannot wait
            return
        with anyio.CancelScope(shield=True):
            await ending.wait()
        if self._error is not None:
            if kind is None:
                raise self._refusal(self._error)
            logger.error("%s", self._refusal(self._error))

    def _refusal(self, error: Exception) -> InvalidRequest:
        why = getattr(error, "strerror", None) or error
        return InvalidRequest(f"the trace {str(self.path)!r} cannot be written: {why}")

    # -- any thread of the pool ------------------------------------------------------------------

    def _take(self, record: Record) -> None:
        """Take a record from the pool. Called for one record at a time. Must not block."""
        if len(self._pending) >= MOST_PENDING:
            self.dropped += 1
            return
        self._pending.append(record)
        if not self._is_scheduled:
            self._is_scheduled = True
            assert self._thread is not None
            self._thread.submit_if_running(self._write)

    # -- on the thread ---------------------------------------------------------------------------

    def _open(self) -> None:
        from greensched.observability.perfetto_writer import PerfettoWriter  # loads protobuf

        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except (OSError, ValueError) as error:
            raise self._refusal(error) from error
        self._writer = PerfettoWriter(self._devices, self._time())
        self._write_out()

    def _write(self) -> None:
        """Encode and write the pending records."""
        self._is_scheduled = False  # first, because a record from here on must schedule a call
        pending, writer = self._pending, self._writer
        while pending:
            for _ in range(min(BATCH, len(pending))):
                writer.add(pending.popleft())
            self._write_out()

    def _write_out(self) -> None:
        encoded = memoryview(self._writer.take())
        if self._file is None or self._error is not None:
            return
        try:
            while encoded:
                encoded = encoded[os.write(self._file, encoded) :]
        except OSError as error:
            self._error = error

    def _end(self) -> None:
        """End all open slices in the trace, and close the file."""
        self._lifecycle.unwatch(self._take)
        self._write()
        self._writer.end(self._time(), self.dropped)
        self._write_out()
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)
