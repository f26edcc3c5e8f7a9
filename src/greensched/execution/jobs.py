"""Jobs: one piece of work submitted to a partition, with the interface of a future."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol

from greensched._validation import Uncopyable
from greensched.device.buffers import Closable
from greensched.device.tickets import StreamOwner, TicketedStream
from greensched.errors import WouldBlock, WrongThread
from greensched.execution.completion_poller import CompletionPoller
from greensched.execution.eventloop import current_adapter, current_trio
from greensched.typing import T

logger = logging.getLogger("greensched")


class JobLease(Protocol):
    """What a job needs from its lease.

    Attributes:
        failed: The failed jobs whose failure was not retrieved.
        poller: The poller of the loop that holds the lease.
    """

    failed: list[Job[Any]]
    poller: CompletionPoller


class Job(Uncopyable, Generic[T]):
    """Submitted work. Await it, query it, or leave it to the end of the partition's block.

    Any number of tasks on any loops may await it, any number of times. Cancelling such a task
    stops only the waiting: work on a device cannot be stopped.

    A failed job raises at each await. If its failure was never retrieved, a normal end of the
    partition's block raises it.

    It works with `asyncio.wait`, `as_completed`, `gather` and `ensure_future`.
    """

    __slots__ = ("__dict__", "_lease", "_stream", "_ticket", "name")

    # Attributes that few jobs set; the defaults here make the other jobs faster to create.
    _value: Any = None
    _error: BaseException | None = None
    _is_retrieved = False
    _callbacks: list[_DoneCallback] | None = None
    _finalizer: Callable[[T], object] | None = None
    _cleanup: Callable[[], object]
    _finalizing: threading.RLock
    _is_finalizing = False

    def __init__(self, stream: TicketedStream, ticket: int, name: str, lease: JobLease) -> None:
        self._lease = lease
        self._stream = stream
        #: The ticket that the stream writes when the work is done.
        self._ticket = ticket
        #: Names the kernel, function or copy in messages.
        self.name = name

    def done(self) -> bool:
        """Say whether it has succeeded, failed or been given up. Does not wait."""
        stream, ticket = self._stream, self._ticket  # a known ticket needs no call
        return (
            ticket <= stream.last_reached
            or (ticket <= stream.submitted and stream.reached(ticket))
            or stream.health.is_over
            or ticket <= stream.given_up
        )

    def cancelled(self) -> bool:
        """Return False, because a job cannot be cancelled; `asyncio.wait` calls this."""
        return False

    def result(self) -> T:
        """Return the result, without waiting.

        Raises:
            WouldBlock: The job is not done.
            DeviceLost: The device failed before the job was done.
            DeviceHung: The job was given up (`Pool.hang_after`), and is still not done.
            PoolClosed, ForkedPool: The pool ended before the job was done.
            Exception: The job itself failed with this exception.
        """
        stream = self._stream
        if not stream.reached(self._ticket):
            if stream.health.is_over:
                self._set_retrieved()
                raise stream.health.error()
            if stream.hang is not None and self._ticket <= stream.given_up:
                raise stream.hang.of(self.name)
            raise WouldBlock(f"{self!r} is not done: await it")
        if self._stream.launch_errors and self._error is None:
            error = self._stream.take_launch_error(self._ticket)
            if error is not None:
                self._set_exception(error)
        if self._finalizer is not None:
            self._finalize()
        if self._error is not None:
            self._set_retrieved()
            raise self._error
        value = self._value
        if value is not None and isinstance(value, Closable):
            value.is_known = True
        return value  # type: ignore[no-any-return]  # T, or None where T is None

    def exception(self) -> BaseException | None:
        """Return the job's exception, or None. Raises `WouldBlock` while the job is not done."""
        try:
            self.result()
        except WouldBlock:
            raise
        except BaseException as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[Job[T]], object]) -> None:
        """Call a function with the job once it is done, on this thread's loop.

        A thread without a loop, for example in `p.run`, cannot add a callback. The function is
        called in a copy of the current context, and its exceptions are logged. If the job is done
        already, the function is called in the loop's next turn.

        Raises:
            NoLoop: No loop is running on this thread.
        """
        entry = _DoneCallback(callback, copy_context())
        call = partial(current_adapter().call_threadsafe, partial(self._run_callback, entry))
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(entry)
        if self.done():
            call()
        else:
            self._owner.notify_when(self._stream, self._ticket, call)

    def remove_done_callback(self, callback: Callable[[Job[T]], object]) -> int:
        """Remove all entries of a callback; return how many there were."""
        entries = [entry for entry in self._callbacks or () if entry.callback == callback]
        return sum(self._remove_callback(entry) for entry in entries)

    def _remove_callback(self, entry: _DoneCallback) -> bool:
        try:
            (self._callbacks or []).remove(entry)
        except ValueError:
            return False
        return True

    def _run_callback(self, entry: _DoneCallback) -> None:
        if self._remove_callback(entry):  # otherwise it was removed
            try:
                entry.context.run(entry.callback, self)
            except Exception:
                logger.exception("a done callback of %r raised", self)

    def __await__(self) -> Generator[Any, Any, T]:
        """Wait until the job is done, then return what `result` returns.

        Raises:
            WrongThread: The partition's context is current here; a call may be waiting for it.
        """
        waiter = self._next_waiter()
        trio = current_trio() if waiter is None else None
        if trio is not None:  # in trio each await is a checkpoint
            yield from trio.lowlevel.checkpoint().__await__()
        while waiter is not None:
            yield from waiter.__await__()
            waiter = self._next_waiter()
        return self.result()

    def _next_waiter(self) -> Awaitable[object] | None:
        """Return what to await before calling this again, or None once the job is done."""
        if self.done():
            return None
        owner = self._owner
        if owner.ownership is not None and owner.ownership.owner is not None and owner.is_entered:
            raise WrongThread("no `await` inside `with p.context:`: leave that block first")
        poller = self._lease.poller
        if not poller.loop.is_current():
            return owner.wait(self._stream, self._ticket)
        return poller.wait(self._stream, self._ticket)

    @property
    def _owner(self) -> StreamOwner:
        owner = self._stream.owner
        assert owner is not None, "an executor's streams have their owner from the start"
        return owner

    # -- for its lease and its executor ------------------------------------------------------------

    def _set_result(self, value: T) -> None:
        """Set the result, before the ticket is written."""
        self._value = value

    def _set_exception(self, error: BaseException) -> None:
        """Set the failure, before the ticket is written."""
        self._error = error
        self._lease.failed.append(self)

    def _take_error(self) -> BaseException | None:
        """Return the failure, so that another job can raise it instead. From any thread."""
        self._set_retrieved()
        return self._error

    def _set_retrieved(self) -> None:
        """Remove the job from its lease's failures, because a traceback refers to many objects."""
        self._is_retrieved = True
        with suppress(ValueError):  # it is removed already, perhaps by another thread just now
            self._lease.failed.remove(self)

    @property
    def _unretrieved_error(self) -> BaseException | None:
        return None if self._is_retrieved else self._error

    def _set_finalizer(
        self, finalizer: Callable[[T], object], cleanup: Callable[[], object]
    ) -> None:
        """Set the host's work after the device is done. `_finalize` runs it once.

        Args:
            finalizer: Called with the job's value.
            cleanup: Called after the finalizer; if the job failed, only this is called.
        """
        self._finalizing, self._cleanup = threading.RLock(), cleanup
        self._finalizer = finalizer

    def _finalize(self) -> None:
        """Do the host's work. Another thread that calls this meanwhile waits for it.

        Never raises: an exception becomes the job's failure. If the device has failed, do nothing,
        because the device may still be writing.
        """
        with self._finalizing:
            finalizer = self._finalizer
            if finalizer is None or not self._stream.reached(self._ticket):
                return
            if self._is_finalizing:  # a progress callback requests the result
                return
            self._is_finalizing = True
            try:
                if self._error is None:
                    finalizer(self._value)
            except BaseException as error:
                self._set_exception(error)
            finally:
                self._finalizer = None  # last: until then the value is not complete
                self._cleanup()

    def __repr__(self) -> str:
        state = "done" if self.done() else "running"
        if self._error is not None:
            state = f"failed: {type(self._error).__name__}"
        return f"<Job {self.name}: {state}>"


@dataclass(slots=True, eq=False)
class _DoneCallback:
    """A done callback and the context to call it in. Compared by identity."""

    callback: Callable[[Any], object]
    context: Context
