"""A picture of a report: attainment over the rate, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from greensched.capacity import metrics
from greensched.capacity.results import Results, attained
from greensched.errors import InvalidRequest, MissingPackage


def save(answer: Results, path: Path) -> None:
    """Draws, for each multiple of the alone-p99, each arm's attainment over the offered rate.

    Raises:
        MissingPackage: matplotlib is not installed; says what to install.
        InvalidRequest: the file cannot be written.
    """
    multiples = metrics.MULTIPLES
    figure, axes = pyplot().subplots(1, len(multiples), figsize=(4 * len(multiples), 3.5))
    for axis, multiple in zip(axes, multiples, strict=True):
        for arm in dict.fromkeys(cell.arm for cell in answer.cells):
            cells = [cell for cell in answer.cells if cell.arm == arm]
            found = [metrics.interval(attained(answer, cell, multiple)) for cell in cells]
            x = [answer.offered[cell.rate] for cell in cells]
            axis.plot(x, [mean for mean, _, _ in found], marker="o", label=arm)
            axis.fill_between(x, [f[1] for f in found], [f[2] for f in found], alpha=0.2)
        axis.axhline(metrics.MUST_MEET, color="grey", linewidth=0.5)
        axis.set(title=f"within {multiple:g} x alone-p99", xlabel="requests/s", ylim=(0, 1.02))
    axes[0].set_ylabel("attained by the worst class")
    axes[-1].legend()
    write(figure, path)


def pyplot() -> Any:
    """What draws, without a screen.

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
    """Writes a figure of `pyplot` in the format that the name ends in, and lets go of it.

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
