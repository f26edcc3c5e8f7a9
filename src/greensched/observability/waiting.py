"""Why a queued request waits: which rule of the scheduler keeps it, with figures.

It reads the same facts as `scheduling.dispatch`, in the same order, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from greensched.records import holder_name
from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.requests import Grant, Request
from greensched.scheduling.scheduler import Scheduler

#: Why a request waits: an executor over its SMs is being made; its class exceeds its quota, or has
#: reached its cap; a device is kept for an earlier request; shared and exclusive leases exclude
#: each other; free SMs are kept for other classes' reserves; the free SMs do not form one
#: partition; too few are free; other requests go first.
Reason = Literal[
    "executor", "quota", "cap", "kept", "shared", "reserve", "fragmented", "sms", "order"
]


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A queued request, and why it waits.

    Attributes:
        holder: The name of its task or thread.
        sms: The fewest SMs that it needs, for all its parts together.
        waited: How long it has waited, in seconds.
        reason: The reason in one word; `text` is a sentence.
    """

    holder: str
    sms: int
    waited: float
    reason: Reason
    text: str


class _Facts(NamedTuple):
    """A request, and the device where it is closest to a grant."""

    scheduler: Scheduler
    request: Request
    sms: int
    device: int
    where: str
    now: float

    @property
    def allocator(self) -> SMAllocator:
        return self.scheduler.allocator

    @property
    def state(self) -> ClassState:
        return self.request.class_state

    @property
    def free(self) -> int:
        """The number of free SMs on the device."""
        allocator = self.allocator
        return allocator.free_sms[self.device]

    @property
    def largest(self) -> int:
        """The SMs of the largest partition that the free SMs form."""
        allocator = self.allocator
        return allocator.devices[self.device].largest_within(allocator.free_masks[self.device])


def describe(
    scheduler: Scheduler, ordinals: Sequence[int], request: Request, now: float
) -> WaitingRequest:
    """Describe a queued request and why it waits. The caller holds the scheduler's lock."""
    allocator, sms = scheduler.allocator, scheduler.dispatcher.asked(request)
    reservation = scheduler.queue.reservation
    if reservation is not None and reservation.request is request:
        device = reservation.device
    else:
        device = max(
            request.devices,
            key=lambda d: allocator.devices[d].largest_within(allocator.free_masks[d]),
        )
    facts = _Facts(scheduler, request, sms, device, f"device {ordinals[device]}", now)
    reason, text = _explain(facts)
    waited = max(0.0, now - request.arrived)
    return WaitingRequest(holder_name(request.holder), sms, waited, reason, text)


def _explain(facts: _Facts) -> tuple[Reason, str]:
    request, sms, where = facts.request, facts.sms, facts.where
    if request.missing_executors:
        return "executor", f"needs {sms} SMs, which are free: an executor over them is being made"
    limit = _limit(facts)
    if limit is not None:
        return limit
    if facts.largest >= sms:
        return _kept(facts)
    if facts.free >= sms:
        text = f"needs {sms} SMs in one partition; {facts.free} are free on {where}, "
        return "fragmented", f"{text}of which at most {facts.largest} fit into one"
    text = f"needs {sms} SMs; {facts.free} of {facts.allocator.devices[facts.device].total} "
    return "sms", f"{text}are free on {where}{_more(facts)}: {_next(facts)}"


def _limit(facts: _Facts) -> tuple[Reason, str] | None:
    """Return the limit of its own class that keeps a request waiting, or None."""
    state, sms = facts.state, facts.sms
    if state.quota is not None and not state.is_within_quota(facts.now):
        seconds = max(0.0, state.refilled_at() - facts.now)
        text = f"its class is over its quota of {state.quota:g} SMs on average"
        return "quota", f"{text}, for another {_duration(seconds)}"
    if state.sms + sms > state.cap:
        return "cap", f"needs {sms} SMs; its class holds {state.sms} of at most {state.cap}"
    return None


def _kept(facts: _Facts) -> tuple[Reason, str]:
    """Return why a request waits although enough SMs are free."""
    scheduler, request, sms, device = facts.scheduler, facts.request, facts.sms, facts.device
    allocator, reservation = facts.allocator, scheduler.queue.reservation
    need = f"needs {sms} SMs; {facts.free} are free on {facts.where}"
    sharing = len(allocator.shared_grants[device])
    if sharing and not facts.state.shared:
        return "shared", f"needs {sms} SMs of {facts.where}: {sharing} shared leases must end there"
    if reservation is not None and reservation.request is not request:
        first = reservation.request
        if reservation.device == device and device not in request.held_devices:
            requested, waited = scheduler.dispatcher.asked(first), facts.now - first.arrived
            text = f"{need}, which is kept for an earlier request of {_named(first.class_state)}"
            return "kept", f"{text} for {requested} SMs, which has waited {_duration(waited)}"
    size = allocator.devices[device].size
    owners = [owner for owner in allocator.reservations[device].owners if owner is not facts.state]
    kept = {owner.name: owner.reserved_free * size for owner in owners if owner.reserved_free}
    if kept and facts.free - sum(kept.values()) < sms:
        parts = " and ".join(f"{count} for {name!r}" for name, count in kept.items())
        return "reserve", f"{need}, of which reserves keep {parts}"
    return "order", f"{need}: requests before it go first"


def _more(facts: _Facts) -> str:
    """Mention SMs of the device that drain, or that its class lends."""
    lent: dict[str, int] = {}
    for grant in facts.allocator.reservations[facts.device].borrowers:
        count = grant.loans.get(facts.state, 0) * facts.allocator.devices[facts.device].size
        if count:
            name = _named(grant.class_state)
            lent[name] = lent.get(name, 0) + count
    parts = [f"{count} of its reserve are lent to {name}" for name, count in lent.items()]
    draining = sum(grant.sms for grant in _exclusive(facts) if grant.draining)
    if draining:
        parts.append(f"{draining} are draining")
    reservation = facts.scheduler.queue.reservation
    if reservation is not None and reservation.request is facts.request:
        parts.append("the device is kept for it")
    return "".join(f", {part}" for part in parts)


def _next(facts: _Facts) -> str:
    """Say when SMs are expected to become free, if known."""
    grants, now = _exclusive(facts), facts.now
    ends = [(grant.ends, grant.sms) for grant in grants if grant.ends is not None]
    known = [(end - now, sms) for end, sms in ends if end > now]
    if known:
        seconds, sms = min(known)
        return f"the next {sms} are expected back in {_duration(seconds)}"
    if ends:
        return f"the next lease should have ended {_duration(now - min(ends)[0])} ago"
    oldest = min(grants, key=lambda grant: grant.began, default=None)
    if oldest is None:
        return "nothing is leased there"
    held = f"has had {oldest.sms} for {_duration(now - oldest.began)}"
    return (
        f"no lease there is known to end, and the oldest, of {_named(oldest.class_state)}, {held}"
    )


def _exclusive(facts: _Facts) -> list[Grant]:
    return [grant for grant in facts.allocator.grants[facts.device] if not grant.is_shared]


def _named(state: ClassState) -> str:
    return f"class {state.name!r}" if state.name else "no class"


def _duration(seconds: float) -> str:
    """Return seconds with three digits, in the unit that suits them."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"
