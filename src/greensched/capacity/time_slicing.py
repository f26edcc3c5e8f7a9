"""Time slices: two processes on one device that share it in turns, as without MPS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from greensched.capacity.baselines import Streams
from greensched.capacity.machine import Machine
from greensched.capacity.strategies import Client, Pieces, Seats

#: Time slices of two processes: 2 ms. An assumption: the driver's default, as commonly measured.
SLICE_NS = 2_000_000


class Turns:
    """Whose time slice it is; who is alone has all of them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._wants: set[str] = set()
        self._whose = ""
        self._since = 0
        self._left: asyncio.Future[None] | None = None

    def want(self, name: str) -> None:
        """Somebody has work."""
        self._wants.add(name)

    def leave(self, name: str) -> None:
        """Somebody has none any more."""
        self._wants.discard(name)
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    def rest(self, name: str) -> int:
        """Nanoseconds that he still has; 0: it is another's turn."""
        now = self._machine.now()
        if self._whose not in self._wants or self._wants == {name}:
            if self._whose != name:
                self._whose, self._since = name, now
        elif now - self._since >= SLICE_NS:
            passed = (now - self._since) // SLICE_NS
            self._since += passed * SLICE_NS
            if passed % 2:
                self._whose = next(n for n in sorted(self._wants) if n != self._whose)
        return SLICE_NS - (now - self._since) if self._whose == name else 0

    async def wait(self) -> None:
        """Until the other's slice ends, or he has nothing to do."""
        self._left = asyncio.get_running_loop().create_future()
        # A loop's timer may be a nanosecond early: a little later is surely in the next slice.
        left = max(0, SLICE_NS - (self._machine.now() - self._since)) + 100
        await asyncio.wait([self._left], timeout=left / 1e9)


class SlicedSeat:
    """Runs in its slices only; a slice takes a kernel off the device, so long ones are cut."""

    def __init__(self, inner: Client, turns: Turns, name: str) -> None:
        self._inner = inner
        self._turns = turns
        self._name = name

    async def run(self, pieces: Pieces) -> None:
        """What fits into a slice at a time."""
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
    """Two processes on one device without MPS: time slices."""

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Seats]:
        """Seats in turns."""
        turns = Turns(machine)
        async with super().open(machine) as seats:
            yield lambda device, service: SlicedSeat(seats(device, service), turns, service.name)
