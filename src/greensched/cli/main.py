"""The command line: prints, never decides."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

from greensched.errors import GreenschedError, InvalidRequest
from greensched.typing import Granularity, NamedSize, Size


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code.

    0; 1 if a result was wrong, or no device can do what is planned; 2 if it could not run.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except GreenschedError as error:
        print(f"greensched: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="greensched", description=__doc__)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True)
    demo = commands.add_parser(
        "demo", help="a small service under load, with and without partitions"
    )
    demo.add_argument("--seconds", type=float, default=4.0, help="of load, for each arrangement")
    demo.add_argument("--image", type=Path, help="what clients send: .npy, or what Pillow reads")
    demo.add_argument("--driver", help='"cuda", or a simulation such as "simulated:h200"')
    demo.add_argument("--json", action="store_true", help="print JSON instead of a table")
    demo.set_defaults(command=_demo)
    plan = commands.add_parser("plan", help="what a cut would give on each device, before it")
    plan.add_argument(
        "sizes", nargs="+", type=_size, metavar="size", help="16, 8:64 (least:most), all or rest"
    )
    plan.add_argument("--driver", help='"cuda", or a simulation such as "simulated:h200"')
    _add_granularity(plan)
    plan.add_argument("--json", action="store_true", help="print JSON instead of sentences")
    plan.set_defaults(command=_plan)
    _add_simulate(commands.add_parser("simulate", help="what if: traffic on simulated GPUs"))
    return parser


def _add_granularity(command: argparse.ArgumentParser) -> None:
    choices, what = get_args(Granularity), "how finely a pool cuts"
    command.add_argument("--granularity", choices=choices, default="coscheduled", help=what)


def _add_simulate(simulate: argparse.ArgumentParser) -> None:
    source = simulate.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, help="a CSV or JSONL file of requests")
    source.add_argument("--generate", default="azure-conv", help="seeded traffic; %(default)s")
    simulate.add_argument("--gpus", default="h200", help="such as h200x2; %(default)s")
    _add_granularity(simulate)
    simulate.add_argument("--services", default="llm", help="llm, w2, w8, or a file; %(default)s")
    simulate.add_argument("--tables", type=Path, help="measured curves, a JSON file")
    simulate.add_argument("--policy", default="all", help="names with commas between, or all")
    simulate.add_argument("--rates", default="", help="multiples of saturation, commas between")
    simulate.add_argument("--seconds", type=float, default=120.0, help="of traffic; %(default)s")
    simulate.add_argument("--seed", type=int, default=1, help="the first one")
    simulate.add_argument("--seeds", type=int, default=1, help="how many")
    simulate.add_argument("--target", type=float, default=0.0, help="of all, x alone-p99")
    simulate.add_argument("--json", action="store_true", help="print JSON instead of tables")
    simulate.add_argument("--plot", type=Path, help="draw attainment over rates into this file")
    simulate.set_defaults(command=_simulate)


def _size(text: str) -> Size:
    """A size as it is written on a command line."""
    if text.lower() in ("all", "rest"):
        return NamedSize(text.lower())
    least, _, most = text.partition(":")
    try:
        return (int(least), int(most)) if most else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: give 16, 8:64 (least:most), all or rest"
        ) from None


def _version() -> str:
    try:
        return version("greensched")
    except PackageNotFoundError:  # run from its sources, as where nothing can be installed
        return "not installed"


# -- plan -------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> int:
    """Exits with 1 where no device can do it."""
    from greensched.leasing import preview

    fine = options.granularity == "fine"
    found = preview.preview_devices(options.driver, tuple(options.sizes), fine=fine)
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    else:
        print("\n".join(map(str, found)))
    return 0 if any(each.is_possible for each in found) else 1


# -- simulate ---------------------------------------------------------------------------------


def _simulate(options: argparse.Namespace) -> int:
    """How long it took goes to standard error: the answer is the same each time."""
    from greensched.capacity import experiment, plot, results, text_report

    question = results.Experiment(
        gpus=options.gpus,
        granularity=options.granularity,
        services=options.services,
        policies=tuple(options.policy.split(",")),
        trace=options.trace,
        generator=options.generate,
        tables=options.tables,
        seconds=options.seconds,
        rates=_rates(options.rates),
        seed=options.seed,
        repeats=options.seeds,
        target=options.target,
    )
    if options.plot:
        plot.pyplot()  # who lacks it is told before minutes of simulation, not after
    bar = _Bar()
    began = time.perf_counter()
    answer = experiment.ask(question, bar.show)
    bar.end()
    took = time.perf_counter() - began
    print(
        json.dumps(results.as_dict(answer), indent=1) if options.json else text_report.table(answer)
    )
    hours = answer.simulated / 3600
    rate = f"{took / hours:.0f} s an hour, the check of what is known in it"
    print(f"{hours:.2f} hours of traffic in {took:.1f} s: {rate}", file=sys.stderr)
    if options.plot:
        plot.save(answer, options.plot)
    return 0


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(",") if each)
    except ValueError:
        raise InvalidRequest(f"--rates {text!r}: give numbers with commas between") from None


# -- demo -------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    from greensched.cli import demo

    image = demo.read_image(options.image) if options.image else None
    driver = demo.choose_driver(options.driver)
    bar = _Bar()
    work = demo.run(driver, seconds=options.seconds, image=image, progress=bar.show)
    outcome = asyncio.run(work)
    bar.end()
    rows = [row.as_dict() for row in outcome.rows]
    if options.json:
        facts = {"device": outcome.device, "simulated": outcome.simulated, "rows": rows}
        print(json.dumps(facts, indent=1))
    else:
        print(_table(outcome.device, outcome.simulated, rows))
    return 1 if outcome.wrong else 0


_COLUMNS = (
    ("arrangement", "arrangement", "{}"),
    ("SMs", "critical_sms", "{}"),
    ("p50 ms", "p50", "{:.3f}"),
    ("p99 ms", "p99", "{:.3f}"),
    ("p50 ms", "latency_p50_ms", "{:.2f}"),
    ("p99 ms", "latency_p99_ms", "{:.2f}"),
    ("host late p99", "host_late_p99_ms", "{:.2f}"),
    ("batch SMs", "batch_sms", "{}"),
    ("jobs/s", "batch_jobs_per_s", "{}"),
)


def _table(device: str, simulated: bool, rows: list[dict[str, Any]]) -> str:
    columns = [c for c in _COLUMNS if simulated or c[1] not in ("p50", "p99", "host_late_p99_ms")]
    cells = [[head for head, _, _ in columns]]
    for row in rows:
        row |= {"p50": row["device_p50_ms"], "p99": row["device_p99_ms"]}
        cells.append(["-" if row[k] is None else f.format(row[k]) for _, k, f in columns])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells
    ]
    lines.insert(0, device)
    if simulated:
        lines.insert(1, _over("on the device", "in the client's hands", widths))
        lines += ["", *_simulated_words(rows)]
    verified, results = (sum(row[k] for row in rows) for k in ("verified", "results"))
    lines += ["", f"verified {verified} of {results} results against numpy"]
    return "\n".join(lines)


def _over(left: str, right: str, widths: list[int]) -> str:
    """A heading over the two pairs of latency columns."""
    start = sum(widths[:2]) + 4
    first, second = widths[2] + widths[3] + 2, widths[4] + widths[5] + widths[6] + 4
    return " " * start + left.center(first) + "  " + right.center(second)


def _simulated_words(rows: list[dict[str, Any]]) -> list[str]:
    alone, shared, apart = (row["device_p99_ms"] for row in rows[1:])
    if not (alone and shared and apart):
        return ["(too short a run for percentiles)"]
    return [
        f"Beside the batch job the p99 is {apart / alone:.2f} x alone in a partition of its own,",
        f"and {shared / alone:.2f} x that where all share all SMs.",
        "A simulator says so: its times are modelled, SMs are given first come, first served;",
        "memory bandwidth, L2 and power on a real GPU are shared by everybody.",
    ]


class _Bar:
    """A progress bar on standard error, where that is a terminal or a log."""

    WIDTH = 30

    def __init__(self) -> None:
        self._last = ""

    def show(self, done: float, what: str) -> None:
        """Draws it anew if it changed."""
        full = int(done * self.WIDTH)
        line = f"[{'#' * full}{'.' * (self.WIDTH - full)}] {what:30}"
        if line != self._last:
            self._last = line
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leaves the line."""
        print("\r" + " " * (len(self._last)) + "\r", end="", file=sys.stderr, flush=True)
