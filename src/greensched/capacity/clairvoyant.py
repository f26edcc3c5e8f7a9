"""A clairvoyant's prefill and decode on the same devices: an estimate of what is possible.

This is a fluid model. It knows every request in advance, has no launch costs and no granularity of
work, and treats all devices of a pool as one. It is an estimate and not an upper bound: a
clairvoyant could do better in other ways. It could refuse requests of many tokens, whose decoding
takes most of the time, rather than long prompts; stop all decoding for seconds, which makes one
token of each running request late; or batch prompts with tokens (`engine`).

*Speed.* At each moment a device computes for one class on some SMs and for the other on the rest,
or for one on all of them. Its average is a point of the concave hull of these (`Frontier`), with
the published interference.

*Decoding* takes one step per gap of its target, of all requests together in as few batches as
possible; requests without a place in a batch wait. One in a hundred tokens may be late, so the
fluid decodes more slowly by that fraction. It decodes a prompt from the time its first token is
due; before that only with capacity that no prompt needs.

*Which prompts.* All prompts have the same target, so they are read in the order of arrival. A
prompt that cannot be in time is found when it is due. Then the fluid gives up one prompt among
those since the queue was last empty, possibly one that was already read: the prompt without which
the others are done soonest. This keeps the most prompts: Kise, Ibaraki and Mine, A solvable case of
the one-machine scheduling problem with ready and due times (Operations Research 26, 1978). A prompt
that was given up is no longer decoded.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from greensched.capacity.interference import Guard, factor
from greensched.capacity.latency_tables import SpeedupCurve
from greensched.capacity.metrics import MUST_MEET, WARM_UP
from greensched.capacity.traffic import Arrival, Traffic
from greensched.capacity.workload import ServiceProfile

#: Seconds of one step of the model.
STEP = 0.010
#: SMs between two tested splits. No device is split more finely, so none is missed.
GRAIN = 2


class Frontier:
    """The speed of one class by the speed of another, in whole devices: a concave hull of splits.

    Args:
        first: The curve of the class whose speed is given.
        second: The curve of the other class.
        sms: The SMs of each device.
        guard: The interference between the two.
    """

    def __init__(
        self, first: SpeedupCurve, second: SpeedupCurve, sms: Sequence[int], guard: Guard
    ) -> None:
        hulls = [_hull(first, second, device_sms, guard) for device_sms in sms]
        # The sum of the hulls consists of all their edges, flattest first.
        edges = sorted(
            (
                ((y1 - y0) / (x1 - x0), x1 - x0)
                for hull in hulls
                for (x0, y0), (x1, y1) in pairwise(hull)
            ),
            reverse=True,
        )
        self._x, self._y = [0.0], [sum(hull[0][1] for hull in hulls)]
        for slope, length in edges:
            self._x.append(self._x[-1] + length)
            self._y.append(self._y[-1] + slope * length)

    def beside(self, speed: float) -> float:
        """Return the highest speed of the second class at this speed of the first."""
        if speed >= self._x[-1]:
            return 0.0
        high = bisect_right(self._x, speed)
        x0, x1, y0, y1 = self._x[high - 1], self._x[high], self._y[high - 1], self._y[high]
        return y0 + (y1 - y0) * (speed - x0) / (x1 - x0)

    @property
    def most(self) -> float:
        """The speed of the first class alone."""
        return self._x[-1]


def _hull(
    first: SpeedupCurve, second: SpeedupCurve, sms: int, guard: Guard
) -> list[tuple[float, float]]:
    splits = (
        (_speed(first, cut, second, guard), _speed(second, sms - cut, first, guard))
        for cut in range(GRAIN, sms, GRAIN)
    )
    hull: list[tuple[float, float]] = []
    for x, y in sorted([(0.0, 1.0), (1.0, 0.0), *splits]):
        while hull and hull[-1][1] <= y:
            hull.pop()
        while len(hull) > 1 and _is_below(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return [(0.0, hull[0][1]), *hull] if hull[0][0] > 0 else hull


def _is_below(
    left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]
) -> bool:
    over = (middle[0] - left[0]) * (right[1] - left[1])
    return (middle[1] - left[1]) * (right[0] - left[0]) <= over


def _speed(curve: SpeedupCurve, sms: int, beside: SpeedupCurve, guard: Guard) -> float:
    factors = guard.get((curve.name, beside.name))
    return 1 / curve.slowdown(sms) / (factor(factors, sms) if factors else 1.0)


def attainment(
    traffic: Traffic,
    services: Mapping[str, ServiceProfile],
    sms: Sequence[int],
    latency: Mapping[str, float],
    guard: Guard,
    seconds: float,
) -> float:
    """Estimate the fraction of prompts that can have their first token in time.

    Args:
        traffic: The requests.
        services: One class of role prefill and one of role decode.
        sms: The SMs of each device.
        latency: The target of each class, in seconds.
        guard: The interference between the classes.
        seconds: The length of the traffic. Requests in its first tenth do not count.
    """
    roles = {service.role: service for service in services.values()}
    decode, prefill = roles["decode"], roles["prefill"]
    frontier = Frontier(decode.curve, prefill.curve, sms, guard)
    tokens = _Tokens(len(sms), decode, latency[decode.name])
    prompts = _Prompts(prefill, latency[prefill.name])
    coming = deque(sorted(traffic, key=lambda arrival: arrival.at))
    late = tick = 0
    while coming or prompts.is_waiting:
        now = tick * STEP
        tick += 1
        while coming and coming[0].at <= now:
            prompts.take(coming.popleft())
        for given_up in prompts.look(now):
            late += given_up.at >= WARM_UP * seconds
            tokens.leave(given_up)
        is_busy = prompts.is_waiting
        for read in prompts.to_decode(now, is_late=is_busy):
            tokens.join(read)
        least = tokens.least()
        prompts.work(STEP * frontier.beside(least))
        tokens.work(STEP, 0.0 if is_busy else STEP * max(0.0, frontier.most - least))
    counted = sum(arrival.at >= WARM_UP * seconds for arrival in traffic)
    return 1 - late / counted if counted else 1.0


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt to be read, with its work in seconds of a whole device.

    `came` and `done` are its arrival and end, measured by the total capacity for prompts until
    then.
    """

    arrival: Arrival
    came: float
    work: float
    done: float = 0.0
    is_given_up: bool = False


class _Prompts:
    """The prompts that can be in time, in order of arrival, which is the order of due times."""

    def __init__(self, prefill: ServiceProfile, target: float) -> None:
        self._prefill = prefill
        self._target = target
        #: The total capacity for prompts until now.
        self._capacity = 0.0
        #: Three lists in order of arrival: prompts since the queue was last empty, prompts that are
        #: not due yet, and prompts that are not decoded yet.
        self._since: list[_Prompt] = []
        self._due: deque[_Prompt] = deque()
        self._read: deque[_Prompt] = deque()

    @property
    def is_waiting(self) -> bool:
        """Say whether a prompt remains to be read."""
        return bool(self._since) and self._since[-1].done > self._capacity

    def take(self, arrival: Arrival) -> None:
        """Queue a prompt."""
        if not self.is_waiting:
            self._since.clear()
        prompt = _Prompt(arrival, self._capacity, self._prefill.seconds(arrival.context))
        prompt.done = max(prompt.came, self._since[-1].done if self._since else 0.0) + prompt.work
        self._since.append(prompt)
        self._due.append(prompt)
        self._read.append(prompt)

    def work(self, capacity: float) -> None:
        """Add capacity for prompts."""
        self._capacity += capacity

    def look(self, now: float) -> list[Arrival]:
        """Give up prompts until all those due by now are in time; return the ones given up."""
        given_up = []
        while self._due and self._due[0].arrival.at + self._target <= now:
            prompt = self._due[0]
            if prompt.is_given_up or prompt.done <= self._capacity:
                self._due.popleft()
                continue
            worst = self._worst(self._since.index(prompt) + 1)
            worst.is_given_up = True
            given_up.append(worst.arrival)
            self._since.remove(worst)
            before = 0.0
            for other in self._since:
                other.done = before = max(before, other.came) + other.work
        return given_up

    def _worst(self, number: int) -> _Prompt:
        """Return the prompt without which the first `number` prompts are done soonest."""
        prompts = self._since[:number]
        # Their end is the maximum, over all prompts, of its arrival plus the work from it on.
        ends, total = [0.0] * number, 0.0
        for i in range(number - 1, -1, -1):
            total += prompts[i].work
            ends[i] = prompts[i].came + total
        after = [0.0] * (number + 1)
        for i in range(number - 1, -1, -1):
            after[i] = max(ends[i], after[i + 1])
        before, worst, least = -math.inf, prompts[-1], math.inf
        for i, prompt in enumerate(prompts):
            end = max(before - prompt.work, after[i + 1])
            if end < least:
                worst, least = prompt, end
            before = max(before, ends[i])
        return worst

    def to_decode(self, now: float, *, is_late: bool) -> list[Arrival]:
        """Return the prompts that must be decoded now; if not `is_late`, all that can be."""
        arrivals = []
        while self._read:
            prompt = self._read[0]
            due = prompt.arrival.at + self._target if is_late else now
            if not prompt.is_given_up and (prompt.done > self._capacity or due > now):
                break
            self._read.popleft()
            if not prompt.is_given_up:
                arrivals.append(prompt.arrival)
        return arrivals


class _Tokens:
    """Requests that are decoded, all at the same pace."""

    def __init__(self, devices: int, decode: ServiceProfile, gap: float) -> None:
        self._ends: list[tuple[float, int]] = []
        self._running: dict[int, Arrival] = {}
        #: Requests without a place in a batch; for each, one token is late.
        self._waiting: deque[Arrival] = deque()
        self._written = 0.0
        self._devices = devices
        self._decode = decode
        self._batch = decode.batch
        self._gap = gap

    def _step(self) -> float:
        """Return the work of one token for each request, with the best number of batches."""
        number = len(self._running)
        if not number:
            return 0.0
        least = min(self._devices, math.ceil(number / self._batch))
        most = max(least, min(self._devices, number))
        return min(used * self._decode.seconds(number / used) for used in range(least, most + 1))

    def least(self) -> float:
        """Return the least speed that keeps them in time."""
        return MUST_MEET * self._step() / self._gap

    def work(self, seconds: float, more: float) -> None:
        """Advance by this many seconds at that speed, plus `more` work with idle capacity."""
        step = self._step()
        if step:
            self._written += MUST_MEET * seconds / self._gap + more / step
        while self._ends and self._ends[0][0] <= self._written:
            self._running.pop(heapq.heappop(self._ends)[1], None)
        self._fill()

    def join(self, arrival: Arrival) -> None:
        if arrival.generated > 1:
            self._waiting.append(arrival)
            self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._devices * self._batch:
            arrival = self._waiting.popleft()
            self._running[id(arrival)] = arrival
            end = self._written + arrival.generated - 1
            heapq.heappush(self._ends, (end, id(arrival)))

    def leave(self, arrival: Arrival) -> None:
        """Remove a request that was given up."""
        self._running.pop(id(arrival), None)
        if arrival in self._waiting:
            self._waiting.remove(arrival)
