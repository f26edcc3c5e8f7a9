"""A report for people: one table for each rate, goodput over rates, and what is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from greensched.capacity import metrics, validation
from greensched.capacity.experiment import arms
from greensched.capacity.results import Results, as_dict

#: What a column shows of a class.
_HEADS = (
    "policy", "class", *(f"<={k:g}x" for k in metrics.MULTIPLES), "p50", "p95", "p99", "p99.9",
    "x alone", "wait p99", "run p99", "of alone", "SMs busy", "Jain", "gap", "grants/s",
)  # fmt: skip


def table(answer: Results) -> str:
    """All of it as text.

    Latencies in milliseconds, of requests (prefill: to the first token) or of gaps between tokens
    (decode); attainments and shares in percent.
    """
    said = as_dict(answer)
    seeds = ", ".join(map(str, said["seeds"]))
    cut = " (cut finely)" if said["granularity"] == "fine" else ""
    runs = f"{said['seconds']:g} s for each of the seeds {seeds}"
    told = [
        f"{said['traffic']} on {said['gpus']}{cut}, {runs}",
        f"saturation at {said['saturation']:.3f} x the traffic's own rate; alone-p99: "
        + ", ".join(f"{n} {1e3 * v:.1f} ms" for n, v in said["alone_p99"].items() if v),
        "targets: " + ", ".join(f"{n} {1e3 * v:.1f} ms" for n, v in said["targets"].items()),
    ]
    for rate in answer.offered:
        cells = [cell for cell in said["cells"] if cell["rate"] == metrics.rounded(rate)]
        named = f"{rate:g} x saturation, " if rate else ""
        told += ["", f"{named}{answer.offered[rate]:.2f} requests/s", *_cells(cells)]
    told += _goodput(said["goodput"], len(said["seeds"]))
    told += _against(said["against"], len(said["seeds"]))
    told += ["", *(f"{name:12} {arm.about}" for name, arm in arms().items() if _has(said, name))]
    if answer.checks:
        told += ["", *validation.lines(answer.checks), *_caveats(answer)]
    return "\n".join(told)


def _has(said: dict[str, Any], name: str) -> bool:
    return any(cell["arm"] == name for cell in said["cells"])


def _cells(cells: list[dict[str, Any]]) -> list[str]:
    rows = [list(_HEADS)]
    for cell in cells:
        for i, (name, found) in enumerate(cell["classes"].items()):
            rows.append([cell["arm"] if i == 0 else "", name, *_latencies(found)])
            rows[-1] += [_percent(found.get("of_alone"))]
            if i == 0:
                rows[-1] += [
                    _percent(cell["sm_utilisation"]),
                    _number(cell["jain"], 2),
                    _number(cell["pair_gap_sm_seconds"], 0),
                    _number(cell["decisions_per_s"], 0),
                ]
    return aligned(rows)


def _latencies(found: dict[str, Any]) -> list[str]:
    if "attained" not in found:
        return ["-"] * (len(metrics.MULTIPLES) + 7)
    whole = found["whole"]
    return [
        *(_percent(each) for each in found["attained"].values()),
        *(_number(whole[p], 1, 1e3) for p in ("p50", "p95", "p99", "p99.9")),
        _number(found["p99_of_alone"], 2),
        _number(found["wait"]["p99"], 1, 1e3),
        _number(found["service"]["p99"], 1, 1e3),
    ]


def _goodput(said: dict[str, dict[str, list[float]]], seeds: int) -> list[str]:
    if not said:
        return []
    arms_named = list(next(iter(said.values())))
    heads = ["at its targets" if k == "target" else f"at {k} x alone-p99" for k in said]
    rows = [["policy", *heads]]
    rows += [[arm, *(_interval(each[arm], seeds) for each in said.values())] for arm in arms_named]
    head = "Goodput: requests/s up to which 99 % of every class are in time (95 % interval)"
    return ["", head, *aligned(rows)]


def _against(said: dict[str, dict[str, list[float]]], seeds: int) -> list[str]:
    heads = list(dict.fromkeys(head for each in said.values() for head in each))
    if not heads:
        return []
    named = {
        "streams": "x streams",
        "best-split": "x best split",
        "best-split-late": "x that, by target",
        "recovered": "of the gap to the bound",
        "where streams do": "attained, x streams where those do",
    }
    rows = [["at their targets", *(named[head] for head in heads)]]
    rows += [
        [arm, *(_interval(each[h], seeds) if h in each else "-" for h in heads)]
        for arm, each in said.items()
    ]
    return ["", *aligned(rows)]


def _interval(found: Sequence[float | None], seeds: int) -> str:
    mean, low, high = found
    if mean is None:
        return "-"
    if low is None:
        return f"{mean:.2f}"
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]" if seeds > 1 else f"{mean:.2f}"


def _percent(found: list[float | None] | None) -> str:
    return _number(found, 1, 100.0)


def _number(found: list[float | None] | None, digits: int, times: float = 1.0) -> str:
    return "-" if not found or found[0] is None else f"{found[0] * times:.{digits}f}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Columns under each other; the first two to the left."""
    width = max(map(len, rows))
    full = [row + [""] * (width - len(row)) for row in rows]
    widths = [max(len(row[i]) for row in full) for i in range(width)]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in full
    ]


def _caveats(answer: Results) -> list[str]:
    failed = [check.what for check in answer.checks if not check.is_reproduced]
    kinds = sorted({service.curve.name for service in answer.setting.services.values()})
    known = answer.setting.guard
    unknown = [f"{a} by {b}" for a in kinds for b in kinds if a != b and (a, b) not in known]
    return [
        f"not reproduced: {'; '.join(failed) or 'nothing'}",
        f"interference that nobody measured, and is none here: {'; '.join(unknown) or 'none'}",
    ]
