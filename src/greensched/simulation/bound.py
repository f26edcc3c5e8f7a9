"""What a clairvoyant fluid does, for prefill and decode: what is left to be gained at the most.

Each device is one fluid, as fast as the best of its splits is in sum, interference and all, without
launch costs or grains of work; all devices of a pool are one. Decoding has what its target asks for
first: `step(batch)` of work each target gap, which is the least, and what nobody else wants beside.
The rest reads prompts, the most urgent first. Where not all that wait can be in time, the largest
are given up beforehand, which leaves the most of them.

That it is a bound is not proven: which prompts to give up is decided as they come, by the speed
that is left then.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Mapping

from greensched.simulation.interference import Guard, factor
from greensched.simulation.tables import Curve
from greensched.simulation.traffic import Traffic
from greensched.simulation.workload import Service, prompt_seconds, step_seconds

#: Seconds of fluid that are worked out at once.
STEP = 0.010
#: One token in a hundred may be late: so much of decoding is done in time.
IN_TIME = 0.99


def best_sum(one: Curve, other: Curve, sms: int, guard: Guard) -> float:
    """The most that two kinds of work do side by side, in units of one device each alone."""
    cuts = range(8, sms - 7, 8)
    together = (
        _speed(one, cut, other, guard) + _speed(other, sms - cut, one, guard) for cut in cuts
    )
    return max(1.0, *together)


def _speed(curve: Curve, sms: int, beside: Curve, guard: Guard) -> float:
    factors = guard.get((curve.name, beside.name))
    return 1 / curve.slowdown(sms) / (factor(factors, sms) if factors else 1.0)


def attainment(
    traffic: Traffic,
    services: Mapping[str, Service],
    sms: list[int],
    latency: Mapping[str, float],
    guard: Guard,
) -> float:
    """The part of prompts whose first token the fluid has in time, all gaps being in time."""
    roles = {service.role: service for service in services.values()}
    decode, prefill = roles["decode"], roles["prefill"]
    speed = sum(best_sum(decode.curve, prefill.curve, each, guard) for each in sms)
    tokens = _Tokens(len(sms), latency[decode.name])
    prompts = _Prompts(latency[prefill.name])
    now, index = 0.0, 0
    while index < len(traffic) or prompts.waiting:
        if index < len(traffic) and not prompts.waiting and not tokens.ends:
            now = max(now, traffic[index].at)
        left = max(0.0, speed - tokens.least()) * STEP
        while index < len(traffic) and traffic[index].at <= now:
            prompts.take(now, traffic[index].at, traffic[index].context, index, left / STEP)
            index += 1
        now += STEP
        left, done = prompts.work(left)
        tokens.work(STEP, left)
        for order in done:
            tokens.join(traffic[order].generated - 1)
    return prompts.met / len(traffic)


class _Prompts:
    """Those that wait and can be in time: (when due, order, work left), the most urgent first."""

    def __init__(self, target: float) -> None:
        self.waiting: list[tuple[float, int, float]] = []
        self.met = 0
        self._target = target

    def take(self, now: float, at: float, context: int, order: int, speed: float) -> None:
        """One more; somebody is given up if not all can be in time."""
        insort(self.waiting, (at + self._target, order, prompt_seconds(context)))
        total = 0.0
        for i, (due, _, work) in enumerate(self.waiting):
            total += work
            if total > speed * (due - now):
                self.waiting.remove(max(self.waiting[: i + 1], key=lambda one: one[2]))
                return

    def work(self, left: float) -> tuple[float, list[int]]:
        """Does so much; returns what is left over, and who is done."""
        done: list[int] = []
        while self.waiting and left > 0:
            due, order, work = self.waiting[0]
            if work > left:
                self.waiting[0] = (due, order, work - left)
                return 0.0, done
            left -= work
            self.waiting.pop(0)
            self.met += 1
            done.append(order)
        return left, done


class _Tokens:
    """Requests that are decoded, all at one pace: each ends so many tokens after it joined."""

    def __init__(self, devices: int, gap: float) -> None:
        self.ends: list[float] = []
        self._written = 0.0
        self._devices = devices
        self._gap = gap

    def _step(self) -> float:
        """Work of one token of everybody."""
        batch = len(self.ends)
        used = min(self._devices, batch)
        return used * step_seconds(-(-batch // used)) if batch else 0.0

    def least(self) -> float:
        """The part of the fluid that keeps them in time."""
        return IN_TIME * self._step() / self._gap

    def work(self, seconds: float, more: float) -> None:
        """So many seconds at that pace, and faster by what nobody else wanted."""
        step = self._step()
        if step:
            self._written += IN_TIME * seconds / self._gap + more / step
        while self.ends and self.ends[0] <= self._written:
            heapq.heappop(self.ends)

    def join(self, tokens: int) -> None:
        """One more, with so many tokens to come."""
        if tokens > 0:
            heapq.heappush(self.ends, self._written + tokens)
