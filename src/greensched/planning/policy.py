"""Who is next, and who may pass whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from greensched.errors import InvalidRequest


class Service(Protocol):
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


class Waiting(Protocol):
    """What a policy sees of a request. Reading is all it may do."""

    #: Of its class; minus infinity: too late for its deadline, and to be served behind others.
    priority: float
    #: When it came, in seconds.
    arrived: float
    #: How many came before it.
    order: int
    #: When it should be done, in seconds, by its deadline or its class's latency; None: any time.
    due: float | None


class Policy(Protocol):
    """The order of the queue. Pure: equal inputs, equal answers. It is asked under a lock.

    Floors, caps, quotas, loans and bounds hold under every policy; it says who is next of those
    who may be. A third method is asked where there is one:

        def standing(self, service: Service) -> tuple[float, ...]

    Whose class stands smaller goes first, before any rank. It is asked at every decision, once
    for each class that waits, so it may follow what changes.
    """

    def rank(self, request: Waiting) -> tuple[float, ...]:
        """Smaller goes first; asked once, when the request is queued."""

    def may_pass(self, first: Waiting, now: float) -> bool:
        """Whether later requests may be granted while `first` waits for cells that do not fit.

        Once the answer is no, everything that comes free on the device chosen for `first` is
        kept for it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo:
    """First in, first out; larger priority first; who does not fit is passed for a time only.

    Attributes:
        ageing: seconds for which a request that does not fit lets others pass. 20 ms, about a
            job: in simulated traffic (tests/planning/test_traffic.py) it serves large requests as
            often as strict order (0) does, and where sizes are mixed the small ones' median wait
            is a fraction of strict order's. Without a bound large requests wait for seconds.
    """

    ageing: float = 0.020

    def __post_init__(self) -> None:
        if not self.ageing >= 0:
            raise InvalidRequest(f"ageing={self.ageing!r} is no number of seconds >= 0")

    def rank(self, request: Waiting) -> tuple[float, ...]:
        """By priority, then by arrival."""
        return (-request.priority, request.order)

    def may_pass(self, first: Waiting, now: float) -> bool:
        """Until `first` has waited for `ageing` seconds."""
        return now - first.arrived < self.ageing


class Fair(Fifo):
    """Shares of SM-time by weight between classes of the same priority; larger priority first.

    Start-time fair queueing (`fairness`). In a class, first in, first out. Ageing as in `Fifo`.
    """

    def standing(self, service: Service) -> tuple[float, ...]:
        """By priority, then by how far the class is ahead of its share."""
        return (-service.priority, service.tag)


class Deadline(Fifo):
    """Earliest deadline first; larger priority first. Who has none comes last in his priority.

    A request of a class with a `latency` is due so long after it came, unless it says otherwise.
    Ageing as in `Fifo`.
    """

    def rank(self, request: Waiting) -> tuple[float, ...]:
        """By priority, then by deadline."""
        due = math.inf if request.due is None else request.due
        return (-request.priority, due, request.order)


#: Policies by name.
POLICIES: dict[str, type[Policy]] = {"fifo": Fifo, "fair": Fair, "deadline": Deadline}


def policy_named(policy: str | Policy) -> Policy:
    """A policy by its name, or itself."""
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    methods = not isinstance(policy, type)  # not a class: an object of it
    if (
        methods
        and callable(getattr(policy, "rank", None))
        and callable(getattr(policy, "may_pass", None))
    ):
        return policy  # type: ignore[return-value]  # a str has no rank
    named = ", ".join(POLICIES)
    raise InvalidRequest(
        f"no policy {policy!r}: there is {named}, or an object with `rank` and `may_pass`"
    )
