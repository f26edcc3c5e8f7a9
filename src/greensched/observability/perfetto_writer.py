"""Records as packets of Perfetto's trace format: tracks, slices, flows and counters.

    Queue / a class              a slice for each request, from the request to its answer
          / other answers        requests that were refused, expired or cancelled
          / waiting              a counter for each class
    GPU   / a set of SMs         a slice for each lease, and in it what happens to it
          /   / launch call copy   a slice for each job: see `Done.started`
          / SMs leased ...       counters

Flows lead from a request to its leases, from a lease to its first submission, and from a submission
to its job. All times are the host's. One event has each record in its annotations, where
`trace_reader` finds it again.
"""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from google.protobuf import proto
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    Trace,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)

from greensched import records
from greensched.observability.lease_history import TracedDevice

#: The tag of a packet in a trace.
PACKET: Final = bytes([Trace.PACKET_FIELD_NUMBER << 3 | 2])
#: The annotation with the record's name, or `Device` or `Ended`.
RECORD: Final = "record"
#: The one sequence of all packets, which are in the order of their times.
SEQUENCE: Final = 1

_BEGIN, _END = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END
_INSTANT, _COUNTER = TrackEvent.TYPE_INSTANT, TrackEvent.TYPE_COUNTER
#: The order of a device's tracks: the counters, then the sets of SMs.
_COUNTERS: Final = ("SMs leased", "SMs draining", "SMs lent", "SMs free")

Key = tuple[object, ...]
Annotations = Mapping[str, object]
#: Numbers of flows; 0 stands for none.
Flows = tuple[int, ...]


@dataclass(slots=True)
class _Slice:
    """A slice that has begun. Slices that overlap have separate tracks of the same name."""

    track: int
    key: Key
    row: int


@dataclass(slots=True)
class _Wait:
    slice: _Slice
    flow: int
    is_queued: bool = False


@dataclass(slots=True)
class _Lease:
    service: str
    device: int
    cells: int
    sms: int
    slice: _Slice
    #: The flow to the first submission; 0 after that.
    flow: int
    is_draining: bool = False
    lent: int = 0


@dataclass(slots=True)
class _Stream:
    """A stream and the names and flows of its unfinished jobs, in order. The first one runs."""

    track: int
    jobs: dict[int, tuple[str, int]] = field(default_factory=dict)


class PerfettoWriter:
    """Encodes the records of one pool, on one thread.

    Args:
        devices: The devices of the pool.
        time: When the trace begins, in seconds; earlier starts are shown at this time.
    """

    def __init__(self, devices: Sequence[TracedDevice], time: float) -> None:
        self._packets = io.BytesIO()
        self._nanoseconds = round(time * 1e9)
        self._devices = {device.ordinal: device for device in devices}
        self._tracks: dict[Key, int] = {}
        self._new_flow = itertools.count(1).__next__
        self._rows: defaultdict[Key, set[int]] = defaultdict(set)
        self._counters: dict[int, int] = {}
        #: When the last instant of each track was.
        self._instants: dict[int, int] = {}
        self._waits: dict[int, _Wait] = {}
        self._waiting: defaultdict[str, int] = defaultdict(int)
        self._leases: dict[int, _Lease] = {}
        self._streams: dict[Key, _Stream] = {}
        self._stream_of: dict[int, _Stream] = {}
        #: The latest granted request and its flow, for its further leases.
        self._last_granted = (-1, 0)
        self._encoders: dict[type[records.Record], Callable[[Any], None]] = {
            records.Requested: self._request,
            records.Queued: self._queue,
            records.Granted: self._grant,
            records.Resized: self._resize,
            records.Lent: self._lend,
            records.Reclaimed: self._lend,
            records.Submitted: self._submit,
            records.Done: self._finish,
            records.Released: self._release,
            records.Drained: self._drain,
            records.Refused: self._answer,
            records.Expired: self._answer,
            records.Cancelled: self._answer,
            records.Lost: self._lose,
        }
        for device in devices:
            facts = {RECORD: "Device", **asdict(device)}
            self._event(_INSTANT, self._device(device.ordinal), device.name, facts)
            self._count(device.ordinal)

    def take(self) -> bytes:
        """Return the bytes encoded since the last call."""
        packets, self._packets = self._packets.getvalue(), io.BytesIO()
        return packets

    def add(self, record: records.Record) -> None:
        """Encode the next record."""
        self._nanoseconds = max(self._nanoseconds, round(record.time * 1e9))
        self._encoders[type(record)](record)

    def end(self, time: float, dropped: int) -> None:
        """End every slice at the end of the trace; `dropped` records are missing."""
        self._nanoseconds = max(self._nanoseconds, round(time * 1e9))
        for stream in self._streams.values():
            if stream.jobs:
                self._event(_END, stream.track)
        for lease in self._leases.values():
            self._end_lease(lease)
        for wait in self._waits.values():
            self._end_slice(wait.slice)
        self._event(_INSTANT, self._queue_track(), "end", {RECORD: "Ended", "dropped": dropped})

    # -- requests --------------------------------------------------------------------------------

    def _request(self, record: records.Requested) -> None:
        self._end_wait(record.request)  # the record of its answer was dropped
        flow, key = self._new_flow(), ("wait", record.service)
        begun = self._begin_slice(key, self._queue_track(), _name(record.service), record, (flow,))
        self._waits[record.request] = _Wait(begun, flow)

    def _queue(self, record: records.Queued) -> None:
        wait = self._waits.get(record.request)
        if wait is not None:
            wait.is_queued = True
            self._event(_INSTANT, wait.slice.track, "queued", _annotations(record))
            self._count_waiting(record.service, 1)

    def _end_wait(self, request: int, service: str = "") -> int:
        """End the waiting of a request; return its flow, or 0 if the request does not wait."""
        wait = self._waits.pop(request, None)
        if wait is None:
            return 0
        self._end_slice(wait.slice)
        if wait.is_queued:
            self._count_waiting(service, -1)
        return wait.flow

    def _answer(self, record: records.Refused | records.Expired | records.Cancelled) -> None:
        flow = self._end_wait(record.request, record.service)
        track = self._track(("answers",), "other answers", self._queue_track())
        name = f"{type(record).__name__.lower()}: {_name(record.service)}"
        self._event(_INSTANT, track, name, _annotations(record), ends=flow)

    # -- leases ----------------------------------------------------------------------------------

    def _grant(self, record: records.Granted) -> None:
        flow = self._end_wait(record.request, record.service)
        if not flow and record.request == self._last_granted[0]:
            flow = self._last_granted[1]
        self._last_granted = record.request, flow
        own = self._new_flow()
        begun = self._begin_on_cells(record, (flow, own))
        self._leases[record.lease] = _Lease(
            record.service, record.device, record.cells, record.sms, begun, own
        )
        self._count(record.device)

    def _begin_on_cells(self, record: records.Granted | records.Resized, flows: Flows) -> _Slice:
        key = ("lease", record.device, record.cells)
        parent = self._device(record.device)
        ranges = self._devices[record.device].sms_of(record.cells)
        label = ", ".join(f"{first}-{end - 1}" for first, end in ranges)
        rank = len(_COUNTERS) + (record.cells & -record.cells).bit_length()
        name = _name(record.service)
        return self._begin_slice(key, parent, name, record, flows, label=f"SMs {label}", rank=rank)

    def _resize(self, record: records.Resized) -> None:
        lease = self._leases.get(record.lease)
        if lease is not None:
            self._end_lease(lease)
            lease.cells, lease.sms = record.cells, record.sms
            lease.slice = self._begin_on_cells(record, (lease.flow,))
            self._count(lease.device)

    def _lend(self, record: records.Lent | records.Reclaimed) -> None:
        lease = self._leases.get(record.lease)
        if lease is not None:
            is_lent = isinstance(record, records.Lent)
            lease.lent = max(0, lease.lent + (record.sms if is_lent else -record.sms))
            what = "borrowed" if is_lent else "returned"
            name = f"{what} {record.sms} SMs of {record.owner}"
            self._event(_INSTANT, lease.slice.track, name, _annotations(record))
            self._count(lease.device)

    def _release(self, record: records.Released) -> None:
        lease = self._leases.get(record.lease)
        if lease is not None:
            lease.is_draining = True
            self._event(_BEGIN, lease.slice.track, "draining", _annotations(record))
            self._count(lease.device)

    def _drain(self, record: records.Drained) -> None:
        lease = self._leases.pop(record.lease, None)
        if lease is not None:
            self._end_lease(lease, record)
            self._count(lease.device)

    def _end_lease(self, lease: _Lease, record: records.Record | None = None) -> None:
        if lease.is_draining:
            self._event(_END, lease.slice.track)
        self._end_slice(lease.slice, record)

    def _lose(self, record: records.Lost) -> None:
        known = record.device if record.device in self._devices else None
        track = self._queue_track() if known is None else self._device(known)
        self._event(_INSTANT, track, f"lost: {record.error}", _annotations(record))

    # -- jobs ------------------------------------------------------------------------------------

    def _submit(self, record: records.Submitted) -> None:
        lease = self._leases.get(record.lease)
        if lease is None:
            return
        flow, name, track = self._new_flow(), record.name, lease.slice.track
        ends, lease.flow = lease.flow, 0
        self._event(_INSTANT, track, f"submit {name}", _annotations(record), (flow,), ends)
        key = ("stream", lease.device, lease.cells, record.stream)
        stream = self._streams.get(key)
        if stream is None:
            parent = self._tracks["lease", lease.device, lease.cells, 0]
            stream = self._streams[key] = _Stream(self._track(key, record.stream, parent))
        stream.jobs[record.job] = name, flow
        self._stream_of[record.job] = stream
        if len(stream.jobs) == 1:
            self._event(_BEGIN, stream.track, name, ends=flow)

    def _finish(self, record: records.Done) -> None:
        stream = self._stream_of.pop(record.job, None)
        if stream is None:
            return
        ran = next(iter(stream.jobs)) == record.job
        name, flow = stream.jobs.pop(record.job)
        if ran:
            self._event(_END, stream.track, annotations=_annotations(record))
        else:  # it failed before earlier jobs were done
            self._event(_INSTANT, stream.track, name, _annotations(record), ends=flow)
        if ran and stream.jobs:
            name, flow = next(iter(stream.jobs.values()))
            self._event(_BEGIN, stream.track, name, ends=flow)

    # -- counters --------------------------------------------------------------------------------

    def _count(self, ordinal: int) -> None:
        """Encode the changed counters of a device."""
        leases = [lease for lease in self._leases.values() if lease.device == ordinal]
        draining = sum(lease.sms for lease in leases if lease.is_draining)
        leased = sum(lease.sms for lease in leases) - draining
        lent = sum(lease.lent for lease in leases)
        free = max(0, self._devices[ordinal].sms - leased - draining)
        for rank, value in enumerate((leased, draining, lent, free)):
            key = "counter", ordinal, _COUNTERS[rank]
            self._set_counter(key, _COUNTERS[rank], self._device(ordinal), value, rank=rank)

    def _count_waiting(self, service: str, more: int) -> None:
        self._waiting[service] += more
        name = f"waiting: {_name(service)}"
        self._set_counter(
            ("waiting", service), name, self._queue_track(), self._waiting[service], unit="requests"
        )

    def _set_counter(
        self, key: Key, name: str, parent: int, value: int, *, rank: int = 0, unit: str = "SMs"
    ) -> None:
        track = self._track(key, name, parent, rank=rank, unit=unit)
        if self._counters.get(track) != value:
            self._counters[track] = value
            self._event(_COUNTER, track, value=value)

    # -- tracks ----------------------------------------------------------------------------------

    def _queue_track(self) -> int:
        return self._track(("queue",), "Queue")

    def _device(self, ordinal: int) -> int:
        device = self._devices[ordinal]
        return self._track(("device", ordinal), f"GPU {ordinal}: {device.name}", rank=1 + ordinal)

    def _track(self, key: Key, name: str, parent: int = 0, *, rank: int = 0, unit: str = "") -> int:
        """Return the number of a track; describe a new track in the trace."""
        known = self._tracks.get(key)
        if known is not None:
            return known
        self._tracks[key] = uuid = len(self._tracks) + 1
        packet = TracePacket(trusted_packet_sequence_id=SEQUENCE)
        described = packet.track_descriptor
        described.uuid, described.name = uuid, name
        described.child_ordering = TrackDescriptor.EXPLICIT
        described.sibling_order_rank = rank
        if parent:
            described.parent_uuid = parent
        if unit:
            described.counter.unit_name = unit
        self._write(packet)
        return uuid

    def _begin_slice(
        self,
        key: Key,
        parent: int,
        name: str,
        record: records.Record,
        flows: Flows,
        *,
        label: str = "",
        rank: int = 0,
    ) -> _Slice:
        """Begin a slice on the first free track of this name."""
        used = self._rows[key]
        row = next(row for row in itertools.count() if row not in used)
        used.add(row)
        track = self._track((*key, row), label or name, parent, rank=rank)
        self._event(_BEGIN, track, name, _annotations(record), flows)
        return _Slice(track, key, row)

    def _end_slice(self, begun: _Slice, record: records.Record | None = None) -> None:
        self._rows[begun.key].discard(begun.row)
        annotations = None if record is None else _annotations(record)
        self._event(_END, begun.track, annotations=annotations)

    # -- packets ---------------------------------------------------------------------------------

    def _event(
        self,
        kind: Any,
        track: int,
        name: str = "",
        annotations: Annotations | None = None,
        flows: Flows = (),
        ends: int = 0,
        value: int | None = None,
    ) -> None:
        if kind == _INSTANT:
            # Perfetto nests the instants of one time, and drops those that are too deep.
            self._nanoseconds = max(self._nanoseconds, self._instants.get(track, -1) + 1)
            self._instants[track] = self._nanoseconds
        packet = TracePacket(timestamp=self._nanoseconds, trusted_packet_sequence_id=SEQUENCE)
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name:
            event.name = name
        event.flow_ids.extend(filter(None, flows))
        if ends:
            event.terminating_flow_ids.append(ends)
        if value is not None:
            event.counter_value = value
        for key, annotation in (annotations or {}).items():
            _annotate(event.debug_annotations.add(), key, annotation)
        self._write(packet)

    def _write(self, packet: TracePacket) -> None:
        self._packets.write(PACKET)
        proto.serialize_length_prefixed(packet, self._packets)


def _name(service: str) -> str:
    return service or "no class"


def _annotations(record: records.Record) -> Annotations:
    values = record.as_dict()
    del values["time"]
    return values


def _annotate(annotation: Any, key: str, value: object) -> None:
    annotation.name = key
    if isinstance(value, int) and key != "cells":
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    elif isinstance(value, tuple):
        annotation.string_value = ", ".join(map(str, value))
    elif value is not None:  # a mask of cells may exceed the format's integers
        annotation.string_value = hex(value) if isinstance(value, int) else str(value)
