"""Serve sequences with a model: the queue and the slots, and three ways to order the passes.

A pass computes the next token of all sequences (a decode step), or reads a prompt (prefill), or
both at once. Each of `separate`, `interleaved` and `fused` serves an engine, on the places that it
is given: a place is entered for some passes, and says how to run them. A pass is submitted while
the one before it runs, so the device does not wait for the host between two passes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from batch import AHEAD, MAX_PIECES, Answer, Batch, Piece, Shape

from greensched import Pool, ServiceClass
from greensched.errors import QueueFull
from greensched.typing import Size

#: Submit a pass; its answer is there once this is awaited.
Run = Callable[[Batch], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What entering a place gives: how to run passes there, and for how long."""

    run: Run
    #: Whether entering the place again would give the same.
    is_current: Callable[[], bool] = lambda: True
    #: How many passes may be submitted at a time.
    ahead: int = AHEAD


Place = Callable[[], AbstractAsyncContextManager[Turn]]
#: The weight of the newest prompt in the average time of reading one.
NEWEST = 0.2
#: So many sequences gain next to nothing from further SMs: a step of 16 takes 8.2 ms on 64 SMs of
#: an H100, and 8.4 ms on all 132.
FEW = 16
#: Seconds without a prompt after which decode steps of many sequences have all SMs. Earlier, the
#: next prompt would often wait for such a step.
QUIET = 0.1


class Sequence:
    """A prompt and its answer, as far as it is computed."""

    def __init__(self, prompt: list[int], tokens: int, temperature: float = 0.0) -> None:
        self.prompt, self.temperature = prompt, temperature
        #: Tokens to give; 0: it is complete, or its client has left. Tokens to submit a pass for.
        self.left = self.unsubmitted = tokens
        #: Submitted passes that have not ended.
        self.passes = 0
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
        """Stop: its slot is free after the passes that are submitted now."""
        self.left = self.unsubmitted = 0

    @property
    def is_unread(self) -> bool:
        """Whether a part of the prompt is not in any pass yet, and its client has not left."""
        return bool(self.left) and self.read < len(self.prompt)

    def piece(self, most: int) -> Piece:
        """Return the next tokens of the prompt, at most this many."""
        end = min(self.read + most, len(self.prompt))
        tokens, is_last = self.prompt[self.read : end], end == len(self.prompt)
        piece = Piece(self.slot, tokens, self.read, is_last, self.temperature)
        self.read = end
        return piece


#: A sequence, and the part of its prompt that a pass reads.
_Part = tuple[Sequence, Piece]


@dataclass(frozen=True, slots=True)
class Pass:
    """A batch, the sequences that it extends, and those whose prompts it reads and ends."""

    batch: Batch
    growing: list[Sequence]
    reading: list[Sequence]
    ended: list[Sequence]

    def begin(self) -> None:
        """Give the first tokens of sequences, because the device begins this pass now."""
        for sequence in self.growing:
            sequence.start()


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
        #: When a pass last began or ended while there were prompts.
        self._prompts_seen_at = 0.0

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
    def is_quiet(self) -> bool:
        """Whether no prompt has waited or been read for a while."""
        return not self.has_prompts and time.monotonic() - self._prompts_seen_at > QUIET

    @property
    def can_read(self) -> bool:
        """Whether a pass can read a prompt now."""
        is_unread = any(sequence.is_unread for sequence in self.reading)
        return is_unread or bool(self._free and any(sequence.left for sequence in self.waiting))

    @property
    def is_idle(self) -> bool:
        """Whether there is no sequence."""
        return not (self.waiting or self.reading or self.growing)

    async def wait(self, what: Callable[[], object]) -> None:
        """Wait until this is true; looks after each submission and each pass."""
        while not what():
            self._news.clear()
            await self._news.wait()

    def read(self, most: int = 0) -> Pass | None:
        """Return a pass that reads the first prompts, at most so many tokens of them.

        0: as many as the largest graph takes.
        """
        self._retire()
        return self._pass([], self._parts(most or self.shape.prefill_sizes[-1], MAX_PIECES))

    def step(self, budget: int = 0) -> Pass | None:
        """Return a pass that extends every sequence by a token.

        With a budget it reads prompts, too, up to so many tokens in all. Then all passes are on one
        stream, so a sequence can grow in the pass behind the one that reads its prompt.
        """
        self._retire()
        growing, parts = [s for s in self.growing if s.unsubmitted], list[_Part]()
        if budget:
            sizes = self.shape.decode_sizes
            taken = next((size for size in sizes if size >= len(growing)), 0) if growing else 0
            parts = self._parts(budget - taken, MAX_PIECES)
        found = self._pass(growing, parts)
        if found is not None:
            for sequence in found.ended:
                self._grow(sequence)
        return found

    def _pass(self, growing: list[Sequence], parts: list[_Part]) -> Pass | None:
        """Return a pass of these sequences; None: there are none."""
        if not (growing or parts):
            return None
        reading = [sequence for sequence, _ in parts]
        ended = [sequence for sequence, piece in parts if piece.is_last]
        for sequence in (*growing, *reading):
            sequence.passes += 1
        for sequence in (*growing, *ended):
            sequence.unsubmitted -= bool(sequence.unsubmitted)
        slots = [sequence.slot for sequence in growing]
        return Pass(Batch(slots, [piece for _, piece in parts]), growing, reading, ended)

    def _parts(self, room: int, most: int) -> list[_Part]:
        """Return the next parts of prompts, at most so many tokens and parts."""
        parts: list[_Part] = []
        unread = [sequence for sequence in self.reading if sequence.is_unread]
        while room > 0 and len(parts) < most:
            sequence = unread.pop(0) if unread else self._next_prompt()
            if sequence is None:
                break
            piece = sequence.piece(room)
            parts.append((sequence, piece))
            room -= len(piece.tokens)
        return parts

    def _next_prompt(self) -> Sequence | None:
        """Give the first prompt that waits a slot; None: there is no prompt, or no slot."""
        self._drop_cancelled()
        if not (self.waiting and self._free):
            return None
        sequence = self.waiting.popleft()
        sequence.slot, sequence.begun = self._free.pop(), time.monotonic()
        self.reading.append(sequence)
        return sequence

    def settle(self, done: Pass, tokens: list[int]) -> None:
        """Give each sequence of a pass its token; those whose prompt ended grow from now on."""
        for sequence in (*done.growing, *done.reading):
            sequence.passes -= 1
        for sequence, token in zip(done.growing, tokens, strict=False):
            sequence.give(token)
        for sequence, token in zip(done.ended, tokens[len(done.growing) :], strict=True):
            sequence.first = token
            if sequence in self.reading:
                self._grow(sequence)
            if not sequence.unsubmitted:
                sequence.start()  # no step follows
            taken = time.monotonic() - sequence.begun
            self._reading_time += NEWEST * (taken - self._reading_time)
        self._retire()

    def _grow(self, sequence: Sequence) -> None:
        """Extend a sequence from the next step on: its prompt is read."""
        self.reading.remove(sequence)
        self.growing.append(sequence)

    def _retire(self) -> None:
        """Free the slots of complete sequences that no pass uses."""
        for sequences in (self.growing, self.reading):
            for sequence in [s for s in sequences if not (s.left or s.passes)]:
                sequences.remove(sequence)
                self._free.append(sequence.slot)
        if self.has_prompts:
            self._prompts_seen_at = time.monotonic()
        self._news.set()

    def _drop_cancelled(self) -> None:
        if any(not sequence.left for sequence in self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if sequence.left)


# -- orders of passes -----------------------------------------------------------------------------


async def serve(
    engine: Engine, place: Place, plan: Callable[[], Pass | None], ready: Callable[[], object]
) -> None:
    """Run the passes that `plan` returns, in a place that is entered while `ready` is true."""
    while True:
        await engine.wait(ready)
        async with place() as turn:
            submitted = deque[tuple[Pass, Awaitable[Answer]]]()
            is_new = True
            while True:
                while len(submitted) < turn.ahead and (is_new or turn.is_current()):
                    is_new = False
                    if (planned := plan()) is None:
                        break
                    submitted.append((planned, turn.run(planned.batch)))
                    if len(submitted) == 1:
                        planned.begin()
                if not submitted:
                    break
                done, answer = submitted.popleft()
                engine.settle(done, (await answer).tokens())
                if submitted:
                    submitted[0][0].begin()


async def separate(engine: Engine, decode: Place, prefill: Place) -> None:
    """Decode in one place and read prompts in another, at the same time."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(engine, decode, engine.step, lambda: engine.growing))
        tasks.create_task(serve(engine, prefill, engine.read, lambda: engine.can_read))


async def interleaved(engine: Engine, place: Place, interval: int) -> None:
    """Read prompts first, but make `interval` decode steps between two."""
    steps = interval

    def plan() -> Pass | None:
        nonlocal steps
        is_due = steps >= interval or not engine.growing
        if is_due and (found := engine.read()) is not None:
            steps = 0
            return found
        steps += 1
        return engine.step()

    await serve(engine, place, plan, lambda: engine.growing or engine.can_read)


async def fused(engine: Engine, place: Place, budget: int) -> None:
    """Read prompts in chunks, each in one pass with a decode step, `budget` tokens in all."""
    await serve(
        engine, place, lambda: engine.step(budget), lambda: engine.growing or engine.can_read
    )


# -- places that are leases of a pool -------------------------------------------------------------


def leased(
    pool: Pool,
    service: str,
    graphs: Callable[[], Any],
    sms: Callable[[], Size],
    ahead: Callable[[Size], int] = lambda _: AHEAD,
) -> Place:
    """Return the place that is a lease of the pool, of a size that is asked for each time."""

    @asynccontextmanager
    async def take() -> AsyncIterator[Turn]:
        size = sms()
        async with pool.partition(size, service=service) as p:
            made = await p.local(graphs)
            yield Turn(lambda batch: p.run(made.launch, batch), lambda: sms() == size, ahead(size))

    return take


def sized_classes(sms: int, total: int) -> list[ServiceClass]:
    """Return the classes of `sized`: each has two sizes, so there are few sets of graphs.

    The first class begins at the end of the device with the remainder of the split. So a decode
    step has whole groups of SMs, as in a fixed split.
    """
    return [
        ServiceClass("prefill", sizes=(total - sms, total)),
        ServiceClass("decode", sizes=(sms, total), priority=1),
    ]


def sized(pool: Pool, model: Any, engine: Engine, sms: int, total: int) -> tuple[Place, Place]:
    """Return places for decode steps and prompts, each with the SMs that it can use.

    A decode step has `sms`: a few sequences would gain nothing from more. Many have all SMs once
    no prompt has come for a while. A prompt has the SMs that are left, and all while no sequence
    grows. On all SMs one pass is submitted at a time, because the other place may need some next.

    Args:
        pool: with `sized_classes`.
        model: for its graphs.
        engine: what has to be served decides the sizes.
        sms: of a decode step of few sequences, or beside a prompt.
        total: of the device.
    """

    def step_sms() -> int:
        return total if engine.is_quiet and len(engine.growing) > FEW else sms

    def prompt_sms() -> int:
        return total - sms if engine.growing else total

    def ahead(size: Size) -> int:
        return 1 if size == total else AHEAD

    return (
        leased(pool, "decode", model.decode_graphs, step_sms, ahead),
        leased(pool, "prefill", model.prefill_graphs, prompt_sms, ahead),
    )


async def prepare(pool: Pool, model: Any) -> None:
    """Capture the graphs of `sized` for each set of SMs, before there are requests."""
    await pool.prepare_local("decode", model.decode_graphs)
    await pool.prepare_local("prefill", model.prefill_graphs)
