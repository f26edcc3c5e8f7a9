"""What happens to a request that would be late: it is refused, or goes behind all others.

A request of known duration with a deadline is admitted if its predicted end is not later. Where the
policy serves the earliest deadline first, every admitted request of its priority that is due later
must still be in time as well. The prediction is a lower bound: what goes before, by what packs.
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
        queue: what is due, where the policy serves the earliest deadline first.
        allocator: what is granted.
    """

    def __init__(self, queue: RequestQueue, allocator: SMAllocator) -> None:
        self._queue = queue
        self._allocator = allocator
        #: How many requests were refused.
        self.refused = 0

    def check(self, request: Request) -> None:
        """Handle what cannot be done in time, not even at once with the most it asks for.

        Raises:
            DeadlineImpossible: it is refused.
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
        """Handle what must wait too long to be done in time, or would make others late.

        Raises:
            DeadlineImpossible: it is refused.
        """
        sms = line.asked
        if request.is_elastic:  # it may be granted more than its least
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
            request: the request.
            due: when it is due.
            seconds: what it takes once it is granted.
            sms: the SMs that it takes.
            now: seconds.

        Returns:
            Seconds from now until then, and whether those of its priority that are due later stay
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
        """Refuse a late request, or put it behind all others, as its class says.

        Now and then one is admitted, to find out whether the durations of the class are right.
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
