"""A lease on one pool of a fleet, for several jobs of one program."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from greensched.errors import InvalidRequest, PartitionClosed
from greensched.integrations.ray import protocol
from greensched.integrations.ray.connection import PoolConnection
from greensched.integrations.ray.deadlines import answered_within, value_of


class Session:
    """SMs of one pool, leased to one program; made by `fleet.partition(...)`.

    The program says that it lives with every beat of its line to the pool. When it does no more,
    or when its block is left by an error or a cancellation, the SMs go back once what runs there
    has ended. It never moves to another pool: when its own is lost, it is `PoolLost`.
    """

    def __init__(
        self,
        opened: Callable[[], Awaitable[tuple[PoolConnection, int, int]]],
        functions: protocol.Functions,
    ) -> None:
        self._opened = opened
        self._functions = functions
        self._line: PoolConnection | None = None
        self._number = self._sm_count = 0
        self._is_entered = False

    async def __aenter__(self) -> Self:
        """Waits for the SMs; a cancellation leaves nothing behind.

        Raises:
            TooManySMs, QueueFull, NoPool, NotAnswered: as `Fleet.submit`.
            InvalidRequest: it is, or was, entered already.
        """
        if self._is_entered:
            raise InvalidRequest("this session was entered already: ask for another")
        self._is_entered = True
        self._line, self._number, self._sm_count = await self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Ends the lease. Left normally, it waits for the work, and raises what nobody has seen.

        Raises:
            PoolLost: the pool was lost meanwhile.
        """
        line, self._line = self._granted(), None
        if kind is None:
            close = protocol.Close(line.next_number(), self._number)
            await value_of(await line.ask(close), line.name)
        else:
            line.cancel(protocol.Cancel(self._number))

    async def run(
        self, job: Callable[..., Any], /, *args: object, deadline: float | None = None
    ) -> Any:
        """Runs a job on the session's SMs, and waits for its result; see `Fleet.submit`.

        Jobs that are awaited at the same time run at the same time. It is never tried again.

        Args:
            job, args: as of `Fleet.submit`.
            deadline: seconds until the answer is here.

        Raises:
            PartitionClosed: outside of the block.
            NotAnswered: the deadline passed; it may have run.
            PoolLost: the pool was lost, and it may have run.
            Others: what the job raised.
        """
        line = self._granted()
        async with answered_within(deadline):
            work = await protocol.packed(self._functions, job, args)
            outcome = await line.ask(protocol.Run(line.next_number(), work, self._number))
            return await value_of(outcome, line.name)

    @property
    def sm_count(self) -> int:
        """The SMs it was granted."""
        self._granted()
        return self._sm_count

    @property
    def pool(self) -> str:
        """The name of its pool."""
        return self._granted().name

    def _granted(self) -> PoolConnection:
        if self._line is None:
            state = "closed" if self._is_entered else "not granted: use it with `async with`"
            raise PartitionClosed("this session", state)
        return self._line
