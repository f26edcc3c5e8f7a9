"""Machines for the tests of the simulated driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .h200 import SPEC
from .machine import Machine


@pytest.fixture
def make() -> Iterator[Callable[..., Machine]]:
    """Make machines, and end them with the test."""
    made: list[Machine] = []

    def new(*args: Any, **options: Any) -> Machine:
        made.append(Machine(*args, **options))
        return made[-1]

    yield new
    for machine in made:
        machine.close()


@pytest.fixture
def machine(make: Callable[..., Machine]) -> Machine:
    """An H200 on virtual time."""
    return make()


@pytest.fixture
def h200(make: Callable[..., Machine]) -> Machine:
    """The H200 that was asked, on virtual time."""
    return make(SPEC)
