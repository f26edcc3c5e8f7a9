"""Shared grants: all SMs of a device that is not split, several at once. See `split_controller`."""

from __future__ import annotations

from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.requests import Grant, Request
from greensched.scheduling.reservations import expected_times


def can_share(allocator: SMAllocator, request: Request, device: int) -> bool:
    """Return whether a request may have a shared grant, beside those that are there."""
    state, total = request.class_state, allocator.devices[device].total
    if not state.shared or allocator.split_controller.is_split or allocator.exclusive[device]:
        return False
    if len(request.parts) > 1 or state.sms + total > state.cap:
        return False
    # A class with a reserve here that is not shared will have to wait for all shared grants.
    owners = [owner for owner in allocator.reservations[device].owners if not owner.shared]
    length = expected_times(request, total)[0] if owners else 0.0
    lends = state.preemptible and length > 0
    return all(lends and length <= owner.max_wait and not owner.waiting for owner in owners)


def free_mask(allocator: SMAllocator, device: int) -> int:
    """Return a mask of a shared grant that no other grant has."""
    taken = {grant.mask for grant in allocator.shared_grants[device]}
    number = 0
    while (mask := allocator.devices[device].shared_mask(number)) in taken:
        number += 1
    return mask


def enter_or_leave(allocator: SMAllocator, grant: Grant) -> int:
    """At a checkpoint, make a grant shared or exclusive, as its device is not split, or is.

    Returns the cells that it should have and that have no executor; 0: none.
    """
    # A request of a class that is not shared may wait for nothing but the shared grants.
    others = any(state.waiting and not state.shared for state in allocator.classes.values())
    if grant.is_shared:
        if not (others or allocator.split_controller.is_split):
            return 0
        least = grant.request.parts[0].least
        mask, missing = allocator.choose_mask(grant, least, least)
    elif not (others or grant.is_exclusive) and can_share(allocator, grant.request, grant.device):
        mask, missing = free_mask(allocator, grant.device), 0
        if not allocator.is_made(grant.device, mask):
            return mask
    else:
        return 0
    if mask:
        allocator.resize(grant, mask)
    return missing


def is_leaving(allocator: SMAllocator, device: int) -> bool:
    """Return whether shared grants of a device that is split still need cells there."""
    grants = allocator.shared_grants[device]
    return allocator.split_controller.is_split and any(not grant.draining for grant in grants)
