"""Policies: which request is next, which may overtake, and how large an elastic grant is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any, Protocol, TypeGuard, TypeVar

from greensched.errors import InvalidRequest
from greensched.scheduling import user_code

T = TypeVar("T")


class ClassView(Protocol):
    """A service class as a policy sees it. Read only."""

    @property
    def name(self) -> str:
        """The name of the class; "" for requests without one."""

    priority: float
    weight: float
    #: The SMs that it holds now.
    sms: int
    #: The number of its queued requests.
    waiting: int
    #: The number of its leases, and the SM-seconds of those that have ended.
    granted: int
    sm_time: float
    #: Where its next grant starts in virtual time, which shows how far it is ahead of its share.
    tag: float


class RequestView(Protocol):
    """A request as a policy sees it. Read only."""

    #: Its class's priority, or its own; minus infinity if it is late and goes after others.
    priority: float
    #: When it arrived, in seconds.
    arrived: float
    #: How many requests arrived before it.
    order: int
    #: When it should be done, by its deadline or its class's latency. None: at any time.
    due: float | None

    @property
    def limit(self) -> float | None:
        """The seconds after which it is late once granted. None: no latency or known duration.

        This is the time that is left until its class's latency, or until the deadline given at its
        lease's last checkpoint.
        """

    @property
    def allowed(self) -> float | None:
        """The fraction of `limit` with which the class was recently in time."""

    def seconds(self, sms: int) -> float | None:
        """Return its expected duration on so many SMs. None: unknown."""


@dataclass(frozen=True, slots=True)
class SizingView:
    """A device as a policy sees it, for a lease of variable size.

    Attributes:
        sizes: The SMs that it can have there, from its minimum to the most that it may have now.
        left: The SMs that classes of higher priority neither have nor want.
        beside: The SMs left for it once every other elastic lease has reached a checkpoint. A lease
            of a lower class then keeps its minimum, any other lease the size that this policy gives
            it.
        spare: The most SMs that it can have so that the next queued request still fits beside it on
            an otherwise idle device. Without such a request: all, or 0 if there is no other lease.
    """

    sizes: tuple[int, ...]
    left: int
    beside: int
    spare: int


@dataclass(frozen=True, slots=True)
class ClassSnapshot:
    """A service class at the time of a call of the user's policy: a `ClassView`."""

    name: str
    priority: float
    weight: float
    sms: int
    waiting: int
    granted: int
    sm_time: float
    tag: float


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request at the time of a call of the user's policy: a `RequestView`."""

    priority: float
    arrived: float
    order: int
    due: float | None
    limit: float | None
    allowed: float | None
    _seconds: Callable[[int], float | None]

    def seconds(self, sms: int) -> float | None:
        """Return its expected duration on so many SMs. None: unknown."""
        return self._seconds(sms)


def _class_snapshot(state: ClassView) -> ClassSnapshot:
    return ClassSnapshot(
        state.name,
        state.priority,
        state.weight,
        state.sms,
        state.waiting,
        state.granted,
        state.sm_time,
        state.tag,
    )


def _request_snapshot(request: RequestView) -> RequestView:
    snapshot: Any = RequestSnapshot(
        request.priority,
        request.arrived,
        request.order,
        request.due,
        request.limit,
        request.allowed,
        request.seconds,
    )
    return snapshot  # type: ignore[no-any-return]  # frozen: no member can be set


class Policy(Protocol):
    """The order of the queue. Pure: equal inputs give equal results.

    Other threads wait for decisions, in which it is called, so it must not block. It sees
    snapshots, and may read the pool's `statistics()`; calls that would change the pool raise
    `InvalidRequest`.

    Exceptions of `rank` are raised to the caller of the request. A failure or a wrong result of any
    other method is logged, and the default applies instead: no request or lease is lost. A
    `KeyboardInterrupt` or `SystemExit` is raised once the decision is complete.

    Reserves, caps, quotas, loans and bounds hold under every policy; the policy orders the requests
    that they allow. Two more methods are optional:

        def class_rank(self, service: ClassView) -> tuple[float, ...]

    The class with the smallest rank goes first, before any `rank` of requests is compared. Called
    in every decision, once for each waiting class, so it may depend on changing values.

        def size(self, request: RequestView, view: SizingView) -> tuple[int, int]

    The smallest and the largest number of SMs that an elastic request should have now. Called
    whenever the request is tried, and at each checkpoint of its lease. The request is granted fewer
    than the first only from its own reserve, and the lease gives back SMs above the second. Without
    this method the request's own sizes apply, and a lease at a checkpoint gives back SMs above its
    minimum while others wait.
    """

    def rank(self, request: RequestView) -> tuple[float, ...]:
        """Return the rank; smaller goes first, then arrival. Called once, before queueing."""

    def may_overtake(self, first: RequestView, now: float) -> bool:
        """Say whether later requests may be granted while `first` does not fit.

        Once this returns False, everything that becomes free on the device chosen for `first` is
        kept for it.
        """


class Fifo:
    """First in, first out, after larger priority. A request that does not fit is overtaken briefly.

    Attributes:
        ageing: Seconds for which a request that does not fit lets others overtake. 20 ms is about
            one job. In simulated traffic (tests/scheduling/test_traffic.py) it serves large
            requests as often as strict order (0) does, and with mixed sizes the median wait of
            small ones is a fraction of strict order's. Without a bound large requests wait for
            seconds.
    """

    __slots__ = ("ageing",)

    def __init__(self, *, ageing: float = 0.020) -> None:
        if not ageing >= 0:
            raise InvalidRequest(f"ageing={ageing!r}: give seconds, at least 0")
        self.ageing = ageing

    def rank(self, request: RequestView) -> tuple[float, ...]:
        """Order by priority, then by arrival."""
        return (-request.priority,)

    def may_overtake(self, first: RequestView, now: float) -> bool:
        """Allow it until `first` has waited for `ageing` seconds."""
        return now - first.arrived < self.ageing


class Fair(Fifo):
    """Shares of SM-time by weight among classes of the same priority. Larger priority first.

    Start-time fair queueing (`fair_queueing`). Within a class, first in, first out. Ageing as in
    `Fifo`.
    """

    def class_rank(self, service: ClassView) -> tuple[float, ...]:
        """Order by priority, then by how far the class is ahead of its share."""
        return (-service.priority, service.tag)


class Deadline(Fifo):
    """Earliest deadline first, after larger priority. Requests without a deadline come last.

    A request of a class with a `latency` is due that long after its arrival, unless it has a
    deadline of its own. Ageing as `Fifo`.
    """

    def rank(self, request: RequestView) -> tuple[float, ...]:
        """Order by priority, then by deadline."""
        due = math.inf if request.due is None else request.due
        return (-request.priority, due)


class Sized(Fifo):
    """Size by latency: a request with a latency gets the fewest SMs that meet it, others the rest.

    For elastic requests; a request that would leave too little for the next one, or is alone, gets
    all it requests. Order and ageing as in `Fifo`.
    """

    def size(self, request: RequestView, view: SizingView) -> tuple[int, int]:
        """Size by the expected duration, within what higher classes leave."""
        most, left = view.sizes[-1], max(view.left, view.sizes[0])
        limit, allowed = request.limit, request.allowed
        if limit is None or allowed is None:
            return view.sizes[0], left
        enough = next((n for n in view.sizes if (request.seconds(n) or 0.0) <= allowed), most)
        if (request.seconds(enough) or 0.0) > limit:  # late with any size: do not wait for more
            enough = min(most, max(view.beside, view.sizes[0]))
        least = min(enough, left)
        return least, least if least <= view.spare else most


#: The built-in policies by name.
POLICIES: dict[str, type[Fifo]] = {
    "fifo": Fifo,
    "fair": Fair,
    "deadline": Deadline,
    "sized": Sized,
}


class GuardedPolicy:
    """A policy as the scheduler calls it, so that no request is lost if a user's policy fails.

    `rank` is called while a request is made, so its failure is raised. The other methods are
    called inside decisions, when cells have moved and no caller can get an error: a failure or
    a wrong result is logged after the decision, once for each method, and the default applies
    instead (`Fifo`'s order, and the sizes of the request). Built-in policies are called directly.

    Attributes:
        policy: The policy itself.
        class_rank, size: None if the policy lacks the method.
        by_deadline: Whether it serves the earliest deadline first, so that admission depends on it.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.by_deadline = isinstance(policy, Deadline)
        untyped: Any = policy
        is_own = type(policy) in POLICIES.values()
        self.rank: Callable[[Any], tuple[float, ...]] = policy.rank if is_own else self._rank
        self.may_overtake: Callable[[Any, float], bool] = (
            policy.may_overtake if is_own else self._may_overtake
        )
        self.class_rank: Callable[[Any], tuple[float, ...]] | None = None
        if hasattr(policy, "class_rank"):
            self.class_rank = untyped.class_rank if is_own else self._class_rank
        self.size: Callable[[Any, SizingView], tuple[int, int]] | None = None
        if hasattr(policy, "size"):
            self.size = untyped.size if is_own else self._size
        self._failed: set[str] = set()

    def _rank(self, request: RequestView) -> tuple[float, ...]:
        snapshot = _request_snapshot(request)
        rank: object = user_code.call(lambda: self.policy.rank(snapshot))
        if not _is_rank(rank):
            raise InvalidRequest(
                f"{self.policy!r}.rank() returned {rank!r}: return a tuple of numbers"
            )
        return rank

    def _may_overtake(self, first: RequestView, now: float) -> bool:
        default = Fifo().may_overtake(first, now)
        return self._call(
            "may_overtake",
            lambda: bool(self.policy.may_overtake(_request_snapshot(first), now)),
            default,
        )

    def _class_rank(self, service: ClassView) -> tuple[float, ...]:
        def call() -> tuple[float, ...]:
            policy: Any = self.policy
            rank: object = policy.class_rank(_class_snapshot(service))
            if not _is_rank(rank):
                raise TypeError(f"class_rank() returned {rank!r}: return a tuple of numbers")
            return rank

        return self._call("class_rank", call, (-service.priority,))

    def _size(self, request: RequestView, view: SizingView) -> tuple[int, int]:
        def call() -> tuple[int, int]:
            policy: Any = self.policy
            least, most = policy.size(_request_snapshot(request), view)
            return index(least), index(most)

        return self._call("size", call, (view.sizes[0], view.sizes[-1]))

    def _call(self, method: str, call: Callable[[], T], default: T) -> T:
        try:
            return user_code.call(call)
        except BaseException as error:
            if method not in self._failed or not isinstance(error, Exception):
                self._failed.add(method)
                user_code.defer(
                    error,
                    "%r.%s() failed or returned a wrong result; each time it does, %r counts "
                    "instead",
                    self.policy,
                    method,
                    default,
                )
            return default


def _is_rank(value: object) -> TypeGuard[tuple[float, ...]]:
    """Say whether a value is a tuple of numbers that can be ordered."""
    return isinstance(value, tuple) and all(isinstance(x, Real) and bool(x == x) for x in value)


def policy_named(policy: object) -> Policy:
    """Return the policy with a name; return a policy object unchanged.

    Raises:
        InvalidRequest: Neither the name of a policy, nor an object with its methods.
    """
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    is_object = not isinstance(policy, type)
    methods = ("rank", "may_overtake")
    if is_object and all(callable(getattr(policy, name, None)) for name in methods):
        return policy  # type: ignore[return-value]  # an object with both methods is one
    raise InvalidRequest(
        f"policy={policy!r}: give one of {', '.join(POLICIES)}, or an object with the methods "
        "`rank` and `may_overtake`"
    )
