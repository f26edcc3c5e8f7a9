"""Draining an ended lease: wait for its last ticket, then `Lease.close` has its cells freed.

`Lease.end` begins it; `LeaseManager.lease_closed` and `Scheduler.drained` free the cells.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from greensched.errors import CUDAError
from greensched.execution.completion_poller import CompletionPoller
from greensched.execution.executor import Executor


class LeaseDrain:
    """The wait for the work of an ended lease.

    Args:
        executor: The lease's executor.
        poller: The poller of the loop that ends the lease; another takes over if that loop closes.
        close: Called once all the work is done, on the thread of the loop that polls it.
        foreign_work: Whether libraries may have work on the green context that has no ticket.
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
        #: The last ticket of the lease, once it is known.
        self._last_ticket: int | None = None

    def begin(self) -> None:
        """Have a ticket written after all the work, and watch for it. Does not block."""
        if self._has_last_ticket():
            self._await_last_ticket()
        else:
            self._poller.thread_work_started()
            self._executor.calls.submit_behind(partial(self._write_last_ticket, self._poller))

    def take_over(self, poller: CompletionPoller) -> None:
        """Watch for the last ticket on another loop, because the previous loop has closed."""
        self._poller = poller
        if self._last_ticket is not None:
            self._await_last_ticket()

    def _has_last_ticket(self) -> bool:
        """Say whether a ticket follows all work of the lease, or write one now if possible.

        If a thread still has work to submit, it does so first and then writes the ticket.
        """
        executor, stream = self._executor, self._executor.launch_stream
        if any(not other.is_idle for other in executor.streams[1:]):
            return False
        if self._foreign_work:
            if stream.submitted != stream.issued or stream.first_uses:
                return False
            try:
                executor.order_behind_green_context()
            except CUDAError:  # a library captures on its own stream: a thread waits for its end
                return False
            executor.write_launch_ticket(stream.issue())
        self._last_ticket = stream.issued
        return True

    def _write_last_ticket(self, poller: CompletionPoller) -> None:
        """Write a ticket after all work of the green context. Runs last on the submit thread.

        Libraries submit to their own streams, and only the context knows them all. `poller` belongs
        to the loop that ended the lease, which may be closed by now.
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
