"""Handling of requests that would be late: they are refused, or go after all others.

A request of known duration with a deadline is admitted if its predicted end is not later. If the
policy serves the earliest deadline first, every admitted request of its priority that is due later
must also stay in time. The prediction is a lower bound, from the work that precedes the request
(`Packing`).
"""

from __future__ import annotations

import math
from operator import add

from greensched.errors import DeadlineImpossible
from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.queue import RequestQueue
from greensched.scheduling.request_line import RequestLine
from greensched.scheduling.requests import Request


class Lateness:
    """Predicts when requests of known duration are done, and handles those that would be late.

    Args:
        queue: The queued work, by due time if the policy serves the earliest deadline first.
        allocator: The grants.
    """

    def __init__(self, queue: RequestQueue, allocator: SMAllocator) -> None:
        self._queue = queue
        self._allocator = allocator
        #: The number of refused requests.
        self.refused = 0

    def check(self, request: Request) -> None:
        """Handle a request that would be late even if it were granted its largest size now.

        Raises:
            DeadlineImpossible: The request is refused.
        """
        if request.due is None:
            return
        most = request.parts[0].most if len(request.parts) == 1 else 0
        total = max(self._allocator.devices[device].total for device in request.devices)
        seconds = request.seconds(min(most or total, total))
        if seconds is not None:
            seconds *= request.class_state.duration_ratio
            if request.arrived + seconds > request.due:
                self._handle(request, seconds)

    def check_in_queue(self, request: Request, line: RequestLine, now: float) -> None:
        """Handle a request that would be late after its wait, or would make others late.

        Raises:
            DeadlineImpossible: The request is refused.
        """
        sms = line.asked
        if request.is_elastic:  # it may get more than its minimum
            sms = min(request.parts[0].most, self._allocator.most_ever(request))
        seconds = request.seconds(sms)
        if request.due is None or seconds is None:
            return
        seconds *= request.class_state.duration_ratio
        done, is_fair = self._predict(request, request.due, seconds, sms, now)
        if now + done > request.due or not is_fair:
            self._handle(request, done)

    def _predict(
        self, request: Request, due: float, seconds: float, sms: int, now: float
    ) -> tuple[float, bool]:
        """Predict when a request that must wait will be done.

        Args:
            request: The request.
            due: When it is due.
            seconds: Its duration once it is granted.
            sms: The SMs that it takes.
            now: The time in seconds.

        Returns:
            The seconds from now until then, and whether all later-due requests of its priority stay
            in time.
        """
        allocator, queue, priority = self._allocator, self._queue, request.priority
        begins = min(allocator.free_at(device, request, now) for device in request.devices) - now
        devices, ledger = queue.packing.devices, queue.ledgers.get(priority)
        before = queue.work_before(priority, is_equal=not queue.policy.by_deadline)
        if ledger is None:
            return begins + max(before) / devices + seconds, True
        ledger.advance(now)
        sooner = map(add, before, ledger.due_by(due))
        running = queue.packing.work([(sms, seconds), *allocator.running(now, priority)])
        is_fair = ledger.has_room(now, due, list(map(add, before, running)))
        return begins + max(sooner) / devices + seconds, is_fair

    def _handle(self, request: Request, done: float) -> None:
        """Refuse a late request, or put it after all others, as its class says.

        Sometimes a late request is admitted, to test the durations of the class.
        """
        assert request.due is not None
        if request.class_state.rules.on_late == "refuse":
            if request.class_state.is_probe():
                request.due = None
                return
            self.refused += 1
            request.class_state.refused += 1
            raise DeadlineImpossible(done, request.due - request.arrived)
        request.deadline = request.due = None
        request.priority = -math.inf
