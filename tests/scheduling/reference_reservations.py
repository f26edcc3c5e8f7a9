"""A second implementation of reserves and loans, which counts from the leases alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.policy import Sized
from greensched.scheduling.requests import Grant, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.typing import ALL, REST

from .reference_cells import is_enough, possible, sms, subsets


@dataclass
class ReferenceReservations:
    """The leases, and the cells that they leave to each class."""

    scheduler: Scheduler
    devices: list[DeviceCells]
    leases: list[Grant] = field(default_factory=list)
    #: When a lease last gave back, or could have given back, what it has on loan.
    taken_at: dict[Grant, float] = field(default_factory=dict)
    now: float = 0.0

    def classes(self) -> list[ClassState]:
        return list(self.scheduler.allocator.classes.values())

    def equal(self, device: int, mask: int) -> int:
        return (mask & self.devices[device].cell_mask).bit_count()

    def free(self, device: int) -> int:
        taken = 0
        for lease in self.leases:
            taken |= lease.mask if lease.device == device else 0
        return self.devices[device].full_mask & ~taken

    def unmet(self, state: ClassState) -> int:
        """Count the cells of a class's reserve that it does not hold, borrowed ones excluded."""
        mine = [x for x in self.leases if x.class_state is state and x.device == state.home]
        own = sum(self.equal(x.device, x.mask) - sum(x.loans.values()) for x in mine)
        return max(0, state.reserve_cells - own)

    def lent(self, state: ClassState) -> int:
        return sum(lease.loans.get(state, 0) for lease in self.leases)

    def kept(self, state: ClassState) -> int:
        return self.unmet(state) - self.lent(state)

    def owners(self, device: int) -> list[ClassState]:
        return [state for state in self.classes() if state.reserve_cells and state.home == device]

    # -- what must hold ------------------------------------------------------------------------

    def check_reserves(self) -> None:
        for device in range(len(self.devices)):
            owners = self.owners(device)
            assert all(self.kept(state) >= 0 for state in owners), "lent more than is idle"
            kept = sum(self.kept(state) for state in owners)
            assert self.equal(device, self.free(device)) >= kept, "a reserve was given away"
        for state in self.classes():
            assert state.lent == self.lent(state)
            assert state.reserved_free == max(0, self.kept(state))

    def check_loans(self) -> None:
        for lease in self.leases:
            assert sum(lease.loans.values()) <= self.equal(lease.device, lease.mask)
            for owner, cells in lease.loans.items():
                assert cells > 0
                assert owner is not lease.class_state
                assert owner.home == lease.device
                assert owner.max_wait > 0, "an owner without a budget lends nothing"
                assert lease.class_state.preemptible

    def check_size(self, lease: Grant) -> None:
        """Check that a grant has at least the requested SMs, rounded up to whole cells at most."""
        cells, parts = self.devices[lease.device], lease.request.parts
        part = parts[lease.request.grants.index(lease)]
        assert lease.sms == sms(cells, lease.mask)
        if part.named is not REST:
            assert is_enough(cells, lease.mask, part)
        if part.named is None and lease.request.is_elastic and lease.sms > part.most:
            needed = -(-part.least // cells.size)
            assert self.equal(lease.device, lease.mask) <= needed

    def kept_to_its_end(self, lease: Grant) -> int:
        """Return the SMs that a lease keeps until its end."""
        if not lease.request.is_elastic:
            return lease.sms
        size = self.devices[lease.device].size
        return min(lease.sms, size * -(-lease.request.parts[0].least // size))

    def kept_from(self, request: Request, lease: Grant) -> int:
        """Return the SMs that a lease keeps at its checkpoint whatever the request needs."""
        if lease.draining or not lease.request.is_elastic:
            return lease.sms
        return (
            0
            if lease.class_state.priority < request.class_state.priority
            else min(lease.sms, self.kept_to_its_end(lease))
        )

    def gave_back(self, lease: Grant) -> bool:
        """Say whether an elastic lease holds only the cells that its minimum needs."""
        cells = self.devices[lease.device]
        needed = -(-lease.request.parts[0].least // cells.size)
        is_least = self.equal(lease.device, lease.mask) <= needed
        return is_least or not is_enough(
            cells, lease.mask & cells.cell_mask, lease.request.parts[0]
        )

    def is_due(self, lease: Grant, now: float) -> bool:
        """Say whether a borrower that keeps its declared interval reaches a checkpoint now."""
        return now - self.taken_at[lease] >= self.segment(lease)

    def segment(self, lease: Grant) -> float:
        """Return the seconds within which it gives back: its declared interval, or its duration."""
        declared = lease.class_state.rules.checkpoint_interval or math.inf
        known = lease.request.seconds(lease.sms)
        if known is None:
            return declared
        return min(known, declared) if lease.request.is_elastic else known

    def gives_back_at_its_end(self, lease: Grant) -> bool:
        """Say whether its minimum needs what it still borrows after a checkpoint."""
        waiting = any(owner.waiting for owner in lease.loans)
        return bool(lease.loans) and (waiting or not lease.request.is_elastic)

    def is_entitled(self, request: Request) -> bool:
        """Say whether a request asks for no more than the unused part of its class's reserve."""
        state = request.class_state
        cells = self.devices[state.home]
        part = request.parts[0]
        if len(request.parts) > 1 or part.named or state.home not in request.devices:
            return False
        needed = -(-part.least // cells.size)
        is_capped = state.sms + needed * cells.size > state.cap
        is_sized = isinstance(self.scheduler.queue.policy.policy, Sized) and request.is_elastic
        if is_sized and self.unmet(state) < state.reserve_cells:
            return False  # what is left of its reserve may be less than is enough
        return needed <= self.unmet(state) and not is_capped

    def wanted(self, request: Request, device: int) -> SizeRange:
        """Return the size that a request should get: its own, or the policy's within its bounds."""
        part, policy = request.parts[0], self.scheduler.queue.policy.policy
        if not isinstance(policy, Sized) or not request.is_elastic:
            return part
        self.scheduler.dispatcher.set_target(request, device, self.now)
        (wants,) = request.target
        cells, state = self.devices[device], request.class_state
        assert part.least <= wants.least <= wants.most
        kept = [self.kept_from(request, x) for x in self.leases if x.device == device]
        if self.now - request.arrived >= policy.ageing:
            assert wants.least <= max(part.least, cells.total - sum(kept)), "it could wait for ever"
        if request.allowed is None:
            sizes = [sms(cells, mask) for mask in subsets(cells.full_mask) if possible(cells, mask)]
            smallest = min((n for n in sizes if n >= part.least), default=0)
            assert wants.least <= max(smallest, cells.size * -(-part.least // cells.size))
        if self.is_entitled(request) and state.home == device:
            assert -(-wants.least // cells.size) <= max(
                -(-part.least // cells.size), self.unmet(state)
            ), "waits for more than its reserve"
        return wants

    def could_be_granted(self, request: Request, device: int) -> bool:
        """Say whether free cells outside reserves suffice: without a loan, within the cap."""
        cells, state = self.devices[device], request.class_state
        if len(request.parts) > 1:
            return False
        others = sum(self.kept(owner) for owner in self.owners(device) if owner is not state)
        count = self.equal(device, self.free(device)) - others
        part = self.wanted(request, device)
        for mask in subsets(self.free(device)):
            fits = self.equal(device, mask) <= count and sms(cells, mask) <= state.cap - state.sms
            named = part.named in (ALL, REST)
            enough = mask == cells.full_mask if named else is_enough(cells, mask, part)
            if fits and enough:
                return True
        return False
