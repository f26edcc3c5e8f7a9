"""What nobody could beat: a fluid that knows everything, for prefill and decode.

Each device is one fluid, as fast as the best of its splits is in sum, interference and all, without
launch costs or grains of work. Decoding goes at the slowest pace its target allows, which costs
least: `step(batch)` of work each target gap. What is left reads prompts, the most urgent first; a
prompt that cannot be in time is known beforehand and takes nothing. All devices of a pool are one
fluid.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from greensched.simulation.interference import Guard, factor
from greensched.simulation.tables import Curve
from greensched.simulation.traffic import Traffic
from greensched.simulation.workload import Service, prompt_seconds, step_seconds

#: Seconds of fluid that are worked out at once.
STEP = 0.010


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
    gap, target = latency[decode.name], latency[prefill.name]
    waiting: list[tuple[float, int, float]] = []  # (when due, order, work left)
    ends: list[float] = []  # when each request that is decoded has its last token
    now, index, met = 0.0, 0, 0
    while index < len(traffic) or waiting:
        if not waiting and not ends and index < len(traffic):
            now = max(now, traffic[index].at)
        while index < len(traffic) and traffic[index].at <= now:
            arrival = traffic[index]
            heapq.heappush(waiting, (arrival.at + target, index, prompt_seconds(arrival.context)))
            index += 1
        while ends and ends[0] <= now:
            heapq.heappop(ends)
        left = (speed - _decoding(len(ends), len(sms), gap)) * STEP
        now += STEP
        while waiting and left > 0:
            due, order, work = heapq.heappop(waiting)
            if now - STEP + work / speed > due:
                continue  # late whatever is done: a clairvoyant never began it
            if work > left:
                heapq.heappush(waiting, (due, order, work - left))
                break
            left -= work
            met += 1
            heapq.heappush(ends, now + max(0, traffic[order].generated - 1) * gap)
    return met / len(traffic)


def _decoding(batch: int, devices: int, gap: float) -> float:
    """The part of the fluid that decoding takes: one step of its share on each device a gap."""
    if not batch:
        return 0.0
    used = min(devices, batch)
    # One token in a hundred may be late: so much less is done.
    return 0.99 * used * step_seconds(-(-batch // used)) / gap
