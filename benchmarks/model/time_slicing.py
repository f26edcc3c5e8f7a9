"""Time slicing: two processes take turns on one device, as without MPS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from greensched.capacity.baselines import Streams
from greensched.capacity.machine import Machine
from greensched.capacity.strategies import Client, Clients, Pieces

#: The time slice of a process: 2 ms. An assumption: the driver's default, as commonly measured.
SLICE_NS = 2_000_000


class Turns:
    """Gives time slices to the processes that have work. A process alone gets all of them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._waiting: set[str] = set()
        self._current = ""
        self._since = 0
        self._left: asyncio.Future[None] | None = None

    def want(self, name: str) -> None:
        """Record that a process has work."""
        self._waiting.add(name)

    def leave(self, name: str) -> None:
        """Record that a process has no more work."""
        self._waiting.discard(name)
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    def rest(self, name: str) -> int:
        """Return the nanoseconds left in a process's slice, or 0 during another process's slice."""
        now = self._machine.now()
        if self._current not in self._waiting or self._waiting == {name}:
            if self._current != name:
                self._current, self._since = name, now
        elif now - self._since >= SLICE_NS:
            passed = (now - self._since) // SLICE_NS
            self._since += passed * SLICE_NS
            if passed % 2:
                self._current = next(n for n in sorted(self._waiting) if n != self._current)
        return SLICE_NS - (now - self._since) if self._current == name else 0

    async def wait(self) -> None:
        """Wait until the current slice ends, or its process has no more work."""
        self._left = asyncio.get_running_loop().create_future()
        # A loop's timer may be a nanosecond early. A little more certainly reaches the next slice.
        left = max(0, SLICE_NS - (self._machine.now() - self._since)) + 100
        await asyncio.wait([self._left], timeout=left / 1e9)


class SlicedClient(Client):
    """A client that runs only in its slices. Long kernels are split, as a slice's end preempts."""

    def __init__(self, inner: Client, turns: Turns, name: str) -> None:
        self._inner = inner
        self._turns = turns
        self._name = name

    async def run(self, pieces: Pieces) -> None:
        """Run a pass in parts that fit into slices."""
        turns, name = self._turns, self._name
        turns.want(name)
        left = sum(pieces)
        while left > 0:
            rest = turns.rest(name)
            if rest <= 0:
                await turns.wait()
                continue
            now = min(left, rest)
            await self._inner.run((now,))
            left -= now
        turns.leave(name)


class Sliced(Streams):
    """Two processes on one device without MPS, in time slices."""

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Clients]:
        """Open clients that take turns."""
        turns = Turns(machine)
        async with super().open(machine) as clients:
            yield lambda device, service: SlicedClient(
                clients(device, service), turns, service.name
            )
