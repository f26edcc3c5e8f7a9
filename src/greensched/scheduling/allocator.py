"""The cells of a pool's devices: which are free, which grants hold the others, and the limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Literal, NamedTuple

from greensched.scheduling.cells import DeviceCells, SizeRange, lowest
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.fair_queueing import VirtualTime
from greensched.scheduling.home_cells import HomeMasks
from greensched.scheduling.requests import Duration, Grant, Request
from greensched.scheduling.reservations import expected_times, place_reserves
from greensched.scheduling.services import DEFAULT_CLASS, ServiceClass
from greensched.scheduling.split_controller import SplitController

#: Which device to try first. Spread: the device with the most free SMs, so that leases share as
#: little of a device's memory bandwidth as possible. Pack: the device with the fewest, so that the
#: others stay free for large requests.
Placement = Literal["spread", "pack"]


class SMAllocator:
    """Counts cells and SMs, by device and by class.

    Args:
        devices: The cells of each device.
        is_made: Whether (device, cells) has an executor.
        may_make: Whether a device may have another executor, although requests could wait for one.
        services: The classes.
        placement: Which device to try first.
    """

    def __init__(
        self,
        devices: Sequence[DeviceCells],
        is_made: Callable[[int, int], bool],
        may_make: Callable[[int], bool],
        services: Iterable[ServiceClass],
        placement: Placement,
    ) -> None:
        self.devices = tuple(devices)
        self.is_made = is_made
        self.may_make = may_make
        self.placement: Placement = placement
        self.free_masks = [cells.full_mask for cells in self.devices]
        #: The number of free SMs on each device.
        self.free_sms = [cells.total for cells in self.devices]
        #: Sets of cells with an executor, by device and number of cells. The pool updates it.
        self.ready_masks: list[dict[int, dict[int, None]]] = [{} for _ in self.devices]
        #: Grants whose cells are not free yet, by device.
        self.grants: list[dict[Grant, None]] = [{} for _ in self.devices]
        #: The shared grants among them, and the number of grants that exclude shared ones.
        self.shared_grants: list[dict[Grant, None]] = [{} for _ in self.devices]
        self.exclusive = [0 for _ in self.devices]
        self.split_controller = SplitController()
        self.virtual_time = VirtualTime()
        self.total = sum(cells.total for cells in self.devices)
        #: Whether leases are timed, for the histograms of their classes.
        self.is_timed = False
        #: Called inside a decision with a grant whose cells have changed, and its earlier mask and
        #: SMs.
        self.on_resize: Callable[[Grant, int, int, float | None], object] | None = None
        self.classes: dict[str, ClassState] = {"": ClassState(DEFAULT_CLASS)}
        self.set_rules(services)

    def set_rules(self, services: Iterable[ServiceClass]) -> None:
        """Apply other classes. Leases end under the rules they began under.

        A class that is not in `services` no longer has a reserve or a cap. It is forgotten once it
        has no queued request and no grant.

        Raises:
            InvalidRequest: The reserves do not fit on the devices; nothing has changed.
        """
        rules = {service.name: service for service in services}
        classes = {"": self.classes[""]}
        for name, rule in rules.items():
            classes[name] = self.classes.get(name) or ClassState(rule)
        wanted = [(state, rules[name]) for name, state in classes.items() if name]
        reservations = place_reserves(self.devices, wanted)
        for name, state in self.classes.items():
            state.cells = state.borrowed = state.lent = state.short = 0
            if name not in classes:
                state.reserve_cells = 0
                state.set_rules(ServiceClass(name, priority=state.priority))
                if state.waiting or state.sms:
                    classes[name] = state
        for name, rule in rules.items():
            classes[name].set_rules(rule)
        self.classes, self.reservations = classes, reservations
        self.split_controller.forget()
        #: Removed classes that still have requests or grants.
        self.retired = classes.keys() - rules.keys() - {""}
        for state in classes.values():
            state.account()
        for device, of_device in enumerate(reservations):
            of_device.take_over(x for x in self.grants[device] if not x.is_shared)
        #: Whether there are classes, so that leases must be accounted for.
        self.is_classed = len(classes) > 1
        #: Whether there are shared grants, or may be.
        self.may_share = any(state.shared for state in classes.values()) or any(self.shared_grants)
        #: Whether any class is limited, so that limits must be checked.
        self.is_limited = any(
            state.rules.reserve or state.cap < self.total or state.quota
            for state in classes.values()
        )

    # -- looking for cells -----------------------------------------------------------------------

    def order(
        self, request: Request, devices: Sequence[int], suspended: Iterable[Grant] = ()
    ) -> Sequence[int]:
        """Return the devices to try for a request, in order; cells of `suspended` count as free."""
        if len(devices) < 2:
            return devices
        if self.may_share:
            devices = sorted(devices, key=lambda device: len(self.shared_grants[device]))
        free, near = self.free_sms, request.near
        if suspended or near is not None:
            free = list(free)
            for grant in suspended:
                free[grant.device] += grant.sms
            if near is not None and near in devices:
                free[near] = self.total if self.placement == "spread" else -1
        return sorted(devices, key=free.__getitem__, reverse=self.placement == "spread")

    def most_free(self) -> int:
        """Return the most free SMs on any device."""
        return max(self.free_sms)

    def find(self, request: Request, device: int, limit: int | None = None) -> tuple[int, ...]:
        """Return the free cells to grant, within the limits of the class.

        Args:
            request: The request.
            device: The index of the device.
            limit: The most cells. None: only the class's limits apply.

        Returns:
            One set for each part; empty if they do not fit.
        """
        cells, free, parts = self.devices[device], self.free_masks[device], request.target
        ready, state = self.ready_masks[device], request.class_state
        if not self.is_limited and not (state.sizes and len(parts) == 1):
            return cells.fit_all(free, parts, ready)
        reservations = self.reservations[device]
        least, most, left = self._limits(request, device, limit)
        size = parts[0]
        if len(parts) > 1 or size.named is not None:
            masks = cells.fit_all(self.visible(state, device, least), parts, ready)
            return masks if sum(map(cells.sm_count, masks)) <= left else ()
        if size.most > left:
            size = SizeRange(size.least, max(size.least, left))
        needed = -(-size.least // cells.size)
        if needed > least:  # the remainder alone may suffice
            if not cells.is_helped(free, size.least):
                return ()
            most = least
        elif reservations.owners and size.most < (needed + 1) * cells.size and not state.sizes:
            # Owners use their own block, others the cells outside all blocks, if that suffices.
            among = free & reservations.blocks.get(state, reservations.beside)
            if among.bit_count() < needed and size.most <= needed * cells.size:
                among = self.visible(state, device, most) & cells.cell_mask
            if among.bit_count() >= needed:
                return (cells.choose(among, needed, ready),)
        return self._find_one(state, device, size, most, left)

    def _limits(self, request: Request, device: int, limit: int | None) -> tuple[int, int, int]:
        """Return the cells a grant may keep to its end, the cells it may have, and its most SMs."""
        cells, state = self.devices[device], request.class_state
        least = most = cells.cell_count(self.free_masks[device])
        if self.reservations[device].owners:
            least, most = self.reservations[device].available_for(least, request, request.fewest)
        if limit is not None:
            least, most = min(least, limit), min(most, limit)
        left = state.cap - state.sms
        if left < cells.total:
            least, most = min(least, left // cells.size), min(most, left // cells.size)
        return least, most, left

    def find_made(self, request: Request, device: int, limit: int | None, *, is_aged: bool) -> int:
        """Return free cells with an executor for an elastic request, or 0.

        This is the largest set that the request should have; otherwise the smallest larger set; and
        otherwise, for an aged request, the largest smaller set. A request does not wait for a new
        executor, because some drivers make one only on an idle device, and a busy one may never be.
        """
        cells, free = self.devices[device], self.free_masks[device]
        (part,), (target,) = request.parts, request.target
        least, most, left = self._limits(request, device, limit)
        if cells.cells_for(part.least) > least:
            return 0
        fewest = part.least if is_aged else target.least
        visible = self.visible(request.class_state, device, most)

        def value(mask: int) -> tuple[bool, bool, bool, int]:
            sms = cells.sm_count(mask)
            is_below = sms <= target.most
            return sms >= target.least, is_below, not mask & ~visible, sms if is_below else -sms

        homes = self.homes(request.class_state, device)
        masks = [
            mask
            for mask in chain.from_iterable((homes or self.ready_masks[device]).values())
            if not mask & ~free
            and self.is_made(device, mask)
            and fewest <= cells.sm_count(mask) <= min(part.most, left)
            and cells.cell_count(mask) <= most
        ]
        return max(masks, key=value, default=0)

    def _find_one(
        self, state: ClassState, device: int, size: SizeRange, most: int, left: int
    ) -> tuple[int, ...]:
        """Fit one part into at most this many cells and SMs."""
        cells, free = self.devices[device], self.free_masks[device]
        visible = self.visible(state, device, most)
        mask = self._fit(state, device, visible, size, free, most)
        if cells.sm_count(mask) > left:  # only the remainder has more SMs than `most` cells
            among = cells.cell_mask
            mask = self._fit(state, device, visible & among, size, free & among, most)
        return (mask,) if mask else ()

    def _fit(
        self,
        state: ClassState,
        device: int,
        among: int,
        size: SizeRange,
        reachable: int,
        count: int,
    ) -> int:
        """Return the cells for one part. A class with sizes gets the largest possible, at home.

        Args:
            state: The class.
            device: The index of the device.
            among: The cells to choose from if the class has no reachable home cells.
            size: The SMs. Between two sizes of the class, the larger one is used.
            reachable: Every cell that the part may have.
            count: How many cells the part may have.
        """
        cells, ready = self.devices[device], self.ready_masks[device]
        if not state.sizes:
            return cells.fit(among, size, ready)
        least = next((sms for sms in state.sizes if sms >= size.least), size.least)
        for sms in reversed(state.sizes):
            if not least <= sms <= max(least, size.most):
                continue
            for mask in self.homes(state, device).get(sms, ()):
                if not mask & ~reachable and cells.cell_count(mask) <= count:
                    return mask
            mask = cells.fit(among, SizeRange(sms, sms), ready)
            if mask:
                return mask
        return 0

    def homes(self, state: ClassState, device: int) -> HomeMasks:
        """Return the home cells of a class by size; empty for a class without sizes."""
        return self.reservations[device].homes.get(state, {})

    def visible(self, state: ClassState, device: int, count: int) -> int:
        """Return this many free cells, and the remainder. Other classes' reserves come last."""
        return self._visible_of(self.free_masks[device], state, device, count)

    def _visible_of(self, free: int, state: ClassState, device: int, count: int) -> int:
        cells, reservations = self.devices[device], self.reservations[device]
        left = free & cells.cell_mask
        if count >= left.bit_count():
            return free
        chosen = free & cells.remainder_mask
        own = reservations.blocks.get(state, 0)
        for among in (own, reservations.beside, cells.cell_mask):
            part = lowest(left & among, count)
            chosen |= part
            left &= ~part
            count -= part.bit_count()
        return chosen

    # -- what is possible ------------------------------------------------------------------------

    def reachable(self, request: Request, device: int, without: int = 0) -> int:
        """Return the cells that a request could be granted if only `without` were held."""
        cells, state = self.devices[device], request.class_state
        most = cells.full_mask & ~without
        if not self.is_limited:
            return most
        length = self._known_length(request, device)
        count = min(self._reachable_cells(request, device, length), state.cap // cells.size)
        return self._visible_of(most, state, device, count)

    def can_ever_fit(self, request: Request, device: int, without: int = 0) -> bool:
        """Say whether a request could be granted on a device if only `without` were held."""
        cells, reachable = self.devices[device], self.reachable(request, device, without)
        parts = _of_class_sizes(request)
        if not parts:
            return False
        if not self.is_limited:
            return bool(cells.fit_all(reachable, parts))
        part = parts[0]
        is_single = len(parts) == 1 and not without
        if is_single and 0 < part.least <= cells.cell_count(reachable) * cells.size:
            return True
        # Elastic parts take what is free, so only their minimum sizes must be possible.
        least = tuple(SizeRange(part.least, part.least, part.named) for part in parts)
        masks = cells.fit_all(reachable, least)
        return bool(masks) and sum(map(cells.sm_count, masks)) <= request.class_state.cap

    def find_idle(self, request: Request, device: int, without: int) -> tuple[int, ...]:
        """Return the cells that a request could be granted if only `without` were held."""
        cells, reachable = self.devices[device], self.reachable(request, device, without)
        return cells.fit_all(reachable, request.target, self.ready_masks[device])

    def missing(self, device: int, masks: Iterable[int]) -> list[tuple[int, int]]:
        """Return the (device, cells) of those sets that have no executor."""
        return [(device, mask) for mask in masks if not self.is_made(device, mask)]

    def devices_for(self, request: Request) -> tuple[int, ...]:
        """Return the devices on which a request fits once all leases have ended."""
        return tuple(d for d in request.devices if self.can_ever_fit(request, d))

    def needs_loan(self, request: Request) -> bool:
        """Say whether a request may fit only with borrowed cells, even after every lease ends."""
        state, (part, *more) = request.class_state, request.parts
        for device in request.devices:
            cells, owners = self.devices[device], self.reservations[device].owners
            others = sum(owner.reserve_cells for owner in owners if owner is not state)
            most = min((cells.count - others) * cells.size, state.cap)
            if 0 < part.least <= most and not more:
                return False
        return True

    def _known_length(self, request: Request, device: int) -> float:
        """Return the seconds until its lease ends, for borrowing; infinite if unknown."""
        owners = self.reservations[device].owners
        return (expected_times(request, request.fewest)[0] or math.inf) if owners else 0.0

    def _reachable_cells(self, request: Request, device: int, length: float) -> int:
        """Return how many cells a request of this length can have while all reserves are idle."""
        state, reservations = request.class_state, self.reservations[device]
        count = self.devices[device].count
        for owner in reservations.owners:
            lends = state.preemptible and owner.max_wait > 0 and length <= owner.max_wait
            if owner is not state and not lends:
                count -= owner.reserve_cells
        return count

    def most_now(self, request: Request, device: int, grant: Grant | None) -> int:
        """Return the most SMs for a request while other grants of its class keep theirs.

        Args:
            request: The request.
            device: The index of the device.
            grant: The grant that the request already has there, or None.
        """
        most, state = request.parts[0].most, request.class_state
        most = min(most, self.most_idle(request, device))
        return min(most, state.cap - state.sms + (grant.sms if grant else 0))

    def most_idle(self, request: Request, device: int) -> int:
        """Return the SMs that reserves leave for a request on an idle device."""
        cells = self.devices[device]
        if not self.is_limited:
            return cells.total
        # SMs above its minimum are given back before its end.
        length = 0.0 if request.duration is None else self._known_length(request, device)
        count = self._reachable_cells(request, device, length)
        return count * cells.size + cells.remainder

    def most_ever(self, request: Request) -> int:
        """Return the most SMs that a request could ever be granted as one partition."""
        sizes = request.class_state.sizes if len(request.parts) == 1 else ()
        most = 0
        for device in request.devices:
            cells = self.devices[device]
            sms = cells.largest_within(self.reachable(request, device))
            most = max(most, cells.largest(min(sms, request.class_state.cap)))
        return max((sms for sms in sizes if sms <= most), default=most)

    def nearest(self, request: Request) -> tuple[int, ...]:
        """Return the sizes nearest to a request's that could ever be granted together."""
        nearest = [
            self.devices[d].nearest(self.reachable(request, d), request.parts)
            for d in request.devices
        ]
        cap = request.class_state.cap
        return max((sizes for sizes in nearest if sum(sizes) <= cap), key=sum, default=())

    # -- granting and freeing --------------------------------------------------------------------

    def allocate(
        self, request: Request, device: int, masks: tuple[int, ...], now: float
    ) -> tuple[Grant, ...]:
        """Grant free cells, or a shared grant, to the parts of a request."""
        grants: list[Grant] = []
        for mask in masks:
            grant = Grant(request, device, now)
            self.exclusive[device] += grant.is_exclusive
            self.resize(grant, mask, now)
            if self.is_classed or request.duration is not None:
                self._charge(grant, now)
            # Counted like `granted`: waits of 0 are those of `granted` that are not counted here.
            if self.is_timed and now > request.arrived and (self.is_classed or not grants):
                request.class_state.wait.add(now - request.arrived)
            self.grants[device][grant] = None
            grants.append(grant)
        return tuple(grants)

    def free(self, grant: Grant, now: float) -> None:
        """Free the cells of a grant. Its `mask` and `sms` keep what it had."""
        mask, sms = grant.mask, grant.sms
        del self.grants[grant.device][grant]
        self.exclusive[grant.device] -= grant.is_exclusive
        if self.is_timed:
            self._time(grant, now)
        if not grant.is_settled and (self.is_classed or grant.request.duration is not None):
            self._settle(grant, now)
        self.resize(grant, 0, now)
        grant.mask, grant.sms = mask, sms

    def resize(self, grant: Grant, mask: int, now: float | None = None) -> None:
        """Give a grant other cells, and account for them. No other method moves cells.

        Args:
            grant: The grant, with its present cells or none.
            mask: The cells that it has from now on, its own or free ones; or a mask from
                `DeviceCells.shared_mask`; or 0.
            now: The time in seconds at which the grant begins or ends. None: it does neither.
        """
        device, state = grant.device, grant.class_state
        cells, reservations = self.devices[device], self.reservations[device]
        free, is_shared = self.free_masks[device], mask > cells.full_mask
        mask_before, sms_before = grant.mask, grant.sms
        held, wanted = 0 if grant.is_shared else grant.mask, 0 if is_shared else mask
        if wanted & ~(free | held):
            raise AssertionError(f"cells granted twice: {wanted:b} of {free | held:b}")
        self.free_masks[device] = (free | held) & ~wanted
        sms = cells.total if is_shared else cells.sm_count(mask)
        state.sms += sms - grant.sms
        self.free_sms[device] += (0 if grant.is_shared else grant.sms) - (0 if is_shared else sms)
        grant.mask, grant.sms = mask, sms
        was_shared = grant.is_shared
        if is_shared:
            self.shared_grants[device][grant] = None
        elif was_shared:
            del self.shared_grants[device][grant]
        grant.is_shared = is_shared
        if reservations.owners:
            all_cells, is_elastic = cells.cell_mask, grant.request.is_elastic
            before, after = (held & all_cells).bit_count(), (wanted & all_cells).bit_count()
            if after > before:
                kept = after  # an elastic grant keeps only its minimum to its end
                if held:  # it does not need the cells that it takes up at a checkpoint
                    kept = 0
                elif is_elastic and not was_shared:
                    kept = min(after, cells.cells_for(grant.request.parts[0].least))
                available = (free & all_cells).bit_count()
                reservations.take(available, grant, after - before, kept)
            elif after < before:
                reservations.give(grant, before - after)
            if is_elastic:
                reservations.note_short(grant, is_over=not wanted)
        if self.on_resize is not None:
            self.on_resize(grant, mask_before, sms_before, now)

    def choose_mask(
        self, grant: Grant, least: int, most: int, *, prefer: int = 0
    ) -> tuple[int, int]:
        """Choose the cells that a grant should have at a checkpoint. Pure.

        A grant with more than `most` SMs gives cells back, one with fewer takes free cells that its
        class may have, and a shared one chooses from the latter. Of the sets with an executor, the
        largest with at most `most` SMs is best, otherwise the smallest larger one. A set without an
        executor is never chosen, because some drivers make one only on an idle device, and a busy
        one may never be.

        Args:
            grant: The grant at its checkpoint.
            least: The SMs that it needs.
            most: The most SMs that it should have.
            prefer: The cells to choose if they are as good as any.

        Returns:
            The best set with an executor, maybe its own, or 0; and a better set without one, or 0.
        """
        device, cells = grant.device, self.devices[grant.device]
        choices = self._choices(grant, least, most)
        most = choices.most
        size = SizeRange(least, max(least, most))
        state, homes = grant.class_state, self.homes(grant.class_state, device)
        ideals = [
            self._fit(state, device, among, size, choices.reachable, choices.cells)
            for among in choices.sets
        ]
        ideals = [mask for mask in ideals if choices.allow(cells, mask, least)]
        made = [mask for mask in ideals if self.is_made(device, mask)]
        if made and choices.gives_back:  # the preferred set leaves others' reserves free
            return made[0], 0
        masks = [*made]
        if choices.sets and (cells.joins or not made):  # a joined remainder may fit better
            ready = chain.from_iterable((homes or self.ready_masks[device]).values())
            allowed = [mask for mask in ready if choices.allow(cells, mask, least)]
            masks += [mask for mask in allowed if not homes or self.is_made(device, mask)]
        if not grant.is_shared:
            masks.insert(0, grant.mask)
        if choices.allow(cells, prefer, least):
            masks.insert(0, prefer)

        def value(mask: int) -> int:
            sms = cells.sm_count(mask)
            return sms if sms <= most else -sms

        best = max(masks, key=value, default=0)
        missing = [mask for mask in ideals if not best or value(mask) > value(best)]
        return best, missing[0] if missing and self.may_make(device) else 0

    def _choices(self, grant: Grant, least: int, most: int) -> _Choices:
        """Return the cells from which a grant may choose."""
        device, state, request = grant.device, grant.class_state, grant.request
        cells, reservations = self.devices[device], self.reservations[device]
        free = self.free_masks[device]
        if not grant.is_shared and most < grant.sms:
            own = grant.mask
            block = reservations.blocks.get(state, 0)
            outside = own & (~reservations.all_blocks | block)
            return _Choices((outside, own), own, cells.cell_count(own), most, grant.sms, True)
        held = 0 if grant.is_shared else cells.cell_count(grant.mask)
        left = state.cap - state.sms + grant.sms
        room = reservations.available_for(cells.cell_count(free), request, request.fewest)
        if grant.is_shared:
            count = min(room[0], left // cells.size)
            visible = self.visible(state, device, count)
            few = self.visible(state, device, min(count, cells.cells_for(least)))
            return _Choices((few, visible), visible, count, most, left)
        count = min(held + room[1], left // cells.size, most // cells.size)
        most = min(most, left)
        if count < cells.count:
            most = min(most, count * cells.size + cells.remainder)
        # With the remainder, fewer cells may have more SMs.
        if count < held or most <= grant.sms or (count == held and not cells.joins):
            return _Choices((), 0, 0, grant.sms, grant.sms)
        sets = (grant.mask | self.visible(state, device, count - held),)
        # A remainder that contains its minimum is kept, unless other cells may be kept as long.
        base = grant.mask & cells.remainder_mask
        if held + room[0] >= cells.cells_for(least):
            base = 0
        return _Choices(sets, grant.mask | free, count, most, most, base=base)

    # -- accounting for time ---------------------------------------------------------------------

    def _charge(self, grant: Grant, now: float) -> None:
        state, request = grant.class_state, grant.request
        state.granted += 1
        known = request.seconds(grant.sms) if request.pieces else None
        seconds = state.mean_duration if known is None else known * request.pieces
        if seconds:
            grant.ends, grant.is_bounded = now + seconds, known is not None
            self.virtual_time.charge(grant, seconds)

    def _time(self, grant: Grant, now: float) -> None:
        """Record how long the lease of an ended grant lasted, and how long it drained."""
        state = grant.class_state
        if grant.short_uses:
            self.count_short_uses(grant)
        if not self.is_classed and grant.request.duration is None:
            state.sm_time += self.unsettled_sm_time(grant, now, is_suspended=grant.is_suspended)
        if not grant.is_suspended:
            ended = now if grant.released is None else grant.released
            state.use.add(ended - grant.began)
            if ended < now:  # otherwise it counts as the difference between `use` and the rest
                state.drain.add(now - ended)

    def count_short_uses(self, grant: Grant) -> None:
        """Count the short leases that ended on a grant which is kept."""
        grant.class_state.use.add_shortest(grant.short_uses, grant.short_s)
        grant.reused_s += grant.short_s
        grant.short_uses, grant.short_s = 0, 0.0

    def unsettled_sm_time(self, grant: Grant, now: float, *, is_suspended: bool) -> float:
        """Return the SM-seconds of a grant that its class's `sm_time` does not include yet."""
        if self.is_classed:
            return 0.0 if grant.is_settled else grant.used + grant.sms * (now - grant.since)
        used = grant.reused_s * grant.sms
        if is_suspended:
            return used
        if grant.request.is_elastic:
            return used + grant.used + grant.sms * (now - grant.since)
        return used + grant.sms * (now - grant.began)

    def _settle(self, grant: Grant, now: float) -> None:
        state, request = grant.class_state, grant.request
        self.virtual_time.settle(grant, now)
        seconds = now - grant.began
        expected = grant.ends - grant.began if grant.is_bounded and grant.ends else None
        state.record_lease(seconds, now - grant.since, expected)
        if grant.used:  # it reached checkpoints, which recorded its pieces
            return
        request.learn(grant.sms, seconds)
        if state.latency is not None and not state.reports_latency:
            latency = now - request.arrived
            state.record_latency(latency, 1)
            if state.shared:
                self.split_controller.record(state, latency, 1, now)

    def charge_piece(
        self, grant: Grant, now: float, duration: Duration | None, within: float | None
    ) -> None:
        """Account for the SM-time of a grant up to a checkpoint.

        Args:
            grant: The grant.
            now: The time in seconds.
            duration: The expected duration until the next checkpoint. None: unknown.
            within: Seconds in which that should be done. None: the latency of its class.
        """
        state, request, seconds = grant.class_state, grant.request, now - grant.since
        state.record_interval(seconds)
        if duration is not None:
            if request.duration is not None:
                request.learn(grant.sms, seconds)
                if not state.reports_latency:
                    state.record_latency(seconds, 1)
            request.duration, request.cost_failed = duration, False
        request.within = within
        self.virtual_time.charge_elapsed(grant, now)

    def suspend(self, grant: Grant, now: float) -> None:
        """Account for the end of a lease whose grant is suspended. Needed if there are classes."""
        self._settle(grant, now)
        grant.is_settled = True

    def resume(self, grant: Grant, now: float) -> None:
        """Account for the start of a lease on a suspended grant. Needed if there are classes."""
        if self.is_limited:
            grant.class_state.forget_overruns(now)
        grant.request.arrived = now
        grant.is_settled = False
        grant.charged = grant.used = 0.0
        self._charge(grant, now)

    # -- expectations ----------------------------------------------------------------------------

    def would_fit(self, request: Request, device: int, freed: Mapping[Grant, int]) -> bool:
        """Say whether a request would fit on a device if grants had freed these cells.

        An elastic request is checked with the least that it should have. Cells that are kept for
        other classes' reserves do not count.
        """
        cells, free, parts = self.devices[device], self.free_masks[device], request.parts
        if request.is_elastic:
            least = request.target[0].least
            parts = (SizeRange(least, least),)
        reachable = free
        for mask in freed.values():
            reachable |= mask
        reservations = self.reservations[device]
        if reservations.owners:
            returned = {grant: cells.cell_count(mask) for grant, mask in freed.items()}
            available = reservations.available_after(cells.cell_count(free), request, returned)
            reachable = self._visible_of(reachable, request.class_state, device, available)
        return bool(cells.fit_all(reachable, parts))

    def free_at(self, device: int, request: Request, now: float) -> float:
        """Return when a request will fit on a device if nothing else is granted there.

        A lease of unknown duration, or one that exceeds its known duration, counts as if it could
        end at any moment.
        """
        at, freed = now, dict[Grant, int]()
        if self.shared_grants[device] and not request.class_state.shared:
            at = max(grant.frees_at(now, request) for grant in self.shared_grants[device])
        ends = [(x.frees_at(now, request), x) for x in self.grants[device] if not x.is_shared]
        for end, grant in sorted(ends, key=itemgetter(0)):
            if self.would_fit(request, device, freed):
                break
            at = max(at, end)
            freed[grant] = grant.mask
        return at

    def running(self, now: float, priority: float) -> list[tuple[int, float]]:
        """Return the SMs of each grant, and the seconds that it is expected to last from now on.

        Leaves out grants that exceed their known duration, which may end at any moment, and elastic
        grants of lower priority, which give way.
        """
        return [
            (grant.sms, grant.ends - now)
            for grant in chain.from_iterable(self.grants)
            if grant.ends is not None and grant.ends > now
            if not (grant.request.is_elastic and grant.class_state.priority < priority)
        ]


def _of_class_sizes(request: Request) -> tuple[SizeRange, ...]:
    """Return a request's parts, with the next size of its class as the minimum; () without one.

    The minimum of a request may lie between two sizes, if its class got other sizes meanwhile.
    """
    (part, *more), sizes = request.parts, request.class_state.sizes
    if more or part.named is not None or not sizes:
        return request.parts
    least = next((sms for sms in sizes if sms >= part.least), None)
    return () if least is None else (SizeRange(least, max(least, part.most)),)


class _Choices(NamedTuple):
    """The cells from which a grant may choose.

    Attributes:
        sets: Sets of cells to look for the ideal cells in, preferred one first. Empty: no change.
        reachable: Every cell that the grant may have.
        cells: How many cells it may have.
        most: The most SMs that it should have.
        limit: The most SMs that it may have.
        gives_back: Whether it has more than it should.
        base: Cells that it must keep.
    """

    sets: tuple[int, ...]
    reachable: int
    cells: int
    most: int
    limit: int
    gives_back: bool = False
    base: int = 0

    def allow(self, device: DeviceCells, mask: int, least: int) -> bool:
        """Say whether a grant that needs at least this many SMs may have a set of cells."""
        if not mask or mask & ~self.reachable or self.base & ~mask:
            return False
        if device.cell_count(mask) > self.cells:
            return False
        return least <= device.sm_count(mask) <= self.limit
