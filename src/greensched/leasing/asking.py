"""Waiting for the desk: for a grant, and until nobody has one.

A room of its own, because what awaits is Python in a compiled build, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import anyio

from greensched.execution.completion import CompletionPoller
from greensched.execution.eventloop.base import Waiter
from greensched.execution.lease import Lease
from greensched.scheduling.requests import Request

H = TypeVar("H")


class Grantor(Protocol):
    """Who grants leases: a pool, which says its desk once it is open, or the desk itself."""

    def opened(self) -> Asked: ...
    def take(self, wish: Any) -> Lease | None: ...


class Asked(Grantor, Protocol):
    """What a desk answers, at once."""

    def current_poller(self) -> CompletionPoller: ...
    def park(self, wish: Any, lease: Lease) -> bool: ...
    def ask(self, wish: Any, completion: CompletionPoller) -> tuple[Lease, ...] | Request: ...
    def claim(self, request: Request) -> tuple[Lease, ...]: ...
    def leave(self, request: Request) -> None: ...
    def forsake(self, request: Request) -> None: ...
    def checkpoint(self, lease: Lease, duration: Any, deadline: Any) -> None: ...
    def until_none(self, completion: CompletionPoller) -> Waiter | None: ...


class Asker(ABC, Generic[H]):
    """What is entered once its SMs are granted: a partition, or several together."""

    __slots__ = ("_desk", "_is_entered", "_leased", "_wish")

    #: Whom it asks: a grantor; once it has asked, the desk.
    _desk: Any
    _wish: Any
    #: What a partition has, perhaps before it is entered.
    _leased: Lease | None
    #: Somebody's block is entered, or about to be.
    _is_entered: bool

    @abstractmethod
    def _refuse(self) -> NoReturn:
        """It is entered already: raises what says so."""

    @abstractmethod
    def _have(self, leases: tuple[Lease, ...]) -> H:
        """What its block gets of a grant."""

    async def __aenter__(self) -> H:
        """Waits its turn for the SMs; a checkpoint on trio, and on asyncio only if it waits.

        A cancellation leaves nothing behind: no place in the queue, no SM.

        Raises:
            QueueFull: too many wait already.
            DeadlineExceeded: the deadline passed while it was queued.
            WouldDeadlock: this task holds what it asks for.
            PoolClosed, DeviceLost, ForkedPool: the pool grants nothing (any more).
            InvalidRequest: it is entered already, by whatever task; a second one would end its
                lease, or lose one.
            PartitionClosed: its block has ended.
        """
        if self._is_entered:
            self._refuse()
        self._is_entered = True
        if self._leased is None:  # else it was granted by partition_nowait
            self._leased = self._desk.take(self._wish)
        if self._leased is not None:  # of several together nothing is
            return self  # type: ignore[return-value]  # so it is a partition, and its own H
        try:
            desk: Asked = self._desk.opened()
            self._desk = desk
            completion = desk.current_poller()
            if completion.loop.always_yields:
                await completion.loop.checkpoint()
            asked: Any = desk.ask(self._wish, completion)
        except BaseException:
            self._is_entered = False  # it may be tried again
            raise
        if isinstance(asked, tuple):
            return self._have(asked)
        try:
            await asked.waiter
            leases = desk.claim(asked)
        except GeneratorExit:
            self._is_entered = False
            desk.forsake(asked)
            raise
        except BaseException:
            self._is_entered = False
            desk.leave(asked)
            raise
        return self._have(leases)


async def wait_for_leases(desk: Asked, grace: float) -> None:
    """Waits until no lease is granted, held or draining, or the grace has passed."""
    completion = desk.current_poller()
    completion.request_queued()  # so that it tends: a loop may close meanwhile
    try:
        with anyio.move_on_after(grace):
            while (waiter := desk.until_none(completion)) is not None:
                await waiter
    finally:
        completion.waiting -= 1
