"""Plots of results with matplotlib: attainment, and the latencies of each class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from greensched.capacity import metrics
from greensched.capacity.results import Results, RunGroup, attained, targets
from greensched.errors import InvalidRequest, MissingPackage

#: Percentiles of a distribution that are drawn.
PARTS = [part / 200 for part in range(1, 200)]


def save(results: Results, path: Path) -> None:
    """Draw each strategy's attainment, and the latencies and target of each class.

    With several rates, attainment and the 99th percentile are drawn over the offered requests per
    second, otherwise as bars. Below are the distributions of latencies at the highest rate.

    Raises:
        MissingPackage: matplotlib is not installed; says what to install.
        InvalidRequest: the file cannot be written.
    """
    latencies = targets(results)
    columns = 1 + len(latencies)
    figure, axes = pyplot().subplots(2, columns, figsize=(5 * columns, 8), squeeze=False)
    first, *rest = axes[0]
    _draw(first, results, partial(attained, results))
    first.axhline(metrics.MUST_MEET, color="grey", linewidth=0.8)
    first.set(title="in time, worst class", ylim=(0, 1.02))
    for axis, (name, target) in zip(rest, latencies.items(), strict=True):
        _draw(axis, results, partial(_p99, name))
        axis.axhline(1e3 * target, color="grey", linewidth=0.8)
        axis.set(title=f"{name}: p99 in ms (line: target)")
        axis.set_yscale("log")
    for axis, (name, target) in zip(axes[1][1:], latencies.items(), strict=True):
        draw_distribution(axis, results, name)
        axis.axvline(1e3 * target, color="grey", linewidth=0.8)
        rate = max(results.offered.values())
        axis.set(title=f"{name}: latencies in ms at {rate:.3g} requests/s", ylim=(0, 1.02))
    axes[1][0].axis("off")
    if latencies:
        axes[1][0].legend(*axes[1][1].get_legend_handles_labels(), loc="center")
    write(figure, path)


def draw_distribution(axis: Any, results: Results, name: str) -> None:
    """Draw what fraction of a class's requests had at most each latency, at the highest rate."""
    highest = max(results.offered, key=lambda rate: results.offered[rate])
    for group in results.groups:
        if group.rate == highest:
            latencies = [run[name].whole for run in group.latencies]
            seconds = [fmean(values.percentile(part) for values in latencies) for part in PARTS]
            axis.plot([1e3 * value for value in seconds], PARTS, label=group.strategy)
    axis.set_xscale("log")


def _p99(name: str, group: RunGroup) -> list[float]:
    return [1e3 * run[name].whole.percentile(0.99) for run in group.latencies]


def _draw(axis: Any, results: Results, of: Callable[[RunGroup], list[float]]) -> None:
    """Draw a figure of each strategy with its interval, as lines over the rates or as bars."""
    strategies = list(dict.fromkeys(group.strategy for group in results.groups))
    for strategy in strategies:
        groups = [group for group in results.groups if group.strategy == strategy]
        intervals = [metrics.interval(of(group)) for group in groups]
        if len(results.offered) == 1:
            ((mean, low, high),) = intervals
            axis.bar(strategy, mean, yerr=[[mean - low], [high - mean]])
            continue
        x = [results.offered[group.rate] for group in groups]
        axis.plot(x, [mean for mean, _, _ in intervals], marker="o", label=strategy)
        axis.fill_between(x, [f[1] for f in intervals], [f[2] for f in intervals], alpha=0.2)
    if len(results.offered) == 1:
        axis.tick_params(axis="x", labelrotation=30)
    else:
        axis.set_xlabel("requests/s")


def check(path: Path) -> None:
    """Refuse a picture that cannot be written, before minutes of work for it.

    Raises:
        MissingPackage: matplotlib is not installed; says what to install.
        InvalidRequest: Its format is unknown, or its folder does not exist.
    """
    formats = sorted(pyplot().FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in formats:
        raise InvalidRequest(f"--plot {path}: give a file that ends in .{', .'.join(formats)}")
    check_folder(path)


def check_folder(path: Path) -> None:
    """Refuse a file whose folder does not exist. Raises InvalidRequest."""
    if not path.parent.is_dir():
        raise InvalidRequest(f"--plot {path}: there is no folder {path.parent}")


def pyplot() -> Any:
    """Import matplotlib's pyplot with a backend that needs no screen.

    Raises:
        MissingPackage: matplotlib is not installed; says what to install.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingPackage("a plot", "matplotlib", "plot") from error
    mpl.use("Agg")
    from matplotlib import pyplot as found

    return found


def write(figure: Any, path: Path) -> None:
    """Write a figure of `pyplot` in the format of the file's suffix, and close it.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path}: {getattr(error, 'strerror', error)}") from error
    finally:
        pyplot().close(figure)
