"""Records of the manager's decisions, and its rare events.

Records are added under the manager's lock, in the order of the decisions. `Recorder.flush` then
delivers them, outside the lock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context

from greensched import records
from greensched.errors import DeadlineExceeded
from greensched.leasing.device_pool import DevicePool
from greensched.leasing.requests import LeaseRequest
from greensched.records import holder_name
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.requests import NO_LOANS, QUEUED, Grant, Request

logger = logging.getLogger("greensched")

#: Rare events kept for `recent`.
MOST_RECENT = 64


class LeaseRecords:
    """Makes the records of requests and grants. The `add_...` methods are for watchers only.

    Args:
        recorder: Delivers the records.
        time: Returns the time of the driver's clock, in seconds.
    """

    def __init__(self, recorder: records.Recorder, time: Callable[[], float]) -> None:
        self.recorder = recorder
        self.device_pools: tuple[DevicePool, ...] = ()
        #: The latest rare events: time and text.
        self.recent: deque[tuple[float, str]] = deque(maxlen=MOST_RECENT)
        self._time = time
        #: What grants have borrowed, according to the latest records.
        self._told_loans: dict[Grant, Mapping[ClassState, int]] = {}

    # -- requests --------------------------------------------------------------------------------

    def add_requested(self, now: float, number: int, request: LeaseRequest, holder: object) -> None:
        """Record that a request was made, with the context of its caller."""
        sizes, name = tuple(map(repr, request.sizes)), holder_name(holder)
        context = copy_context()
        self.recorder.add(records.Requested(now, number, request.service, sizes, name, context))

    def add_requested_again(self, now: float, number: int, grant: Grant) -> None:
        """Record that a lease without SMs requests them again, with the context of its task."""
        request, service = grant.request, grant.class_state.name
        sizes, context = tuple(map(str, request.parts)), copy_context()
        name = holder_name(request.holder if grant.holder is None else grant.holder)
        self.recorder.add(records.Requested(now, number, service, sizes, name, context))

    def add_queued(self, request: Request, waiting: int) -> None:
        """Record that a request waits, unless it is granted or rejected already."""
        if request.state is QUEUED:
            name = request.class_state.name
            self.recorder.add(records.Queued(self._time(), request.order, name, waiting))

    def add_cancelled(self, request: Request) -> None:
        self.recorder.add(records.Cancelled(self._time(), request.order, request.class_state.name))

    def refused_in_queue(self, request: Request, error: Exception) -> None:
        """Record that a request left the queue with an error. Not for use under the lock."""
        name = request.class_state.name
        is_expired = isinstance(error, DeadlineExceeded)
        what = "expired" if is_expired else "refused"
        self.tell_rarely("%s a queued request of class %r: %s", what, name, error)
        if self.recorder.watched:
            now, number = self._time(), request.order
            refused = records.Refused(now, number, name, type(error).__name__)
            self.recorder.emit(records.Expired(now, number, name) if is_expired else refused)

    # -- grants ----------------------------------------------------------------------------------

    def granted(self, grant: Grant, now: float) -> records.Granted:
        """Make the record of a grant, and number it."""
        request, device_pool = grant.request, self.device_pools[grant.device]
        grant.number = grant.number or self.recorder.next_number()
        return records.Granted(
            now,
            request.order,
            grant.number,
            grant.class_state.name,
            device_pool.device.ordinal,
            grant.mask & device_pool.cells.full_mask,
            grant.sms,
            max(0.0, now - request.arrived),
            holder_name(grant.holder),
        )

    def add_resized(self, grant: Grant, mask: int, sms: int, time: float | None) -> None:
        """Record that a grant has new cells: its first, others than its earlier mask, or none.

        `time` is the statistics' time of its beginning or end, or None.
        """
        now, add, name = time, self.recorder.add, grant.class_state.name
        if now is None:
            now = self._time()
        device_pool = self.device_pools[grant.device]
        if not mask:
            add(self.granted(grant, now))
        elif grant.mask:
            ordinal, cells = device_pool.device.ordinal, grant.mask & device_pool.cells.full_mask
            add(records.Resized(now, grant.number, name, ordinal, cells, grant.sms))
        # Other grants, too, because owners may write off their loans.
        for borrower in {grant: None, **dict.fromkeys(self._told_loans)}:
            self._add_loans(borrower, now)
        if not grant.mask:
            if grant.released is None:
                add(records.Released(now, grant.number, name))
            add(records.Drained(now, grant.number, name, grant.used + sms * (now - grant.since)))
            if grant.request.state is QUEUED:  # it gave way, and is queued again
                self.add_requested_again(now, grant.request.order, grant)

    def _add_loans(self, grant: Grant, now: float) -> None:
        """Record what a grant has borrowed and returned since the last record."""
        before, loans = self._told_loans.get(grant, NO_LOANS), grant.loans
        if loans is before:
            return
        device_pool = self.device_pools[grant.device]
        for owner in {**before, **loans}:
            more = (loans.get(owner, 0) - before.get(owner, 0)) * device_pool.cells.size
            if more:
                kind = records.Lent if more > 0 else records.Reclaimed
                names = grant.class_state.name, device_pool.device.ordinal, owner.name
                self.recorder.add(kind(now, grant.number, *names, abs(more)))
        if loans:
            self._told_loans[grant] = loans
        else:
            self._told_loans.pop(grant, None)

    def add_released(self, grant: Grant, now: float) -> None:
        """Record that the block of a lease was left before its work was done."""
        grant.released = now
        if self.recorder.watched:
            self.recorder.add(records.Released(now, grant.number, grant.class_state.name))

    def forget(self) -> None:
        """Forget earlier records, because the last watcher has gone."""
        self._told_loans.clear()

    # -- rare events -----------------------------------------------------------------------------

    def tell_rarely(self, what: str, *values: object, level: int = logging.DEBUG) -> None:
        """Log a rare event, and keep it in `recent`. Not for use under the lock."""
        logger.log(level, what, *values)
        self.recent.append((self._time(), what % values))

    def lost(self, error: BaseException, leased: Sequence[str]) -> None:
        """Log a lost device, with the leases that may be the cause. Not for use under the lock."""
        message = "the GPU is unusable until this process is replaced: %s (leased then: %s)"
        self.tell_rarely(message, error, ", ".join(leased) or "nothing", level=logging.ERROR)
        if self.recorder.watched:
            self.recorder.emit(
                records.Lost(self._time(), getattr(error, "device", None), str(error))
            )
