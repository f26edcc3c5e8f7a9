"""Reserves and loans from them: how many of a device's free cells a request may take.

The reserve of a class, its *owner*, is a number of cells of one device, its home. Cells that the
owner does not use are *kept* free for it, except those that are *lent*. On each device, always:

    free cells >= the sum over its reserves of (cells its owner does not have, minus lent ones)

An owner wants its reserve while a request of it waits, or an elastic grant of it has less than it
may have. It takes what is kept for it at once, and the rest when the loans come back. A class
borrows only if it is preemptible, and only from an owner that wants none of its reserve, and whose
longest wait covers the time that the borrower takes to give back: the next checkpoint for what an
elastic grant has above its minimum, the end of the lease for the rest. So an owner waits at most
that long for its reserve. Each loan belongs to one owner: returned cells go to no other class. If
no class holds anything and all wait for each other's cells, owners lend even though they wait,
because they need more than their reserves.

After a change of the classes, fewer cells may be free for a time: leases end under the rules they
began under, and freed cells are kept until they suffice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from greensched.errors import InvalidRequest
from greensched.scheduling.cells import DeviceCells, alignment
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.home_cells import HomeMasks, home_masks
from greensched.scheduling.requests import NO_LOANS, Grant, Request
from greensched.scheduling.services import NO_CAP, ServiceClass
from greensched.typing import NamedSize

NO_SIZES: Final[Mapping[ClassState, ServiceClass]] = {}


class Reservations:
    """The reserves of one device.

    Args:
        cells: The cells of the device.
        owners: The classes with a reserve there.
        sized: The rules of each class that names its sizes.
    """

    def __init__(
        self,
        cells: DeviceCells,
        owners: Sequence[ClassState],
        sized: Mapping[ClassState, ServiceClass] = NO_SIZES,
    ) -> None:
        self.cells = cells
        self.owners = tuple(owners)
        #: For each owner, the cells that other classes get last, so that what is kept for the owner
        #: stays in one block, as near to the top as `DeviceCells.menu` has executors for it. An
        #: executor that is made only when needed may wait until the device is idle.
        self.blocks: dict[ClassState, int] = {}
        #: The home cells of each class with sizes, alternately from the top and from the bottom.
        self.homes: dict[ClassState, HomeMasks] = {}
        top, bottom = cells.count, 0
        for state in sorted(sized, key=lambda state: state not in self.owners):
            need = state.reserve_cells if state in self.owners else 0
            downward, rules = len(self.homes) % 2 == 0, sized[state]
            cap = NO_CAP if isinstance(rules.cap, NamedSize) else rules.cap
            edge = top if downward else bottom
            self.homes[state] = home_masks(cells, rules.sizes, cap, edge, downward=downward)
            if need:
                self.blocks[state] = ((1 << need) - 1) << (top - need if downward else bottom)
            top, bottom = (top - need, bottom) if downward else (top, bottom + need)
        still = sum(owner.reserve_cells for owner in self.owners if owner not in sized)
        for owner in self.owners:
            if owner not in sized:
                need = owner.reserve_cells
                still -= need
                step = alignment(need)
                top = max((top - need) // step * step, bottom + still)
                self.blocks[owner] = ((1 << need) - 1) << top
        #: The union of the blocks, which are disjoint.
        self.all_blocks = sum(self.blocks.values())
        #: The cells outside the blocks.
        self.beside = cells.cell_mask & ~self.all_blocks
        #: Whether no class holds cells here or can be granted any, so that owners lend even though
        #: they wait.
        self.is_idle = False
        #: Grants with borrowed cells.
        self.borrowers: dict[Grant, None] = {}

    def unmet(self, state: ClassState) -> int:
        """Return how many cells of its reserve a class does not have."""
        return _unmet(state) if state in self.blocks else 0

    def reserved_free(self, state: ClassState) -> int:
        """Return how many free cells are kept for a class."""
        return state.reserved_free if state in self.blocks else 0

    def available_for(self, free: int, request: Request, sms: int) -> tuple[int, int]:
        """Return how many of the free cells a grant may take.

        Args:
            free: The number of free cells.
            request: The request of the grant.
            sms: The SMs that it will have, on which its duration depends.

        Returns:
            The number that it may keep to its end, and the number with those that it gives back
            earlier.
        """
        state = request.class_state
        least = most = free
        length = interval = -1.0
        for owner in self.owners:
            kept = owner.reserved_free
            if not kept or owner is state:
                continue
            if state.preemptible and owner.max_wait > 0 and self._lends(owner):
                if length < 0:
                    length, interval = expected_times(request, sms)
                if not 0 < length <= owner.max_wait:
                    least -= kept
                if not 0 < interval <= owner.max_wait:
                    most -= kept
            else:
                least -= kept
                most -= kept
        if least < 0:
            least = 0
        return least, max(least, most)

    def available_after(self, free: int, request: Request, returned: Mapping[Grant, int]) -> int:
        """Return how many cells a request could take if grants had given these cells back.

        Args:
            free: The number of free cells now.
            request: The request.
            returned: The cells that each grant gives back; borrowed ones go to their owner.
        """
        kept, state = 0, request.class_state
        for owner in self.owners:
            if owner is state:
                continue
            may_lend = state.preemptible and owner.max_wait > 0 and self._lends(owner)
            if may_lend and not any(grant.class_state is owner for grant in returned):
                length, _ = expected_times(request, request.fewest)
                if 0 < length <= owner.max_wait:
                    continue
            own, lent = owner.cells - owner.borrowed, owner.lent
            for grant, cells in returned.items():
                lent -= min(cells, grant.loans.get(owner, 0))
                if grant.class_state is owner:
                    own -= max(0, cells - sum(grant.loans.values()))
            unmet = max(0, owner.reserve_cells - own)
            kept += max(0, unmet - lent)
        return free + sum(returned.values()) - kept

    def _lends(self, owner: ClassState) -> bool:
        return self.is_idle or not (owner.waiting or owner.short)

    def take(self, free: int, grant: Grant, taken: int, least: int) -> None:
        """Account for a grant that takes free cells, and borrows those that are kept for others.

        Args:
            free: The number of free cells before.
            grant: The grant that takes them.
            taken: The number of cells.
            least: How many of them it keeps until it ends.
        """
        state = grant.class_state
        left = free - taken
        for owner in self.owners:
            if owner is not state:
                left -= owner.reserved_free
        if left < 0:
            self._borrow(grant, min(taken, -left), taken - least)
        if state in self.blocks:
            state.account(taken)
        if self.borrowers:
            self._settle()

    def _borrow(self, grant: Grant, borrowed: int, spare: int) -> None:
        """Borrow this many cells; `spare` of the taken ones can be given back before the end."""
        until_end = max(0, borrowed - spare)
        length, interval = expected_times(grant.request, grant.request.fewest)
        # The owner that can wait longest lends first. The cells kept to the end are borrowed
        # first, because fewer owners can lend them.
        for owner in sorted(self.owners, key=lambda owner: -owner.max_wait):
            if owner is grant.class_state or not self._lends(owner):
                continue
            lent = 0
            if length <= owner.max_wait:
                lent = min(until_end, owner.reserved_free)
                until_end -= lent
                borrowed -= lent
            if interval <= owner.max_wait:
                more = min(borrowed - until_end, owner.reserved_free - lent)
                borrowed -= more
                lent += more
            if lent:
                self._lend(owner, grant, lent)

    def give(self, grant: Grant, cells: int) -> None:
        """Account for a grant that gives cells back, borrowed ones first."""
        state = grant.class_state
        if grant.loans:
            left = cells
            # An owner that waits for its reserve gets its cells back first.
            for owner in sorted(grant.loans, key=lambda owner: not owner.waiting):
                back = min(left, grant.loans[owner])
                left -= back
                self._end_loan(owner, grant, back)
        if state in self.blocks:
            state.account(-cells)

    def note_short(self, grant: Grant, *, is_over: bool = False) -> None:
        """Record whether an elastic grant of an owner has less than it may have."""
        state, part = grant.class_state, grant.request.target[0]
        if state not in self.blocks:
            return
        most = min(part.most, state.cap) // self.cells.size
        held = self.cells.cell_count(grant.mask)
        is_short = held < min(most, self.cells.count) and not is_over
        state.short += is_short - grant.is_short
        grant.is_short = is_short

    def _lend(self, owner: ClassState, grant: Grant, cells: int) -> None:
        owner.account(lent=cells)
        if grant.class_state in self.blocks:
            grant.class_state.account(borrowed=cells)
        grant.loans = {**grant.loans, owner: grant.loans.get(owner, 0) + cells}
        self.borrowers[grant] = None

    def _end_loan(self, owner: ClassState, grant: Grant, cells: int) -> None:
        owner.account(lent=-cells)
        if grant.class_state in self.blocks:
            grant.class_state.account(borrowed=-cells)
        left = grant.loans[owner] - cells
        others = {lender: n for lender, n in grant.loans.items() if lender is not owner}
        grant.loans = {**others, owner: left} if left else others
        if not grant.loans:
            self.borrowers.pop(grant, None)

    def _settle(self) -> None:
        """End loans whose owner does not need the cells, because it got other cells instead."""
        again = True
        while again:
            again = False
            for owner in self.owners:
                excess = owner.lent - _unmet(owner)
                for grant in tuple(self.borrowers) if excess > 0 else ():
                    ended = min(excess, grant.loans.get(owner, 0))
                    if ended > 0:
                        excess -= ended
                        again = True  # the borrower now owns the cells, which may meet its reserve
                        self._end_loan(owner, grant, ended)

    def take_over(self, grants: Iterable[Grant]) -> None:
        """Count existing grants and loans after a change of the classes."""
        for grant in grants:
            grant.is_short = False
            if grant.request.is_elastic:
                self.note_short(grant)
            if grant.class_state in self.blocks:
                grant.class_state.account(self.cells.cell_count(grant.mask))
            loans, grant.loans = grant.loans, NO_LOANS
            for owner, lent in loans.items():
                if owner in self.blocks:
                    self._lend(owner, grant, lent)
        if self.borrowers:
            self._settle()


def expected_times(request: Request, sms: int) -> tuple[float, float]:
    """Return the seconds until a lease ends, and until it gives back what it can before that."""
    state, is_elastic = request.class_state, request.is_elastic
    length = state.longest_lease(request.seconds(sms), is_elastic=is_elastic)
    return length, min(length, state.longest_interval()) if is_elastic else length


def _unmet(state: ClassState) -> int:
    """Return how many cells of its reserve an owner lacks; borrowed cells do not count."""
    return max(0, state.reserve_cells - (state.cells - state.borrowed))


def place_reserves(
    devices: Sequence[DeviceCells], wanted: Sequence[tuple[ClassState, ServiceClass]]
) -> list[Reservations]:
    """Choose a device for each reserve, largest first, each where most cells are unreserved.

    A reserve stays on its device if it still fits there.

    Raises:
        InvalidRequest: They do not fit together; nothing has changed.
    """
    left = [cells.count for cells in devices]
    homes: list[list[ClassState]] = [[] for _ in devices]
    placed: list[tuple[ClassState, int, int]] = []
    for state, rules in sorted(wanted, key=lambda pair: -pair[1].reserve):
        needs = [cells.cells_for(rules.reserve) for cells in devices]
        fits = [device for device, need in enumerate(needs) if need <= left[device]]
        if not fits:
            total = sum(cells.size * cells.count for cells in devices)
            raise InvalidRequest(
                f"service {rules.name!r}: reserve={rules.reserve}: the reserves together do not "
                f"fit on the devices, where {total} SMs can be reserved in all"
            )
        home = max(
            fits, key=lambda d: (d == state.home and state.reserve_cells > 0, left[d] - needs[d])
        )
        left[home] -= needs[home]
        placed.append((state, home, needs[home]))
        if rules.reserve:
            homes[home].append(state)
    for state, home, need in placed:
        state.home, state.reserve_cells = home, need
    sized = {state: rules for state, rules in wanted if rules.sizes}
    return [
        Reservations(cells, owners, sized) for cells, owners in zip(devices, homes, strict=True)
    ]
