"""What a policy is: who is next, and who may pass whom. Ours are in `policies`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class ClassView(Protocol):
    """What a policy sees of a service class. Reading is all it may do."""

    @property
    def name(self) -> str:
        """The class's; "": those who named none."""

    priority: float
    weight: float
    #: SMs it holds now.
    sms: int
    #: Its requests that are queued.
    waiting: int
    #: Its leases, and the SM-seconds of those that are over.
    granted: int
    sm_time: float
    #: Where its next grant starts in virtual time: how far ahead of its share it is.
    tag: float


class RequestView(Protocol):
    """What a policy sees of a request. Reading is all it may do."""

    #: Of its class; minus infinity: too late for its deadline, and to be served behind others.
    priority: float
    #: When it came, in seconds.
    arrived: float
    #: How many came before it.
    order: int
    #: When it should be done, in seconds, by its deadline or its class's latency; None: any time.
    due: float | None

    @property
    def allowed(self) -> float | None:
        """Seconds it may take once it is granted; None: it has no latency, or no known duration.

        Of its class's latency, or of the deadline that its lease's last checkpoint gave, it is the
        part with which the class was in time of late.
        """

    def seconds(self, sms: int) -> float | None:
        """How long it is expected to take on so many SMs; None: nobody knows."""


@dataclass(frozen=True, slots=True)
class SizingView:
    """What a policy sees of a device, for a lease that may have more SMs or fewer.

    Attributes:
        sizes: what it can have there, from the least it asks for to the most it may have now.
        left: SMs that classes of higher priority neither have nor want.
        is_alone: nobody else has or wants any.
    """

    sizes: tuple[int, ...]
    left: int
    is_alone: bool


class Policy(Protocol):
    """The order of the queue. Pure: equal inputs, equal answers. It is asked under a lock.

    What `rank` raises is the asker's. What any other method raises, or is no answer, is logged,
    and the usual counts instead: no lease or request is lost by it.

    Floors, caps, quotas, loans and bounds hold under every policy; it says who is next of those
    who may be. Two more methods are asked where they are there:

        def class_rank(self, service: Service) -> tuple[float, ...]

    Whose class stands smaller goes first, before any rank. It is asked at every decision, once
    for each class that waits, so it may follow what changes.

        def size(self, request: Waiting, room: Room) -> tuple[int, int]

    How many SMs an elastic request is to have now, at least and at most: whenever it is tried, and
    at each checkpoint of its lease. Fewer than so many it is not granted, unless they are its
    floor; more it gives back. Without it that is what was asked for, and whoever comes to a
    checkpoint while others wait gives back what is above its least.
    """

    def rank(self, request: RequestView) -> tuple[float, ...]:
        """Smaller goes first, and of equals who came first; asked once, when it is queued."""

    def may_overtake(self, first: RequestView, now: float) -> bool:
        """Whether later requests may be granted while `first` waits for cells that do not fit.

        Once the answer is no, everything that comes free on the device chosen for `first` is
        kept for it.
        """
