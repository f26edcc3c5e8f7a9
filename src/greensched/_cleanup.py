"""Run all steps of a close, even if some raise, and find the first failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from greensched.errors import GreenschedError


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Run every step, even if earlier steps raise.

    Raises:
        GreenschedError: The first error of a step; later errors are its notes.
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
    """Return the library's error that was being handled when this one was raised, if any.

    Cleaning up after a failure may fail as well, but that error does not show the cause.
    """
    while isinstance(error.__context__, GreenschedError) and not error.__suppress_context__:
        error = error.__context__
    return error
