"""Run the steps of a close, each of them, whatever the others raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from greensched.errors import GreenschedError


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Run every step.

    Raises:
        GreenschedError: the first error of a step; later ones are its notes.
    """
    first: GreenschedError | None = None
    for step in steps:
        try:
            step()
        except GreenschedError as error:
            if first is None:
                first = error
            else:
                first.add_note(f"and then: {error}")
    if first is not None:
        raise first
