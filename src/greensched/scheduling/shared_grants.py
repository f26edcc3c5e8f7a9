"""Seats: leases of all SMs of a device that is not split, several at once. See `sharing`."""

from __future__ import annotations

from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.requests import Grant, Request
from greensched.scheduling.reservations import lengths


def may_sit(ground: SMAllocator, request: Request, device: int) -> bool:
    """Whether a request may be granted a seat, and so all SMs, beside whoever has one."""
    flow, total = request.flow, ground.devices[device].total
    if not flow.shared or ground.verdict.is_split or ground.apart[device]:
        return False
    if len(request.parts) > 1 or flow.sms + total > flow.cap:
        return False
    # Whoever has a floor here and did not say `shared` will have to wait for all seats.
    owners = [owner for owner in ground.floors[device].owners if not owner.shared]
    length = lengths(request, total)[0] if owners else 0.0
    lends = flow.preemptible and length > 0
    return all(lends and length <= o.budget and not o.waiting for o in owners)


def seat(ground: SMAllocator, device: int) -> int:
    """A seat that nobody has."""
    taken = {lease.mask for lease in ground.seats[device]}
    number = 0
    while (seat := ground.devices[device].seat(number)) in taken:
        number += 1
    return seat


def give_seat(
    ground: SMAllocator, request: Request, device: int, seat: int, now: float
) -> tuple[Grant, ...]:
    """Leases all SMs of a device to one more."""
    flow, total = request.flow, ground.devices[device].total
    lease = Grant(device, seat, total, request.holder, request, now)
    lease.is_seat, lease.is_apart = True, False
    flow.sms += total
    ground.charge(flow, lease, request, now)
    ground.live[device][lease] = ground.seats[device][lease] = None
    return (lease,)


def sit(ground: SMAllocator, lease: Grant, seat: int) -> None:
    """A lease gives its cells back, and has a seat from now on."""
    device, cells = lease.device, ground.devices[lease.device]
    if ground.floors[device].owners:
        ground.floors[device].give(lease, (lease.mask & cells.equal).bit_count())
        ground.floors[device].note(lease, is_over=True)
    ground.free[device] |= lease.mask
    ground.seats[device][lease] = None
    lease.flow.sms += cells.total - lease.sms
    lease.mask, lease.sms, lease.is_seat = seat, cells.total, True


def stand_up(ground: SMAllocator, lease: Grant) -> int:
    """A lease has the least it asked for instead of its seat, if that is free.

    Returns the cells it should have and over which no partition is made; 0: none.
    """
    device, flow, request = lease.device, lease.flow, lease.request
    cells, floors = ground.devices[device], ground.floors[device]
    flow.sms -= lease.sms  # what it would have instead is within the class's cap
    least = -(-request.parts[0].least // cells.size)
    (mask,) = ground.fit(request, device, least) or (0,)
    missing = 0 if ground.is_made(device, mask) else mask
    if missing and least:
        have = (ground.free[device] & cells.equal).bit_count()
        room, _ = floors.room(have, request, lease.sms)
        mask = ground.made_within(device, ground.visible(flow, device, room), least, room)
    if not mask or (missing and mask == missing):
        flow.sms += lease.sms
        return missing
    lease.sms = cells.sms(mask)
    flow.sms += lease.sms
    if floors.owners:
        have, taken = (
            (ground.free[device] & cells.equal).bit_count(),
            (mask & cells.equal).bit_count(),
        )
        floors.take(have, lease, taken, taken, lease.sms)
    ground.free[device] &= ~mask
    del ground.seats[device][lease]
    lease.mask, lease.is_seat = mask, False
    floors.note(lease)
    return missing


def is_claimed(ground: SMAllocator, device: int) -> bool:
    """Whether somebody on a seat, whose device is to be split, has to find room for his least."""
    seats = ground.seats[device]
    return ground.verdict.is_split and any(not x.draining for x in seats)
