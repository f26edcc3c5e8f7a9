"""Share a GPU between async tasks: a demo, a preview of splits, and capacity planning."""

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
    """Run a command and return its exit code.

    0: success. 1: a result was wrong, or no device can be split as requested. 2: the command could
    not run; the reason is printed in one line.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except GreenschedError as error:
        print(f"greensched: {error}", file=sys.stderr)
    except ExceptionGroup as group:
        _, unexpected = group.split(GreenschedError)
        if unexpected is not None:
            raise
        print(f"greensched: {_first(group)}", file=sys.stderr)
    return 2


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="greensched", description=__doc__)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True)
    _add_demo(commands.add_parser("demo", help="run a small service with and without partitions"))
    _add_plan(commands.add_parser("plan", help="show what a split would give on each device"))
    _add_simulate(commands.add_parser("simulate", help="run traffic on simulated GPUs"))
    _add_measure(commands.add_parser("measure", help="measure this host and GPU for simulate"))
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.description = (
        "Serve image requests beside a batch job, in four arrangements of one GPU. Without a GPU "
        "and without --driver the demo says so and runs on a simulated one."
    )
    add = demo.add_argument
    add(
        "--seconds",
        type=float,
        default=4.0,
        help="seconds of load for each arrangement (default: %(default)s)",
    )
    add(
        "--image",
        type=Path,
        help="the image that clients send: .npy, or a format that Pillow reads",
    )
    _add_driver(demo, "$GREENSCHED_DRIVER, else a GPU, else simulated:h200")
    add("--json", action="store_true", help="print JSON instead of a table")
    demo.set_defaults(command=_demo)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.description = "Show what each device of this machine would give for these sizes."
    plan.add_argument(
        "sizes",
        nargs="+",
        type=_size,
        metavar="size",
        help="a number of SMs (16), a range (8:64), all or rest",
    )
    _add_driver(plan, "$GREENSCHED_DRIVER, else cuda")
    _add_granularity(plan)
    plan.add_argument("--json", action="store_true", help="print JSON instead of sentences")
    plan.set_defaults(command=_plan)


def _add_simulate(simulate: argparse.ArgumentParser) -> None:
    simulate.description = (
        "Run traffic through the real scheduler on simulated GPUs, in virtual time, and compare "
        "policies."
    )
    source = simulate.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, help="a CSV or JSONL file of requests")
    source.add_argument(
        "--generate", default="azure-conv", help="a traffic generator (default: %(default)s)"
    )
    add = simulate.add_argument
    add("--gpus", default="h200", help="the simulated GPUs, such as h200x2 (default: %(default)s)")
    _add_granularity(simulate)
    add(
        "--services",
        default="llm",
        help="the service classes: llm, w2, w8, or a file (default: %(default)s)",
    )
    add("--tables", type=Path, help="a JSON file of measured latencies (default: built-in tables)")
    add(
        "--policy",
        default="streams,priority,sized,best-split-late",
        help="the policies to compare, separated by commas, or all (default: %(default)s)",
    )
    add(
        "--load-factors",
        default="",
        help="loads as multiples of saturation, separated by commas (default: the traffic's own)",
    )
    add(
        "--seconds",
        type=float,
        default=120.0,
        help="seconds of traffic in each run (default: %(default)s)",
    )
    add("--seed", type=int, default=1, help="the seed of the first run (default: %(default)s)")
    add(
        "--repeats",
        type=int,
        default=1,
        help="how many runs, each with the next seed (default: %(default)s)",
    )
    add(
        "--slo",
        default="",
        help="latency targets in seconds by class, such as search=0.01; of a language model "
        "first=0.5,between=0.05 (default: each class's own target)",
    )
    add(
        "--slo-multiple",
        type=float,
        default=0.0,
        help="latency target of every class, as a multiple of its median alone "
        "(default: each class's own target)",
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--plot", type=Path, help="draw latencies and attainment into this file")
    simulate.set_defaults(command=_simulate)


def _add_measure(measure: argparse.ArgumentParser) -> None:
    measure.description = (
        "Measure what a model's passes take by SMs and batch, and what the host takes, and write "
        "the file that `simulate --tables` reads. A model file is Python that defines "
        "prefill(tokens) or decode(batch), or both: each returns a function that puts one pass on "
        "the current stream."
    )
    add = measure.add_argument
    add("model", nargs="?", type=Path, help="a Python file that defines prefill, decode, or both")
    add("--host", action="store_true", help="measure the host's part of each operation, too")
    add("--out", type=Path, help="write the file here (default: standard output)")
    add("--sms", default="8,16,32,64,96", help="sizes, besides all SMs (default: %(default)s)")
    add("--batches", default="1,8,32", help="batches of decode (default: %(default)s)")
    add("--tokens", default="256,1024", help="lengths of prompts (default: %(default)s)")
    _add_driver(measure, "$GREENSCHED_DRIVER, else cuda")
    measure.set_defaults(command=_measure)


def _add_driver(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--driver", help=f"cuda, or a simulated driver such as simulated:h200 (default: {default})"
    )


def _add_granularity(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--granularity",
        choices=get_args(Granularity),
        default="coscheduled",
        help="how finely devices are split (default: %(default)s)",
    )


def _size(text: str) -> Size:
    """Parse a size of a command line."""
    if text.lower() in ("all", "rest"):
        return NamedSize(text.lower())
    least, _, most = text.partition(":")
    try:
        return (int(least), int(most)) if most else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give a number of SMs (16), a range (8:64), all or rest"
        ) from None


def _version() -> str:
    try:
        return version("greensched")
    except PackageNotFoundError:  # it runs from its sources, on a machine without package registry
        return "not installed"


# -- plan -------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> int:
    """Return 1 if no device can be split as requested."""
    from greensched.leasing import preview

    fine = options.granularity == "fine"
    previews = preview.preview_devices(options.driver, tuple(options.sizes), fine=fine)
    if options.json:
        print(json.dumps([asdict(each) for each in previews], indent=1))
    else:
        print("\n".join(map(str, previews)))
    return 0 if any(each.is_possible for each in previews) else 1


# -- measure ----------------------------------------------------------------------------------


def _measure(options: argparse.Namespace) -> int:
    """Print the tables, or write them to a file."""
    from greensched import driver as drivers
    from greensched.cli import measure

    driver = drivers.open(options.driver)
    found = measure.measure(
        driver,
        options.model,
        host=options.host,
        sms=_counts("--sms", options.sms),
        batches=_counts("--batches", options.batches),
        tokens=_counts("--tokens", options.tokens),
    )
    text = json.dumps(found, indent=1)
    if options.out is None:
        print(text)
        return 0
    try:
        options.out.write_text(text + "\n")
    except OSError as error:
        print(text)  # a measurement takes minutes: do not lose it
        raise InvalidRequest(
            f"--out {options.out}: {error.strerror}: the tables were printed instead"
        ) from error
    return 0


def _counts(option: str, text: str) -> list[int]:
    try:
        found = sorted({int(each) for each in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise InvalidRequest(f"{option} {text!r}: give numbers of at least 1, such as 8,16")
    return found


# -- simulate ---------------------------------------------------------------------------------


def _simulate(options: argparse.Namespace) -> int:
    """Print the results; the time taken goes to standard error, as it differs between runs."""
    from greensched.capacity import experiment, plot, results, text_report

    chosen = results.Experiment(
        gpus=options.gpus,
        granularity=options.granularity,
        services=options.services,
        policies=tuple(options.policy.split(",")),
        trace=options.trace,
        generator=options.generate,
        tables=options.tables,
        seconds=options.seconds,
        rates=_load_factors(options.load_factors),
        seed=options.seed,
        repeats=options.repeats,
        slo=_targets(options.slo),
        multiple=options.slo_multiple,
    )
    if options.plot:
        plot.pyplot()  # raise without matplotlib before minutes of simulation, not after
    bar = _ProgressBar()
    began = time.perf_counter()
    found = experiment.run_experiment(chosen, bar.show)
    bar.end()
    took = time.perf_counter() - began
    if options.json:
        print(json.dumps(results.as_dict(found), indent=1))
    else:
        print(text_report.table(found))
    hours = found.simulated / 3600
    print(
        f"{hours:.2f} hours of traffic in {took:.1f} s: {took / hours:.0f} s per hour of traffic, "
        "validation included",
        file=sys.stderr,
    )
    if options.plot:
        plot.save(found, options.plot)
    return 0


def _load_factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(",") if each)
    except ValueError:
        raise InvalidRequest(
            f"--load-factors {text!r}: give numbers separated by commas, such as 0.5,1"
        ) from None


def _targets(text: str) -> dict[str, float]:
    try:
        pairs = (each.split("=") for each in text.split(",") if each)
        return {name.strip(): float(seconds) for name, seconds in pairs}
    except ValueError:
        raise InvalidRequest(
            f"--slo {text!r}: give seconds by class, such as first=0.5,between=0.05"
        ) from None


# -- demo -------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    from greensched.cli import demo

    image = demo.read_image(options.image) if options.image else None
    driver, explanation = demo.choose_driver(options.driver)
    print(explanation, file=sys.stderr)
    bar = _ProgressBar()
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
    ("p50 ms", "latency_p50_ms", "{:.3f}"),
    ("p99 ms", "latency_p99_ms", "{:.3f}"),
    ("batch SMs", "batch_sms", "{}"),
    ("jobs/s", "batch_jobs_per_s", "{}"),
)


def _table(device: str, simulated: bool, rows: list[dict[str, Any]]) -> str:
    cells = [[header for header, _, _ in _COLUMNS]]
    cells += [["-" if row[k] is None else f.format(row[k]) for _, k, f in _COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = [device + (": latencies on the device's timeline" if simulated else "")]
    lines += [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]
    lines += ["", *_comparison(rows)]
    if simulated:
        lines += [
            "The times of a simulated GPU are modelled. On a GPU, partitions also share memory",
            "bandwidth, the L2 cache and power.",
        ]
    verified, results = (sum(row[k] for row in rows) for k in ("verified", "results"))
    lines += ["", f"verified {verified} of {results} results against numpy"]
    return "\n".join(lines)


def _comparison(rows: list[dict[str, Any]]) -> list[str]:
    _, alone, shared, apart = (row["latency_p99_ms"] for row in rows)
    if not (alone and shared and apart):
        return ["The run was too short for percentiles: give more --seconds."]
    return [
        "The clients' p99 beside the batch job, as a multiple of their p99 alone on their own SMs:",
        f"{apart / alone:.2f} x on their own SMs, {shared / alone:.2f} x where both share all SMs.",
    ]


class _ProgressBar:
    """A progress bar on standard error; nothing if that is not a terminal."""

    WIDTH = 30

    def __init__(self) -> None:
        self._last = ""
        self._is_terminal = sys.stderr.isatty()

    def show(self, done: float, what: str) -> None:
        """Draw the bar if it changed."""
        full = int(done * self.WIDTH)
        line = f"[{'#' * full}{'.' * (self.WIDTH - full)}] {what:30}"
        if self._is_terminal and line != self._last:
            self._last = line
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Erase the bar."""
        if self._is_terminal:
            print("\r" + " " * len(self._last) + "\r", end="", file=sys.stderr, flush=True)
