"""One run: traffic, classes and an arm on simulated devices, from the first request to the last."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from greensched.capacity.interference import PUBLISHED, Guard
from greensched.capacity.machine import DeviceTrace, Machine
from greensched.capacity.servers import Decode, Loop, Prefill, Requests, Samples, Server
from greensched.capacity.strategies import Seats, Strategy
from greensched.capacity.traffic import Arrival, Traffic
from greensched.capacity.workload import ServiceProfile
from greensched.typing import Granularity

#: Seconds of virtual time between two looks at whether anybody waits, once traffic has ended.
LOOK_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What stays the same while arms are compared.

    Attributes:
        gpus: as `--gpus`.
        granularity: how finely pools cut them.
        services: the classes.
        seconds: of traffic.
        guard: interference.
        late_after: seconds, for each class, after which whoever waits is late, whatever he is held
            to. A run goes on without traffic until all who wait are, at most as long again.
    """

    gpus: str
    services: Mapping[str, ServiceProfile]
    seconds: float
    guard: Guard = field(default_factory=lambda: PUBLISHED)
    granularity: Granularity = "coscheduled"
    late_after: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Outcome:
    """What one run gave. All but samples' latencies and `drained` is of the time of the traffic.

    Attributes:
        samples: of each class; what was done in them is of that time, too.
        seconds: of traffic.
        drained: seconds of virtual time after that.
        sm_seconds: that each class had SMs for, over all devices, in kernels that ended by then.
        busy: the part of all SM-seconds in which some kernel was on them.
        decisions: leases granted.
    """

    arm: str
    seed: int
    seconds: float
    drained: float
    samples: dict[str, Samples]
    sm_seconds: dict[str, float]
    busy: float
    decisions: int = 0


def simulate(arm: Strategy, setting: Scenario, traffic: Traffic, seed: int) -> Outcome:
    """Runs an arm. The same arguments give the same outcome, to the last digit.

    All of the traffic comes within the setting's seconds.
    """
    machine = Machine(
        setting.gpus, setting.services, setting.guard, seed, granularity=setting.granularity
    )
    try:
        arm.prepare(machine)
        return machine.clock.run(_run, machine, arm, setting, traffic, seed)
    finally:
        machine.close()


def alone(arm: Strategy, setting: Scenario, traffic: Traffic, seed: int) -> dict[str, Outcome]:
    """Each class by itself: as if the others took no time.

    Nobody is late there: a run goes on until all are served, at most as long again.
    """
    setting = replace(setting, late_after=dict.fromkeys(setting.services, math.inf))
    found = {}
    for name, service in setting.services.items():
        single = replace(setting, services={name: service})
        found[name] = simulate(arm, single, traffic, seed)
    return found


async def _run(
    machine: Machine, arm: Strategy, setting: Scenario, traffic: Traffic, seed: int
) -> Outcome:
    async with arm.open(machine) as seats:
        end = machine.begin()
        house = _Recorder(machine, seats)
        servers = [asyncio.ensure_future(server.serve()) for server in house.servers]
        played = asyncio.ensure_future(_play(machine, house, arm, setting, traffic, seed))
        # A server ends only by failing.
        await asyncio.wait([*servers, played], return_when=asyncio.FIRST_COMPLETED)
        for task in (*servers, played):
            task.cancel()
        ended = await asyncio.gather(*servers, played, return_exceptions=True)
        end()
        failed = [e for e in ended if isinstance(e, Exception)]
        if failed:
            raise failed[0]
        return played.result()


async def _play(
    machine: Machine,
    house: _Recorder,
    arm: Strategy,
    setting: Scenario,
    traffic: Traffic,
    seed: int,
) -> Outcome:
    """Sends the traffic, and waits until everybody is served or late.

    If runs ended with their traffic, there would be the fewer late ones the more are left waiting.
    """
    began, seconds = machine.now() / 1e9, setting.seconds
    end = began + seconds
    await house.feed(traffic, began)
    await asyncio.sleep(end - machine.now() / 1e9)
    ended, decisions, done = machine.now(), machine.granted(), house.done()
    for _ in range(math.ceil(seconds / LOOK_S)):
        if not house.is_undecided(end, setting.late_after):
            break
        await asyncio.sleep(LOOK_S)
    spans = [[r for r in ran if r.end <= ended] for ran in machine.ran]
    return Outcome(
        arm=arm.name,
        seed=seed,
        seconds=seconds,
        drained=machine.now() / 1e9 - end,
        samples=house.samples(began, done),
        sm_seconds=_sm_seconds(spans, setting.services),
        busy=sum(map(occupied, spans)) / (sum(machine.sms) * seconds),
        decisions=decisions,
    )


class _Recorder:
    """Every class's servers, and who sends requests to which of them."""

    def __init__(self, machine: Machine, seats: Seats) -> None:
        self._machine = machine
        self._by: dict[str, list[Server]] = {}
        self._decoders: dict[int, Decode] = {}
        roles = {service.role: service for service in machine.services.values()}
        self._prefill, self._decode = roles.get("prefill"), roles.get("decode")
        for service in sorted(machine.services.values(), key=lambda s: s.role != "decode"):
            self._by[service.name] = [self._server(d, service, seats) for d in machine.devices]

    @property
    def servers(self) -> list[Server]:
        """All of them."""
        return [server for each in self._by.values() for server in each]

    def _server(self, device: int, service: ServiceProfile, seats: Seats) -> Server:
        machine, seat = self._machine, seats(device, service)
        if service.role == "prefill":
            return Prefill(machine, device, service, seat, self._decoders.get(device))
        if service.role == "decode":
            decode = self._decoders[device] = Decode(machine, device, service, seat)
            return decode
        kind = Requests if service.role == "request" else Loop
        return kind(machine, device, service, seat)

    async def feed(self, traffic: Traffic, began: float) -> None:
        """Sends each request when it comes, to the device with the least to do."""
        for arrival in traffic:
            due = began + arrival.at
            delay = due - self._machine.now() / 1e9
            if delay > 0:
                await asyncio.sleep(delay)
            self._send(replace(arrival, at=due))

    def _send(self, arrival: Arrival) -> None:
        if arrival.service:
            if arrival.service in self._by:  # else another class is alone
                self._least([arrival.service]).take(arrival)
        elif self._prefill is not None:
            names = [self._prefill.name] + ([self._decode.name] if self._decode else [])
            self._least(names).take(arrival)
        elif self._decode is not None and arrival.generated > 1:  # alone: as if read at once
            self._least([self._decode.name]).take(arrival)

    def _least(self, names: Sequence[str]) -> Server:
        """The first class's server on the device where they all have the least to do."""
        devices = self._machine.devices
        where = min(devices, key=lambda d: (sum(self._by[name][d].load for name in names), d))
        return self._by[names[0]][where]

    def is_undecided(self, until: float, late_after: Mapping[str, float]) -> bool:
        """Whether anybody waits who came until then, and is not late by now."""
        now = self._machine.now() / 1e9
        return any(
            at <= until and now - at <= late_after.get(name, 0.0)
            for name, servers in self._by.items()
            for server in servers
            for at in server.waiting()
        )

    def done(self) -> dict[str, float]:
        """Seconds of whole-device work that each class had done until now."""
        return {name: sum(s.samples.done for s in each) for name, each in self._by.items()}

    def samples(self, began: float, done: Mapping[str, float]) -> dict[str, Samples]:
        """Of each class, over all devices, by the time at which the run began."""
        now = self._machine.now() / 1e9
        found = {}
        for name, servers in self._by.items():
            merged = Samples(done=done[name])
            for server in servers:
                each = server.samples
                merged.latency += each.latency
                merged.wait += each.wait
                merged.weight += each.weight
                merged.at += [at - began for at in each.at]
                merged.left += [now - at for at in server.waiting()]
            found[name] = merged
        return found


# -- the devices' timelines -------------------------------------------------------------------


def _sm_seconds(
    spans: Sequence[Sequence[DeviceTrace]], services: Mapping[str, ServiceProfile]
) -> dict[str, float]:
    found = dict.fromkeys(services, 0.0)
    for ran in spans:
        for each in ran:
            found[each.service] += (each.end - each.start) * each.sms.bit_count() / 1e9
    return found


def occupied(ran: Sequence[DeviceTrace]) -> float:
    """SM-seconds of one device in which some kernel was there: what overlaps counts once."""
    turns = sorted(
        [(each.start, 1, each.sms) for each in ran] + [(each.end, -1, each.sms) for each in ran]
    )
    on: dict[int, int] = {}
    total, last, there = 0, 0, 0
    for time, change, sms in turns:
        total += (time - last) * there
        last = time
        on[sms] = on.get(sms, 0) + change
        if not on[sms]:
            del on[sms]
        there = _union(on)
    return total / 1e9


def _union(on: Mapping[int, int]) -> int:
    mask = 0
    for sms in on:
        mask |= sms
    return mask.bit_count()
