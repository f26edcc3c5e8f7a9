"""Run the steps of a close, each of them, whatever the others raise; find what failed first."""

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


def first_error(error: BaseException) -> BaseException:
    """Return the library's error in whose handling this one was raised, or the error itself.

    Cleaning up after a failure may fail as well, and that says nothing of the cause.
    """
    while isinstance(error.__context__, GreenschedError) and not error.__suppress_context__:
        error = error.__context__
    return error
