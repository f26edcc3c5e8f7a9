"""`greensched trace`: the content of a trace as tables, JSON, or a picture of SMs by time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from greensched.capacity.plot import check_folder, pyplot, write
from greensched.cli import trace_report
from greensched.cli.terminal import print_table
from greensched.errors import InvalidRequest
from greensched.leasing.latency import quantile
from greensched.observability import sm_map
from greensched.observability.trace_reader import RecordedTrace

#: Colours of classes in the order of their names: matplotlib's, for light and dark screens.
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
#: Formats of `--plot`.
FORMATS = (".html", ".png", ".svg")


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before the trace is read.

    Raises:
        InvalidRequest: The format is unknown, or the folder does not exist.
        MissingPackage: matplotlib is not installed; says what to install.
    """
    if path.suffix not in FORMATS:
        raise InvalidRequest(f"--plot {path}: give a file that ends in {', '.join(FORMATS)}")
    check_folder(path)
    if path.suffix != ".html":
        pyplot()


def summary(trace: RecordedTrace) -> dict[str, Any]:
    """Return the figures of a trace for JSON. Times are in seconds."""
    seconds = trace.end - trace.start
    total = sum(device.sms for device in trace.devices) * seconds
    services = []
    for name, service in sorted(trace.history.services.items()):
        waits = sorted(service.waits)
        services.append(
            {
                "service": name,
                "sm_seconds": service.sm_seconds,
                "share": service.sm_seconds / total if total else 0.0,
                "leases": service.leases,
                **{
                    kind: service.requests[kind]
                    for kind in ("requested", "granted", "refused", "expired", "cancelled")
                },
                **{
                    f"wait_p{part}": quantile(waits, part / 100) if waits else None
                    for part in (50, 99)
                },
                "wait_max": waits[-1] if waits else None,
                "jobs": service.jobs,
                "failed": service.failed,
            }
        )
    return {
        "seconds": seconds,
        "is_complete": trace.is_complete,
        "dropped": trace.dropped,
        "lost": trace.history.lost,
        "devices": [
            {"device": device.ordinal, "name": device.name, "uuid": device.uuid, "sms": device.sms}
            for device in trace.devices
        ],
        "services": services,
    }


def print_summary(trace: RecordedTrace, figures: dict[str, Any]) -> None:
    """Print the devices, a table of the classes, and the map as text."""
    for device in figures["devices"]:
        print("GPU {device}: {name}, {sms} SMs, {uuid}".format(**device))
    columns = ["class", "SM-s", "share %", "leases", "requests", "refused", "expired", "cancelled"]
    rows = [
        (
            service["service"] or "-",
            f"{service['sm_seconds']:.3f}",
            f"{100 * service['share']:.1f}",
            service["leases"],
            service["requested"],
            *(service[kind] for kind in ("refused", "expired", "cancelled")),
            *(milliseconds(service[kind]) for kind in ("wait_p50", "wait_p99")),
            service["jobs"],
            service["failed"],
        )
        for service in figures["services"]
    ]
    columns += ["wait p50 ms", "wait p99 ms", "jobs", "failed"]
    print_table(columns, rows, f"{figures['seconds']:.3f} s")
    print()
    spans, when = list(trace.history.spans), (trace.start, trace.end, trace.start)
    print("\n".join(sm_map.text(spans, trace.devices, *when)))
    for note in notes(figures):
        print(note)


def milliseconds(seconds: float | None) -> str | None:
    """Format a time in milliseconds; None stays None."""
    return None if seconds is None else f"{1e3 * seconds:.3f}"


def notes(figures: dict[str, Any]) -> list[str]:
    """Return one sentence for each problem of a trace."""
    sentences = [f"A device was lost: {error}" for error in figures["lost"]]
    if figures["dropped"]:
        sentences.append(
            f"{figures['dropped']} records are missing: the disk was slower than the pool."
        )
    if not figures["is_complete"]:
        sentences.append("The trace has no end: its process ended first.")
    return sentences


def save(trace: RecordedTrace, figures: dict[str, Any], path: Path, title: str) -> None:
    """Draw the map of a trace into a file, in the format of its suffix.

    Raises:
        InvalidRequest: The file cannot be written.
    """
    names = [service["service"] for service in figures["services"]]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    gap = (trace.end - trace.start) * sm_map.RESOLUTION
    areas = sm_map.merged(sm_map.rectangles(trace.history.spans, trace.devices), gap)
    if path.suffix == ".html":
        page = trace_report.page(trace, figures, areas, colours, notes(figures), title)
        try:
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}") from error
        return
    figure, axes = pyplot().subplots(
        len(trace.devices), 1, figsize=(11, 1 + 3 * len(trace.devices)), sharex=True, squeeze=False
    )
    for device, (axis,) in zip(trace.devices, axes, strict=True):
        of_device = [area for area in areas if area.device == device.ordinal]
        draw(axis, of_device, colours, trace.start)
        axis.set(ylim=(0, device.sms), ylabel="SMs", title=f"GPU {device.ordinal}: {device.name}")
    axes[-1][0].set(xlim=(0, trace.end - trace.start), xlabel="s")
    axes[0][0].legend(loc="upper right")
    write(figure, path)


def draw(
    axis: Any, areas: Sequence[sm_map.Rectangle], colours: dict[str, str], start: float
) -> None:
    """Draw rectangles in the colours of classes; hatched means draining, dim means lent."""
    for name, colour in colours.items():
        axis.broken_barh([], (0, 0), color=colour, label=name or "no class")
    for area in areas:
        axis.broken_barh(
            [(area.start - start, area.end - area.start)],
            (area.first, area.end_sm - area.first),
            facecolor=colours[area.service],
            alpha=0.45 if area.is_lent else 0.9,
            hatch="////" if area.is_draining else None,
            edgecolor="white",
            linewidth=0.2,
        )
