"""A fleet's connection to one pool: messages, their outcomes, and the pool's last snapshot."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
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

#: Ray calls in flight to one pool with more than `protocol.FEW` jobs: one waits there for outcomes,
#: one is on its way. Messages that come meanwhile go together in the next call: one costs a
#: millisecond, and ten jobs as much.
CALLS = 2
#: Seconds without work after which the connection polls for the pool's snapshot.
IDLE = 0.1
#: Heartbeats in a row without a reply after which the pool counts as lost: its process is stopped,
#: or a job blocks its loop. More than `STALE`, because all its jobs fail.
SILENT = 10
#: Seconds after which a snapshot is stale: the pool hangs, or its node is slow.
STALE = 2 * protocol.HEARTBEAT


class PoolConnection:
    """A connection of one program to one pool. All methods run on the program's loop.

    A failed Ray call closes it; then it is unknown whether the pool handled the sent messages.
    """

    def __init__(self, handle: Any, key: str, info: PoolInfo, code: Mapping[bytes, bytes]) -> None:
        self.name, self.node, self.most = info.name, info.node, info.most
        self.snapshot = info.snapshot
        #: Whether a job's outcome showed that the pool is lost, before a snapshot did.
        self.is_lost = False
        #: Completed with the reason once the connection is closed.
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._last_reply = self._last_beat = self._loop.time()
        self._silent = 0
        self._exchange, self._goodbye, self._key = handle.exchange, handle.goodbye, key
        self._code, self._known = code, set[bytes]()
        self._outbox: list[Message] = []
        self._pending: dict[int, asyncio.Future[Outcome]] = {}
        self._numbers = self._sent_batches = self._calls = 0
        #: For each batch, the SMs of its messages, until a snapshot includes them.
        self._unreported: deque[tuple[int, int]] = deque()
        self._unreported_sms = 0
        self._polling: asyncio.Handle = self._loop.call_soon(self._poll)

    # -- requests ----------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return the number of a new message, by which the pool knows it."""
        self._numbers += 1
        return self._numbers

    async def request(self, message: Message, sms: int = 0) -> Outcome:
        """Send a message and wait for its outcome. A cancellation is sent to the pool at once.

        Args:
            message: the message.
            sms: The load that the message adds to the pool.

        Returns:
            The outcome. If the connection closed before the message was sent, the outcome is
            `PoolLost` with `has_begun` false.

        Raises:
            PoolLost: the connection closed after the message was sent.
        """
        number = message.number
        if self.closed.done():
            return self._unsent_outcome(number)
        reply = self._pending[number] = self._loop.create_future()
        self._outbox.append(message)
        self._unreported.append((self._sent_batches, sms))
        self._unreported_sms += sms
        if len(self._outbox) == 1:
            self._loop.call_soon(self._flush)
        try:
            outcome: Outcome = await reply
        except asyncio.CancelledError:
            self.cancel(message)
            raise
        return outcome

    def cancel(self, message: Message) -> None:
        """Cancel a message. Sent at once, as the program's loop may be about to end."""
        self._pending.pop(message.number, None)
        if message in self._outbox:
            self._outbox.remove(message)
        elif not self.closed.done():
            self._outbox.append(Message("cancel", message.number))
            self._send()

    # -- load --------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Say whether the pool grants requests, by its last snapshot."""
        return self.snapshot.is_open and not self.is_lost and not self.closed.done()

    @property
    def is_fresh(self) -> bool:
        """Say whether the last snapshot is recent."""
        return self._loop.time() - self._last_reply < STALE

    @property
    def load(self) -> tuple[float, float]:
        """The requested fraction of the pool's SMs, then the seconds that jobs wait there."""
        snapshot = self.snapshot
        return (snapshot.wanted + self._unreported_sms) / snapshot.sms_total, snapshot.wait

    # -- batches -----------------------------------------------------------------------------------

    def _flush(self) -> None:
        few = len(self._pending) - len(self._outbox) <= protocol.FEW
        if self._outbox and (few or self._calls < CALLS) and not self.closed.done():
            self._send()

    def _poll(self) -> None:
        if not self._calls and not self.closed.done():
            self._send()

    def _send(self) -> None:
        self._polling.cancel()
        messages, self._outbox = self._outbox, []
        new = {m.digest for m in messages if m.digest} - self._known
        self._known |= new
        batch = MessageBatch(
            self._sent_batches, messages, {digest: self._code[digest] for digest in new}
        )
        self._sent_batches += 1
        self._calls += 1
        call = self._exchange.remote(protocol.pack_batch(self._key, batch))
        call.future().add_done_callback(functools.partial(self._replied, messages))

    def _replied(self, messages: list[Message], call: Future[Any]) -> None:
        """Pass a reply to the loop; Ray calls this on a thread of its own."""
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._exchanged, messages, call)

    def _exchanged(self, messages: list[Message], call: Future[Any]) -> None:
        if self.closed.done():
            return
        try:
            sent = call.result()
            reply = None if sent is None else protocol.unpack_reply(sent)
        except Exception as error:
            self.fail(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
            return
        if reply is None:
            self._outbox += messages
            self.fail("its process was restarted, or it received nothing from here for too long")
        else:
            self._receive(reply)

    def _receive(self, reply: ReplyBatch) -> None:
        self._calls -= 1
        self._last_reply = self._loop.time()
        self.snapshot = reply.snapshot
        while self._unreported and self._unreported[0][0] <= reply.received:
            self._unreported_sms -= self._unreported.popleft()[1]
        for outcome in reply.outcomes:
            waiting = self._pending.pop(outcome.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(outcome)
        if self._outbox:
            self._flush()
        elif not self._calls:
            self._polling = self._loop.call_later(0 if self._pending else IDLE, self._poll)

    def beat(self) -> None:
        """Close the connection if the pool was silent for too many heartbeats; call it at each.

        Heartbeats are counted, because time also passes while this program's loop is blocked.
        """
        self._silent = 0 if self._last_reply > self._last_beat else self._silent + 1
        self._last_beat = self._loop.time()
        if self._silent >= SILENT:
            self.fail(f"it gave no reply for {SILENT * protocol.HEARTBEAT:g} s")

    # -- the end -----------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Close the connection for a reason; sent messages are lost. Idempotent."""
        if self.closed.done():
            return
        self.closed.set_result(why)
        self._polling.cancel()
        unsent = {message.number for message in self._outbox}
        self._outbox.clear()
        for number, waiting in self._pending.items():
            if waiting.done():
                continue
            if number in unsent:
                waiting.set_result(self._unsent_outcome(number))
            else:
                waiting.set_exception(PoolLost(self.name, why))
        self._pending.clear()

    def _unsent_outcome(self, number: int) -> Outcome:
        lost = PoolLost(self.name, self.closed.result())
        return protocol.failure(number, lost, has_begun=False)

    def close(self) -> None:
        """Close the connection and notify the pool."""
        if not self.closed.done():
            self._goodbye.remote(self._key)
        self.fail("the fleet was closed here")
