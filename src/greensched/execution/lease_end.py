"""The end of a lease: its work, until its last ticket is reached and its cells can be freed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from greensched.errors import CUDAError
from greensched.execution.completion import CompletionPoller
from greensched.execution.executor import Executor
from greensched.execution.worker_calls import drop_capture


class LeaseEnd:
    """The work of a lease that has ended, on the executor that it had.

    Args:
        executor: of the lease.
        poller: of the loop that ends the lease, until that loop closes.
        close: called once all the work is done, on the thread of the loop that then polls it.
        foreign_work: libraries may have work on the green context that has no ticket.
    """

    def __init__(
        self,
        executor: Executor,
        poller: CompletionPoller,
        close: Callable[[], object],
        *,
        foreign_work: bool,
    ) -> None:
        self._executor = executor
        self._poller = poller
        self._close = close
        self._foreign_work = foreign_work
        #: The last ticket of all, once it is known.
        self._last_ticket: int | None = None

    def begin(self) -> None:
        """Have a ticket written behind all the work, and wait for it. Does not block."""
        if self._has_last_ticket():
            self._await_last_ticket()
        else:
            self._poller.thread_work_started()
            self._executor.calls.submit_behind(partial(self._write_last_ticket, self._poller))

    def take_over(self, poller: CompletionPoller) -> None:
        """Have another loop wait for the last ticket: the loop that did has closed."""
        self._poller = poller
        if self._last_ticket is not None:
            self._await_last_ticket()

    def _has_last_ticket(self) -> bool:
        """Whether a ticket is behind all work of the lease, or could be written there now.

        Where a thread has something left to do, that comes first, and the thread writes it.
        """
        executor, stream = self._executor, self._executor.launch_stream
        if any(not one.is_idle for one in executor.streams[1:]):
            return False
        if self._foreign_work:
            if stream.submitted != stream.issued or stream.first_uses:
                return False
            try:
                executor.order_behind_green_context()
            except CUDAError:  # a library captures on a stream of its own: a thread waits for that
                return False
            executor.write_launch_ticket(stream.issue())
        self._last_ticket = stream.issued
        return True

    def _write_last_ticket(self, poller: CompletionPoller) -> None:
        """On the submit thread, after all else of the lease: order behind the whole green context.

        Libraries put work on streams of their own; only the context knows them all. `poller` is
        of the loop that ended the lease, which may be closed by now.
        """
        stream = self._executor.launch_stream
        try:
            self._executor.order_behind_context()
            copies = self._executor.copy_stream
            if copies is not None and not copies.is_idle:
                stream.order_behind(copies)
            ticket = stream.issue()
            stream.mark(ticket)
            self._last_ticket = ticket
        except CUDAError as error:
            self._executor.health.fail(error)
        poller.loop.call_threadsafe(poller.thread_work_done)
        self._poller.loop.call_threadsafe(self._await_last_ticket)

    def _await_last_ticket(self) -> None:
        stream, last = self._executor.launch_stream, self._last_ticket
        if stream.health.is_over or (last is not None and stream.reached(last)):
            self._close()
        elif last is not None:
            self._poller.when_reached(stream, last, self._close)


def end_capture(executor: Executor) -> None:
    """End a capture on a launch stream that libraries had: it would take in the last ticket."""
    try:
        drop_capture(executor.driver, executor.launch_stream)
    except CUDAError as error:
        executor.health.fail(error)
