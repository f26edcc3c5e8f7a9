"""Checkpoints: where an elastic lease gives SMs back, takes up idle ones, or gives way."""

from __future__ import annotations

from collections.abc import Callable

from greensched.scheduling import shared_grants
from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.dispatch import Dispatcher
from greensched.scheduling.queue import RequestQueue
from greensched.scheduling.requests import QUEUED, Duration, Grant, Request


class Checkpoints:
    """Changes the cells of leases at their checkpoints, as `Scheduler.checkpoint` says.

    Args:
        queue: The queued requests.
        allocator: The cells.
        dispatcher: Grants what a lease gives back.
        drained: Frees the cells of a grant, and returns the requests that are granted.
    """

    def __init__(
        self,
        queue: RequestQueue,
        allocator: SMAllocator,
        dispatcher: Dispatcher,
        drained: Callable[[float, Grant], list[Request]],
    ) -> None:
        self._queue = queue
        self._allocator = allocator
        self._dispatcher = dispatcher
        self._drained = drained

    def reach(
        self, now: float, grant: Grant, duration: Duration | None, within: float | None
    ) -> list[Request]:
        """Let a lease grow, shrink or give way; return the requests that are granted."""
        allocator, dispatcher, before = self._allocator, self._dispatcher, grant.mask
        dispatcher.reuse_no_more(grant)
        allocator.charge_piece(grant, now, duration, within)
        if grant.draining:
            return []
        if allocator.may_share:
            dispatcher.need(grant.device, shared_grants.enter_or_leave(allocator, grant))
        if grant.is_shared or not grant.request.is_elastic:
            is_changed = grant.mask != before or dispatcher.may_change()
            return dispatcher.dispatch(now) if is_changed else []
        dispatcher.set_target(grant.request, grant.device, now, grant)
        first, keeps = dispatcher.first_before(grant, now), None
        # A lease that could never continue does not give way.
        if first is not None and allocator.devices_for(grant.request):
            keeps = dispatcher.keeps_at_checkpoint(first, grant, now)
        if keeps == 0:
            return self._give_way(grant, now)
        granted: list[Request] = []
        if self._gives_back(grant):
            least = self._least_kept(grant, keeps)
            if grant.mask == before and least < grant.sms:
                self._resize(grant, now, least, least)
            if grant.mask != before:
                granted = dispatcher.dispatch(now)
        if self._takes_up(grant, now):
            held = grant.mask
            parts, target = grant.request.parts, grant.request.target
            self._resize(grant, now, parts[0].least, target[0].most, prefer=before)
            if held & ~grant.mask:  # it moved, in order to have more
                granted += dispatcher.dispatch(now)
        if dispatcher.may_change():
            granted += dispatcher.dispatch(now)
        return granted

    def ask_again(self, now: float, grant: Grant) -> list[Request]:
        """Queue the request of an ended grant again; see `Scheduler.ask_again`."""
        request = grant.request
        self._queue_again(request, now)
        request.holder = grant.holder
        if not self._allocator.devices_for(request):
            self._dispatcher.reject(request)
        return self._dispatcher.dispatch(now)

    def _give_way(self, grant: Grant, now: float) -> list[Request]:
        """Free the cells of a grant and queue its request again, which counts as a new request.

        `grant` is then over. The request is QUEUED, or at once GRANTED again.
        """
        request = grant.request
        self._queue_again(request, now)
        request.gave_way = not grant.will_end(now)
        request.pieces = grant.pieces_left(now)
        request.holder = grant.holder
        return self._drained(now, grant)

    def _queue_again(self, request: Request, now: float) -> None:
        queue = self._queue
        request.arrived, request.order = now, queue.arrivals
        request.holder, request.held_devices = None, frozenset()
        request.gave_way, request.pieces = False, 1.0
        latency = request.class_state.latency
        request.due, request.deadline = None if latency is None else now + latency, None
        # It keeps its grants if this raises.
        queue.add(request, self._dispatcher.line_of(request))
        request.state, request.grants = QUEUED, ()
        queue.arrivals += 1

    def _resize(self, grant: Grant, now: float, least: int, most: int, *, prefer: int = 0) -> None:
        mask, missing = self._allocator.choose_mask(grant, least, most, prefer=prefer)
        if mask != grant.mask:
            sms = grant.sms
            self._allocator.resize(grant, mask)
            grant.move_end(now, sms)
        self._dispatcher.need(grant.device, missing)

    def _gives_back(self, grant: Grant) -> bool:
        """Say whether an elastic grant gives back SMs above its minimum."""
        is_above = self._queue.policy.size is not None and grant.sms > grant.request.target[0].most
        return bool(
            self._queue.waiting
            or is_above
            or any(owner.short for owner in grant.loans)
            or shared_grants.is_leaving(self._allocator, grant.device)
        )

    def _least_kept(self, grant: Grant, keeps: int | None) -> int:
        """Return the SMs that an elastic grant keeps: its minimum if others must have the rest.

        Those are the owners of borrowed cells, and shared grants that must leave. Otherwise it is
        what it keeps for the request that precedes it, or, if that is None, what its policy says.
        """
        is_due = any(owner.short or owner.waiting for owner in grant.loans)
        if is_due or shared_grants.is_leaving(self._allocator, grant.device):
            return grant.request.parts[0].least
        return grant.request.target[0].least if keeps is None else keeps

    def _takes_up(self, grant: Grant, now: float) -> bool:
        """Say whether an elastic grant may take idle cells."""
        if grant.sms >= grant.request.target[0].most or self._dispatcher.is_wanted(grant):
            return False
        is_leaving = shared_grants.is_leaving(self._allocator, grant.device)
        return not is_leaving and grant.class_state.is_within_quota(now)
