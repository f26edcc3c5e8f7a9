"""Which leases held which SMs, and when: a pool's records as spans of time."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Any, Self

from greensched import records
from greensched.device.device import Device
from greensched.scheduling.cells import DeviceCells


@dataclass(frozen=True, slots=True)
class TracedDevice:
    """A device, split into `cell_count` cells of `cell_sms` SMs and a cell of the remainder."""

    ordinal: int
    name: str
    uuid: str
    sms: int
    cell_count: int
    cell_sms: int

    @classmethod
    def of(cls, device: Device, cells: DeviceCells) -> Self:
        """Describe a device and its split into cells."""
        return cls(device.ordinal, device.name, device.uuid, cells.total, cells.count, cells.size)

    def sms_of(self, mask: int) -> list[tuple[int, int]]:
        """Return the SMs of a set of cells as ranges (first, end), in the order of the cells."""
        ranges: list[tuple[int, int]] = []
        for cell in range(mask.bit_length()):
            if mask >> cell & 1:
                first = min(cell * self.cell_sms, self.sms)
                end = first + self.cell_sms if cell < self.cell_count else self.sms
                if ranges and ranges[-1][1] == first:
                    first = ranges.pop()[0]
                ranges.append((first, end))
        return ranges


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which a lease held the same cells in the same state, in seconds of the clock.

    Attributes:
        draining: The block was left, but its work was not done.
        lent: How many of the SMs were borrowed.
    """

    lease: int
    service: str
    holder: str
    device: int
    cells: int
    sms: int
    start: float
    end: float
    draining: bool = False
    lent: int = 0

    @property
    def sm_seconds(self) -> float:
        """The span's duration times its SMs."""
        return self.sms * (self.end - self.start)


@dataclass(slots=True)
class ServiceHistory:
    """The SM-time of a class, and the outcomes of its requests.

    Attributes:
        requests: Numbers of `requested`, `granted`, `refused`, `expired` and `cancelled`.
        waits: The waits of granted requests, in seconds.
        jobs, failed: Numbers of completed jobs, and of those with an error.
    """

    sm_seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    leases: int = 0
    jobs: int = 0
    failed: int = 0


class LeaseHistory:
    """Collects spans from records. Pass `add` to `Pool.watch`.

    Args:
        most: The most spans to keep, newest first. None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        #: Ended spans, in the order of their ends.
        self.spans: deque[Span] = deque(maxlen=most)
        self.services: defaultdict[str, ServiceHistory] = defaultdict(ServiceHistory)
        #: The number of waiting requests after each change, as (time, class, number).
        self.waiting: deque[tuple[float, str, int]] = deque(maxlen=most)
        self.lost: list[str] = []
        self._open: dict[int, Span] = {}
        #: Unanswered requests, and whether each is queued.
        self._asked: dict[int, bool] = {}
        self._queued: Counter[str] = Counter()

    def add(self, record: records.Record) -> None:
        """Process the next record."""
        match record:
            case records.Requested():
                self.services[record.service].requests["requested"] += 1
                self._asked[record.request] = False
            case records.Queued():
                self._asked[record.request] = True
                self._note_waiting(record, 1)
            case records.Granted():
                self._grant(record)
            case records.Resized():
                self._change(record, cells=record.cells, sms=record.sms)
            case records.Lent() | records.Reclaimed():
                self._lend(record)
            case records.Released():
                self._change(record, draining=True)
            case records.Drained():
                self._end(record.lease, record.time)
            case records.Done():
                self._count_job(record)
            case records.Refused() | records.Expired() | records.Cancelled():
                self._answer(record)
            case records.Lost():
                self.lost.append(record.error)

    def _grant(self, record: records.Granted) -> None:
        service = self.services[record.service]
        service.leases += 1
        if record.request in self._asked:  # otherwise a further part, or a lease from before
            service.waits.append(record.wait)
            self._answer(record)
        self._open[record.lease] = Span(
            record.lease,
            record.service,
            record.holder,
            record.device,
            record.cells,
            record.sms,
            record.time,
            record.time,
        )

    def _count_job(self, record: records.Done) -> None:
        span = self._open.get(record.lease)
        service = self.services["" if span is None else span.service]
        service.jobs += 1
        service.failed += bool(record.error)

    def _lend(self, record: records.Lent | records.Reclaimed) -> None:
        span = self._open.get(record.lease)
        if span is not None:
            more = record.sms if isinstance(record, records.Lent) else -record.sms
            self._change(record, lent=max(0, span.lent + more))

    def _change(
        self,
        record: records.Resized | records.Released | records.Lent | records.Reclaimed,
        **to: Any,
    ) -> None:
        span = self._open.get(record.lease)
        if span is not None:
            self._keep(span, record.time)
            self._open[record.lease] = replace(span, start=record.time, end=record.time, **to)

    def _end(self, lease: int, time: float) -> None:
        span = self._open.pop(lease, None)
        if span is not None:
            self._keep(span, time)

    def _keep(self, span: Span, end: float) -> None:
        if end > span.start:
            ended = replace(span, end=end)
            self.services[span.service].sm_seconds += ended.sm_seconds
            self.spans.append(ended)

    def _answer(
        self, record: records.Granted | records.Refused | records.Expired | records.Cancelled
    ) -> None:
        """Count the outcome of a request."""
        self.services[record.service].requests[type(record).__name__.lower()] += 1
        if self._asked.pop(record.request, False):
            self._note_waiting(record, -1)

    def _note_waiting(
        self,
        record: records.Queued
        | records.Granted
        | records.Refused
        | records.Expired
        | records.Cancelled,
        more: int,
    ) -> None:
        self._queued[record.service] += more
        self.waiting.append((record.time, record.service, self._queued[record.service]))

    def all_spans(self, now: float) -> list[Span]:
        """Return all spans; those that have not ended end now."""
        return [*self.spans, *(replace(span, end=now) for span in self._open.values())]

    def end(self, time: float) -> None:
        """End all open spans, because nothing is known from here on."""
        for lease in tuple(self._open):
            self._end(lease, time)
