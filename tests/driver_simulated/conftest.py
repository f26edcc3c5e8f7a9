"""Machines for the tests of the simulated driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .h200 import SPEC
from .machine import Machine


@pytest.fixture
def make() -> Iterator[Callable[..., Machine]]:
    """Return a function that makes machines, which are closed after the test."""
    made: list[Machine] = []

    def new(*args: Any, **options: Any) -> Machine:
        made.append(Machine(*args, **options))
        return made[-1]

    yield new
    for machine in made:
        machine.close()


@pytest.fixture
def machine(make: Callable[..., Machine]) -> Machine:
    """Return an H200 on virtual time."""
    return make()


@pytest.fixture
def h200(make: Callable[..., Machine]) -> Machine:
    """Return the recorded H200, on virtual time."""
    return make(SPEC)
