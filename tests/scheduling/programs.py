"""Programs of three to six classes, run against the scheduler in virtual time.

A program is a device, classes and their traffic, drawn from one seed. `run` executes it under a
policy and returns what each class had; `partitions` runs the same work as fixed partitions, first
in, first out, for comparison.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from greensched.errors import DeadlineImpossible, QueueFull, TooManySMs
from greensched.leasing.device_pool import MAX_PREBUILT
from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.policy import POLICIES, Fifo, Sized
from greensched.scheduling.requests import Grant, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass

#: H100 and H200 by eights and by twos, with a remainder that joins or does not, and small devices.
DEVICES = (
    DeviceCells(size=8, count=16, remainder=4),
    DeviceCells(size=8, count=16, remainder=4, joins=True),
    DeviceCells(size=8, count=15, remainder=12, joins=True),
    DeviceCells(size=2, count=66),
    DeviceCells(size=4, count=8),
)
#: Seconds that arrivals last, and that their work may take afterwards until it counts as locked.
HORIZON, DRAIN = 0.6, 30.0


class Locked(Exception):
    """Requests wait, and nothing will happen any more."""


@dataclass(frozen=True)
class Curve:
    """The seconds of a piece: its work divided by the SMs that it can use, plus a constant."""

    work: float
    useful: int
    constant: float = 0.0

    def at(self, sms: int) -> float:
        """Return the seconds on so many SMs."""
        return self.constant + self.work / max(1, min(sms, self.useful))

    def observe(self, sms: int, seconds: float) -> None:
        """Learn nothing: the curve is true."""


@dataclass(frozen=True)
class Traffic:
    """A class, its requests, and their times."""

    rules: ServiceClass
    curve: Curve
    pieces: int
    size: int
    least: int
    most: int
    at: tuple[float, ...]


@dataclass(frozen=True)
class Program:
    """A device, classes and traffic, drawn again by `seed`."""

    cells: DeviceCells
    traffic: tuple[Traffic, ...]
    seed: int = 0

    @property
    def highest(self) -> Traffic | None:
        """The class with a target and the highest priority."""
        targets = [one for one in self.traffic if one.rules.latency is not None]
        return max(targets, key=lambda one: one.rules.priority, default=None)


@dataclass
class Outcome:
    """The results of one class."""

    requests: int = 0
    in_time: int = 0
    refused: int = 0
    pieces: int = 0
    longest_wait: float = 0.0


@dataclass(eq=False)
class Task:
    """One request of a program, or one lease without an end."""

    traffic: Traffic
    arrived: float
    left: int
    asked: float = 0.0
    request: Request | None = None
    grant: Grant | None = None


@dataclass
class Execution:
    """One run of a program.

    Args:
        program: what runs.
        policy: its scheduler's.
        elastic: leases are elastic where their class names two sizes, with a checkpoint after each
            piece; else each piece is a lease of one size, which has nothing to give at checkpoints.
        known: the scheduler is told durations.
        check: called after each event.
        prebuilt: only the sets of cells that a pool prepares have executors, and none is made: as
            on a device that is never idle.
    """

    program: Program
    policy: Fifo
    elastic: bool
    known: bool = True
    check: Callable[[Execution], None] | None = None
    prebuilt: bool = False
    now: float = 0.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rules = [one.rules for one in self.program.traffic]
        cells = self.program.cells
        menu = cells.menu(MAX_PREBUILT) if self.prebuilt else []
        made = set(menu)
        self.scheduler = Scheduler(
            [cells], self.policy, 10**6, lambda _, mask: not self.prebuilt or mask in made,
            services=rules,
        )  # fmt: skip
        for mask in menu:
            self.scheduler.ready_masks[0].setdefault(mask.bit_count(), {})[mask] = None
        self._order = count()
        self._events: list[tuple[float, int, Task]] = []
        self.waiting: dict[Task, None] = {}
        self.outcomes = {one.name: Outcome() for one in rules}
        self._sizes = {one.rules.name: self._size(one) for one in self.program.traffic}
        #: The sum over the classes of the longest time between two checkpoints of a lease.
        self.intervals = sum(
            one.curve.at(self._sizes[one.rules.name].least) for one in self.program.traffic
        )

    def _size(self, traffic: Traffic) -> SizeRange:
        """Return what a class asks for."""
        if not self.elastic:
            return SizeRange(traffic.size, traffic.size)
        # What is free at least is granted, so with a target it must be enough, unless the policy
        # says what is.
        is_enough = isinstance(self.policy, Sized) or traffic.rules.latency is None
        return SizeRange(traffic.least if is_enough else traffic.size, traffic.most)

    def run(self) -> dict[str, Outcome]:
        """Run it to its end, and return what each class had.

        Raises:
            Locked: requests wait, and nothing will happen any more.
        """
        for traffic in self.program.traffic:
            for at in traffic.at:
                self._at(at, Task(traffic, at, traffic.pieces or 1))
        last_tick = 0.0
        while self._events:
            self.now, _, task = heapq.heappop(self._events)
            if self.now > HORIZON + DRAIN:
                raise Locked(f"not done after {DRAIN} s: {self.waiting}")
            due = min(last_tick + 0.05, self.scheduler.next_deadline() or math.inf)
            if self.waiting and self.now >= due:
                last_tick = self.now
                self._granted(self.scheduler.tick(self.now)[0])
            if task.grant is None:
                self._ask(task)
            else:
                self._piece_done(task)
            if self.check is not None:
                self.check(self)
        if self.waiting:
            raise Locked(f"{list(self.waiting)} wait")
        return self.outcomes

    def _at(self, at: float, task: Task) -> None:
        heapq.heappush(self._events, (at, next(self._order), task))

    def _ask(self, task: Task) -> None:
        traffic, outcome = task.traffic, self.outcomes[task.traffic.rules.name]
        if task.left == (traffic.pieces or 1) and traffic.pieces:
            outcome.requests += 1
        size = self._sizes[traffic.rules.name]
        pieces = task.left if size.least < size.most else 1
        task.asked = self.now
        try:
            task.request = request = self.scheduler.request(
                self.now, (size,), service=traffic.rules.name, holder=task, owner=task,
                duration=self._duration(traffic, pieces),
            )  # fmt: skip
        except (DeadlineImpossible, QueueFull, TooManySMs):
            outcome.refused += 1
            return
        if request.grants:
            self._begin(task)
        else:
            self.waiting[task] = None
        self._granted(self.scheduler.resized(request))

    def _duration(self, traffic: Traffic, pieces: int) -> Curve | None:
        if not (self.known and self.elastic and traffic.pieces):
            return None
        curve = traffic.curve
        return replace(curve, work=pieces * curve.work, constant=pieces * curve.constant)

    def _granted(self, granted: Iterable[Request]) -> None:
        for request in granted:
            task = request.owner
            assert isinstance(task, Task)
            del self.waiting[task]
            self._begin(task)

    def _begin(self, task: Task) -> None:
        assert task.request is not None
        outcome = self.outcomes[task.traffic.rules.name]
        outcome.longest_wait = max(outcome.longest_wait, self.now - task.asked)
        (task.grant,) = task.request.grants
        self._at(self.now + task.traffic.curve.at(task.grant.sms), task)

    def _piece_done(self, task: Task) -> None:
        traffic, grant = task.traffic, task.grant
        assert grant is not None
        outcome = self.outcomes[traffic.rules.name]
        outcome.pieces += 1
        if traffic.pieces or self.now >= HORIZON:
            task.left -= 1
        if not task.left:
            if traffic.pieces:
                latency = self.now - task.arrived
                outcome.in_time += latency <= (traffic.rules.latency or math.inf)
            self._granted(self.scheduler.drained(self.now, grant))
        elif grant.request.is_elastic:
            due, within = traffic.rules.latency, None
            if due is not None:  # half of what is left: it may have to wait for other leases
                within = max(1e-6, (task.arrived + due - self.now) / task.left / 2)
            duration = self._duration(traffic, 1)
            granted = self.scheduler.checkpoint(self.now, grant, duration, within)
            if grant.over:  # it gave way, and waits to go on
                task.asked, task.grant = self.now, None
                self.waiting[task] = None
            else:
                self._at(self.now + traffic.curve.at(grant.sms), task)
            self._granted(granted)
        else:
            granted = self.scheduler.drained(self.now, grant)
            task.grant = None
            self._granted(granted)
            self._ask(task)


def run(program: Program, policy: str, **options: Any) -> dict[str, Outcome]:
    """Run a program under a policy with elastic leases."""
    return Execution(program, POLICIES[policy](), elastic=True, **options).run()


def partitions(program: Program) -> dict[str, Outcome]:
    """Run a program with a fixed partition for each piece, first in, first out.

    The classes are the same, with their reserves: these hold under every policy, so SMs that are
    kept for one class are not there for the others on fixed partitions either.
    """
    return Execution(program, Fifo(), elastic=False).run()


# -- drawing -------------------------------------------------------------------------------------


def draw(seed: int) -> Program:
    """Draw a program of three to six classes, at most 0.7 of the device busy with requests."""
    return replace(draw_from(random.Random(seed)), seed=seed)


def draw_from(rng: random.Random, *, most: int = 40) -> Program:
    """Draw a program with at most so many requests of each class."""
    cells = rng.choice(DEVICES)
    number = rng.randint(3, 6)
    loops = rng.randint(0, 2)
    reserved, load = 0, rng.uniform(0.2, 0.7) / max(1, number - loops)
    traffic = []
    for i in range(number):
        is_loop = i < loops
        has_target = not is_loop and (i == number - 1 or rng.random() < 0.6)
        size = rng.randint(1, max(1, cells.count * 2 // 3)) * cells.size
        seconds = rng.uniform(0.001, 0.020)
        useful = rng.choice((size, 2 * size, cells.total))
        curve = Curve(seconds * min(size, useful) * 0.9, useful, seconds * 0.1)
        reserve = 0
        if not is_loop and rng.random() < 0.3 and reserved + size <= cells.count * cells.size // 3:
            reserve = size
            reserved += size
        latency = seconds * rng.uniform(4, 12) + 0.040 if has_target else None
        pieces = 0 if is_loop else rng.choice((1, 1, 1, 2, 4))
        rules = ServiceClass(
            f"c{i}", priority=i if rng.random() < 0.8 else max(0, i - 1),
            reserve=reserve, weight=rng.choice((1, 1, 3)),
            latency=latency, preemptible=rng.random() < 0.7, on_late="best_effort",
            max_wait_for_reserve=rng.choice((None, 0, 0.05)),
            checkpoint_interval=rng.choice((None, seconds)),
        )  # fmt: skip
        least = size
        while least > cells.size and curve.at(least - cells.size) < 2 * seconds:
            least -= cells.size
        least = rng.choice((size, least, cells.size if has_target else least))
        upto = max(size, useful if is_loop or rng.random() < 0.5 else size)
        if is_loop and upto == least:
            upto = cells.total
        if is_loop:
            at = [rng.uniform(0, 0.05) for _ in range(rng.randint(1, 2))]
        else:
            rate = load * cells.total / (size * seconds * pieces)
            at, t = [], 0.0
            while (t := t + rng.expovariate(rate)) < HORIZON and len(at) < most:
                at.append(t)
        traffic.append(Traffic(rules, curve, pieces, size, least, upto, tuple(at)))
    return Program(cells, tuple(traffic))
