"""A pool's side of one caller: his letters in their order, his jobs and sessions, his answers."""

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
    """What a caller needs of the pool's actor."""

    @property
    def pool(self) -> Pool: ...
    def snapshot(self) -> Snapshot: ...
    def admit(self) -> None: ...
    def came(self, sms: int) -> None: ...
    def went(self, sms: int) -> None: ...
    def queued(self, seconds: float) -> None: ...


class RemoteClient:
    """One caller of a pool. All of it on the loop of the pool.

    At most one of his letters waits here, the newest: it is answered when something has ended, when
    the pool has changed, or after a beat. An older one is answered when a newer one comes, so that
    he can always send another.
    """

    def __init__(self, house: PoolActorView) -> None:
        self._house = house
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()
        self._next = 0
        #: Letters that overtook others, by number.
        self._early: dict[int, asyncio.Future[None]] = {}
        self._bell: asyncio.Future[None] | None = None
        self._ended: list[Outcome] = []
        self._told: Snapshot | None = None
        self._code: dict[bytes, bytes] = {}
        self._functions: dict[bytes, Callable[..., Any]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sessions: dict[int, _Session] = {}

    # -- letters -----------------------------------------------------------------------------------

    async def answer(self, letter: MessageBatch) -> ReplyBatch:
        """Takes a letter, and waits for something to tell."""
        self.heard = self._loop.time()
        if letter.number != self._next:
            turn = self._early[letter.number] = self._loop.create_future()
            await turn
        self._code.update(letter.code)
        for message in letter.messages:
            self._take(message)
        self._next += 1
        if self._next in self._early:
            self._early.pop(self._next).set_result(None)
        await self._something()
        outcomes, self._ended = self._ended, []
        self._told = self._house.snapshot()
        return ReplyBatch(letter.number, outcomes, self._told)

    async def _something(self) -> None:
        """Until there is something to tell, or a newer letter is here."""
        self.ring()
        if self._ended:
            return
        bell = self._bell = self._loop.create_future()
        beat = self._loop.call_later(protocol.HEARTBEAT, _ring, bell)
        await bell
        beat.cancel()

    def ring(self) -> None:
        """Has the letter that waits answered."""
        if self._bell is not None:
            _ring(self._bell)
            self._bell = None

    def look(self, snapshot: Snapshot) -> None:
        """Tells him how the pool is, if that is news."""
        if snapshot != self._told:
            self.ring()

    @property
    def is_busy(self) -> bool:
        """Whether something has not ended, or he was not told that it has."""
        return bool(self._tasks or self._ended)

    def end(self) -> None:
        """He is gone: whatever waits leaves the queue, and what runs is left."""
        for task in [*self._tasks.values()]:
            task.cancel()
        self.ring()

    def fail(self, error: BaseException) -> None:
        """Everything ends by this now, whether or not it can be stopped."""
        for number, task in [*self._tasks.items()]:
            task.cancel()
            self._tell(protocol.failure(number, error, has_begun=True))

    # -- messages ----------------------------------------------------------------------------------

    def _take(self, message: protocol.Message) -> None:
        match message:
            case protocol.Run(number=number, wish=LeaseSpec() as wish):
                self._begin(number, self._run(message, wish), wish)
            case protocol.Run(number=number, wish=int() as session):
                self._begin(number, self._run_in_session(message, session))
            case protocol.Open(number=number, wish=wish):
                self._begin(number, self._lease(message), wish)
            case protocol.Close(number=number, session=session):
                self._close(number, session)
            case protocol.Cancel(number=number):
                if number in self._tasks:
                    self._tasks[number].cancel()

    def _begin(
        self, number: int, work: Coroutine[Any, Any, None], wish: LeaseSpec | None = None
    ) -> None:
        sms = 0 if wish is None else protocol.least(wish.sms)
        self._house.came(sms)
        task = self._tasks[number] = self._loop.create_task(work)

        def ended(task: asyncio.Task[None]) -> None:
            self._house.went(sms)
            del self._tasks[number]
            if not task.cancelled():
                task.exception()

        task.add_done_callback(ended)

    def _tell(self, outcome: Outcome) -> None:
        """Whatever ends in the same turn of the loop goes by one answer."""
        self._ended.append(outcome)
        self._loop.call_soon(self.ring)

    # -- jobs --------------------------------------------------------------------------------------

    async def _run(self, message: protocol.Run, wish: LeaseSpec) -> None:
        has_begun, came = False, self._loop.time()
        try:
            self._house.admit()
            function, args = await self._unpacked(message.work)
            fetched = self._loop.time()
            async with self._partition(wish, came) as p:
                has_begun = True
                self._house.queued(self._loop.time() - fetched)
                value = await _perform(p, function, args)
            outcome = await protocol.success(message.number, value)
        except BaseException as error:
            if _is_cancelled(error):
                raise
            outcome = protocol.failure(message.number, error, has_begun=has_begun)
        self._tell(outcome)

    async def _run_in_session(self, message: protocol.Run, session: int) -> None:
        has_begun = False
        try:
            function, args = await self._unpacked(message.work)
            p = self._session(session).partition
            has_begun = True
            outcome = await protocol.success(message.number, await _perform(p, function, args))
        except BaseException as error:
            if _is_cancelled(error):
                raise
            outcome = protocol.failure(message.number, error, has_begun=has_begun)
        self._tell(outcome)

    async def _unpacked(self, work: protocol.Packed) -> tuple[Callable[..., Any], list[Any]]:
        function = self._functions.get(work.digest)
        if function is None:
            function = self._functions[work.digest] = pickle.loads(self._code[work.digest])
            del self._code[work.digest]
        return function, await protocol.arguments(work)

    def _partition(self, wish: LeaseSpec, came: float) -> Partition:
        left = None if wish.deadline is None else max(0.0, wish.deadline - self._loop.time() + came)
        return self._house.pool.partition(
            wish.sms, service=wish.service, deadline=left, duration=wish.duration
        )

    # -- sessions ----------------------------------------------------------------------------------

    async def _lease(self, message: protocol.Open) -> None:
        """Holds a session's SMs from the grant to its end; answers both."""
        number, was_granted = message.number, False
        try:
            self._house.admit()
            asked = self._loop.time()
            async with self._partition(message.wish, asked) as p:
                was_granted = True
                self._house.queued(self._loop.time() - asked)
                session = _Session(p, self._loop.create_future())
                self._sessions[message.number] = session
                self._tell(await protocol.success(number, p.sm_count))
                number = await session.closed_by
            outcome = await protocol.success(number, None)
        except BaseException as error:
            if _is_cancelled(error):
                raise
            outcome = protocol.failure(number, error, has_begun=was_granted)
        finally:
            self._sessions.pop(message.number, None)
        self._tell(outcome)

    def _close(self, number: int, session: int) -> None:
        try:
            self._session(session).closed_by.set_result(number)
        except PartitionClosed as error:
            self._tell(protocol.failure(number, error, has_begun=False))

    def _session(self, number: int) -> _Session:
        session = self._sessions.get(number)
        if session is None or session.closed_by.done():
            raise PartitionClosed("this session")
        return session


class _Session(NamedTuple):
    """SMs that one caller has until he closes it; `closed_by` is the number of the message."""

    partition: Partition
    closed_by: asyncio.Future[int]


async def _perform(p: Partition, function: Callable[..., Any], args: list[Any]) -> Any:
    return await (function(p, *args) if protocol.is_awaited(function) else p.run(function, *args))


def _is_cancelled(error: BaseException) -> bool:
    """Whether its task was cancelled, and not just something that the job awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _ring(bell: asyncio.Future[None]) -> None:
    if not bell.done():
        bell.set_result(None)
