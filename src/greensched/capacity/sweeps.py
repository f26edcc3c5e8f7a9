"""Sweeps: several parameters of a strategy are tried, and each run reports the best.

The best is chosen afterwards, for each rate and seed, which no operator can do. So a swept strategy
is compared at its best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from greensched.capacity.baselines import OF_LANGUAGE_MODELS, SWEPT, baselines
from greensched.capacity.metrics import Latencies, of_outcome
from greensched.capacity.pool_strategies import Classes, Elastic, Shared, Sized
from greensched.capacity.run import Outcome
from greensched.capacity.strategies import CELL, Split, Strategy
from greensched.capacity.workload import ServiceProfile

#: The best of all fixed splits.
BEST_SPLIT = "best-split"
#: The same with target-aware servers, like `sized`: the control for the gain of its scheduler.
BEST_LATE = "best-split-late"
#: The most fixed splits to try for one run.
MOST_SPLITS = 120

Run = Callable[[Strategy], Outcome]


def all_strategies() -> dict[str, Strategy]:
    """Return every strategy by name, except the splits."""
    ours: tuple[Strategy, ...] = (Classes(), Elastic(), Shared(), Sized())
    return baselines() | {strategy.name: strategy for strategy in ours}


def names(services: Mapping[str, ServiceProfile]) -> list[str]:
    """Return the names of all strategies that can serve these classes."""
    is_model = any(service.role == "prefill" for service in services.values())
    known = [*all_strategies(), BEST_SPLIT, BEST_LATE]
    return [name for name in known if is_model or name not in OF_LANGUAGE_MODELS]


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """The quality of a run: the worst class's attainment, the mean, and best-effort work."""

    worst: float
    mean: float
    best_effort: float


def score(latencies: Mapping[str, Latencies], services: Mapping[str, ServiceProfile]) -> Score:
    """Score a run by the targets of its classes. Classes without requests do not count."""
    attainments = [
        latencies[name].attained(service.latency)
        for name, service in services.items()
        if not service.is_best_effort
    ]
    attainments = [value for value in attainments if not math.isnan(value)] or [1.0]
    rest = sum(latencies[name].rate for name, s in services.items() if s.is_best_effort)
    return Score(min(attainments), sum(attainments) / len(attainments), rest)


class Best:
    """The best run so far.

    Args:
        run: Simulates a strategy.
        services: The classes, with their targets.
    """

    def __init__(self, run: Run, services: Mapping[str, ServiceProfile]) -> None:
        self.outcomes: list[Outcome] = []
        self._run = run
        self._services = services
        self._best: tuple[Score, Outcome] | None = None

    @property
    def outcome(self) -> Outcome:
        assert self._best is not None  # a strategy was tried
        return self._best[1]

    @property
    def is_perfect(self) -> bool:
        """Say whether no run can be better: all requests are in time, and nothing else counts."""
        loops = any(service.is_best_effort for service in self._services.values())
        return self._best is not None and self._best[0].worst == 1.0 and not loops

    def take(self, strategy: Strategy) -> bool:
        """Simulate a strategy; return whether it is better than all earlier ones."""
        outcome = self._run(strategy)
        self.outcomes.append(outcome)
        new = score(of_outcome(outcome), self._services)
        if self._best is not None and new <= self._best[0]:
            return False
        self._best = new, outcome
        return True


def best_run(
    name: str, run: Run, services: Mapping[str, ServiceProfile], sms: int, finest: int
) -> tuple[Outcome, list[Outcome]]:
    """Return the best run of a strategy over its parameters, and all of its runs.

    Args:
        name: The name of a strategy.
        run: Simulates a strategy.
        services: The classes, with their targets.
        sms: The SMs of the smallest device.
        finest: The step in SMs in which a device can be split.
    """
    best = Best(run, services)
    if name in (BEST_SPLIT, BEST_LATE) and len(services) > 1:
        _sweep_splits(best, name == BEST_LATE, len(services), sms, finest)
    else:
        for strategy in _parameters(name, services):
            best.take(strategy)
            if best.is_perfect:
                break
    return best.outcome, best.outcomes


def split_of(name: str) -> tuple[int, ...] | None:
    """Return the SMs in a name such as `split-48` or `split-48-24`, or None."""
    first, *parts = name.split("-")
    if first == "split" and parts and all(part.isdigit() for part in parts):
        return tuple(map(int, parts))
    return None


def _parameters(name: str, services: Mapping[str, ServiceProfile]) -> Sequence[Strategy]:
    """Return one strategy for each value of its parameter."""
    if name in (BEST_SPLIT, BEST_LATE):  # of one class
        return [Split(target_aware=name == BEST_LATE)]
    sms = split_of(name)
    if sms is not None:
        return [Split(*sms)]
    strategy: Any = all_strategies()[name]
    field, values = SWEPT.get(name, ("", ()))
    is_model = any(service.role == "prefill" for service in services.values())
    if not values or (field == "blocks" and not is_model):
        return [strategy]
    return [replace(strategy, **{field: value}) for value in values]


# -- fixed splits -----------------------------------------------------------------------------


def _sweep_splits(best: Best, target_aware: bool, classes: int, sms: int, finest: int) -> None:
    """Try fixed splits by coordinate descent, because all of them are too many.

    It begins at even shares; a move gives SMs of one class to another. With two classes, more SMs
    put more of one class in time and less of the other, so the search finds the best split.
    """
    tried: set[tuple[int, ...]] = set()
    at: tuple[int, ...] = ()

    def take(sizes: tuple[int, ...]) -> bool:
        nonlocal at
        done = best.is_perfect or len(tried) >= MOST_SPLITS
        if sizes in tried or min(sizes) < finest or done:
            return False
        tried.add(sizes)
        if best.take(Split(*sizes[:-1], target_aware=target_aware)):
            at = sizes
            return True
        return False

    share = sms // classes // finest * finest
    take((*[share] * (classes - 1), sms - share * (classes - 1)))
    step = 4 * CELL
    while step >= finest:
        if not any(take(sizes) for sizes in _moves(at, step)):
            step //= 2


def _moves(at: tuple[int, ...], step: int) -> Iterator[tuple[int, ...]]:
    """Yield the splits in which one class has a step more and another class a step less."""
    for more in range(len(at)):
        for less in range(len(at)):
            if more != less:
                moved = list(at)
                moved[more] += step
                moved[less] -= step
                yield tuple(moved)
