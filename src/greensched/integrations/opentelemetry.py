"""OpenTelemetry metrics and spans of pools. Needs the extra `opentelemetry`.

    from greensched.integrations.opentelemetry import instrument

    instrument(pool)  # after the providers were set

Names follow OpenTelemetry's conventions for connection pools (`db.client.connection.*`) and
hardware (`hw.*`). Spans and histograms come from the pool's records, so each lease costs as much as
with `Pool.watch`; `greensched.integrations.prometheus` gives metrics alone, at less cost.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from functools import partial
from typing import Any, Final

from greensched import (
    Cancelled,
    Done,
    Drained,
    Expired,
    Granted,
    Pool,
    Queued,
    Record,
    Refused,
    Released,
    Requested,
    Submitted,
)
from greensched.errors import MissingPackage
from greensched.integrations.reading import OUTCOMES, ExportedPools, PoolReading, info, read

try:
    from opentelemetry import context as otel_context
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation
    from opentelemetry.trace import Link, Span, StatusCode, TracerProvider
except ModuleNotFoundError as error:
    raise MissingPackage(__name__, "opentelemetry-api", "opentelemetry") from error

SCOPE: Final = "greensched"
#: Bounds of the histograms: those of `Durations`. OpenTelemetry's defaults do not suit seconds.
BOUNDS: Final = [2.0**exponent for exponent in range(-17, 5)]

#: A context without a span, because the delivering thread's current span is unrelated.
NO_PARENT: Final = otel_context.Context()

Measured = Iterator[tuple[float, dict[str, str]]]


def instrument(
    pool: Pool,
    *,
    name: str = "default",
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
) -> None:
    """Report a pool's metrics and spans until it is closed. Idempotent. Never waits.

    Spans: `greensched.lease.acquire`, from a request to its grant, and `greensched.lease.use`, from
    there until the work is done, are children of the span that was current at the request; `launch
    KERNEL`, `call FUNCTION` and `copy ...`, of the one at the submission. A lease that gives way at
    a checkpoint makes a new request there.

    Args:
        name: The attribute `greensched.pool.name`; no other open pool may have it.
        meter_provider, tracer_provider: None means the global providers.

    Raises:
        InvalidRequest: Another pool has the name, or this pool has another name.
    """
    meters = meter_provider or metrics.get_meter_provider()
    with _lock:
        exporter = _exporters.get(meters)
        if exporter is None:
            exporter = _exporters[meters] = _Metrics(meters)
    if exporter.pools.add(pool, name):
        pool.time_leases()  # gives requests without a class statistics, too
        tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        pool.watch(_Watcher(weakref.ref(pool), name, tracer, exporter))


# -- metrics -------------------------------------------------------------------------------------


class _Metrics:
    """The instruments of one provider, shared by all its pools."""

    def __init__(self, provider: MeterProvider) -> None:
        self.pools = ExportedPools()
        meter = metrics.get_meter(SCOPE, meter_provider=provider)
        kinds: dict[str, Callable[..., object]] = {
            "counter": meter.create_observable_counter,
            "up_down": meter.create_observable_up_down_counter,
            "gauge": meter.create_observable_gauge,
        }
        for name, (kind, unit, text, measure) in OBSERVED.items():
            kinds[kind](name, [partial(self._observe, measure)], unit, text)
        self.wait, self.use, self.drain = (
            meter.create_histogram(
                f"greensched.lease.{part}_time",
                "s",
                text,
                explicit_bucket_boundaries_advisory=BOUNDS,
            )
            for part, text in TIMES.items()
        )

    def _observe(
        self, measure: Callable[[PoolReading], Measured], _: CallbackOptions
    ) -> Iterable[Observation]:
        for name, pool in self.pools.live():
            for value, attributes in measure(read(pool)):
                yield Observation(value, {"greensched.pool.name": name, **attributes})


_exporters: weakref.WeakKeyDictionary[MeterProvider, _Metrics] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _info(reading: PoolReading) -> Measured:
    if reading.statistics is not None:
        found = info(reading, reading.statistics)
        yield 1, {f"greensched.{name}": value for name, value in found.items()}


def _ready(reading: PoolReading) -> Measured:
    yield float(reading.is_ready), {}


def _fault(reading: PoolReading) -> Measured:
    if reading.fault is not None:
        kind = type(reading.fault).__name__
        yield 1, {"error.type": kind, "greensched.driver.status": reading.status}


def _of_leases(attribute: str, reading: PoolReading) -> Measured:
    for device in reading.devices:
        for (service, state), leases in device.leases.items():
            attributes = {"greensched.service": service, "greensched.lease.state": state}
            yield getattr(leases, attribute), {"hw.id": device.device.uuid, **attributes}


def _sm_limit(reading: PoolReading) -> Measured:
    for device in reading.devices:
        yield device.device.sm_count, {"hw.id": device.device.uuid}


def _sm_usage(reading: PoolReading) -> Measured:
    for device in reading.devices:
        for state, sms in device.sms.items():
            yield sms, {"hw.id": device.device.uuid, "greensched.sm.state": state}


def _sm_hung(reading: PoolReading) -> Measured:
    for device in reading.devices:
        for service, sms in device.hung.items():
            yield sms, {"hw.id": device.device.uuid, "greensched.service": service}


def _wakes(reading: PoolReading) -> Measured:
    wake = None if reading.statistics is None else reading.statistics.wake
    if wake is not None:
        yield wake.count, {"greensched.wake.at_most": "+Inf"}
        for bound, count in wake.buckets:
            yield count, {"greensched.wake.at_most": str(bound)}


def _of_services(attribute: str, reading: PoolReading) -> Measured:
    if reading.statistics is not None:
        for service, of_class in reading.statistics.services.items():
            yield getattr(of_class, attribute), {"greensched.service": service}


def _requests(reading: PoolReading) -> Measured:
    for outcome in OUTCOMES:
        for value, attributes in _of_services(outcome, reading):
            yield value, {**attributes, "greensched.request.outcome": outcome}


def _status(reading: PoolReading) -> Measured:
    for device in reading.devices:
        for state in ("ok", "failed"):
            attributes = {"hw.id": device.device.uuid, "hw.type": "gpu", "hw.state": state}
            yield float(device.is_up == (state == "ok")), attributes


#: Observable instruments: kind, unit, description, and the function that reads a pool.
OBSERVED: Final[dict[str, tuple[str, str, str, Callable[[PoolReading], Measured]]]] = {
    "greensched.pool.info": ("gauge", "1", "1: what a pool runs.", _info),
    "greensched.pool.ready": ("gauge", "1", "1 while the pool grants leases, else 0.", _ready),
    "greensched.pool.fault": (
        *("gauge", "1", "1: why a pool did not open, or what ended it."),
        _fault,
    ),
    "greensched.lease.count": (
        *("up_down", "{lease}", "Leases by state."),
        partial(_of_leases, "count"),
    ),
    "greensched.lease.oldest": (
        *("gauge", "s", "For how long the oldest lease has been in its state."),
        partial(_of_leases, "oldest"),
    ),
    "greensched.sm.limit": ("up_down", "{sm}", "SMs of a GPU.", _sm_limit),
    "greensched.sm.usage": ("up_down", "{sm}", "SMs of a GPU by state.", _sm_usage),
    "greensched.sm.hung": (
        *("up_down", "{sm}", "SMs under work that has not ended within hang_after."),
        _sm_hung,
    ),
    "greensched.wake.count": (
        *("counter", "{wake}", "Queued requests whose task went on within so many seconds."),
        _wakes,
    ),
    "greensched.sm.time": (
        *("counter", "{sm}.s", "SM-seconds that the leases of a class took."),
        partial(_of_services, "sm_seconds"),
    ),
    "greensched.lease.pending_requests": (
        *("up_down", "{request}", "Queued requests."),
        partial(_of_services, "waiting"),
    ),
    "greensched.lease.requests": ("counter", "{request}", "Requests by outcome.", _requests),
    "hw.status": ("up_down", "1", "Whether a GPU works.", _status),
}
TIMES: Final = {
    "wait": "From a request to its grant.",
    "use": "From a grant to the end of the block.",
    "drain": "From the end of the block until the work was done.",
}


# -- spans ---------------------------------------------------------------------------------------


class _Watcher:
    """Turns the records of one pool into spans, and adds to the histograms."""

    def __init__(
        self, pool: weakref.ref[Pool], name: str, tracer: trace.Tracer, instruments: _Metrics
    ) -> None:
        self._pool = pool
        self._attributes = {"greensched.pool.name": name}
        self._tracer = tracer
        self._histograms: dict[str, Histogram] = {
            "wait": instruments.wait, "use": instruments.use, "drain": instruments.drain,
        }  # fmt: skip
        #: Nanoseconds to add to the driver's clock for the time of day.
        self._offset: int | None = None
        self._acquires: dict[int, tuple[Span, otel_context.Context]] = {}
        #: The latest granted request and its context, for further leases of the same request.
        self._last: tuple[int, otel_context.Context] | None = None
        #: The span of each lease, and when the lease was granted, later when it was released.
        self._uses: dict[int, tuple[Span, float]] = {}
        self._jobs: dict[int, Span] = {}
        self._handlers: dict[type[Record], Callable[[Any], None]] = {
            Requested: self._requested,
            Queued: self._queued,
            Granted: self._granted,
            Refused: self._ended,
            Expired: self._ended,
            Cancelled: self._ended,
            Released: self._released,
            Drained: self._drained,
            Submitted: self._submitted,
            Done: self._done,
        }

    def __call__(self, record: Record) -> None:
        handle = self._handlers.get(type(record))
        if handle is not None:
            handle(record)

    def _ns(self, seconds: float) -> int:
        """Convert a time of the driver's clock to nanoseconds of the time of day."""
        if self._offset is None:
            pool = self._pool()
            assert pool is not None  # it has just delivered a record
            now = pool.devices[0].driver.time()
            self._offset = time.time_ns() - int(now * 1e9)
        return self._offset + int(seconds * 1e9)

    def _start(
        self,
        name: str,
        parent: otel_context.Context,
        start: float,
        links: list[Link] | None = None,
        **attributes: str | int,
    ) -> Span:
        prefixed = {f"greensched.{key}": value for key, value in attributes.items()}
        return self._tracer.start_span(
            name,
            parent,
            attributes={**self._attributes, **prefixed},
            links=links,
            start_time=self._ns(start),
        )

    def _record(self, part: str, seconds: float, service: str) -> None:
        attributes = {**self._attributes, "greensched.service": service}
        self._histograms[part].record(max(0.0, seconds), attributes)

    # -- requests --------------------------------------------------------------------------------

    def _requested(self, record: Requested) -> None:
        parent = _current(record.context)
        name = "greensched.lease.acquire"
        span = self._start(name, parent, record.time, service=record.service)
        self._acquires[record.request] = span, parent

    def _queued(self, record: Queued) -> None:
        acquire = self._acquires.get(record.request)
        if acquire is not None:  # else it was made before the pool was watched
            acquire[0].add_event("queued", timestamp=self._ns(record.time))

    def _granted(self, record: Granted) -> None:
        acquire = self._acquires.pop(record.request, None)
        if acquire is not None:  # otherwise a further part, or a lease that existed before
            span, parent = acquire
            self._record("wait", record.wait, record.service)
            span.end(self._ns(record.time))
            self._last = record.request, parent
        request, parent = self._last or (None, NO_PARENT)
        span = self._start(
            "greensched.lease.use",
            parent if request == record.request else NO_PARENT,
            record.time,
            service=record.service,
            sms=record.sms,
            holder=record.holder,
        )
        pool = self._pool()
        for device in pool.devices if pool is not None else ():
            if device.ordinal == record.device:
                span.set_attribute("hw.id", device.uuid)
        self._uses[record.lease] = span, record.time

    def _ended(self, record: Refused | Expired | Cancelled) -> None:
        acquire = self._acquires.pop(record.request, None)
        if acquire is not None:
            span, _ = acquire
            if not isinstance(record, Cancelled):
                error = record.error if isinstance(record, Refused) else "DeadlineExceeded"
                _fail(span, error)
            span.set_attribute("greensched.request.outcome", type(record).__name__.lower())
            span.end(self._ns(record.time))

    # -- leases ----------------------------------------------------------------------------------

    def _released(self, record: Released) -> None:
        use = self._uses.get(record.lease)
        if use is not None:
            span, granted = use
            span.add_event("released", timestamp=self._ns(record.time))
            self._record("use", record.time - granted, record.service)
            self._uses[record.lease] = span, record.time

    def _drained(self, record: Drained) -> None:
        use = self._uses.pop(record.lease, None)
        if use is not None:
            span, released = use
            self._record("drain", record.time - released, record.service)
            span.set_attribute("greensched.sm_seconds", record.sm_seconds)
            span.end(self._ns(record.time))

    # -- jobs ------------------------------------------------------------------------------------

    def _submitted(self, record: Submitted) -> None:
        use = self._uses.get(record.lease)
        links = [] if use is None else [Link(use[0].get_span_context())]
        self._jobs[record.job] = self._start(
            f"{record.stream} {record.name}", _current(record.context), record.time, links
        )

    def _done(self, record: Done) -> None:
        span = self._jobs.pop(record.job, None)
        if span is not None:
            span.add_event("started", timestamp=self._ns(record.started))
            if record.error:
                _fail(span, record.error)
            span.end(self._ns(record.time))


def _current(context: Context) -> otel_context.Context:
    """Return OpenTelemetry's context from a Python context."""
    return context.run(otel_context.get_current)


def _fail(span: Span, error: str) -> None:
    span.set_attribute("error.type", error)
    span.set_status(StatusCode.ERROR, error)
