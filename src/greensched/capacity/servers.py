"""Servers: what a program does with requests, on whatever seats an arm gives it.

One for each class on each device. Times are of the virtual clock; a piece's waiting and running
are told apart by the device's own timeline.
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
from greensched.capacity.workload import ServiceProfile, prompt_seconds, step_seconds

#: Tokens of a prompt that are read in one pass at most: what engines call chunked prefill.
CHUNK = 2_048
#: Weight of the newest prompt in how long prompts take: the last ten or so count.
SMOOTHING = 0.1


@dataclass
class Samples:
    """Latencies of one class in seconds, and how many requests or tokens had each.

    Attributes:
        latency: of each sample.
        wait: the part of it in which nothing of it ran.
        weight: how many had it.
        at: when it began, on a server's clock; of a whole run, since that began.
        left: ages of what was not served at the end.
        done: seconds of whole-device work that was done.
    """

    latency: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    weight: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    done: float = 0.0

    def add(self, at: float, latency: float, served: float, weight: int = 1) -> None:
        """One more."""
        self.at.append(at)
        self.latency.append(latency)
        self.wait.append(max(0.0, latency - served))
        self.weight.append(weight)


def _nobody(_latency: float, _weight: int) -> None:
    """Most arms plan without looking back."""


class Server(abc.ABC):
    """Takes work, and runs it on a seat until it is cancelled."""

    def __init__(
        self, machine: Machine, device: int, service: ServiceProfile, seat: Client
    ) -> None:
        self.service = service
        self.samples = Samples()
        #: Requests taken and not done.
        self.load = 0
        #: Since when each of those waits whose turn it is now.
        self._current: list[float] = []
        self._machine = machine
        self._seat = seat
        self._ran = machine.ran[device]
        self._queue: deque[Arrival] = deque()
        self._came: asyncio.Future[None] | None = None
        #: An arm that learns from what became of its plans is told of each latency.
        self._tell: Callable[[float, int], None] = getattr(seat, "told", _nobody)

    def take(self, arrival: Arrival) -> None:
        """One more request."""
        self.load += 1
        self._queue.append(arrival)
        self._wake()

    def waiting(self) -> list[float]:
        """Since when each waits who is not served, or is being served."""
        return [*self._current, *(arrival.at for arrival in self._queue)]

    @abc.abstractmethod
    async def serve(self) -> None:
        """Serves, for ever."""

    def _now(self) -> float:
        return self._machine.now() / 1e9

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    async def _next(self) -> Arrival:
        while not self._queue:
            await self._anybody()
        return self._queue.popleft()

    async def _anybody(self) -> None:
        """Until it is woken."""
        self._came = asyncio.get_running_loop().create_future()
        await self._came

    async def _run(self, pieces: list[int], since: list[float]) -> float:
        """A pass for those that wait since then; returns the seconds for which it ran."""
        before = len(self._ran)
        self._current = since
        await self._seat.run(pieces)
        self._current = []
        name = self.service.name
        own = (ran for ran in self._ran[before:] if ran.service == name)
        return sum(ran.end - ran.start for ran in own) / 1e9


class Requests(Server):
    """Requests of a known cost, one after another."""

    async def serve(self) -> None:
        """Each in pieces of at most the class's segment."""
        while True:
            arrival = await self._next()
            number = max(1, round(arrival.cost / self.service.segment))
            served = await self._run([round(arrival.cost / number * 1e9)] * number, [arrival.at])
            latency = self._now() - arrival.at
            self.samples.add(arrival.at, latency, served)
            self._tell(latency, 1)
            self.samples.done += arrival.cost
            self.load -= 1


class Loop(Server):
    """Best effort: the next piece is there as soon as the last is done."""

    async def serve(self) -> None:
        """Counts what was done."""
        piece = round(self.service.segment * 1e9)
        pieces = [piece] * self.service.depth
        while True:
            await self._run(pieces, [])
            self.samples.done += sum(pieces) / 1e9


class Prefill(Server):
    """Prompts, in the order they came; the first token of each is its latency.

    Where the arm's seat says so (`by_target`), it minds its target and that of the tokens. Who
    makes others late waits for all others. And the first token is given out when the step of
    decoding begins that writes the next: after one given out in the midst of a step there would be
    the rest of it and another, and steps would have to be half as long, twice as many, on more SMs.
    """

    def __init__(
        self,
        machine: Machine,
        device: int,
        service: ServiceProfile,
        seat: Client,
        decode: Decode | None,
    ) -> None:
        super().__init__(machine, device, service, seat)
        self._decode = decode
        self._by_target = getattr(seat, "by_target", False)
        #: Prompts that are read, whose first token is not given out; and for how long each ran.
        self._read: list[tuple[Arrival, float]] = []
        if decode is not None and self._by_target:
            decode.before_step = self._give_all_out
        #: How many times longer than alone prompts took of late.
        self._stretch = 1.0

    async def serve(self) -> None:
        """Each in passes of at most CHUNK tokens."""
        while True:
            arrival = await self._next()
            pieces = passes(arrival.context, self.service.blocks)
            began = self._now()
            served = await self._run(pieces, [arrival.at])
            now = self._now()
            self._stretch += SMOOTHING * ((now - began) * 1e9 / sum(pieces) - self._stretch)
            self.samples.done += sum(pieces) / 1e9
            if self._by_target and self._may_wait(arrival, now):
                self._read.append((arrival, served))
            else:
                self._give_out(arrival, served)

    def _may_wait(self, arrival: Arrival, now: float) -> bool:
        """Whether a step follows, and its first token is in time when that begins."""
        decode = self._decode
        if decode is None or arrival.generated <= 1:
            return False
        decode.look()
        return now + decode.service.latency <= arrival.at + self.service.latency

    def _give_all_out(self) -> None:
        for arrival, served in self._read:
            self._give_out(arrival, served)
        self._read.clear()

    def _give_out(self, arrival: Arrival, served: float) -> None:
        """Its first token; the next one counts from now."""
        now = self._now()
        self.samples.add(arrival.at, now - arrival.at, served)
        self._tell(now - arrival.at, 1)
        self.load -= 1
        if self._decode is not None and arrival.generated > 1:
            self._decode.take(replace(arrival, at=now))

    def waiting(self) -> list[float]:
        """Whose first token was not given out has none."""
        return [*super().waiting(), *(arrival.at for arrival, _ in self._read)]

    async def _next(self) -> Arrival:
        """In their order; by target, whoever makes others late waits for all others."""
        first = await super()._next()
        if not self._by_target or not self._queue:
            return first
        found = self._first_in_time([first, *self._queue]) or first
        if found is not first:
            self._queue.remove(found)
            self._queue.appendleft(first)
        return found

    def _first_in_time(self, waiting: list[Arrival]) -> Arrival | None:
        """The first of those that can all be in time; None: nobody can.

        Where somebody would be late the longest of those up to him is left out, which leaves the
        most of them (Moore 1968), if all take as much longer than alone as those of late did.
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
                longest = max(kept, key=lambda each: each.context)
                kept.remove(longest)
                end -= self._seconds(longest)
        return kept[0] if kept else None

    def _seconds(self, arrival: Arrival) -> float:
        return prompt_seconds(arrival.context) * self._stretch


def passes(tokens: int, blocks: int) -> list[int]:
    """The pieces of a prompt: each pass over so many tokens, in blocks of layers."""
    pieces, read = [], 0
    while read < tokens:
        end = min(tokens, read + CHUNK)
        seconds = prompt_seconds(end) - prompt_seconds(read)
        pieces += [round(seconds / blocks * 1e9)] * blocks
        read = end
    return pieces


class Decode(Server):
    """Continuous batching: each step is a token of every running request.

    A latency is the gap between two tokens of a request; those of a step that a request did not
    join in are the same for all, so they are counted at once.
    """

    #: Called before each step: who is to join gives himself in then.
    before_step: Callable[[], None] = staticmethod(lambda: None)

    def look(self) -> None:
        """Somebody may join."""
        self._wake()

    async def serve(self) -> None:
        """Steps, as long as anybody runs."""
        ends: list[int] = []  # the steps after which requests are done
        step, last = 0, 0.0
        while True:
            self.before_step()
            if not ends and not self._queue:
                await self._anybody()
                continue
            joined = self._join(ends, step)
            began = self._now()
            batch = len(ends)
            blocks = self.service.blocks
            seconds = step_seconds(batch)
            since = joined + [last] * (batch - len(joined))
            served = await self._run([round(seconds / blocks * 1e9)] * blocks, since)
            now, step = self._now(), step + 1
            for at in joined:
                self.samples.add(at, now - at, served)
                self._tell(now - at, 1)
            if batch > len(joined):
                self.samples.add(began, now - last, served, batch - len(joined))
                self._tell(now - last, batch - len(joined))
            self.samples.done += seconds
            last = now
            while ends and ends[0] <= step:
                heapq.heappop(ends)
                self.load -= 1

    def _join(self, ends: list[int], step: int) -> list[float]:
        """Whoever waits joins the batch, up to its bound; returns when each had its last token."""
        joined = []
        while self._queue and len(ends) < self.service.batch:
            arrival = self._queue.popleft()
            heapq.heappush(ends, step + arrival.generated - 1)
            joined.append(arrival.at)
        return joined
