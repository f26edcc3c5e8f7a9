"""One run: traffic, classes and a strategy on simulated devices, from first to last request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from greensched.capacity.engine import Engine, PromptQueue
from greensched.capacity.host_costs import NO_COSTS, HostCosts
from greensched.capacity.interference import PUBLISHED, Guard
from greensched.capacity.machine import KernelRun, Machine
from greensched.capacity.servers import Decode, Loop, Prefill, Requests, Samples, Server
from greensched.capacity.strategies import Clients, Strategy
from greensched.capacity.traffic import Arrival, Traffic
from greensched.capacity.workload import ServiceProfile
from greensched.typing import Granularity

#: Seconds of virtual time between two checks for waiting requests after the traffic's end.
POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The settings that are the same for all compared strategies.

    Attributes:
        gpus: The devices, as for `--gpus`.
        granularity: As `Pool(granularity=...)`.
        services: The classes.
        seconds: The length of the traffic.
        guard: The interference between kinds of work.
        late_after: For each class, the seconds after which a waiting request has missed every
            target. After its traffic a run continues until every waiting request has, but for at
            most `seconds`.
        host: The host's time for a lease and a checkpoint; zero if it was not measured.
    """

    gpus: str
    services: Mapping[str, ServiceProfile]
    seconds: float
    guard: Guard = field(default_factory=lambda: PUBLISHED)
    granularity: Granularity = "coscheduled"
    late_after: Mapping[str, float] = field(default_factory=dict)
    host: HostCosts = NO_COSTS


@dataclass
class Outcome:
    """The outcome of one run. Except latencies and `drained` it covers only the traffic's time.

    Attributes:
        samples: The latencies of each class.
        seconds: The length of the traffic.
        drained: Seconds of virtual time after the traffic.
        sm_seconds: For each class, SM-seconds on all devices of kernels that ended in that time.
        busy: The fraction of all SM-seconds in which a kernel ran.
        decisions: The number of granted leases.
    """

    strategy: str
    seed: int
    seconds: float
    drained: float
    samples: dict[str, Samples]
    sm_seconds: dict[str, float]
    busy: float
    decisions: int = 0


def simulate(strategy: Strategy, scenario: Scenario, traffic: Traffic, seed: int) -> Outcome:
    """Run a strategy. Equal arguments give equal outcomes, to the last digit.

    All of the traffic must come within the scenario's seconds.
    """
    machine = Machine(
        scenario.gpus,
        scenario.services,
        scenario.guard,
        seed,
        granularity=scenario.granularity,
        host=scenario.host,
    )
    try:
        strategy.prepare(machine)
        return machine.clock.run(_run, machine, strategy, scenario, traffic, seed)
    finally:
        machine.close()


def alone(
    strategy: Strategy, scenario: Scenario, traffic: Traffic, seed: int
) -> dict[str, Outcome]:
    """Run each class alone, as if the other classes took no time.

    Such a run continues until all requests are served, but for at most the scenario's seconds.
    """
    scenario = replace(scenario, late_after=dict.fromkeys(scenario.services, math.inf))
    outcomes = {}
    for name, service in scenario.services.items():
        single = replace(scenario, services={name: service})
        outcomes[name] = simulate(strategy, single, traffic, seed)
    return outcomes


async def _run(
    machine: Machine, strategy: Strategy, scenario: Scenario, traffic: Traffic, seed: int
) -> Outcome:
    async with strategy.open(machine) as clients:
        end = machine.begin()
        group = _ServerGroup(machine, clients)
        servers = [asyncio.ensure_future(server.serve()) for server in group.servers]
        played = asyncio.ensure_future(_play(machine, group, strategy, scenario, traffic, seed))
        # A server ends only when it fails.
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
    group: _ServerGroup,
    strategy: Strategy,
    scenario: Scenario,
    traffic: Traffic,
    seed: int,
) -> Outcome:
    """Send the traffic, and wait until every request is served or late.

    If a run ended with its traffic, a strategy that leaves more requests waiting would have fewer
    late ones.
    """
    began, seconds = machine.now() / 1e9, scenario.seconds
    end = began + seconds
    await group.dispatch(traffic, began)
    await asyncio.sleep(end - machine.now() / 1e9)
    ended, decisions, done = machine.now(), machine.granted(), group.done()
    for _ in range(math.ceil(seconds / POLL_S)):
        if not group.is_undecided(end, scenario.late_after):
            break
        await asyncio.sleep(POLL_S)
    spans = [[r for r in trace if r.end <= ended] for trace in machine.traces]
    return Outcome(
        strategy=strategy.name,
        seed=seed,
        seconds=seconds,
        drained=machine.now() / 1e9 - end,
        samples=group.samples(began, done),
        sm_seconds=_sm_seconds(spans, scenario.services),
        busy=sum(map(occupied, spans)) / (sum(machine.sms) * seconds),
        decisions=decisions,
    )


class _ServerGroup:
    """The servers of every class on every device, and the dispatch of requests to them."""

    def __init__(self, machine: Machine, clients: Clients) -> None:
        self._machine = machine
        self._by: dict[str, list[Server]] = {}
        self._decoders: dict[int, Decode] = {}
        roles = {service.role: service for service in machine.services.values()}
        self._prefill, self._decode = roles.get("prefill"), roles.get("decode")
        for service in sorted(machine.services.values(), key=lambda s: s.role != "decode"):
            self._by[service.name] = [self._server(d, service, clients) for d in machine.devices]

    @property
    def servers(self) -> list[Server]:
        return [server for servers in self._by.values() for server in servers]

    def _server(self, device: int, service: ServiceProfile, clients: Clients) -> Server:
        machine, client = self._machine, clients(device, service)
        if service.role == "prefill":
            decode = self._decoders.get(device)
            if isinstance(decode, Engine):
                return PromptQueue(machine, device, service, client, decode)
            return Prefill(machine, device, service, client, decode)
        if service.role == "decode":
            if client.batching is not None:
                decode = Engine(machine, device, service, client, client.batching)
            else:
                decode = Decode(machine, device, service, client)
            self._decoders[device] = decode
            return decode
        kind = Requests if service.role == "request" else Loop
        return kind(machine, device, service, client)

    async def dispatch(self, traffic: Traffic, began: float) -> None:
        """Send each request at its time to the device with the least load."""
        for arrival in traffic:
            due = began + arrival.at
            delay = due - self._machine.now() / 1e9
            if delay > 0:
                await asyncio.sleep(delay)
            self._send(replace(arrival, at=due))

    def _send(self, arrival: Arrival) -> None:
        if arrival.service:
            if arrival.service in self._by:  # otherwise another class runs alone
                self._least([arrival.service]).take(arrival)
        elif self._prefill is not None:
            names = [self._prefill.name] + ([self._decode.name] if self._decode else [])
            self._least(names).take(arrival)
        elif self._decode is not None and arrival.generated > 1:  # decode runs alone
            self._least([self._decode.name]).take(arrival)

    def _least(self, names: Sequence[str]) -> Server:
        """Return the first class's server on the device where these classes have the least load."""
        devices = self._machine.devices
        where = min(devices, key=lambda d: (sum(self._by[name][d].load for name in names), d))
        return self._by[names[0]][where]

    def is_undecided(self, until: float, late_after: Mapping[str, float]) -> bool:
        """Say whether a request from before `until` waits and is not late yet."""
        now = self._machine.now() / 1e9
        return any(
            at <= until and now - at <= late_after.get(name, 0.0)
            for name, servers in self._by.items()
            for server in servers
            for at in server.waiting()
        )

    def done(self) -> dict[str, float]:
        """Return the work that each class has done, in seconds of a whole device."""
        return {name: sum(s.samples.done for s in servers) for name, servers in self._by.items()}

    def samples(self, began: float, done: Mapping[str, float]) -> dict[str, Samples]:
        """Return each class's samples over all devices, with times since the run began."""
        now = self._machine.now() / 1e9
        by_class = {}
        for name, servers in self._by.items():
            merged = Samples(done=done[name])
            for server in servers:
                samples = server.samples
                merged.latency += samples.latency
                merged.wait += samples.wait
                merged.weight += samples.weight
                merged.at += [at - began for at in samples.at]
                merged.left += [now - at for at in server.waiting()]
            by_class[name] = merged
        return by_class


# -- the devices' timelines -------------------------------------------------------------------


def _sm_seconds(
    spans: Sequence[Sequence[KernelRun]], services: Mapping[str, ServiceProfile]
) -> dict[str, float]:
    totals = dict.fromkeys(services, 0.0)
    for trace in spans:
        for run in trace:
            totals[run.service] += (run.end - run.start) * run.sms.bit_count() / 1e9
    return totals


def occupied(trace: Sequence[KernelRun]) -> float:
    """Return the SM-seconds of one device in which a kernel ran. Overlaps count once."""
    turns = sorted(
        [(run.start, 1, run.sms) for run in trace] + [(run.end, -1, run.sms) for run in trace]
    )
    on: dict[int, int] = {}
    total, last, covered = 0, 0, 0
    for time, change, sms in turns:
        total += (time - last) * covered
        last = time
        on[sms] = on.get(sms, 0) + change
        if not on[sms]:
            del on[sms]
        covered = _union(on)
    return total / 1e9


def _union(on: Mapping[int, int]) -> int:
    mask = 0
    for sms in on:
        mask |= sms
    return mask.bit_count()
