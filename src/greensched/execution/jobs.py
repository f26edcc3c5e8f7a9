"""Jobs: one piece of work submitted to a partition, awaitable by anybody, any number of times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic

from greensched._asynclib import is_coroutine_function
from greensched.device.buffers import Closable
from greensched.device.streams import TicketedStream
from greensched.errors import InvalidRequest, WouldBlock, WrongThread, too_late
from greensched.execution.eventloop import current_trio
from greensched.execution.eventloop.base import LoopAdapter, Waiter
from greensched.typing import T

if TYPE_CHECKING:  # what stands above: a track only knows that it has somebody's threads
    from greensched.execution.executor import Executor

#: Told how far a copy is: bytes done, and bytes in all.
ProgressCallback = Callable[[int, int], object]


class ProgressReporter:
    """Tells a caller how far his copy is, on the thread of his loop.

    Reports that the loop had no turn for are one, the newest; so they never pile up.

    Args:
        tell: the caller's.
        nbytes: in all.
        loop: of the loop that the caller runs on.
    """

    __slots__ = ("_done", "_error", "_is_posted", "_loop", "_nbytes", "_owner", "_tell", "_told")

    def __init__(self, tell: object, nbytes: int, loop: LoopAdapter) -> None:
        if not callable(tell) or is_coroutine_function(tell):
            raise InvalidRequest(
                f"progress={tell!r}: give a plain function of bytes done and in all"
            )
        self._tell = tell
        self._nbytes = nbytes
        self._loop = loop
        self._owner = threading.get_ident()
        self._done = 0
        self._told = -1
        self._is_posted = False
        self._error: Exception | None = None

    def moved(self, nbytes: int) -> None:
        """So many bytes more are done. From any thread.

        Raises:
            Exception: what the caller raised when he was told.
        """
        self._done += nbytes
        if not self._is_posted:
            self._is_posted = True
            self._loop.call_threadsafe(self._report)
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Everything is done: he is told before anybody on his thread has the job's value.

        Raises:
            Exception: as `moved`.
        """
        self._done = self._nbytes
        if threading.get_ident() == self._owner:
            self._report()
        else:
            self._loop.call_threadsafe(self._report)
        if self._error is not None:
            raise self._error

    def _report(self) -> None:
        self._is_posted = False
        done = self._done
        if self._error is None and done > self._told:
            self._told = done
            try:
                self._tell(done, self._nbytes)
            except Exception as error:
                self._error = error


class Job(Generic[T]):
    """Work that was submitted: await it, ask it, or leave it to the end of the partition's block.

    Any number of tasks may await it, on any loop, any number of times. Cancelling one of them
    cancels nothing but its waiting: work on a device cannot be stopped.

    A failed job raises at each await. A failure that nobody has seen when the partition's block
    ends normally is raised there.
    """

    __slots__ = ("__dict__", "_failures", "ticket", "track", "what")

    #: What few jobs have. Those that do have a place for it; the others are made the faster.
    _value: Any = None
    _error: BaseException | None = None
    _finish: Callable[[T], object] | None = None
    _finishing: threading.Lock
    _drop: Callable[[], object]
    _is_seen = False

    def __init__(
        self, track: TicketedStream, ticket: int, what: str, failures: list[Job[Any]]
    ) -> None:
        self._failures = failures
        #: Where its ticket is written.
        self.track = track
        #: Written by the stream when the work is done.
        self.ticket = ticket
        #: What it does, for people.
        self.what = what

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""
        track, ticket = self.track, self.ticket  # where it is known, nobody is asked
        return ticket <= track.known or track.reached(ticket) or track.fault is not None

    def result(self) -> T:
        """What it gave, at once.

        Raises:
            WouldBlock: it is not done.
            DeviceLost: the device failed before it was done.
            PoolClosed, ForkedPool: its pool ended before it was done.
            Exception: what the job itself failed with.
        """
        if not self.track.reached(self.ticket):
            if self.track.fault is None:
                raise WouldBlock(f"{self!r} is not done: await it")
            self._was_seen()
            raise too_late(self.track.fault)
        return self.outcome()

    def exception(self) -> BaseException | None:
        """What it failed with, if it did. Raises `WouldBlock` while it is not done."""
        try:
            self.result()
        except WouldBlock:
            raise
        except BaseException as error:
            return error
        return None

    def __await__(self) -> Generator[Any, None, T]:
        """Waits until it is done, then gives what `result` gives.

        Raises:
            WrongThread: its partition's context is current here, which a call may be waiting for.
        """
        waiter = self._next_waiter()
        trio = current_trio() if waiter is None else None
        if trio is not None:
            yield from trio.lowlevel.checkpoint().__await__()
        while waiter is not None:
            yield from waiter.__await__()
            waiter = self._next_waiter()
        return self.result()

    def _next_waiter(self) -> Waiter | None:
        """Make something to await, and then to call this again; None once the job is done."""
        if self.is_done:
            return None
        executor: Executor = self.track.crew
        if executor.is_entered:
            raise WrongThread("no `await` inside `with p.context:`: leave that block first")
        return executor.host.current_poller().wait(self.track, self.ticket)

    # -- for the partition -----------------------------------------------------------------------

    def outcome(self) -> T:
        """What it gave, or failed with; its ticket is reached."""
        if self.track.launch_errors and self._error is None:
            error = self.track.take_launch_error(self.ticket)
            if error is not None:
                self.fail(error)
        if self._finish is not None:
            self.finish()
        if self._error is not None:
            self._was_seen()
            raise self._error
        value = self._value
        if value is not None and isinstance(value, Closable):
            value.is_known = True
        return value  # type: ignore[no-any-return]  # T, or None where T is None

    def finish_with(self, finish: Callable[[T], object], drop: Callable[[], object]) -> None:
        """What remains to be done by the host once the device is done; done once, by `finish`.

        Args:
            finish: told the job's value.
            drop: called behind it, or instead of it where the job failed: the device is done.
        """
        self._finishing, self._drop = threading.Lock(), drop
        self._finish = finish

    @property
    def is_finished(self) -> bool:
        """Whether the host has nothing left to do for it."""
        return self._finish is None

    def finish(self) -> None:
        """Does what remains for the host; who asks meanwhile, in another thread, waits for that.

        Never raises: what goes wrong is the job's failure. If the device failed, nothing is done:
        it may still be writing.
        """
        with self._finishing:
            finish = self._finish
            if finish is None or not self.track.reached(self.ticket):
                return
            try:
                if self._error is None:
                    finish(self._value)
            except BaseException as error:
                self.fail(error)
            finally:
                self._finish = None  # last: until then nobody takes the value for whole
                self._drop()

    def succeed(self, value: T) -> None:
        """Sets the result, before the ticket is written."""
        self._value = value

    def fail(self, error: BaseException) -> None:
        """Sets the failure, before the ticket is written."""
        self._error = error
        self._failures.append(self)

    def pass_on(self) -> BaseException | None:
        """What it failed with, if it did: from here on another job tells that. From any thread."""
        self._was_seen()
        return self._error

    def _was_seen(self) -> None:
        """Its lease keeps it no longer, with all that its traceback holds."""
        self._is_seen = True
        with suppress(ValueError):  # seen before, or by another thread at the same time
            self._failures.remove(self)

    @property
    def unseen_error(self) -> BaseException | None:
        """A failure that nobody has been told."""
        return None if self._is_seen else self._error

    def __repr__(self) -> str:
        state = "done" if self.is_done else "running"
        if self._error is not None:
            state = f"failed: {type(self._error).__name__}"
        return f"<Job {self.what}: {state}>"
