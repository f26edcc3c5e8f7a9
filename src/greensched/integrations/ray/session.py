"""A lease on one pool of a fleet, for several jobs of one program."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from greensched.errors import InvalidRequest, PartitionClosed
from greensched.integrations.ray import protocol
from greensched.integrations.ray.connection import PoolConnection
from greensched.integrations.ray.deadlines import reply_within, result_of
from greensched.integrations.ray.protocol import Message


class Session:
    """A lease on one pool for one program. Made by `fleet.partition(...)`.

    If an error or a cancellation leaves the block, or the pool misses the program's heartbeats, its
    SMs are released once the work that runs there has ended. A session never moves
    to another pool: if its pool is lost, it raises `PoolLost`.
    """

    def __init__(
        self,
        opened: Callable[[], Awaitable[tuple[PoolConnection, int, int]]],
        functions: protocol.Functions,
    ) -> None:
        self._opened = opened
        self._functions = functions
        self._connection: PoolConnection | None = None
        self._number = self._sm_count = 0
        self._is_entered = False

    async def __aenter__(self) -> Self:
        """Wait for the SMs. A cancellation leaves nothing behind.

        Raises:
            TooManySMs, QueueFull, NoPool, FleetTimeout: As for `Fleet.submit`.
            InvalidRequest: The session was entered already.
        """
        if self._is_entered:
            raise InvalidRequest(
                "this session was entered already: make another with fleet.partition(...)"
            )
        self._is_entered = True
        self._connection, self._number, self._sm_count = await self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """End the lease. At a normal end, wait for the work and raise its unretrieved error.

        Raises:
            PoolLost: The pool was lost meanwhile.
        """
        connection, self._connection = self._open_connection(), None
        if kind is None:
            close = Message("close", connection.next_number(), session=self._number)
            await result_of(await connection.request(close), connection.name)
        else:
            connection.cancel(Message("cancel", self._number))

    async def run(
        self, job: Callable[..., Any], /, *args: object, deadline: float | None = None
    ) -> Any:
        """Run a job on the session's SMs, and wait for its result; see `Fleet.submit`.

        Jobs that are awaited together run concurrently. Jobs are never retried.

        Args:
            job, args: As for `Fleet.submit`.
            deadline: Seconds within which the result must arrive.

        Raises:
            PartitionClosed: The block has not begun, or has ended.
            FleetTimeout: The deadline passed; the job may have run.
            PoolLost: The pool was lost; the job may have run.
            Others: Errors of the job.
        """
        connection = self._open_connection()
        async with reply_within(deadline):
            work = await protocol.pack_job(self._functions, job, args)
            run = Message("run", connection.next_number(), *work, session=self._number)
            outcome = await connection.request(run)
            return await result_of(outcome, connection.name)

    @property
    def sm_count(self) -> int:
        """The number of granted SMs."""
        self._open_connection()
        return self._sm_count

    @property
    def pool(self) -> str:
        """The name of the pool."""
        return self._open_connection().name

    def _open_connection(self) -> PoolConnection:
        if self._connection is None:
            state = "closed" if self._is_entered else "not granted: use it with `async with`"
            raise PartitionClosed("this session", state)
        return self._connection
