"""Serve sequences with a model: the queue and the slots, and three ways to order the passes.

A pass computes the next token of all sequences (a decode step), or reads a prompt (prefill), or
both at once. Each of `separate`, `interleaved` and `fused` is a loop that serves an engine, on the
places that it is given: a place is entered for some passes, and says how to run them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from batch import MAX_PIECES, Batch, Piece, Shape

from greensched import Pool, ServiceClass
from greensched.errors import QueueFull
from greensched.typing import Size

#: Run a pass; what it returns is awaited for the new tokens.
Run = Callable[[Batch], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What entering a place gives: how to run passes there, and for how long."""

    run: Run
    #: Whether entering the place again would give the same.
    is_current: Callable[[], bool] = lambda: True


Place = Callable[[], AbstractAsyncContextManager[Turn]]
#: The weight of the newest prompt in the average time of reading one.
NEWEST = 0.2


class Sequence:
    """A prompt and its answer, as far as it is computed."""

    def __init__(self, prompt: list[int], tokens: int, temperature: float = 0.0) -> None:
        self.prompt, self.temperature = prompt, temperature
        #: Tokens to come; 0: it is complete, or its client has left.
        self.left = tokens
        #: Tokens of the prompt that were read, and the slot of the cache.
        self.read, self.slot = 0, -1
        self.begun = 0.0
        self.first: int | None = None
        #: Tokens to send; None: there are no more; an error: why there are no more.
        self.news: asyncio.Queue[int | Exception | None] = asyncio.Queue()

    def start(self) -> None:
        """Give the first token, where the step begins that computes the second.

        Given earlier, in the middle of another step, the second would come late.
        """
        if self.first is not None:
            self.give(self.first)
            self.first = None

    def give(self, token: int) -> None:
        """Add a token of the answer, unless the client has left."""
        if self.left:
            self.left -= 1
            self.news.put_nowait(token)
            if not self.left:
                self.news.put_nowait(None)

    def cancel(self) -> None:
        """Stop: its slot is free after the pass that runs now."""
        self.left = 0

    def piece(self, most: int) -> Piece:
        """Return the next tokens of the prompt, at most this many."""
        end = min(self.read + most, len(self.prompt))
        tokens, is_last = self.prompt[self.read : end], end == len(self.prompt)
        piece = Piece(self.slot, tokens, self.read, is_last, self.temperature)
        self.read = end
        return piece


class Engine:
    """The sequences of a model: those that wait, those whose prompt is read, and those that grow.

    Args:
        shape: of the model.
        max_waiting: prompts that may wait; further ones are refused.
    """

    def __init__(self, shape: Shape, max_waiting: int) -> None:
        self.shape, self._max_waiting = shape, max_waiting
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []
        self.growing: list[Sequence] = []
        self._free = list(reversed(range(shape.slots)))
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        #: Seconds that a prompt takes, on average.
        self._reading_time = 0.0

    # -- for clients -------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFull: too many prompts wait.
            Exception: what ended the engine.
        """
        if self._failure is not None:
            raise self._failure
        if len(self.waiting) >= self._max_waiting:
            self._drop_cancelled()
        if len(self.waiting) >= self._max_waiting:
            raise QueueFull(len(self.waiting), self._reading_time * len(self.waiting))
        self.waiting.append(sequence)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Tell all sequences why there are no more tokens."""
        self._failure = error
        for sequence in (*self.waiting, *self.reading, *self.growing):
            sequence.news.put_nowait(error)

    # -- for the loops that serve ------------------------------------------------------------------

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt waits, or is being read."""
        return bool(self.waiting or self.reading)

    @property
    def is_idle(self) -> bool:
        """Whether there is no sequence."""
        return not (self.waiting or self.reading or self.growing)

    async def wait(self, what: Callable[[], object]) -> None:
        """Wait until this is true; looks after each submission and each prompt that was read."""
        while not what():
            self._news.clear()
            await self._news.wait()

    def begin(self) -> Sequence | None:
        """Give the first prompt that waits a slot; None: there is no prompt, or no slot."""
        self._drop_cancelled()
        if not (self.waiting and self._free):
            return None
        sequence = self.waiting.popleft()
        sequence.slot, sequence.begun = self._free.pop(), time.monotonic()
        self.reading.append(sequence)
        return sequence

    async def next_prompt(self) -> Sequence:
        """Wait for a prompt and a slot."""
        while (sequence := self.begin()) is None:
            self._news.clear()
            await self._news.wait()
        return sequence

    async def read(self, run: Run, sequence: Sequence) -> None:
        """Read a prompt, in as few passes as there are graphs for."""
        while sequence in self.reading:
            if not sequence.left:
                self._abandon(sequence)
                break
            piece = sequence.piece(self.shape.prefill_sizes[-1])
            self._settle([], [piece], await run(Batch(pieces=[piece])))

    async def step(self, run: Run, budget: int = 0) -> None:
        """Extend every sequence by a token; read prompts, too, up to `budget` tokens in all."""
        for sequence in self.growing:
            sequence.start()
        self._retire()
        growing, pieces = list(self.growing), []
        if budget:
            sizes = self.shape.decode_sizes
            taken = next((size for size in sizes if size >= len(growing)), 0) if growing else 0
            pieces = self._pieces(budget - taken)
        if growing or pieces:
            slots = [sequence.slot for sequence in growing]
            self._settle(growing, pieces, await run(Batch(slots, pieces)))
            self._retire()

    def _pieces(self, room: int) -> list[Piece]:
        for sequence in [s for s in self.reading if not s.left]:
            self._abandon(sequence)
        pieces: list[Piece] = []
        unread = [sequence for sequence in self.reading if sequence.read < len(sequence.prompt)]
        while room > 0 and len(pieces) < MAX_PIECES:
            sequence = unread.pop(0) if unread else self.begin()
            if sequence is None:
                break
            pieces.append(sequence.piece(room))
            room -= len(pieces[-1].tokens)
        return pieces

    def _settle(self, growing: list[Sequence], pieces: list[Piece], tokens: list[int]) -> None:
        """Give each sequence its token; those whose prompt ended grow from now on."""
        ended = [piece.slot for piece in pieces if piece.is_last]
        begun = [next(s for s in self.reading if s.slot == slot) for slot in ended]
        for sequence, token in zip(growing, tokens, strict=False):
            sequence.give(token)
        for sequence, token in zip(begun, tokens[len(growing) :], strict=True):
            sequence.first = token
            self.reading.remove(sequence)
            self.growing.append(sequence)
            taken = time.monotonic() - sequence.begun
            self._reading_time += NEWEST * (taken - self._reading_time)
        self._news.set()

    def _retire(self) -> None:
        """Free the slots of complete sequences; only between two decode steps."""
        for sequence in [s for s in self.growing if not s.left]:
            self.growing.remove(sequence)
            self._free.append(sequence.slot)
        self._news.set()

    def _abandon(self, sequence: Sequence) -> None:
        """Free the slot of a sequence whose prompt is not read any further."""
        self.reading.remove(sequence)
        self._free.append(sequence.slot)
        self._news.set()

    def _drop_cancelled(self) -> None:
        if any(not sequence.left for sequence in self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if sequence.left)


# -- orders of passes -----------------------------------------------------------------------------


async def separate(engine: Engine, decode: Place, prefill: Place) -> None:
    """Decode in one place and read prompts in another, at the same time."""

    async def extend() -> None:
        while True:
            await engine.wait(lambda: engine.growing)
            async with decode() as turn:
                await engine.step(turn.run)
                while engine.growing and turn.is_current():
                    await engine.step(turn.run)

    async def read() -> None:
        while True:
            sequence = await engine.next_prompt()
            async with prefill() as turn:
                await engine.read(turn.run, sequence)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(extend())
        tasks.create_task(read())


async def interleaved(engine: Engine, place: Place, interval: int) -> None:
    """Read prompts first, but make `interval` decode steps between two."""
    steps = interval
    while True:
        await engine.wait(lambda: engine.growing or engine.waiting)
        async with place() as turn:
            ready = steps >= interval or not engine.growing
            if ready and (sequence := engine.begin()) is not None:
                await engine.read(turn.run, sequence)
                steps = 0
            elif engine.growing:
                await engine.step(turn.run)
                steps += 1


async def fused(engine: Engine, place: Place, budget: int) -> None:
    """Read prompts in chunks, each in one pass with a decode step, `budget` tokens in all."""
    while True:
        await engine.wait(lambda: engine.growing or engine.has_prompts)
        async with place() as turn:
            await engine.step(turn.run, budget)


# -- places that are leases of a pool -------------------------------------------------------------


def leased(pool: Pool, service: str, graphs: Callable[[], Any], sms: Callable[[], Size]) -> Place:
    """Return the place that is a lease of the pool, of a size that is asked for each time."""

    @asynccontextmanager
    async def take() -> AsyncIterator[Turn]:
        size = sms()
        async with pool.partition(size, service=service) as p:
            made = await p.local(graphs)
            yield Turn(lambda batch: p.run(made.compute, batch), lambda: sms() == size)

    return take


def sized_classes(sms: int, total: int) -> list[ServiceClass]:
    """Return the classes of `sized`: each has two sizes, so there are few sets of graphs."""
    return [
        ServiceClass("decode", sizes=(sms, total), priority=1),
        ServiceClass("prefill", sizes=(total - sms, total)),
    ]


def sized(pool: Pool, model: Any, engine: Engine, sms: int, total: int) -> tuple[Place, Place]:
    """Return places for decode steps and prompts that have all SMs, unless both need some.

    Args:
        pool: with `sized_classes`.
        model: for its graphs.
        engine: what has to be served decides the sizes.
        sms: of a decode step while a prompt waits or is read; a prompt has the others while
            sequences grow.
        total: of the device.
    """

    def step_sms() -> int:
        return sms if engine.has_prompts else total

    def prompt_sms() -> int:
        return total - sms if engine.growing else total

    return (
        leased(pool, "decode", model.decode_graphs, step_sms),
        leased(pool, "prefill", model.prefill_graphs, prompt_sms),
    )


async def prepare(pool: Pool, model: Any) -> None:
    """Capture the graphs of `sized` for each set of SMs, before there are requests."""
    await pool.prepare_local("decode", model.decode_graphs)
    await pool.prepare_local("prefill", model.prefill_graphs)
