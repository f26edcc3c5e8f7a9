"""The commands of `greensched`: their options and help.

Each command imports what it needs when it runs, so that help and completion load neither numpy nor
rich.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from greensched.cli.terminal import print_json, print_table, progress
from greensched.errors import GreenschedError, InvalidRequest
from greensched.typing import Granularity, NamedSize, Size


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; `main` explains the codes."""
    if "_GREENSCHED_COMPLETE" in os.environ:
        from greensched.cli import completion

        completion.register()
    try:
        code = greensched.main(list(arguments), "greensched", standalone_mode=False)
    except click.UsageError as error:
        return _refuse_usage(error)
    except click.Abort:
        return _refuse("interrupted", code=130)
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (GreenschedError, click.ClickException, OSError) as error:
        return _refuse(str(error))
    except ImportError as error:
        return _refuse(f"{error}: greensched doctor says what is missing")
    except ExceptionGroup as group:
        _, unexpected = group.split(GreenschedError)
        if unexpected is not None:
            raise
        return _refuse(str(_first(group)))
    return int(code or 0)


def _refuse(reason: str, code: int = 2) -> int:
    print(f"greensched: {reason}", file=sys.stderr)
    return code


def _refuse_usage(error: click.UsageError) -> int:
    path = error.ctx.command_path if error.ctx is not None else "greensched"
    reason = " ".join(error.format_message().split())
    reason = reason if reason.endswith("?") else f"{reason.removesuffix('.')}."
    print(f"{path}: {reason} See {path} --help", file=sys.stderr)
    return 2


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


# -- values of options --------------------------------------------------------------------------


class _Value(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A value that a function parses; a refusal includes an example."""

    def __init__(self, name: str, parse: Callable[[str], Any], wanted: str) -> None:
        self.name = name
        self._parse = parse
        self._wanted = wanted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError:
            self.fail(f"{value!r} {self._wanted}", param, ctx)


def _parse_size(text: str) -> Size:
    if text.lower() in ("all", "rest"):
        return NamedSize(text.lower())
    first, _, second = text.partition(":")
    least, most = int(first), int(second or first)
    if not 0 < least <= most:
        raise ValueError
    return (least, most) if second else least


def _parse_counts(text: str) -> tuple[int, ...]:
    sizes = sorted({int(item) for item in text.split(",")})
    if sizes[0] < 1:
        raise ValueError
    return tuple(sizes)


def _parse_factors(text: str) -> tuple[float, ...]:
    factors = tuple(float(item) for item in text.split(",") if item)
    if not all(0 < factor < math.inf for factor in factors):
        raise ValueError
    return factors


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 1e6:
        raise ValueError
    return seconds


def _parse_targets(text: str) -> dict[str, float]:
    pairs = (item.split("=") for item in text.split(",") if item)
    return {name.strip(): float(seconds) for name, seconds in pairs}


SIZE = _Value(
    "size", _parse_size, "is not a size: give a number of SMs (16), a range (8:64), all or rest"
)
COUNTS = _Value("counts", _parse_counts, "is not a list of numbers of at least 1, such as 8,16")
FACTORS = _Value("factors", _parse_factors, "is not a list of numbers above 0, such as 0.5,1")
TARGETS = _Value(
    "targets", _parse_targets, "gives no seconds by class, such as first=0.5,between=0.05"
)
SECONDS = _Value("seconds", _parse_seconds, "is not a number above 0 and up to 1000000")
FILE = click.Path(path_type=Path)

Command = Callable[..., Any]


def _complete_driver(_ctx: object, _param: object, incomplete: str) -> list[str]:
    from greensched.driver.simulated import device_models

    known = ["cuda", *(f"simulated:{name}" for name in device_models.PRESETS)]
    return [name for name in known if name.startswith(incomplete)]


def _complete_generator(_ctx: object, _param: object, incomplete: str) -> list[str]:
    from greensched.capacity import traffic

    return [name for name in traffic.GENERATORS if name.startswith(incomplete)]


def _complete_gpus(_ctx: object, _param: object, incomplete: str) -> list[str]:
    from greensched.driver.simulated import device_models

    return [name for name in device_models.PRESETS if name.startswith(incomplete)]


def _complete_services(_ctx: object, _param: object, incomplete: str) -> list[str]:
    from greensched.capacity import workload

    return [name for name in workload.SERVICES if name.startswith(incomplete)]


def _complete_policies(_ctx: object, _param: object, incomplete: str) -> list[str]:
    """Complete the last of the policies, which commas separate."""
    from greensched.capacity import sweeps, workload

    before, comma, last = incomplete.rpartition(",")
    known = ["all", *sweeps.names(workload.services("llm"))]
    return [f"{before}{comma}{name}" for name in known if name.startswith(last)]


def _driver_option(default: str) -> Callable[[Command], Command]:
    return click.option(
        "--driver",
        metavar="DRIVER",
        show_default=default,
        shell_complete=_complete_driver,
        help="cuda, or a simulated driver such as simulated:h200.",
    )


_granularity_option = click.option(
    "--granularity",
    type=click.Choice(get_args(Granularity)),
    default="coscheduled",
    help="Split devices so that large thread-block clusters fit, or as finely as possible.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
}


def _print_version(ctx: click.Context, _param: object, chosen: bool) -> None:
    if chosen:
        from greensched.cli import facts

        print(facts.installed("greensched") or "not installed")
        ctx.exit()


@click.group(
    invoke_without_command=True,
    context_settings=_SETTINGS,
    epilog="Exit codes: 0, success; 1, the answer is no; 2, the command could not run.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
@click.pass_context
def greensched(ctx: click.Context) -> None:
    """Share a GPU between async tasks: green contexts, scheduled."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        ctx.exit(2)


# -- what is here -------------------------------------------------------------------------------


@greensched.command()
@_driver_option("$GREENSCHED_DRIVER, else cuda")
@_json_option
def doctor(driver: str | None, as_json: bool) -> int:
    """Find out whether a pool can be opened here.

    Looks at the installation, the driver and its features, the devices and how they can be split,
    clocks and power, and other processes and pools on the GPUs. Creates no CUDA context. Exits with
    1 if no pool can be opened.
    """
    from greensched.cli import doctor

    return doctor.main(driver, as_json=as_json)


@greensched.command()
@_driver_option("$GREENSCHED_DRIVER, else cuda")
@_json_option
def info(driver: str | None, as_json: bool) -> None:
    """Show versions and devices, for example for a bug report."""
    from greensched import driver as drivers
    from greensched.cli import facts

    opened = drivers.open(driver)
    opened.initialise()
    software, of_driver = facts.software(), facts.of_driver(opened)
    devices = [facts.of_device(opened, i) for i in range(opened.device_count())]
    if as_json:
        print_json({"software": software, "driver": of_driver, "devices": devices})
        return
    rows = [
        (
            device["device"],
            device["name"],
            device["sms"],
            "{cells} x {sms_each} + {sms_over}".format(**device["coscheduled"]),
            "{cells} x {sms_each} + {sms_over}".format(**device["fine"]),
            f"{device['memory_bytes'] / 2**30:.0f} GiB",
            device["arch"],
        )
        for device in devices
    ]
    title = (
        f"greensched {software['greensched'] or '(not installed)'}, Python {software['python']}, "
        f"driver {of_driver['name']} (CUDA {of_driver['cuda']})"
    )
    print_table(("", "device", "SMs", "cells", "fine cells", "memory", "arch"), rows, title)


@greensched.command()
@click.argument("sizes", nargs=-1, required=True, type=SIZE)
@_driver_option("$GREENSCHED_DRIVER, else cuda")
@_granularity_option
@_json_option
def plan(sizes: tuple[Size, ...], driver: str | None, granularity: str, as_json: bool) -> int:
    """Show the partitions that each device would give for these SIZES.

    A size is a number of SMs (16), a range (8:64), all or rest. Exits with 1 if they fit on no
    device.
    """
    from dataclasses import asdict

    from greensched.leasing import preview

    previews = preview.preview_devices(driver, sizes, fine=granularity == "fine")
    if as_json:
        print_json([asdict(preview) for preview in previews])
    else:
        print("\n".join(map(str, previews)))
    return 0 if any(preview.is_possible for preview in previews) else 1


# -- what it does -------------------------------------------------------------------------------


@greensched.command()
@click.option("--seconds", type=SECONDS, default=4.0, help="Seconds of load per arrangement.")
@click.option("--trace", type=FILE, help="Write a trace into this file, for `greensched trace`.")
@_driver_option("$GREENSCHED_DRIVER, else a GPU, else simulated:h200")
@_json_option
def demo(seconds: float, trace: Path | None, driver: str | None, as_json: bool) -> int:
    """Run a small service with and without partitions.

    Serves image requests beside a batch job, in four arrangements of one GPU. Without a GPU and
    without --driver the demo says so and runs on a simulated one. Exits with 1 if a result was
    wrong.
    """
    import asyncio

    from greensched.cli import demo

    opened, explanation = demo.choose_driver(driver)
    print(explanation, file=sys.stderr)
    with progress() as show:
        run = demo.run(opened, seconds=seconds, trace=trace, progress=show)
        outcome = asyncio.run(run)
    rows = [row.as_dict() for row in outcome.rows]
    if as_json:
        print_json({"device": outcome.device, "simulated": outcome.simulated, "rows": rows})
    else:
        demo.print_rows(outcome, rows)
    return 1 if outcome.wrong else 0


@greensched.command()
@click.argument("file", type=FILE)
@click.option("--plot", type=FILE, help="Draw the map of the SMs: a .html report, .svg or .png.")
@_json_option
def trace(file: Path, plot: Path | None, as_json: bool) -> None:
    """Show which lease held which SMs, from a FILE that pool.trace wrote.

    Prints the SM-time, requests, waits and jobs of each class, and a map of the SMs over time:
    which class held them, and when they drained. The map of --plot also shows which were lent.
    """
    from greensched.cli import trace
    from greensched.observability import trace_reader

    if plot is not None:
        trace.check_plot(plot)
    with progress() as show:
        recorded = trace_reader.read(file, show)
    figures = trace.summary(recorded)
    if as_json:
        print_json(figures)
    else:
        trace.print_summary(recorded, figures)
    if plot is not None:
        trace.save(recorded, figures, plot, file.name)


@greensched.command()
@_driver_option("$GREENSCHED_DRIVER, else cuda")
@_json_option
def bench(driver: str | None, as_json: bool) -> None:
    """Measure the host time of each operation on this machine.

    With a simulated driver, the times are those of the simulation.
    """
    import asyncio

    from greensched import driver as drivers
    from greensched.cli import bench

    opened = drivers.open(driver)
    with progress() as show:
        times = asyncio.run(bench.bench(opened, show))
    if as_json:
        print_json(times)
    else:
        columns = ("operation", "p50 us", "p99 us", "beside", "p50 us", "ratio")
        print_table(columns, bench.rows(times), times["source"])


@greensched.command()
@click.argument("pool", required=False, metavar="[PID|PATH]")
@click.option("--interval", type=SECONDS, default=1.0, help="Seconds between two updates.")
@click.option("--once", is_flag=True, help="Print one screen, and exit.")
@_json_option
def top(pool: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Watch the pools of running programs.

    Shows which lease holds which SMs, which requests wait and why, and the figures of each class.
    Without an argument it shows every pool of this user that is open with Pool(socket=True); with a
    PID, the pools of that process; with a PATH, the pool with that socket. Ctrl-C ends it. With
    --json, each update is one line: a list of snapshots.
    """
    from contextlib import suppress

    from rich.console import Console

    from greensched.cli import top

    console = Console(highlight=False, markup=False)
    with suppress(KeyboardInterrupt):
        top.top(pool, interval=interval, once=once, as_json=as_json, console=console)


@greensched.command()
@click.argument("model", required=False, type=FILE)
@click.option("--host", is_flag=True, help="Measure the host time of each operation, too.")
@click.option("--out", type=FILE, help="Write the results to this file, for `simulate --tables`.")
@click.option("--sms", type=COUNTS, default="8,16,32,64,96", help="Numbers of SMs, besides all.")
@click.option("--batches", type=COUNTS, default="1,8,32", help="Batch sizes for decode.")
@click.option("--tokens", type=COUNTS, default="256,1024", help="Prompt lengths for prefill.")
@_driver_option("$GREENSCHED_DRIVER, else cuda")
@_json_option
def measure(
    model: Path | None,
    host: bool,
    out: Path | None,
    sms: tuple[int, ...],
    batches: tuple[int, ...],
    tokens: tuple[int, ...],
    driver: str | None,
    as_json: bool,
) -> None:
    """Measure this GPU and host for simulate.

    Measures how long the passes of a MODEL take for each number of SMs and each batch size. A model
    file is Python that defines prefill(tokens) or decode(batch), or both: each returns a function
    that launches one pass on the current stream.
    """
    import asyncio

    from greensched import driver as drivers
    from greensched.cli import measure

    if model is None and not host:
        raise click.UsageError("nothing to measure: give a model file, or --host")
    opened = drivers.open(driver)
    with progress() as show:
        run = measure.measure(
            opened, model, host=host, sms=sms, batches=batches, tokens=tokens, progress=show
        )
        tables = asyncio.run(run)
    if out is not None:
        try:
            measure.write(tables, out)
        except OSError as error:
            print_json(tables)  # a measurement takes minutes: do not lose it
            raise InvalidRequest(
                f"--out {out}: {error.strerror}: the tables were printed instead"
            ) from error
    if as_json:
        print_json(tables)
    elif out is None:
        measure.print_tables(tables)


# -- capacity planning --------------------------------------------------------------------------


@greensched.command()
@click.option("--trace", type=FILE, help="A CSV or JSONL file of requests.")
@click.option(
    "--generate",
    default="azure-conv",
    shell_complete=_complete_generator,
    help="The traffic without --trace: azure-code, mooncake, poisson or another generator.",
)
@click.option(
    "--gpus",
    default="h200",
    shell_complete=_complete_gpus,
    help="The simulated GPUs: h100, h200x2 (two of them) or another model.",
)
@_granularity_option
@click.option(
    "--services",
    default="llm",
    shell_complete=_complete_services,
    help="The service classes: llm, w2, w8, or a file.",
)
@click.option(
    "--tables",
    type=FILE,
    show_default="built-in tables",
    help="A JSON file of measured latencies.",
)
@click.option(
    "--policy",
    default="streams,priority,sized,best-split-late",
    shell_complete=_complete_policies,
    help="The policies to compare, separated by commas, or all.",
)
@click.option(
    "--load-factors",
    type=FACTORS,
    default="",
    show_default="the traffic's own",
    help="Loads, as multiples of the saturating rate, separated by commas.",
)
@click.option("--seconds", type=SECONDS, default=120.0, help="Seconds of traffic in each run.")
@click.option("--seed", type=int, default=1, help="The seed of the first run.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=1,
    help="How many runs, each with the next seed.",
)
@click.option(
    "--slo",
    type=TARGETS,
    default="",
    show_default="each class's own",
    help="Latency targets in seconds by class, such as search=0.01, or for a language model: "
    "first=0.5,between=0.05 (first token, and between tokens).",
)
@click.option(
    "--slo-multiple",
    type=float,
    default=0.0,
    show_default="each class's own target",
    help="Latency target of each class, as a multiple of its median latency without load.",
)
@click.option("--plot", type=FILE, help="Draw latencies and attained targets into this file.")
@_json_option
def simulate(plot: Path | None, as_json: bool, **options: Any) -> None:
    """Run traffic on simulated GPUs, and compare policies.

    The traffic passes through the real scheduler in virtual time. The elapsed time is printed to
    standard error.
    """
    source = click.get_current_context().get_parameter_source("generate")
    if options["trace"] is not None and source is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--generate makes traffic, and --trace reads it: give one of them")
    from greensched.capacity import experiment, results, text_report
    from greensched.capacity import plot as plots

    policies = tuple(options.pop("policy").split(","))
    chosen = results.Experiment(
        policies=policies,
        generator=options.pop("generate"),
        rates=options.pop("load_factors"),
        multiple=options.pop("slo_multiple"),
        **options,
    )
    if plot is not None:
        plots.check(plot)
    began = time.perf_counter()
    with progress() as show:
        outcome = experiment.run_experiment(chosen, show)
    took = time.perf_counter() - began
    if as_json:
        print_json(results.as_dict(outcome))
    else:
        print(text_report.table(outcome))
    hours = outcome.simulated / 3600
    print(
        f"{hours:.2f} hours of traffic in {took:.1f} s: {took / hours:.0f} s per hour of traffic",
        file=sys.stderr,
    )
    if plot is not None:
        plots.save(outcome, plot)
