"""Who is next, and who may pass whom."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any, Protocol, TypeVar

from greensched.errors import InvalidRequest

T = TypeVar("T")

logger = logging.getLogger("greensched")


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

    @property
    def allowed(self) -> float | None:
        """Seconds it may take once it is granted; None: it has no latency, or no known cost.

        Of its class's latency, or of the deadline that its lease's last checkpoint gave, it is the
        part with which the class was in time of late.
        """

    def seconds(self, sms: int) -> float | None:
        """How long it is expected to take on so many SMs; None: nobody knows."""


@dataclass(frozen=True, slots=True)
class Room:
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

        def standing(self, service: Service) -> tuple[float, ...]

    Whose class stands smaller goes first, before any rank. It is asked at every decision, once
    for each class that waits, so it may follow what changes.

        def size(self, request: Waiting, room: Room) -> tuple[int, int]

    How many SMs an elastic request is to have now, at least and at most: whenever it is tried, and
    at each checkpoint of its lease. Fewer than so many it is not granted, unless they are its
    floor; more it gives back. Without it that is what was asked for, and whoever comes to a
    checkpoint while others wait gives back what is above its least.
    """

    def rank(self, request: Waiting) -> tuple[float, ...]:
        """Smaller goes first, and of equals who came first; asked once, when it is queued."""

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
        return (-request.priority,)

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
        return (-request.priority, due)


class Sized(Fifo):
    """The right size: who has a latency has the fewest SMs for it, the others what that leaves.

    Of elastic requests; whoever is alone has all he asks for. Order and ageing as in `Fifo`.
    """

    def size(self, request: Waiting, room: Room) -> tuple[int, int]:
        """By what it takes on each size, and never what classes above it want."""
        most, left = room.sizes[-1], max(room.left, room.sizes[0])
        allowed = request.allowed
        if allowed is None:
            return room.sizes[0], left
        enough = next((sms for sms in room.sizes if _takes(request, sms) <= allowed), most)
        return min(enough, left), most if room.is_alone else min(enough, left)


def _takes(request: Waiting, sms: int) -> float:
    return request.seconds(sms) or 0.0


#: What counts where a user's policy has no answer.
USUAL = Fifo()

#: Policies by name.
POLICIES: dict[str, type[Policy]] = {
    "fifo": Fifo,
    "fair": Fair,
    "deadline": Deadline,
    "sized": Sized,
}


class Asked:
    """A user's policy, asked so that nothing is lost by what it gets wrong.

    A rank is asked for by who queues, and he is told. All else is asked in decisions, where cells
    have moved already and there is nobody to tell: what is raised there, or is no answer, is
    logged, once of each method, and counts as what is usual: `Fifo`'s, and the size asked for.

    Args:
        policy: theirs.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._wrong: set[str] = set()

    def rank(self, request: Waiting) -> tuple[float, ...]:
        """As `Policy`.

        Raises:
            InvalidRequest: what is no tuple of numbers; and what the policy raises.
        """
        rank: tuple[float, ...] = self._policy.rank(request)
        if not _are_numbers(rank):
            raise InvalidRequest(f"{self._policy!r}: rank() is {rank!r}: return a tuple of numbers")
        return rank

    def may_pass(self, first: Waiting, now: float) -> bool:
        """As `Policy`."""
        usual = USUAL.may_pass(first, now)
        return self._ask("may_pass", lambda: bool(self._policy.may_pass(first, now)), usual)

    def standing(self, service: Service) -> tuple[float, ...]:
        """As `Policy`."""

        def ask() -> tuple[float, ...]:
            standing: tuple[float, ...] = self._policy.standing(service)
            if not _are_numbers(standing):
                raise TypeError(f"{standing!r} is no tuple of numbers")
            return standing

        return self._ask("standing", ask, (-service.priority,))

    def size(self, request: Waiting, room: Room) -> tuple[int, int]:
        """As `Policy`."""

        def ask() -> tuple[int, int]:
            least, most = self._policy.size(request, room)
            return index(least), index(most)

        return self._ask("size", ask, (room.sizes[0], room.sizes[-1]))

    def _ask(self, method: str, ask: Callable[[], T], usual: T) -> T:
        try:
            return ask()
        except Exception:
            if method not in self._wrong:
                self._wrong.add(method)
                said = "%r: %s() failed, or is no answer; as long as it does it counts as %r"
                logger.exception(said, self._policy, method, usual)
            return usual


def _are_numbers(answer: object) -> bool:
    """Whether it is a tuple that has its place in an order."""
    return isinstance(answer, tuple) and all(isinstance(x, Real) and x == x for x in answer)


def asked(policy: Policy) -> Any:
    """A policy as it is to be asked: one of ours as it is, another's with care."""
    return policy if type(policy) in POLICIES.values() else Asked(policy)


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
