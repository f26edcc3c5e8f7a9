"""Who is next, and who may pass whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from greensched.errors import InvalidRequest


class Waiting(Protocol):
    """What a policy sees of a request."""

    priority: int
    #: When it came, in seconds.
    arrived: float
    #: How many came before it.
    order: int


class Policy(Protocol):
    """The order of the queue. Pure: equal inputs, equal answers."""

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


#: Policies by name.
POLICIES: dict[str, type[Policy]] = {"fifo": Fifo}


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
