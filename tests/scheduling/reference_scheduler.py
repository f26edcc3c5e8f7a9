"""The scheduler's rules once more, with lists and brute force, to check the real one against.

It does not choose cells: it says which request must be granted next and on which devices, checks
what the real one granted, and takes that over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from greensched.scheduling.cells import DeviceCells
from greensched.scheduling.requests import Grant, GrantState, Request
from greensched.typing import REST

from .reference_cells import fits, is_enough, is_no_excess, possible, rest_of, sms, subsets


@dataclass
class ReferenceScheduler:
    """The waiting requests, the leases, and the request for which a device is kept."""

    devices: list[DeviceCells]
    ageing: float
    waiting: list[Request] = field(default_factory=list)
    leases: list[Grant] = field(default_factory=list)
    kept: tuple[Request, int] | None = None

    # -- facts ---------------------------------------------------------------------------------

    def free(self, device: int) -> int:
        taken = 0
        for lease in self.leases:
            if lease.device == device:
                taken |= lease.mask
        return self.devices[device].full_mask & ~taken

    def free_sms(self, device: int) -> int:
        return sms(self.devices[device], self.free(device))

    def grantable_sms(self, device: int) -> int:
        """Return the SMs of the largest partition that free cells can form."""
        cells = self.devices[device]
        masks = [mask for mask in subsets(self.free(device)) if possible(cells, mask)]
        return max((sms(cells, mask) for mask in masks), default=0)

    def in_order(self) -> list[Request]:
        """Return requests by priority, then by arrival."""
        return sorted(self.waiting, key=lambda request: (-request.priority, request.order))

    def where_fits(self, request: Request) -> list[int]:
        """Return the devices on which a request fits now and that are kept for no other request."""
        return [
            device
            for device in request.devices
            if (
                self.kept is None
                or self.kept[0] is request
                or self.kept[1] != device
                or device in request.held_devices
            )
            and fits(self.devices[device], self.free(device), request.parts)
        ]

    def where_fits_ever(self, request: Request, *, beside_own: bool) -> list[int]:
        """Return the devices on which a request fits once all other leases have ended."""
        able = []
        for device in request.devices:
            cells, own = self.devices[device], 0
            for lease in self.leases:
                mine = request.holder is not None and lease.holder == request.holder
                if beside_own and mine and lease.device == device and not lease.draining:
                    own |= lease.mask
            if fits(cells, cells.full_mask & ~own, request.parts):
                able.append(device)
        return able

    # -- what happens --------------------------------------------------------------------------

    def keep_a_device(self, now: float) -> None:
        """Keep a device for the first request that does not fit, if it has aged."""
        blocked = [request for request in self.in_order() if not self.where_fits(request)]
        if self.kept is None and blocked and now - blocked[0].arrived >= self.ageing:
            able = self.where_fits_ever(blocked[0], beside_own=True) or blocked[0].devices
            most = max(self.free_sms(device) for device in able)
            chosen = next(device for device in able if self.free_sms(device) == most)
            self.kept = (blocked[0], chosen)

    def take_over(self, request: Request) -> None:
        """Check a grant of the real scheduler and its leases, and adopt them."""
        able = self.where_fits(request)
        (device,) = {lease.device for lease in request.grants}
        assert device in able
        assert self.free_sms(device) == max(map(self.free_sms, able))
        cells, free, union = self.devices[device], self.free(device), 0
        assert request.state is GrantState.GRANTED
        assert len(request.grants) == len(request.parts)
        for lease, part in zip(request.grants, request.parts, strict=True):
            assert lease.mask & ~free == 0, "granted what was not free"
            assert lease.mask & union == 0, "granted twice in one request"
            assert lease.sms == sms(cells, lease.mask)
            assert lease.holder == request.holder
            assert possible(cells, lease.mask)
            union |= lease.mask
            if part.named is None or len(request.parts) == 1:
                assert is_enough(cells, lease.mask, part)
            if part.named is None:
                assert is_no_excess(cells, lease.mask, part)
        for lease, part in zip(request.grants, request.parts, strict=True):
            if part.named is REST:
                assert lease.mask == rest_of(cells, union & ~lease.mask)
        self.leases.extend(request.grants)
        if request in self.waiting:
            self.waiting.remove(request)
        if self.kept is not None and self.kept[0] is request:
            self.kept = None

    def dispatch(self, now: float, granted: list[Request]) -> None:
        """Check the grants and their order: the request with a kept device, then by rank."""
        for request in granted:
            assert request is self.next_one(now), "granted out of order"
            self.take_over(request)
        if any(map(self.free, range(len(self.devices)))):
            self.keep_a_device(now)

    def next_one(self, now: float) -> Request | None:
        if self.kept is not None and self.where_fits(self.kept[0]):
            return self.kept[0]
        for candidate in self.in_order():
            if self.where_fits(candidate):
                return candidate
            self.keep_a_device(now)  # for the first that is blocked: those behind see it
        return None

    def leave(self, request: Request) -> bool:
        """Remove a request that stops waiting; true if a device was kept for it."""
        self.waiting.remove(request)
        kept = self.kept is not None and self.kept[0] is request
        if kept:
            self.kept = None
        return kept
