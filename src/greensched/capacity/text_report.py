"""The report as text: a table for each rate, goodput, and reproduced published figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from greensched.capacity import metrics
from greensched.capacity.results import Results, as_dict
from greensched.capacity.sweeps import all_strategies

_COLUMNS = (
    "policy", "class", "in time", "at least", "p50", "p95", "p99", "p99.9", "x alone", "wait p99",
    "run p99", "of alone", "SMs busy", "Jain", "gap", "grants/s",
)  # fmt: skip


def table(results: Results) -> str:
    """Format the whole report.

    Latencies are in milliseconds: of a whole request, until the first token (prefill), or between
    tokens (decode). Attainments and shares are in percent; "at least" is the interval's lower end.
    """
    report = as_dict(results)
    seeds = ", ".join(map(str, report["seeds"]))
    cut = " (cut finely)" if report["granularity"] == "fine" else ""
    runs = f"{report['seconds']:g} s for each of the seeds {seeds}"
    lines = [
        *report["model"],
        f"{report['traffic']} on {report['gpus']}{cut}, {runs}",
        f"saturation at {report['saturation']:.3f} x the traffic's own rate; alone-p99: "
        + ", ".join(f"{n} {1e3 * v:.1f} ms" for n, v in report["alone_p99"].items() if v),
        "targets: " + ", ".join(f"{n} {1e3 * v:.1f} ms" for n, v in report["targets"].items()),
    ]
    for rate in results.offered:
        groups = [group for group in report["runs"] if group["rate"] == metrics.rounded(rate)]
        load = f"{rate:g} x saturation, " if rate else ""
        lines += ["", f"{load}{results.offered[rate]:.2f} requests/s", *_group_rows(groups)]
    lines += _goodput(report, len(report["seeds"]))
    lines += [
        "",
        *(
            f"{name:12} {strategy.about}"
            for name, strategy in all_strategies().items()
            if any(group["policy"] == name for group in report["runs"])
        ),
    ]
    return "\n".join([*lines, "", _caveat(results)])


def _group_rows(groups: list[dict[str, Any]]) -> list[str]:
    rows = [list(_COLUMNS)]
    for group in groups:
        for i, (name, figures) in enumerate(group["classes"].items()):
            rows.append([group["policy"] if i == 0 else "", name, *_latencies(figures)])
            rows[-1] += [_percent(figures.get("of_alone"))]
            if i == 0:
                rows[-1] += [
                    _percent(group["sm_utilisation"]),
                    _number(group["jain"], 2),
                    _number(group["pair_gap_sm_seconds"], 0),
                    _number(group["decisions_per_s"], 0),
                ]
    return aligned(rows)


def _latencies(figures: dict[str, Any]) -> list[str]:
    if "attained" not in figures:
        return ["-"] * 9
    whole, in_time = figures["whole"], figures["attained"]
    return [
        _percent(in_time),
        _percent(in_time[1:]),
        *(_number(whole[p], 1, 1e3) for p in ("p50", "p95", "p99", "p99.9")),
        _number(figures["p99_of_alone"], 2),
        _number(figures["wait"]["p99"], 1, 1e3),
        _number(figures["service"]["p99"], 1, 1e3),
    ]


def _goodput(report: dict[str, Any], seeds: int) -> list[str]:
    """Format goodputs and their ratios to the controls' goodputs."""
    if not report["goodput"]:
        return []
    titles = {
        "streams": "x streams",
        "best-split": "x best split",
        "best-split-late": "x best split, by target",
        "where streams do": "attained, x streams where those do",
    }
    compared = report["comparison"]
    columns = [h for h in titles if any(h in row for row in compared.values())]
    rows = [["policy", "", "requests/s", *(titles[title] for title in columns)]]
    for strategy, figures in report["goodput"].items():
        ratios = compared[strategy]
        row = (_interval(ratios[h], seeds) if h in ratios else "-" for h in columns)
        rows.append([strategy, "", _interval(figures, seeds), *row])
    title = "Goodput: requests/s up to which 99 % of every class are in time (95 % interval)"
    return ["", title, *aligned(rows)]


def _interval(interval: Sequence[float | None], seeds: int) -> str:
    mean, low, high = interval
    if mean is None:
        return "-"
    if low is None:
        return f"{mean:.2f}"
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]" if seeds > 1 else f"{mean:.2f}"


def _percent(interval: list[float | None] | None) -> str:
    return _number(interval, 1, 100.0)


def _number(interval: list[float | None] | None, digits: int, times: float = 1.0) -> str:
    return "-" if not interval or interval[0] is None else f"{interval[0] * times:.{digits}f}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Align rows in columns, the first two to the left."""
    width = max(map(len, rows))
    full = [row + [""] * (width - len(row)) for row in rows]
    widths = [max(len(row[i]) for row in full) for i in range(width)]
    return [
        "  ".join(
            group.ljust(w) if i < 2 else group.rjust(w)
            for i, (group, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in full
    ]


def _caveat(results: Results) -> str:
    kinds = sorted({service.curve.name for service in results.scenario.services.values()})
    known = results.scenario.guard
    unknown = [f"{a} by {b}" for a in kinds for b in kinds if a != b and (a, b) not in known]
    return f"interference without measurements, none assumed here: {'; '.join(unknown) or 'none'}"
