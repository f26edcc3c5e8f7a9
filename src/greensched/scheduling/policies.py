"""The policies there are, and how a user's is asked. Apart from `policy`, to be compiled."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from numbers import Real
from operator import index
from typing import Any, TypeVar

from greensched.errors import InvalidRequest
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.policy import Policy, SizingView
from greensched.scheduling.requests import Request

T = TypeVar("T")

logger = logging.getLogger("greensched")


class Fifo:
    """First in, first out; larger priority first; who does not fit is passed for a time only.

    Attributes:
        ageing: seconds for which a request that does not fit lets others pass. 20 ms, about a
            job: in simulated traffic (tests/scheduling/test_traffic.py) it serves large requests as
            often as strict order (0) does, and where sizes are mixed the small ones' median wait
            is a fraction of strict order's. Without a bound large requests wait for seconds.
    """

    __slots__ = ("ageing",)

    def __init__(self, *, ageing: float = 0.020) -> None:
        if not ageing >= 0:
            raise InvalidRequest(f"ageing={ageing!r} is no number of seconds >= 0")
        self.ageing = ageing

    def rank(self, request: Request) -> tuple[float, ...]:
        """By priority, then by arrival."""
        return (-request.priority,)

    def may_overtake(self, first: Request, now: float) -> bool:
        """Until `first` has waited for `ageing` seconds."""
        return now - first.arrived < self.ageing


class Fair(Fifo):
    """Shares of SM-time by weight between classes of the same priority; larger priority first.

    Start-time fair queueing (`fairness`). In a class, first in, first out. Ageing as in `Fifo`.
    """

    def class_rank(self, flow: ClassState) -> tuple[float, ...]:
        """By priority, then by how far the class is ahead of its share."""
        return (-flow.priority, flow.tag)


class Deadline(Fifo):
    """Earliest deadline first; larger priority first. Who has none comes last in his priority.

    A request of a class with a `latency` is due so long after it came, unless it says otherwise.
    Ageing as in `Fifo`.
    """

    def rank(self, request: Request) -> tuple[float, ...]:
        """By priority, then by deadline."""
        due = math.inf if request.due is None else request.due
        return (-request.priority, due)


class Sized(Fifo):
    """The right size: who has a latency has the fewest SMs for it, the others what that leaves.

    Of elastic requests; whoever is alone has all he asks for. Order and ageing as in `Fifo`.
    """

    def size(self, request: Request, room: SizingView) -> tuple[int, int]:
        """By what it takes on each size, and never what classes above it want."""
        most, left = room.sizes[-1], max(room.left, room.sizes[0])
        allowed = request.allowed
        if allowed is None:
            return room.sizes[0], left
        enough = next((sms for sms in room.sizes if _takes(request, sms) <= allowed), most)
        return min(enough, left), most if room.is_alone else min(enough, left)


def _takes(request: Request, sms: int) -> float:
    return request.seconds(sms) or 0.0


#: One of ours, or a user's.
Order = Policy | Fifo

#: Ours by name.
POLICIES: dict[str, type[Fifo]] = {
    "fifo": Fifo,
    "fair": Fair,
    "deadline": Deadline,
    "sized": Sized,
}


class GuardedPolicy(Fifo):
    """A user's policy, asked so that nothing is lost by what it gets wrong.

    A rank is asked for by who queues, and he is told. All else is asked in decisions, where cells
    have moved already and there is nobody to tell: what is raised there, or is no answer, is
    logged, once of each method, and counts as what is usual: `Fifo`'s, and the size asked for.

    Args:
        policy: theirs.
    """

    __slots__ = ("_policy", "_wrong")

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self._policy = policy
        self._wrong: set[str] = set()

    def rank(self, request: Request) -> tuple[float, ...]:
        """As `Policy`.

        Raises:
            InvalidRequest: what is no tuple of numbers; and what the policy raises.
        """
        rank: Any = self._policy.rank(request)  # compiled, a tuple would be insisted on
        if not _are_numbers(rank):
            raise InvalidRequest(f"{self._policy!r}: rank() is {rank!r}: return a tuple of numbers")
        return tuple(rank)

    def may_overtake(self, first: Request, now: float) -> bool:
        """As `Policy`."""
        usual = super().may_overtake(first, now)
        return self._ask("may_overtake", lambda: bool(self._policy.may_overtake(first, now)), usual)

    def class_rank(self, flow: ClassState) -> tuple[float, ...]:
        """As `Policy`."""

        def ask() -> tuple[float, ...]:
            rank: tuple[float, ...] = self._policy.class_rank(flow)
            if not _are_numbers(rank):
                raise TypeError(f"{rank!r} is no tuple of numbers")
            return rank

        return self._ask("class_rank", ask, (-flow.priority,))

    def size(self, request: Request, room: SizingView) -> tuple[int, int]:
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
    return isinstance(answer, tuple) and all(isinstance(x, Real) and bool(x == x) for x in answer)


def guard(policy: Order) -> Fifo:
    """A policy as it is to be asked: one of ours as it is, another's with care."""
    if isinstance(policy, Fifo) and type(policy) in POLICIES.values():
        return policy
    return GuardedPolicy(policy)


def policy_named(policy: object) -> Order:
    """A policy by its name, or itself."""
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    methods = not isinstance(policy, type)  # not a class: an object of it
    if (
        methods
        and callable(getattr(policy, "rank", None))
        and callable(getattr(policy, "may_overtake", None))
    ):
        return policy  # type: ignore[return-value]  # what has both is one
    named = ", ".join(POLICIES)
    raise InvalidRequest(
        f"no policy {policy!r}: there is {named}, or an object with `rank` and `may_overtake`"
    )
