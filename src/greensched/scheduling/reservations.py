"""Floors, and what of them is lent: who may take how many of a device's free cells.

A class's floor is a number of cells of one device, its home. What of a floor its owner does not
use is *kept*, free, for him, but for what is *lent*. On each device, always:

    free cells >= the sum over its floors of (cells its owner has not of it, less those lent)

An owner wants his floor while a request of his waits, or an elastic lease of his has less than it
may have. He takes what is kept for him at once, and the rest when its loans come back. A class
borrows only if it is preemptible, and only from an owner who wants none of it and whose blocking
budget is at least as long as the borrower takes to give back: the next checkpoint for what an
elastic lease has above its least size, the end of the lease for the rest. So an owner waits for his
floor for one budget at most. Each loan is one owner's: what comes back goes to nobody else. Where
nobody has anything, and all wait for what is others', owners lend though they wait: what they wait
for is more than their floors.

After a change of the classes free cells may be fewer than that for a time: leases end under the
rules they began under, and what comes free is kept until it suffices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from greensched.errors import InvalidRequest
from greensched.scheduling.cells import DeviceCells, aligned
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.requests import NO_LOANS, Grant, Request
from greensched.scheduling.services import ServiceClass


class Reservations:
    """The floors of one device.

    Args:
        cells: the device's.
        owners: who has a floor there.
    """

    def __init__(self, cells: DeviceCells, owners: Sequence[ClassState]) -> None:
        self.cells = cells
        self.owners = tuple(owners)
        #: Cells to be given last to anybody else than their owner, for each owner: so that what
        #: is kept for him stays in one block. As near to the top as it can be where
        #: `DeviceCells.menu`
        #: has lanes over it: one that is made only when it is needed may wait for all that runs.
        self.blocks: dict[ClassState, int] = {}
        top, still = cells.count, sum(owner.need for owner in self.owners)
        for owner in self.owners:
            still -= owner.need
            step = aligned(owner.need)
            top = max((top - owner.need) // step * step, still)
            self.blocks[owner] = ((1 << owner.need) - 1) << top
        #: All of them; they share no cell.
        self.all_blocks = sum(self.blocks.values())
        #: The equal cells beside them.
        self.beside = cells.equal & ~self.all_blocks
        #: Nobody has anything, and nobody could be granted anything: then owners lend who wait.
        self.is_idle = False
        #: Leases that have something on loan.
        self.borrowers: dict[Grant, None] = {}

    def unmet(self, flow: ClassState) -> int:
        """Cells of its floor that a class does not have."""
        return _unmet(flow) if flow in self.blocks else 0

    def kept(self, flow: ClassState) -> int:
        """Free cells that are the flow's own."""
        return flow.kept if flow in self.blocks else 0

    def room(self, free: int, request: Request, sms: int) -> tuple[int, int]:
        """How many of so many free cells a lease may take.

        Args:
            free: free cells there are.
            request: whose.
            sms: how many it will have, as far as is known: how long it takes goes by that.

        Returns:
            For its least, and for all of it.
        """
        flow = request.flow
        least = most = free
        length = segment = -1.0
        for owner in self.owners:
            kept = owner.kept
            if not kept or owner is flow:
                continue
            if flow.preemptible and owner.budget > 0 and self._lends(owner):
                if length < 0:
                    length, segment = lengths(request, sms)
                if not 0 < length <= owner.budget:
                    least -= kept
                if not 0 < segment <= owner.budget:
                    most -= kept
            else:
                least -= kept
                most -= kept
        if least < 0:
            least = 0
        return least, max(least, most)

    def _lends(self, owner: ClassState) -> bool:
        return self.is_idle or not (owner.waiting or owner.short)

    def take(self, free: int, lease: Grant, taken: int, least: int, sms: int) -> None:
        """A lease takes cells of so many free ones; what is kept for others is borrowed.

        Args:
            free: free cells there were.
            lease: who takes.
            taken: how many cells.
            least: how many of them it keeps until it ends.
            sms: see `room`.
        """
        flow = lease.flow
        left = free - taken
        for owner in self.owners:
            if owner is not flow:
                left -= owner.kept
        if left < 0:
            self._borrow(lease, min(taken, -left), taken - least, sms)
        if flow in self.blocks:
            flow.account(taken)
        if self.borrowers:
            self._settle()

    def _borrow(self, lease: Grant, borrowed: int, spare: int, sms: int) -> None:
        """So many cells; what is beyond those that it can give back before its end, until then."""
        until_end = max(0, borrowed - spare)
        length, segment = lengths(lease.request, sms)
        # Whoever can wait longest lends first, and the least part first: fewer can lend it.
        for owner in sorted(self.owners, key=lambda owner: -owner.budget):
            if owner is lease.flow or not self._lends(owner):
                continue
            lent = 0
            if length <= owner.budget:
                lent = min(until_end, owner.kept)
                until_end -= lent
                borrowed -= lent
            if segment <= owner.budget:
                more = min(borrowed - until_end, owner.kept - lent)
                borrowed -= more
                lent += more
            if lent:
                self._lend(owner, lease, lent)

    def give(self, lease: Grant, given: int) -> None:
        """A lease gives cells back, those it has on loan first."""
        flow = lease.flow
        if lease.loans:
            left = given
            # Who waits for his floor has it back first.
            for owner in sorted(lease.loans, key=lambda owner: not owner.waiting):
                back = min(left, lease.loans[owner])
                left -= back
                self._end_loan(owner, lease, back)
        if flow in self.blocks:
            flow.account(-given)

    def note(self, lease: Grant, *, is_over: bool = False) -> None:
        """Counts whether an owner's elastic lease has less than it may have."""
        flow, part = lease.flow, lease.request.wants[0]
        if flow not in self.blocks or not lease.request.is_elastic:
            return
        most = min(part.most, flow.cap) // self.cells.size
        have = (lease.mask & self.cells.equal).bit_count()
        is_short = have < min(most, self.cells.count) and not is_over
        flow.short += is_short - lease.is_short
        lease.is_short = is_short

    def _lend(self, owner: ClassState, lease: Grant, cells: int) -> None:
        owner.account(lent=cells)
        if lease.flow in self.blocks:
            lease.flow.account(borrowed=cells)
        lease.loans = {**lease.loans, owner: lease.loans.get(owner, 0) + cells}
        self.borrowers[lease] = None

    def _end_loan(self, owner: ClassState, lease: Grant, cells: int) -> None:
        owner.account(lent=-cells)
        if lease.flow in self.blocks:
            lease.flow.account(borrowed=-cells)
        left = lease.loans[owner] - cells
        others = {one: n for one, n in lease.loans.items() if one is not owner}
        lease.loans = {**others, owner: left} if left else others
        if not lease.loans:
            self.borrowers.pop(lease, None)

    def _settle(self) -> None:
        """An owner who found his floor elsewhere needs no loan back: the borrower has it."""
        again = True
        while again:
            again = False
            for owner in self.owners:
                excess = owner.lent - _unmet(owner)
                for lease in tuple(self.borrowers) if excess > 0 else ():
                    ended = min(excess, lease.loans.get(owner, 0))
                    if ended > 0:
                        excess -= ended
                        again = True  # it is the borrower's own now, and may meet his floor
                        self._end_loan(owner, lease, ended)

    def take_over(self, leases: Iterable[Grant]) -> None:
        """After a change of the classes: counts what is leased and lent already."""
        for lease in leases:
            lease.is_short = False
            self.note(lease)
            if lease.flow in self.blocks:
                lease.flow.account((lease.mask & self.cells.equal).bit_count())
            loans, lease.loans = lease.loans, NO_LOANS
            for owner, lent in loans.items():
                if owner in self.blocks:
                    self._lend(owner, lease, lent)
        if self.borrowers:
            self._settle()


def lengths(request: Request, sms: int) -> tuple[float, float]:
    """Seconds until a lease of a request has ended; until it gives back what can go before."""
    flow = request.flow
    elastic = request.is_elastic
    length = flow.longest_lease(request.seconds(sms), is_elastic=elastic)
    return length, min(length, flow.longest_segment()) if elastic else length


def _unmet(flow: ClassState) -> int:
    """Cells of its floor that an owner does not have; what he has on loan is not of it."""
    return max(0, flow.need - (flow.cells - flow.borrowed))


def place(
    devices: Sequence[DeviceCells], wanted: Sequence[tuple[ClassState, ServiceClass]]
) -> list[Reservations]:
    """Finds each floor its device: the largest first, each where most is unreserved.

    A floor stays on the device it is on, where it fits.

    Raises:
        InvalidRequest: they do not fit together; nothing has changed.
    """
    left = [cells.count for cells in devices]
    homes: list[list[ClassState]] = [[] for _ in devices]
    placed: list[tuple[ClassState, int, int]] = []
    for flow, rules in sorted(wanted, key=lambda one: -one[1].reserve):
        needs = [-(-rules.reserve // cells.size) for cells in devices]
        fits = [device for device, need in enumerate(needs) if need <= left[device]]
        if not fits:
            raise InvalidRequest(
                f"service {rules.name!r}: reserve={rules.reserve}: the floors together do not fit "
                f"on the devices, which have {_reservable(devices)} SMs in all to reserve"
            )
        home = max(fits, key=lambda d: (d == flow.home and flow.need > 0, left[d] - needs[d]))
        left[home] -= needs[home]
        placed.append((flow, home, needs[home]))
        if rules.reserve:
            homes[home].append(flow)
    for flow, home, need in placed:
        flow.home, flow.need = home, need
    return [Reservations(cells, owners) for cells, owners in zip(devices, homes, strict=True)]


def _reservable(devices: Sequence[DeviceCells]) -> int:
    return sum(cells.size * cells.count for cells in devices)
