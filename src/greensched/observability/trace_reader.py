"""Read the records of a trace that `Pool.trace` wrote, as a history."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Final

from greensched import records
from greensched.errors import InvalidRequest, MissingPackage
from greensched.observability.lease_history import LeaseHistory, TracedDevice

#: Records between two reports of progress.
PROGRESS: Final = 1000
#: Converts an annotation to a field, by the field's type.
_PARSERS: Final[dict[str, Callable[[Any], object]]] = {
    "int": lambda value: int(value, 0) if isinstance(value, str) else int(value),
    "int | None": lambda value: None if value == "" else int(value),
    "tuple[str, ...]": lambda value: tuple(value.split(", ")),
}


@dataclass(slots=True)
class RecordedTrace:
    """The content of a trace. Times are in seconds of the pool's clock.

    Attributes:
        start, end: When the trace begins and ends.
        dropped: How many records are missing because the disk was too slow.
        is_complete: Whether the trace has its end; without one its process died.
    """

    devices: list[TracedDevice] = field(default_factory=list)
    history: LeaseHistory = field(default_factory=LeaseHistory)
    start: float = 0.0
    end: float = 0.0
    dropped: int = 0
    is_complete: bool = False


def read(
    path: Path, progress: Callable[[float, str], None] = lambda _done, _what: None
) -> RecordedTrace:
    """Read a trace. Blocks; the history of a long trace takes memory.

    Args:
        path: The path of the file.
        progress: Called repeatedly with the fraction read, from 0 to 1, and the current step.

    Raises:
        MissingPackage: perfetto is not installed; says what to install.
        InvalidRequest: The file cannot be read, or `Pool.trace` did not write it.
    """
    trace = RecordedTrace()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for number, (time, values) in enumerate(_annotated(file)):
                _add(trace, time, values)
                if number % PROGRESS == 0:
                    progress(file.tell() / size, "reading")
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from error
    if not trace.devices:
        raise InvalidRequest(f"{path} is not a trace that Pool.trace wrote")
    trace.history.end(trace.end)
    return trace


def _add(trace: RecordedTrace, time: float, values: dict[str, Any]) -> None:
    kind = values.pop("record")
    if kind == "Device":
        trace.devices.append(TracedDevice(**values))
        trace.start = trace.end = time
        return
    trace.end = max(trace.end, time)
    if kind == "Ended":
        trace.dropped, trace.is_complete = values["dropped"], True
        return
    of_kind: type[records.Record] = getattr(records, kind)
    made: dict[str, Any] = {"time": time}
    for record_field in fields(of_kind):
        if record_field.name == "context":
            made[record_field.name] = Context()
        elif record_field.name != "time":
            value = values.get(record_field.name, "")
            parse = _PARSERS.get(str(record_field.type))
            made[record_field.name] = value if parse is None else parse(value)
    trace.history.add(of_kind(**made))


def _annotated(file: IO[bytes]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the time and the annotations of each event that has a record."""
    try:
        from google.protobuf import proto
        from google.protobuf.message import DecodeError
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

        from greensched.observability.perfetto_writer import PACKET, RECORD
    except ImportError as error:
        raise MissingPackage("a trace", "perfetto", "trace") from error
    while file.read(1) == PACKET:
        try:
            packet = proto.parse_length_prefixed(TracePacket, file)
        except (DecodeError, ValueError):
            return  # the process died while writing this
        annotations = packet.track_event.debug_annotations
        if annotations and annotations[0].name == RECORD:
            values = {
                annotation.name: getattr(
                    annotation, annotation.WhichOneof("value") or "string_value"
                )
                for annotation in annotations
            }
            yield packet.timestamp / 1e9, values
