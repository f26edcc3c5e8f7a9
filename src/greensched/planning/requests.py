"""Requests and leases: what the scheduler is asked for, and what it gives."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import frexp
from typing import Protocol, TypeVar

from greensched.planning.cells import Demand
from greensched.planning.services import Flow

K = TypeVar("K")


class State(enum.Enum):
    """Where a request is in its life."""

    QUEUED = "waits for cells"
    GRANTED = "has its leases"
    GONE = "was cancelled or expired while it waited"


class Curve(Protocol):
    """How long a piece of work takes on so many SMs, in seconds."""

    def at(self, sms: int) -> float: ...

    def observe(self, sms: int, seconds: float) -> None: ...


#: What a request is expected to take: seconds, or a curve that says it for each size.
Cost = float | Curve
NO_LOANS: Mapping[Flow, int] = {}


class Lease:
    """Cells granted to one part of a request. `mask` and `sms` change at its checkpoints alone."""

    #: Nobody holds it any more, and its work may still run.
    draining = False
    #: Its cells are free.
    over = False
    #: Cells it has on loan, by the owner of the floor they are of.
    loans = NO_LOANS
    #: When it ends, as far as is known.
    ends: float | None = None
    #: SM-seconds its class was charged for beforehand.
    charged = 0.0
    #: SM-seconds it had before `since`.
    had = 0.0

    def __init__(
        self, device: int, mask: int, sms: int, holder: Hashable, request: Request, now: float
    ) -> None:
        self.device = device
        self.mask = mask
        self.sms = sms
        self.holder = holder
        self.request = request
        self.flow = request.flow
        #: When it began; and when it last came to a checkpoint.
        self.began = self.since = now

    def __repr__(self) -> str:
        state = "over" if self.over else "draining" if self.draining else "leased"
        return f"<Lease: {self.sms} SMs of device {self.device}, cells {self.mask:b}, {state}>"


class Request:
    """What somebody wants: sizes, where, how urgently, and for whom the grant is (`owner`)."""

    state = State.QUEUED
    rank: tuple[float, ...] = ()
    leases: tuple[Lease, ...] = ()
    #: (device, cells) that it fits on, and over which nothing is made.
    lacks: tuple[tuple[int, int], ...] = ()
    #: The class it is of; set by the scheduler.
    flow: Flow
    #: What it is expected to take.
    cost: Cost | None = None
    #: When it should be done.
    due: float | None = None
    #: SM-seconds it counts for while it waits.
    work = 0.0
    #: The device to be preferred.
    near: int | None = None

    def __init__(
        self,
        parts: tuple[Demand, ...],
        devices: tuple[int, ...],
        priority: float,
        arrived: float,
        order: int,
        deadline: float | None = None,
        holder: Hashable = None,
        owner: object = None,
    ) -> None:
        self.parts = parts
        self.devices = devices
        self.priority = priority
        self.arrived = arrived
        self.order = order
        self.deadline = deadline
        self.holder = holder
        self.owner = owner

    @property
    def is_elastic(self) -> bool:
        """Whether its lease gives back and takes up SMs at its checkpoints."""
        return len(self.parts) == 1 and self.parts[0].least < self.parts[0].most

    @property
    def wish(self) -> tuple[object, ...]:
        """What its line has in common: where one of them does not fit, nor does the next.

        Who is known to end sooner may fit into a gap that is closed to others, so a known cost
        counts by its magnitude.
        """
        cost = self.cost
        if cost is None:
            return self.flow, self.parts, self.devices
        magnitude = frexp(cost)[1] if isinstance(cost, (int, float)) else cost
        return self.flow, self.parts, self.devices, magnitude

    def seconds(self, sms: int) -> float | None:
        """How long it is expected to take on so many SMs; None: nobody knows."""
        cost = self.cost
        return cost if cost is None or isinstance(cost, (int, float)) else cost.at(sms)

    def __repr__(self) -> str:
        return f"<Request {self.order}: {self.parts}, {self.state.name}>"


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts since the beginning, and what is the case now.

    Every request taken is `requested`, and then `waiting`, `granted`, `cancelled` (also by the
    end of the pool) or `expired`; one that was refused because of what else waits is `refused`.
    """

    waiting: int
    requested: int
    granted: int
    cancelled: int
    expired: int
    refused: int
    sms_free: int
    sms_leased: int
    sms_draining: int


@dataclass(frozen=True, slots=True)
class ServiceStatistics:
    """What a class has and had.

    Attributes:
        sms: SMs it holds, also where their work still drains.
        sms_lent: of its floor, to others.
        waiting: its requests that are queued.
        granted: its leases since the beginning.
        sm_seconds: what they took, those that are over.
    """

    sms: int
    sms_lent: int
    waiting: int
    granted: int
    sm_seconds: float


def by_rank(request: Request) -> tuple[tuple[float, ...], int]:
    """The order of the queue."""
    return request.rank, request.order


def still_waiting(heap: list[tuple[K, int, Request]]) -> list[tuple[K, int, Request]]:
    """The heap without those that left."""
    kept = [entry for entry in heap if entry[2].state is State.QUEUED]
    heapq.heapify(kept)
    return kept


class Line:
    """Requests of one class with the same wish, by rank. Only its first is ever tried.

    Attributes:
        able: the devices on which they fit when everybody has left.
    """

    __slots__ = ("_heap", "able", "flow")

    def __init__(self, flow: Flow, able: tuple[int, ...]) -> None:
        self.flow = flow
        self.able = able
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, request.order, request))

    def first(self) -> Request | None:
        """The first that still waits; drops those that left."""
        while self._heap and self._heap[0][2].state is not State.QUEUED:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def waiting(self) -> list[Request]:
        """All that still wait; drops those that left."""
        self._heap = still_waiting(self._heap)
        return [request for _, _, request in self._heap]
