"""A pool's side of one client: its batches in order, its jobs and sessions, and the replies."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from greensched import Partition, Pool
from greensched.errors import PartitionClosed
from greensched.integrations.ray import protocol
from greensched.integrations.ray.protocol import (
    LeaseSpec,
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

    At most one batch waits here, the newest. It gets its reply when something has ended, when the
    pool's state has changed, or after a heartbeat. An older batch gets its reply when a newer batch
    comes, so that the client can always send another.
    """

    def __init__(self, actor: PoolActorView) -> None:
        self._actor = actor
        self._loop = asyncio.get_running_loop()
        self.last_batch = self._loop.time()
        self._next_batch = 0
        #: Batches that arrived before their predecessors, by number.
        self._early: dict[int, asyncio.Future[None]] = {}
        self._wakeup: asyncio.Future[None] | None = None
        self._ended: list[Outcome] = []
        self._reported: Snapshot | None = None
        self._code: dict[bytes, bytes] = {}
        self._functions: dict[bytes, Callable[..., Any]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sessions: dict[int, _Session] = {}

    # -- batches -----------------------------------------------------------------------------------

    async def reply(self, batch: MessageBatch) -> ReplyBatch:
        """Handle a batch, and wait for news to reply with."""
        self.last_batch = self._loop.time()
        if batch.number != self._next_batch:
            turn = self._early[batch.number] = self._loop.create_future()
            await turn
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
        self.wake()
        if self._ended:
            return
        wakeup = self._wakeup = self._loop.create_future()
        beat = self._loop.call_later(protocol.HEARTBEAT, _wake, wakeup)
        await wakeup
        beat.cancel()

    def wake(self) -> None:
        """Reply to the waiting batch."""
        if self._wakeup is not None:
            _wake(self._wakeup)
            self._wakeup = None

    def update(self, snapshot: Snapshot) -> None:
        """Send the pool's state if it has changed."""
        if snapshot != self._reported:
            self.wake()

    @property
    def is_busy(self) -> bool:
        """Say whether a job runs, or an outcome is not sent yet."""
        return bool(self._tasks or self._ended)

    def close(self) -> None:
        """Cancel all jobs. Queued jobs leave the queue; running kernels run to their end."""
        for task in [*self._tasks.values()]:
            task.cancel()
        self.wake()

    def fail(self, error: BaseException) -> None:
        """Fail every job with this error, even jobs that cannot be stopped."""
        for number, task in [*self._tasks.items()]:
            task.cancel()
            self._add_outcome(protocol.failure(number, error, has_begun=True))

    # -- messages ----------------------------------------------------------------------------------

    def _handle(self, message: protocol.Message) -> None:
        match message:
            case protocol.Run(number=number, lease=LeaseSpec() as lease):
                self._start(number, self._run(message, lease), lease)
            case protocol.Run(number=number, lease=int() as session):
                self._start(number, self._run_in_session(message, session))
            case protocol.Open(number=number, lease=lease):
                self._start(number, self._hold_session(message), lease)
            case protocol.Close(number=number, session=session):
                self._close(number, session)
            case protocol.Cancel(number=number):
                if number in self._tasks:
                    self._tasks[number].cancel()

    def _start(
        self, number: int, work: Coroutine[Any, Any, None], lease: LeaseSpec | None = None
    ) -> None:
        sms = 0 if lease is None else protocol.least_sms(lease.sms)
        self._actor.job_started(sms)
        task = self._tasks[number] = self._loop.create_task(work)

        def ended(task: asyncio.Task[None]) -> None:
            self._actor.job_ended(sms)
            del self._tasks[number]
            if not task.cancelled():
                task.exception()

        task.add_done_callback(ended)

    def _add_outcome(self, outcome: Outcome) -> None:
        """Add an outcome. All outcomes of one turn of the loop go in one reply."""
        self._ended.append(outcome)
        self._loop.call_soon(self.wake)

    # -- jobs --------------------------------------------------------------------------------------

    async def _run(self, message: protocol.Run, lease: LeaseSpec) -> None:
        has_begun, job_started = False, self._loop.time()
        try:
            self._actor.admit()
            function, args = await self._unpack(message.work)
            fetched = self._loop.time()
            async with self._partition(lease, job_started) as p:
                has_begun = True
                self._actor.job_granted(self._loop.time() - fetched)
                value = await _perform(p, function, args)
            outcome = await protocol.success(message.number, value)
        except BaseException as error:
            if _is_cancelled(error):
                raise
            outcome = protocol.failure(message.number, error, has_begun=has_begun)
        self._add_outcome(outcome)

    async def _run_in_session(self, message: protocol.Run, session: int) -> None:
        has_begun = False
        try:
            function, args = await self._unpack(message.work)
            p = self._session(session).partition
            has_begun = True
            outcome = await protocol.success(message.number, await _perform(p, function, args))
        except BaseException as error:
            if _is_cancelled(error):
                raise
            outcome = protocol.failure(message.number, error, has_begun=has_begun)
        self._add_outcome(outcome)

    async def _unpack(self, work: protocol.Packed) -> tuple[Callable[..., Any], list[Any]]:
        function = self._functions.get(work.digest)
        if function is None:
            function = self._functions[work.digest] = pickle.loads(self._code[work.digest])
            del self._code[work.digest]
        return function, await protocol.load_arguments(work)

    def _partition(self, lease: LeaseSpec, job_started: float) -> Partition:
        left = (
            None
            if lease.deadline is None
            else max(0.0, lease.deadline - self._loop.time() + job_started)
        )
        return self._actor.pool.partition(
            lease.sms, service=lease.service, deadline=left, duration=lease.duration
        )

    # -- sessions ----------------------------------------------------------------------------------

    async def _hold_session(self, message: protocol.Open) -> None:
        """Hold a session's lease from its grant to its end, and report both."""
        number, was_granted = message.number, False
        try:
            self._actor.admit()
            asked = self._loop.time()
            async with self._partition(message.lease, asked) as p:
                was_granted = True
                self._actor.job_granted(self._loop.time() - asked)
                session = _Session(p, self._loop.create_future())
                self._sessions[message.number] = session
                self._add_outcome(await protocol.success(number, p.sm_count))
                number = await session.closed_by
            outcome = await protocol.success(number, None)
        except BaseException as error:
            if _is_cancelled(error):
                raise
            outcome = protocol.failure(number, error, has_begun=was_granted)
        finally:
            self._sessions.pop(message.number, None)
        self._add_outcome(outcome)

    def _close(self, number: int, session: int) -> None:
        try:
            self._session(session).closed_by.set_result(number)
        except PartitionClosed as error:
            self._add_outcome(protocol.failure(number, error, has_begun=False))

    def _session(self, number: int) -> _Session:
        session = self._sessions.get(number)
        if session is None or session.closed_by.done():
            raise PartitionClosed("this session")
        return session


class _Session(NamedTuple):
    """A client's lease. `closed_by` gets the number of the message that ends it."""

    partition: Partition
    closed_by: asyncio.Future[int]


async def _perform(p: Partition, function: Callable[..., Any], args: list[Any]) -> Any:
    return await (function(p, *args) if protocol.is_async_job(function) else p.run(function, *args))


def _is_cancelled(error: BaseException) -> bool:
    """Say whether the current task was cancelled, and not just something that it awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _wake(wakeup: asyncio.Future[None]) -> None:
    if not wakeup.done():
        wakeup.set_result(None)
