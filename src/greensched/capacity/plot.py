"""Plots of results with matplotlib: attainment over the rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from greensched.capacity import metrics
from greensched.capacity.results import Results, attained
from greensched.errors import InvalidRequest, MissingPackage


def save(results: Results, path: Path) -> None:
    """Draw each strategy's attainment over the offered rate, for each multiple of the alone-p99.

    Raises:
        MissingPackage: matplotlib is not installed; says what to install.
        InvalidRequest: the file cannot be written.
    """
    multiples = metrics.MULTIPLES
    figure, axes = pyplot().subplots(1, len(multiples), figsize=(4 * len(multiples), 3.5))
    for axis, multiple in zip(axes, multiples, strict=True):
        for strategy in dict.fromkeys(group.strategy for group in results.groups):
            groups = [group for group in results.groups if group.strategy == strategy]
            found = [metrics.interval(attained(results, group, multiple)) for group in groups]
            x = [results.offered[group.rate] for group in groups]
            axis.plot(x, [mean for mean, _, _ in found], marker="o", label=strategy)
            axis.fill_between(x, [f[1] for f in found], [f[2] for f in found], alpha=0.2)
        axis.axhline(metrics.MUST_MEET, color="grey", linewidth=0.5)
        axis.set(title=f"within {multiple:g} x alone-p99", xlabel="requests/s", ylim=(0, 1.02))
    axes[0].set_ylabel("attained by the worst class")
    axes[-1].legend()
    write(figure, path)


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
        raise InvalidRequest(f"{path}: {error}") from error
    finally:
        pyplot().close(figure)
