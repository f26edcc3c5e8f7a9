"""Output of commands: JSON, tables and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Called with the fraction done, from 0 to 1, and the current step.
Progress = Callable[[float, str], None]

#: Columns of a table in a file or a pipe, so that rows are not broken there.
WIDE = 240


def print_json(value: Any) -> None:
    """Write a value to standard output as JSON."""
    print(json.dumps(value, indent=1))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Write a table to standard output; numbers are right-aligned, other cells left."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, cells in zip(columns, zip(*rows, strict=True), strict=True):
        table.add_column(name, justify="right" if all(map(_is_number, cells)) else "left")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)
    if title:
        console.print(title)
    console.print(table)


def _is_number(cell: object) -> bool:
    try:
        float("nan" if cell is None else str(cell))
    except ValueError:
        return False
    return True


@contextmanager
def progress() -> Iterator[Progress]:
    """Show a bar on standard error during the block, if standard error is a terminal.

    The reporting calls draw the bar, on their own thread; the end of the block erases it.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
    console = Console(stderr=True, force_terminal=True)
    with Bar(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=1.0)
        shown: object = None

        def show(done: float, what: str) -> None:
            nonlocal shown
            if shown != (shown := (int(100 * done), what)):
                bar.update(task, completed=done, description=what, refresh=True)

        yield show
