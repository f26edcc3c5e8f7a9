"""Servers: how a program handles requests, with a server for each class on each device.

Times are of the virtual clock. The device's timeline separates a piece's waiting from its
running.
"""

from __future__ import annotations

import abc
import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from greensched.capacity.machine import Machine
from greensched.capacity.strategies import Client
from greensched.capacity.traffic import Arrival
from greensched.capacity.workload import ServiceProfile

#: The most tokens of a prompt in one pass (chunked prefill).
CHUNK = 2_048
#: The weight of the newest prompt in the average stretch; about the last ten count.
SMOOTHING = 0.1
#: Seconds of a loop's work that run as one piece where only their sum counts.
JOINED_S = 0.010


@dataclass
class Samples:
    """Latencies of one class in seconds, with the number of requests or tokens for each.

    Attributes:
        latency: The latency of each sample.
        wait: The part of the latency during which none of its work ran.
        weight: The number of requests or tokens of the sample.
        at: When it began, on the virtual clock; in a run's outcome, since the run began.
        left: The ages of requests that were not served at the end.
        done: Work done, in seconds of a whole device.
    """

    latency: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    weight: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    done: float = 0.0

    def add(self, at: float, latency: float, served: float, weight: int = 1) -> None:
        self.at.append(at)
        self.latency.append(latency)
        self.wait.append(max(0.0, latency - served))
        self.weight.append(weight)


class Server(abc.ABC):
    """Queues requests and runs them on a client, in a task that ends when it is cancelled."""

    def __init__(
        self, machine: Machine, device: int, service: ServiceProfile, client: Client
    ) -> None:
        self.service = service
        self.samples = Samples()
        #: Requests that are queued or in progress.
        self.load = 0
        #: The time since which each request in progress has waited.
        self._in_progress: list[float] = []
        self._machine = machine
        self._client = client
        self._trace = machine.traces[device]
        self._queue: deque[Arrival] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._blocks = client.blocks or service.blocks

    def take(self, arrival: Arrival) -> None:
        """Queue a request."""
        self.load += 1
        self._queue.append(arrival)
        self._wake()

    def waiting(self) -> list[float]:
        """Return the time since which each request, queued or in progress, has waited."""
        return [*self._in_progress, *(arrival.at for arrival in self._queue)]

    @abc.abstractmethod
    async def serve(self) -> None:
        """Serve until cancelled."""

    def _now(self) -> float:
        return self._machine.now() / 1e9

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def _next(self) -> Arrival:
        """Wait for a request, and take it."""
        while not self._queue:
            await self._wait_for_work()
        return self.pick()

    def pick(self) -> Arrival:
        """Take the request to serve next: the oldest."""
        return self._queue.popleft()

    async def _wait_for_work(self) -> None:
        """Wait until woken. The client may release what it holds."""
        self._arrived = asyncio.get_running_loop().create_future()
        await self._client.idle()
        await self._arrived

    async def _run(self, pieces: list[int], since: list[float]) -> float:
        """Run a pass for requests that have waited since these times; return how long it ran."""
        before = len(self._trace)
        self._in_progress = since
        await self._client.run(pieces)
        self._in_progress = []
        name = self.service.name
        own = (run for run in self._trace[before:] if run.service == name)
        return sum(run.end - run.start for run in own) / 1e9


class Requests(Server):
    """Serves requests of a known cost one after another."""

    async def serve(self) -> None:
        """Serve each request in pieces of at most the class's segment."""
        while True:
            arrival = await self._next()
            number = max(1, round(arrival.cost / self.service.segment))
            served = await self._run([round(arrival.cost / number * 1e9)] * number, [arrival.at])
            latency = self._now() - arrival.at
            self.samples.add(arrival.at, latency, served)
            self._client.record_latency(latency, 1)
            self.samples.done += arrival.cost
            self.load -= 1


class Loop(Server):
    """Best effort: the next piece begins as soon as the last one is done."""

    async def serve(self) -> None:
        """Run pieces, and count the work."""
        piece = round(self.service.segment * 1e9)
        number = self.service.depth
        if self._client.joins_pieces:
            number = max(number, round(JOINED_S / self.service.segment))
        pieces = [piece] * number
        while True:
            await self._run(pieces, [])
            self.samples.done += sum(pieces) / 1e9


class Prefill(Server):
    """Reads prompts in order of arrival. A prompt's latency ends with its first token.

    With a `target_aware` client it schedules by targets. A prompt that would make others late waits
    for all others. And a first token is released when the next decode step begins: a token
    released during a step would wait for the rest of it and another step, so steps would have
    to be half as long, twice as many, on more SMs.
    """

    def __init__(
        self,
        machine: Machine,
        device: int,
        service: ServiceProfile,
        client: Client,
        decode: Decode | None,
    ) -> None:
        super().__init__(machine, device, service, client)
        self._decode = decode
        self._target_aware = client.target_aware
        #: Prompts that were read but whose first token is not released, and how long each ran.
        self._pending_tokens: list[tuple[Arrival, float]] = []
        if decode is not None and self._target_aware:
            decode.before_step = self._release_tokens
        #: The time of recent prompts, on average, relative to their time without other work.
        self._stretch = 1.0

    async def serve(self) -> None:
        """Read each prompt in passes of at most CHUNK tokens."""
        while True:
            arrival = await self._next()
            pieces = passes(arrival.context, self._blocks, self.service.seconds)
            began = self._now()
            served = await self._run(pieces, [arrival.at])
            now = self._now()
            self._note_stretch(now - began, sum(pieces) / 1e9)
            self.samples.done += sum(pieces) / 1e9
            if self._target_aware and self._may_delay_token(arrival, now):
                self._pending_tokens.append((arrival, served))
            else:
                self._release_token(arrival, served)

    def _note_stretch(self, seconds: float, alone: float) -> None:
        """Update the average time of prompts relative to their time without other work."""
        self._stretch += SMOOTHING * (seconds / alone - self._stretch)

    def _may_delay_token(self, arrival: Arrival, now: float) -> bool:
        """Say whether a first token will still be in time at the next decode step."""
        decode = self._decode
        if decode is None or arrival.generated <= 1:
            return False
        decode.wake()
        return now + decode.service.latency <= arrival.at + self.service.latency

    def _release_tokens(self) -> None:
        for arrival, served in self._pending_tokens:
            self._release_token(arrival, served)
        self._pending_tokens.clear()

    def _release_token(self, arrival: Arrival, served: float) -> None:
        """Release a prompt's first token. The gap to the next token begins now."""
        now = self._now()
        self.samples.add(arrival.at, now - arrival.at, served)
        self._client.record_latency(now - arrival.at, 1)
        self.load -= 1
        if self._decode is not None and arrival.generated > 1:
            self._decode.take(replace(arrival, at=now))

    def waiting(self) -> list[float]:
        """Return the arrival time of each prompt whose first token is not released."""
        return [*super().waiting(), *(arrival.at for arrival, _ in self._pending_tokens)]

    def pick(self) -> Arrival:
        """Take the oldest prompt; if target-aware, the oldest that can be in time."""
        first = self._queue[0]
        if self._target_aware and len(self._queue) > 1:
            first = self._first_in_time([*self._queue]) or first
        self._queue.remove(first)
        return first

    def _first_in_time(self, waiting: list[Arrival]) -> Arrival | None:
        """Return the first prompt of a largest set that can all be in time, or None.

        If a prompt would be late, the longest prompt of the set so far is left out. This keeps
        the most prompts (Moore 1968) if each is slowed down as much as recent prompts were.
        """
        kept: list[Arrival] = []
        end = now = self._now()
        for arrival in waiting:
            due, seconds = arrival.at + self.service.latency, self._seconds(arrival)
            if now + seconds > due:
                continue
            kept.append(arrival)
            end += seconds
            if end > due:
                longest = max(kept, key=lambda arrival: arrival.context)
                kept.remove(longest)
                end -= self._seconds(longest)
        return kept[0] if kept else None

    def _seconds(self, arrival: Arrival) -> float:
        return self.service.seconds(arrival.context) * self._stretch


def passes(tokens: int, blocks: int, seconds_of: Callable[[float], float]) -> list[int]:
    """Return the pieces of a prompt: passes of at most CHUNK tokens, split into layer blocks."""
    pieces, read = [], 0
    while read < tokens:
        end = min(tokens, read + CHUNK)
        seconds = seconds_of(end) - seconds_of(read)
        pieces += [round(seconds / blocks * 1e9)] * blocks
        read = end
    return pieces


class Decode(Server):
    """Continuous batching: each step writes a token of every running request.

    A latency is the gap between two tokens of a request. In one step it is the same for all
    requests that did not just join, so these are one sample.
    """

    #: Called before each step; may queue requests that join in the step.
    before_step: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, machine: Machine, device: int, service: ServiceProfile, client: Client
    ) -> None:
        super().__init__(machine, device, service, client)
        #: The step numbers after which running requests are done.
        self._ends: list[int] = []
        self._step = 0
        #: When the last step ended.
        self._last = 0.0

    def wake(self) -> None:
        """Check again whether a request can join."""
        self._wake()

    async def serve(self) -> None:
        """Run steps while there are requests."""
        while True:
            self.before_step()
            if self._ends or self._queue:
                await self._run_step()
            else:
                await self._wait_for_work()

    async def _run_step(self, more: float = 0.0) -> None:
        """Run a step, with `more` seconds of other work in the same pass."""
        joined = self._join()
        began, ends = self._now(), self._ends
        batch, blocks = len(ends), self._blocks
        seconds = self.service.seconds(batch)
        since = joined + [self._last] * (batch - len(joined))
        served = await self._run([round((seconds + more) / blocks * 1e9)] * blocks, since)
        now, self._step = self._now(), self._step + 1
        for at in joined:
            self.samples.add(at, now - at, served)
            self._client.record_latency(now - at, 1)
        if batch > len(joined):
            self.samples.add(began, now - self._last, served, batch - len(joined))
            self._client.record_latency(now - self._last, batch - len(joined))
        self.samples.done += seconds
        self._last = now
        while ends and ends[0] <= self._step:
            heapq.heappop(ends)
            self.load -= 1

    def _join(self) -> list[float]:
        """Let queued requests join, up to the batch bound; return when each had its last token."""
        joined = []
        while self._queue and len(self._ends) < self.service.batch:
            arrival = self._queue.popleft()
            heapq.heappush(self._ends, self._step + arrival.generated - 1)
            joined.append(arrival.at)
        return joined
