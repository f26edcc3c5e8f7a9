"""A caller's side of one pool: letters there, outcomes back, and what it last said of itself."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from greensched.errors import PoolLost
from greensched.integrations.ray import protocol
from greensched.integrations.ray.protocol import (
    Message,
    MessageBatch,
    Outcome,
    PoolInfo,
    ReplyBatch,
)

#: Calls of Ray that a caller has at one pool at once: one waits there for outcomes, one is on its
#: way there, one on its way back. What comes meanwhile goes together by the next.
CALLS = 3
#: Seconds without work after which a caller listens all the same, for what the pool says of itself.
IDLE = 0.02
#: Seconds after which what a pool said of itself is old: it is hung, or its node is slow.
STALE = 2 * protocol.HEARTBEAT


class PoolConnection:
    """One caller's line to one pool, as long as both live. All of it on the caller's loop.

    Any call of Ray that fails ends it: of what was sent nobody can say then whether it was done.
    """

    def __init__(self, handle: Any, key: str, facts: PoolInfo, code: Mapping[bytes, bytes]) -> None:
        self.name, self.node, self.most = facts.name, facts.node, facts.most
        self.pid, self.uuid = facts.pid, facts.uuid
        self.snapshot = facts.snapshot
        #: A job found that it can do no more, before it said so itself.
        self.is_spoilt = False
        #: Done once the line is.
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._handle, self._key = handle, key
        self._code, self._known = code, set[bytes]()
        self._outbox: list[Message] = []
        self._awaited: dict[int, asyncio.Future[Outcome]] = {}
        self._numbers = self._letters = self._calls = 0
        #: SMs of what was sent, by letter, and is not in the snapshot yet.
        self._unseen: deque[tuple[int, int]] = deque()
        self._unseen_sms = 0
        self._exchanging: set[asyncio.Task[None]] = set()
        self._loop.call_soon(self._listen)

    # -- asking ------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """The number of a new message; at its pool it is known by that."""
        self._numbers += 1
        return self._numbers

    async def ask(
        self, message: protocol.Run | protocol.Open | protocol.Close, sms: int = 0
    ) -> Outcome:
        """Sends a message, and waits for how it ends. A cancellation reaches the pool at once.

        Args:
            sms: what the message adds to the pool's load.

        Raises:
            PoolLost: the line broke; of what was never sent, `has_begun` of an outcome says so.
        """
        number = message.number
        if self.broken.done():
            return self._never_sent(number)
        answer = self._awaited[number] = self._loop.create_future()
        self._outbox.append(message)
        self._unseen.append((self._letters, sms))
        self._unseen_sms += sms
        if len(self._outbox) == 1:
            self._loop.call_soon(self._flush)
        try:
            outcome: Outcome = await answer
        except asyncio.CancelledError:
            self.cancel(message)
            raise
        return outcome

    def cancel(self, message: Message) -> None:
        """Nobody waits for it any more. Sent at once: the caller's loop may be about to end."""
        self._awaited.pop(message.number, None)
        if message in self._outbox:
            self._outbox.remove(message)
        elif not self.broken.done():
            self._outbox.append(protocol.Cancel(message.number))
            self._send()

    # -- load --------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the pool said that it grants."""
        return self.snapshot.is_open and not self.is_spoilt and not self.broken.done()

    @property
    def is_fresh(self) -> bool:
        """Whether it was heard of lately."""
        return self._loop.time() - self._heard < STALE

    @property
    def load(self) -> tuple[float, float]:
        """SMs that are wanted of it for each that it has; then, how long jobs wait there."""
        said = self.snapshot
        return (said.wanted + self._unseen_sms) / said.sms_total, said.wait

    # -- letters -----------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._outbox and self._calls < CALLS and not self.broken.done():
            self._send()

    def _listen(self) -> None:
        if not self._calls and not self.broken.done():
            self._send()

    def _send(self) -> None:
        messages, self._outbox = self._outbox, []
        new = {m.work.digest for m in messages if isinstance(m, protocol.Run)} - self._known
        self._known |= new
        letter = MessageBatch(
            self._letters, messages, {digest: self._code[digest] for digest in new}
        )
        self._letters += 1
        self._calls += 1
        # Sent here and now, by `remote`; the task waits for the answer alone.
        call = self._handle.exchange.remote(self._key, letter)
        task = self._loop.create_task(self._exchange(call, messages))
        self._exchanging.add(task)
        task.add_done_callback(self._exchanging.discard)

    async def _exchange(self, call: Any, messages: list[Message]) -> None:
        try:
            answer: ReplyBatch | None = await call
        except Exception as error:
            self.end(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
            return
        if answer is None:
            self._outbox += messages
            self.end("it was started anew, or heard nothing from here for too long")
        else:
            self._hear(answer)

    def _hear(self, answer: ReplyBatch) -> None:
        self._calls -= 1
        self._heard = self._loop.time()
        self.snapshot = answer.snapshot
        while self._unseen and self._unseen[0][0] <= answer.heard:
            self._unseen_sms -= self._unseen.popleft()[1]
        for outcome in answer.outcomes:
            waiting = self._awaited.pop(outcome.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(outcome)
        if self._outbox:
            self._flush()
        elif not self._calls:
            self._loop.call_later(0 if self._awaited else IDLE, self._listen)

    # -- the end -----------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """The line is no more: what was sent is lost, the rest was never sent. Idempotent."""
        if self.broken.done():
            return
        self.broken.set_result(why)
        unsent = {message.number for message in self._outbox}
        self._outbox.clear()
        for number, waiting in self._awaited.items():
            if waiting.done():
                continue
            if number in unsent:
                waiting.set_result(self._never_sent(number))
            else:
                waiting.set_exception(PoolLost(self.name, why))
        self._awaited.clear()

    def _never_sent(self, number: int) -> Outcome:
        lost = PoolLost(self.name, self.broken.result())
        return protocol.failure(number, lost, has_begun=False)

    def hang_up(self) -> None:
        """Ends it, and has the pool told."""
        if not self.broken.done():
            self._handle.goodbye.remote(self._key)
        self.end("the fleet was closed here")
        for task in self._exchanging:
            task.cancel()
