"""The cells of a pool's devices: which are free, whose they are, and who may have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.fair_queueing import VirtualTime
from greensched.scheduling.placement import Placement, in_order
from greensched.scheduling.requests import Duration, Grant, Request
from greensched.scheduling.reservations import lengths, place
from greensched.scheduling.services import ANYBODY, ServiceClass
from greensched.scheduling.split_controller import SplitController


class SMAllocator:
    """Counts cells and SMs, by device and by class.

    Args:
        devices: the cells of each device.
        is_made: whether there is a partition over (device, cells).
        services: the classes.
        placement: see `placement`.
    """

    def __init__(
        self,
        devices: Sequence[DeviceCells],
        is_made: Callable[[int, int], bool],
        services: Iterable[ServiceClass],
        placement: Placement,
    ) -> None:
        self.devices = tuple(devices)
        self.is_made = is_made
        self.placement: Placement = placement
        self.free = [cells.every for cells in self.devices]
        #: Partitions that exist already, by device and number of cells; the pool keeps it true.
        self.warm: list[dict[int, dict[int, None]]] = [{} for _ in self.devices]
        #: Leases whose cells are not free yet, by device.
        self.live: list[dict[Grant, None]] = [{} for _ in self.devices]
        #: Leases with a seat, by device; and how many leases nobody with a seat may be beside.
        self.seats: list[dict[Grant, None]] = [{} for _ in self.devices]
        self.apart = [0 for _ in self.devices]
        self.verdict = SplitController()
        self.clock = VirtualTime()
        self.total = sum(cells.total for cells in self.devices)
        self.flows: dict[str, ClassState] = {"": ClassState(ANYBODY)}
        self.set_rules(services)

    def set_rules(self, services: Iterable[ServiceClass]) -> None:
        """Other classes. Leases end under the rules they began under.

        A class that is not among them has no floor and no cap any more, and is forgotten once
        nothing of it waits and it holds nothing.

        Raises:
            InvalidRequest: the floors do not fit on the devices; nothing has changed.
        """
        rules = {service.name: service for service in services}
        flows = {"": self.flows[""]}
        for name, rule in rules.items():
            flows[name] = self.flows.get(name) or ClassState(rule)
        floors = place(self.devices, [(flow, rules[name]) for name, flow in flows.items() if name])
        for name, flow in self.flows.items():
            flow.cells = flow.borrowed = flow.lent = flow.short = 0
            if name not in flows:
                flow.need = 0
                flow.set_rules(ServiceClass(name, priority=flow.priority))
                if flow.waiting or flow.sms:
                    flows[name] = flow
        for name, rule in rules.items():
            flows[name].set_rules(rule)
        self.flows, self.floors = flows, floors
        self.verdict.forget()
        #: Classes that are not there any more, and still have requests or leases.
        self.retired = flows.keys() - rules.keys() - {""}
        for flow in flows.values():
            flow.account()
        for device, of_device in enumerate(floors):
            of_device.take_over(x for x in self.live[device] if not x.is_seat)
        #: Whether there are classes, whose leases must be accounted for.
        self.is_classed = len(flows) > 1
        #: Whether there are seats, or may be.
        self.is_shared = any(flow.shared for flow in flows.values()) or any(self.seats)
        #: Whether a class is limited in any way, so that its limits must be looked at.
        self.is_ruled = any(
            flow.rules.reserve or flow.cap < self.total or flow.quota for flow in flows.values()
        )
        #: The free cells to grant, for each part of a request; empty: they do not fit.
        self.find = self.fit if self.is_ruled else self._fit_anybody

    # -- looking for cells -----------------------------------------------------------------------

    def order(self, request: Request, where: Sequence[int]) -> Sequence[int]:
        """The devices to try for a request, in this order."""
        if len(where) < 2:
            return where
        if self.is_shared:
            where = sorted(where, key=lambda device: len(self.seats[device]))
        return in_order(where, self.devices, self.free, self.placement, request.near)

    def _fit_anybody(
        self,
        request: Request,
        device: int,
        limit: int | None = None,  # noqa: ARG002  as `fit`
    ) -> tuple[int, ...]:
        """`fit` where no class has limits."""
        return self.devices[device].fit_all(self.free[device], request.wants, self.warm[device])

    def fit(self, request: Request, device: int, limit: int | None = None) -> tuple[int, ...]:
        """The free cells to grant, within the limits of its class.

        Args:
            request: what is wanted.
            device: where.
            limit: of equal cells; None: no other than the class's own limits.

        Returns:
            One set for each; empty: they do not fit.
        """
        cells, free = self.devices[device], self.free[device]
        flow, floors, parts = request.flow, self.floors[device], request.wants
        least = most = (free & cells.equal).bit_count()
        if floors.owners:
            least, most = floors.room(least, request, request.fewest)
        if limit is not None:
            least, most = min(least, limit), min(most, limit)
        left = flow.cap - flow.sms
        if left < cells.total:
            least, most = min(least, left // cells.size), min(most, left // cells.size)
        wish = parts[0]
        if len(parts) > 1 or wish.named is not None:
            masks = cells.fit_all(self.visible(flow, device, least), parts, self.warm[device])
            return masks if sum(map(cells.sms, masks)) <= left else ()
        if wish.most > left:
            wish = SizeRange(wish.least, max(wish.least, left))
        needed = -(-wish.least // cells.size)
        if needed > least:  # the remainder may do alone
            if not cells.is_helped(free, wish.least):
                return ()
            most = least
        elif floors.owners and wish.most < (needed + 1) * cells.size:
            # Owners in their own block, others outside all blocks, where that does.
            among = free & floors.blocks.get(flow, floors.beside)
            if among.bit_count() < needed and wish.most <= needed * cells.size:
                among = self.visible(flow, device, most) & cells.equal
            if among.bit_count() >= needed:
                return (cells.choose(among, needed, self.warm[device]),)
        return self._fit_one(flow, device, wish, most, left)

    def _fit_one(
        self, flow: ClassState, device: int, wish: SizeRange, most: int, left: int
    ) -> tuple[int, ...]:
        """Fits one part in so many equal cells, and so many SMs."""
        cells, warm = self.devices[device], self.warm[device]
        visible = self.visible(flow, device, most)
        mask = cells.fit(visible, wish, warm)
        if left < cells.total and cells.sms(mask) > left:
            mask = cells.fit(visible & cells.equal, wish, warm)
            return (mask,) if mask and cells.sms(mask) <= left else ()
        return (mask,) if mask else ()

    def visible(self, flow: ClassState, device: int, count: int) -> int:
        """So many of the free equal cells, and the remainder; others' blocks last."""
        free, cells, floors = self.free[device], self.devices[device], self.floors[device]
        left = free & cells.equal
        if count >= left.bit_count():
            return free
        chosen = free & cells.leftover
        own = floors.blocks.get(flow, 0)
        for among in (own, floors.beside, cells.equal):
            some = lowest(left & among, count)
            chosen |= some
            left &= ~some
            count -= some.bit_count()
        return chosen

    def ever(self, request: Request, device: int, without: int) -> bool:
        """Whether it fits on a device once everybody has left but for some cells."""
        cells, flow = self.devices[device], request.flow
        most = cells.every & ~without
        if not self.is_ruled:
            return bool(cells.fit_all(most, request.parts))
        length = self._known_length(request, device)
        count = min(self._cells_ever(request, device, length), flow.cap // cells.size)
        part = request.parts[0]
        if len(request.parts) == 1 and not without and 0 < part.least <= count * cells.size:
            return True
        some = lowest(most & cells.equal, count) | (most & cells.leftover)
        masks = cells.fit_all(some, request.parts)
        # Elastic parts take what there is: the least of them is what must be possible.
        least = tuple(SizeRange(part.least, part.least, part.named) for part in request.parts)
        masks = masks and cells.fit_all(some, least)
        return bool(masks) and sum(map(cells.sms, masks)) <= flow.cap

    def needs_loan(self, request: Request) -> bool:
        """Whether it may fit nowhere, everybody having left, but for what others' floors lend."""
        flow, (part, *more) = request.flow, request.parts
        for device in request.devices:
            cells, owners = self.devices[device], self.floors[device].owners
            others = sum(owner.need for owner in owners if owner is not flow)
            most = min((cells.count - others) * cells.size, flow.cap)
            if 0 < part.least <= most and not more:
                return False
        return True

    def _known_length(self, request: Request, device: int) -> float:
        """Seconds until a lease of it ends, by which it is lent floors; infinite: not known."""
        owners = self.floors[device].owners
        return (lengths(request, request.fewest)[0] or math.inf) if owners else 0.0

    def _cells_ever(self, request: Request, device: int, length: float) -> int:
        """Equal cells of a device that a request so long may ever have, others' floors idle."""
        flow, floors = request.flow, self.floors[device]
        count = self.devices[device].count
        for owner in floors.owners:
            lends = flow.preemptible and owner.budget > 0 and length <= owner.budget
            if owner is not flow and not lends:
                count -= owner.need
        return count

    def most_now(self, request: Request, device: int, lease: Grant | None) -> int:
        """The most SMs of a device that one may have while others of its class have what they have.

        `lease`: what it has already.
        """
        cells, most = self.devices[device], request.parts[0].most
        if not self.is_ruled:
            return min(most, cells.total)
        # What is beyond the least it gives back before its end.
        length = 0.0 if request.duration is None else self._known_length(request, device)
        count = self._cells_ever(request, device, length)
        most = min(most, count * cells.size + cells.remainder)
        return min(most, request.flow.cap - request.flow.sms + (lease.sms if lease else 0))

    def most(self, request: Request, devices: Sequence[int]) -> int:
        """The most SMs it could ever be granted."""
        if not self.is_ruled:
            return max(self.devices[d].total for d in devices)
        most = 0
        for device in devices:
            cells = self.devices[device]
            length = self._known_length(request, device)
            count = self._cells_ever(request, device, length)
            sms = cells.total if count == cells.count else count * cells.size
            most = max(most, min(sms, request.flow.cap))
        return most

    # -- giving and taking back ------------------------------------------------------------------

    def give(
        self, request: Request, device: int, masks: tuple[int, ...], now: float
    ) -> tuple[Grant, ...]:
        """Leases free cells. Whatever else holds, no cell is leased twice."""
        cells, free, flow = self.devices[device], self.free[device], request.flow
        floors = self.floors[device]
        leases = []
        for i, mask in enumerate(masks):
            if mask & ~free:
                raise AssertionError(f"cells granted twice: {mask:b} of {free:b}")
            sms = cells.sms(mask)
            lease = Grant(device, mask, sms, request.holder, request, now)
            if flow.shared:
                lease.is_apart = False
            else:
                self.apart[device] += 1
            if floors.owners:
                have, taken = (free & cells.equal).bit_count(), (mask & cells.equal).bit_count()
                part = request.parts[i]
                least = taken if part.named else min(taken, -(-part.least // cells.size))
                floors.take(have, lease, taken, least, request.fewest)
                if request.is_elastic:
                    floors.note(lease)
            free &= ~mask
            flow.sms += sms
            if self.is_classed or request.duration is not None:
                self.charge(flow, lease, request, now)
            self.live[device][lease] = None
            leases.append(lease)
        self.free[device] = free
        return tuple(leases)

    def charge(self, flow: ClassState, lease: Grant, request: Request, now: float) -> None:
        flow.granted += 1
        seconds = flow.mean if request.duration is None else request.seconds(lease.sms)
        if seconds:
            lease.ends = now + seconds
            self.clock.charge(flow, lease, seconds)

    def take_back(self, lease: Grant, now: float) -> None:
        """The cells of a lease are free."""
        device, flow = lease.device, lease.flow
        cells, floors = self.devices[device], self.floors[device]
        del self.live[device][lease]
        flow.sms -= lease.sms
        if lease.is_seat:
            del self.seats[device][lease]
        else:
            self.apart[device] -= lease.is_apart
            self.free[device] |= lease.mask
            if floors.owners:
                floors.give(lease, (lease.mask & cells.equal).bit_count())
                if lease.is_short:
                    floors.note(lease, is_over=True)
        if not lease.is_paused and (self.is_classed or lease.request.duration is not None):
            self._settle(flow, lease, lease.request, now)

    def pause(self, lease: Grant, now: float) -> None:
        """A lease of a class is over, but for its cells; it is charged for and counted as any."""
        lease.is_paused = True
        self._settle(lease.flow, lease, lease.request, now)

    def resume(self, lease: Grant, now: float) -> None:
        """Another begins, on the cells of one that is paused."""
        lease.is_paused = False
        lease.request.arrived = now
        lease.begin(now)
        self.charge(lease.flow, lease, lease.request, now)

    def _settle(self, flow: ClassState, lease: Grant, request: Request, now: float) -> None:
        self.clock.settle(flow, lease, now)
        duration, took = request.duration, now - lease.began
        expected = None if duration is None else request.seconds(lease.sms)
        flow.saw_lease(took, now - lease.since, expected)
        if not lease.had:
            lease.request.learn(lease.sms, took)
        if flow.latency is not None and not flow.is_told and not lease.had:
            flow.saw_latency(now - request.arrived, 1)
            if flow.shared:
                self.verdict.saw(flow, now - request.arrived, 1, now)

    def saw_piece(self, lease: Grant, duration: Duration, now: float) -> None:
        """A piece of a lease is done, of which the duration is known; that of the next is given."""
        request, flow, took = lease.request, lease.flow, now - lease.since
        if request.duration is not None:
            request.learn(lease.sms, took)
            if not flow.is_told:
                flow.saw_latency(took, 1)
        request.duration, request.is_blind = duration, False

    def shrink(self, lease: Grant, least: int) -> int:
        """An elastic lease gives back what is above so many SMs, as far as partitions are there.

        Returns the cells it should keep and over which no partition is made; 0: none.
        """
        device = lease.device
        cells, floors = self.devices[device], self.floors[device]
        outside = lease.mask & ~floors.all_blocks | lease.mask & floors.blocks.get(lease.flow, 0)
        wish, missing = SizeRange(least, least), 0
        for among in (outside, lease.mask):
            mask = cells.fit(among, wish, self.warm[device])
            if not mask or mask == lease.mask:
                continue
            if self.is_made(device, mask):
                self._shrink_to(lease, mask)
                return 0
            missing = missing or mask
        needed, own = -(-least // cells.size), (lease.mask & cells.equal).bit_count()
        instead = self.made_within(device, lease.mask, needed, own - 1) if missing else 0
        if instead:
            self._shrink_to(lease, instead)
        return missing

    def _shrink_to(self, lease: Grant, mask: int) -> None:
        cells, floors = self.devices[lease.device], self.floors[lease.device]
        if floors.owners:
            floors.give(lease, (lease.mask & ~mask & cells.equal).bit_count())
        self._change(lease, mask)

    def made_within(self, device: int, among: int, least: int, most: int) -> int:
        """The smallest partition that is made, of so many cells of a set; 0: there is none.

        Making one waits until a device has nothing to do, on some drivers: a busy one never has.
        """
        for count in range(least, most + 1):
            for made in self.warm[device].get(count, ()):
                if made & ~among == 0:
                    return made
        return 0

    def grow(self, lease: Grant, before: int) -> int:
        """An elastic lease takes up idle cells; where it can, those it had before.

        Returns the cells it should have and over which no partition is made; 0: none.
        """
        device, flow, request = lease.device, lease.flow, lease.request
        cells, floors, free = self.devices[device], self.floors[device], self.free[device]
        have = (free & cells.equal).bit_count()
        _, room = floors.room(have, request, request.fewest)
        own = (lease.mask & cells.equal).bit_count()
        room = min(room, (flow.cap - flow.sms) // cells.size)
        most = min(own + room, request.wants[0].most // cells.size)
        # With the remainder fewer equal cells may be more SMs.
        if most < own or lease.sms >= request.wants[0].most or (most == own and not cells.joins):
            return 0
        among = lease.mask | self.visible(flow, device, most - own)
        limit = request.wants[0].most
        if most < cells.count:
            limit = min(limit, most * cells.size + cells.remainder)
        limit = min(limit, flow.cap - flow.sms + lease.sms)
        mask = cells.fit(among, SizeRange(request.parts[0].least, limit), self.warm[device])
        best = self._largest_made(device, lease.mask | free, most, limit)
        is_made = mask and self.is_made(device, mask)
        if is_made and cells.sms(mask) >= cells.sms(best):
            best = mask
        was = cells.sms(before)
        is_within = was <= limit and (before & cells.equal).bit_count() <= most
        if is_within and was >= cells.sms(best) and not before & ~(free | lease.mask):
            self._grow_to(lease, before, own)
            return 0
        if cells.sms(best) > lease.sms:
            self._grow_to(lease, best, own)
        return 0 if cells.sms(best) >= cells.sms(mask) else mask

    def _largest_made(self, device: int, among: int, most: int, limit: int) -> int:
        """The largest partition that is made, of at most so many equal cells and SMs; 0: none."""
        cells, found = self.devices[device], 0
        for count in range(most + 1, 0, -1):  # one more where the remainder is in it
            for made in self.warm[device].get(count, ()):
                if made & ~among or (made & cells.equal).bit_count() > most:
                    continue
                if cells.sms(found) < cells.sms(made) <= limit:
                    found = made
            if found:
                break
        return found

    def _grow_to(self, lease: Grant, mask: int, own: int) -> None:
        cells, floors = self.devices[lease.device], self.floors[lease.device]
        if floors.owners:
            have = (self.free[lease.device] & cells.equal).bit_count()
            more = (mask & cells.equal).bit_count() - own
            if more > 0:
                floors.take(have, lease, more, 0, lease.request.fewest)
            elif more < 0:
                floors.give(lease, -more)
        self._change(lease, mask)

    def _change(self, lease: Grant, mask: int) -> None:
        device, sms = lease.device, self.devices[lease.device].sms(mask)
        free = self.free[device] | lease.mask
        if mask & ~free:
            raise AssertionError(f"cells granted twice: {mask:b} of {free:b}")
        self.free[device] = free & ~mask
        lease.flow.sms += sms - lease.sms
        lease.mask, lease.sms = mask, sms
        self.floors[device].note(lease)

    # -- what is to be expected ------------------------------------------------------------------

    def free_at(self, device: int, request: Request, now: float) -> float:
        """When a request fits on a device if nobody else is granted there, as far as is known.

        A lease of which nothing is known, or that takes longer than was known, may end any moment.
        """
        cells, free = self.devices[device], self.free[device]
        ends = [(x.frees_at(now), x.mask) for x in self.live[device] if not x.is_seat]
        at = now
        if self.seats[device] and not request.flow.shared:
            at = max(lease.frees_at(now) for lease in self.seats[device])
        if not cells.fit_all(free, request.parts):
            for end, mask in sorted(ends):
                at = max(at, end)
                free |= mask
                if cells.fit_all(free, request.parts):
                    break
        return at

    def running(self, now: float) -> float:
        """SM-seconds that leases are expected to take from now on."""
        leases = (lease for of_device in self.live for lease in of_device)
        return sum(lease.sms * max(0.0, (lease.ends or now) - now) for lease in leases)


def lowest(mask: int, count: int) -> int:
    """So many of the lowest cells of a set, or all."""
    chosen = 0
    while count > 0 and mask:
        cell = mask & -mask
        chosen |= cell
        mask ^= cell
        count -= 1
    return chosen
