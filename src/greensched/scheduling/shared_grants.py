"""Shared grants: several leases of all SMs of an unsplit device. See `split_controller`."""

from __future__ import annotations

from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.requests import Grant, Request
from greensched.scheduling.reservations import expected_times


def can_share(allocator: SMAllocator, request: Request, device: int) -> bool:
    """Say whether a request may have a shared grant, next to the existing ones."""
    state, total = request.class_state, allocator.devices[device].total
    if not state.shared or allocator.split_controller.is_split or allocator.exclusive[device]:
        return False
    if len(request.parts) > 1 or state.sms + total > state.cap:
        return False
    # An unshared class with a reserve here will have to wait for all shared grants.
    owners = [owner for owner in allocator.reservations[device].owners if not owner.shared]
    length = expected_times(request, total)[0] if owners else 0.0
    lends = state.preemptible and length > 0
    return all(lends and length <= owner.max_wait and not owner.waiting for owner in owners)


def free_mask(allocator: SMAllocator, device: int) -> int:
    """Return an unused mask for a shared grant."""
    taken = {grant.mask for grant in allocator.shared_grants[device]}
    number = 0
    while (mask := allocator.devices[device].shared_mask(number)) in taken:
        number += 1
    return mask


def enter_or_leave(allocator: SMAllocator, grant: Grant) -> int:
    """At a checkpoint, make a grant shared or exclusive, depending on whether its device is split.

    Returns the cells that it should have but that have no executor, or 0.
    """
    # A request of an unshared class may be waiting only for the shared grants.
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
    """Say whether shared grants of a split device still need cells there."""
    grants = allocator.shared_grants[device]
    return allocator.split_controller.is_split and any(not grant.draining for grant in grants)
