"""A pool's side of one client: its batches in order, its jobs and sessions, and the replies."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from greensched import Partition, Pool
from greensched.errors import PartitionClosed
from greensched.integrations.ray import protocol
from greensched.integrations.ray.protocol import (
    Message,
    MessageBatch,
    Outcome,
    ReplyBatch,
    Snapshot,
)


class PoolActorView(Protocol):
    """What a client needs of the pool's actor."""

    @property
    def pool(self) -> Pool: ...
    def snapshot(self) -> Snapshot: ...
    def admit(self) -> None: ...
    def job_started(self, sms: int) -> None: ...
    def job_ended(self, sms: int) -> None: ...
    def job_granted(self, seconds: float) -> None: ...


class RemoteClient:
    """A client of a pool. All methods run on the pool's loop.

    The oldest batch that waits here gets its reply when something has ended, when the pool's state
    has changed, or after a heartbeat. Of more than `protocol.FEW` jobs only the newest batch waits,
    so that the client can always send another; of fewer, one for each.
    """

    def __init__(self, actor: PoolActorView) -> None:
        self._actor = actor
        self._loop = asyncio.get_running_loop()
        self.last_batch = self._loop.time()
        self._next_batch = 0
        #: Batches that arrived before their predecessors, by number.
        self._early: dict[int, asyncio.Future[None]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ended: list[Outcome] = []
        self._reported: Snapshot | None = None
        self._code: dict[bytes, bytes] = {}
        #: The functions by digest, each with whether it is awaited.
        self._functions: dict[bytes, tuple[Callable[..., Any], bool]] = {}
        self._tasks: dict[int, asyncio.Task[Outcome]] = {}
        #: The jobs that were cancelled here: their outcomes were sent, or are no longer wanted.
        self._cancelled: set[int] = set()
        self._is_closed = False
        self._sessions: dict[int, _Session] = {}

    # -- batches -----------------------------------------------------------------------------------

    async def reply(self, batch: MessageBatch) -> ReplyBatch | None:
        """Handle a batch, and wait for news to reply with; None if the client was closed before."""
        self.last_batch = self._loop.time()
        if batch.number != self._next_batch:
            turn = self._early[batch.number] = self._loop.create_future()
            await turn
            if self._is_closed:
                return None
        self._code.update(batch.code)
        for message in batch.messages:
            self._handle(message)
        self._next_batch += 1
        if self._next_batch in self._early:
            self._early.pop(self._next_batch).set_result(None)
        await self._wait_for_news()
        outcomes, self._ended = self._ended, []
        self._reported = self._actor.snapshot()
        return ReplyBatch(batch.number, outcomes, self._reported)

    async def _wait_for_news(self) -> None:
        """Wait for an outcome, a change of state, a newer batch or a heartbeat."""
        if self._ended and not self._waiting:
            return
        wakeup = self._loop.create_future()
        self._waiting.append(wakeup)
        most = len(self._tasks) if len(self._tasks) <= protocol.FEW else 1
        for older in [*self._waiting][: -max(1, most)]:
            _wake(older)
        beat = self._loop.call_later(protocol.HEARTBEAT, _wake, wakeup)
        try:
            await wakeup
        finally:
            beat.cancel()
            self._waiting.remove(wakeup)

    def wake(self) -> None:
        """Reply to the oldest batch that waits: it takes what has ended."""
        if self._waiting:
            _wake(self._waiting[0])

    def update(self, snapshot: Snapshot) -> None:
        """Send the pool's state if it has changed."""
        if snapshot != self._reported:
            self.wake()

    @property
    def is_busy(self) -> bool:
        """Say whether a job runs, or an outcome is not sent yet."""
        return bool(self._tasks or self._ended)

    def close(self) -> None:
        """Cancel all jobs: queued ones leave the queue; running kernels run to their end."""
        self._is_closed = True
        for number in self._tasks:
            self._cancel(number)
        for early in self._early.values():
            _wake(early)
        self.wake()

    def fail(self, error: BaseException) -> None:
        """Fail every job with this error, even jobs that cannot be stopped."""
        for number in [number for number in self._tasks if number not in self._cancelled]:
            self._cancel(number)
            self._add_outcome(protocol.failure(number, error, has_begun=True))

    # -- messages ----------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        match message.kind:
            case "run" if message.session:
                self._start(message, self._run_in_session(message))
            case "run":
                self._start(message, self._run(message))
            case "open":
                self._start(message, self._hold_session(message))
            case "close":
                self._close(message)
            case "cancel" if message.number in self._tasks:
                self._cancel(message.number)

    def _cancel(self, number: int) -> None:
        self._cancelled.add(number)
        self._tasks[number].cancel()

    def _start(self, message: Message, work: Coroutine[Any, Any, Outcome]) -> None:
        number = message.number
        sms = 0 if message.session else protocol.least_sms(message.sms)
        self._actor.job_started(sms)
        task = self._tasks[number] = self._loop.create_task(work)

        def ended(task: asyncio.Task[Outcome]) -> None:
            self._actor.job_ended(sms)  # the reply's snapshot no longer counts it
            del self._tasks[number]
            if number in self._cancelled:
                self._cancelled.remove(number)
            else:
                self._add_outcome(task.result())

        task.add_done_callback(ended)

    def _add_outcome(self, outcome: Outcome) -> None:
        """Add an outcome. All outcomes of one turn of the loop go in one reply."""
        self._ended.append(outcome)
        self.wake()

    # -- jobs --------------------------------------------------------------------------------------

    async def _run(self, message: Message) -> Outcome:
        has_begun, job_started = False, self._loop.time()
        try:
            self._actor.admit()
            job = await self._unpack(message)
            fetched = self._loop.time()
            async with self._partition(message, job_started) as p:
                has_begun = True
                self._actor.job_granted(self._loop.time() - fetched)
                value = await _perform(p, *job)
            return await protocol.success(message.number, value)
        except BaseException as error:
            return self._failure(message.number, error, has_begun=has_begun)

    async def _run_in_session(self, message: Message) -> Outcome:
        has_begun = False
        try:
            job = await self._unpack(message)
            p = self._session(message.session).partition
            has_begun = True
            return await protocol.success(message.number, await _perform(p, *job))
        except BaseException as error:
            return self._failure(message.number, error, has_begun=has_begun)

    def _failure(self, number: int, error: BaseException, *, has_begun: bool) -> Outcome:
        if number in self._cancelled:  # its outcome is not sent
            return Outcome(number)
        return protocol.failure(number, error, has_begun=has_begun)

    async def _unpack(self, message: Message) -> tuple[Callable[..., Any], bool, list[Any]]:
        digest = message.digest
        known = self._functions.get(digest)
        if known is None:
            function = pickle.loads(self._code[digest])
            known = self._functions[digest] = function, protocol.is_async_job(function)
            del self._code[digest]
        return *known, await protocol.load_arguments(message)

    def _partition(self, message: Message, received: float) -> Partition:
        left = message.deadline
        if left is not None:
            left = max(0.0, left - self._loop.time() + received)
        options = {"service": message.service, "deadline": left, "duration": message.duration}
        chosen: Any = {key: value for key, value in options.items() if value is not None}
        return self._actor.pool.partition(message.sms, **chosen)

    # -- sessions ----------------------------------------------------------------------------------

    async def _hold_session(self, message: Message) -> Outcome:
        """Hold a session's lease from its grant to its end; report the grant, return the end."""
        number, was_granted = message.number, False
        try:
            self._actor.admit()
            requested_at = self._loop.time()
            async with self._partition(message, requested_at) as p:
                was_granted = True
                self._actor.job_granted(self._loop.time() - requested_at)
                session = _Session(p, self._loop.create_future())
                self._sessions[message.number] = session
                self._add_outcome(await protocol.success(number, p.sm_count))
                number = await session.closed_by
            return await protocol.success(number, None)
        except BaseException as error:
            return self._failure(number, error, has_begun=was_granted)
        finally:
            self._sessions.pop(message.number, None)

    def _close(self, message: Message) -> None:
        try:
            self._session(message.session).closed_by.set_result(message.number)
        except PartitionClosed as error:
            self._add_outcome(protocol.failure(message.number, error, has_begun=False))

    def _session(self, number: int) -> _Session:
        session = self._sessions.get(number)
        if session is None or session.closed_by.done():
            raise PartitionClosed("this session")
        return session


class _Session(NamedTuple):
    """A client's lease. `closed_by` gets the number of the message that ends it."""

    partition: Partition
    closed_by: asyncio.Future[int]


async def _perform(
    p: Partition, function: Callable[..., Any], is_async: bool, args: list[Any]
) -> Any:
    return await (function(p, *args) if is_async else p.run(function, *args))


def _wake(wakeup: asyncio.Future[None]) -> None:
    if not wakeup.done():
        wakeup.set_result(None)
