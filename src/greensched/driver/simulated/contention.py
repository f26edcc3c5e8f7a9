"""How kernels on one device share its SMs and its memory bandwidth. Pure arithmetic.

*Room.* The threads of a kernel's blocks take up their part of the SMs, and an SM is given out
first come, first served: blocks of a later kernel start in the room that earlier ones leave over,
and where they leave none it waits. So a short kernel behind a large grid waits for that grid,
whatever it may be in a hurry for; on SMs of its own it does not.

*Arithmetic.* The blocks on an SM share what it computes by their threads, as its warp schedulers
do, but none gets more than it can use; a block alone on an SM has all of it.

*Bandwidth* is everybody's: max-min fair, who asks little gets it all, the others share the rest.

A model, not a promise. Blocks are counted in fractions, and all of a grid until the whole of it
ends: a real one gives SMs back block by block in its last wave, and blocks with nothing to do at
once. Threads are all that takes room: registers, shared memory and stream priorities are not
modelled, nor is L2; and nothing here says what a real memory system does to two tenants.

Source for the order: "leftover" block scheduling. CUDA programming guide, green contexts: even a
kernel of high priority waits for blocks that are resident, and on SMs of its own starts at once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from greensched.typing import Cost

#: Fractions of blocks add up to a whole one but for so much.
ROUNDING = 1e-9


class Kernel(Protocol):
    """What of a kernel matters here.

    Attributes:
        sms: those it may use, a mask.
        cap: the most SMs it can use at once.
        part: of an SM's room that one block takes.
        room: that all its blocks take, in SMs' worth.
        working: it does what its cost puts in SM time or bytes; else it only takes room.
        cost: of all of it.
    """

    sms: int
    cap: int
    part: float
    room: float
    working: bool
    cost: Cost


class Area:
    """SMs that the same kernels may use. What is said of them is said of each one of them.

    Attributes:
        sms: a mask.
        free: the part of its room that nobody has.
        held: the part that each kernel has, by number.
    """

    __slots__ = ("free", "held", "size", "sms")

    def __init__(self, sms: int, free: float, held: dict[int, float]) -> None:
        self.sms = sms
        self.size = sms.bit_count()
        self.free = free
        self.held = held

    def cut(self, sms: int) -> Area:
        """Keeps these SMs; returns the others."""
        rest = Area(self.sms & ~sms, self.free, dict(self.held))
        self.sms &= sms
        self.size = self.sms.bit_count()
        return rest


def settle(kernels: Sequence[Kernel]) -> tuple[list[bool], list[float]]:
    """Whether each kernel has room to run, and how many SMs' worth it computes with.

    Args:
        kernels: all on the device, in the order they came.
    """
    runs = [True] * len(kernels)
    shares = [float(kernel.cap) if kernel.working else 0.0 for kernel in kernels]
    indices = _crowd(kernels)
    if not indices:
        return runs, shares
    crowd = [kernels[i] for i in indices]
    areas, rooms = _place(crowd)
    computed = _compute(crowd, areas)
    for index, kernel, room, share in zip(indices, crowd, rooms, computed, strict=True):
        runs[index] = room >= kernel.part * (1 - ROUNDING)
        shares[index] = share
    return runs, shares


def _crowd(kernels: Sequence[Kernel]) -> list[int]:
    """Those that may use an SM which another may use too; the others need no arithmetic."""
    union = crowded = 0
    for kernel in kernels:
        crowded |= union & kernel.sms
        union |= kernel.sms
    return [i for i, kernel in enumerate(kernels) if kernel.sms & crowded] if crowded else []


def _place(kernels: Sequence[Kernel]) -> tuple[list[Area], list[float]]:
    """Gives out the room, in the order the kernels came: where, and how much to each.

    What a kernel needs is spread over its SMs as the room on them is. Whoever lacks room takes
    what there is, so that nobody overtakes him on his SMs; as room only grows when a kernel ends,
    who has begun never loses any.
    """
    areas = [Area(functools.reduce(operator.or_, (k.sms for k in kernels)), 1.0, {})]
    rooms = []
    for number, kernel in enumerate(kernels):
        mine, free = [], 0.0
        for area in tuple(areas):
            shared = area.sms & kernel.sms
            if not shared:
                continue
            if shared != area.sms:
                areas.append(area.cut(shared))
            if area.free > 0:
                mine.append(area)
                free += area.size * area.free
        rooms.append(min(kernel.room, free))
        taken = min(1.0, kernel.room / free) if mine else 0.0
        for area in mine:
            area.held[number] = area.free * taken
            area.free *= 1.0 - taken
    return areas, rooms


def _compute(kernels: Sequence[Kernel], areas: Sequence[Area]) -> list[float]:
    """Gives out the arithmetic of the SMs: how many SMs' worth each kernel computes with."""
    # One block can use a whole SM, but all of a kernel's together no more than `cap`.
    usable, shares = [0.0] * len(kernels), [0.0] * len(kernels)
    wishes = [
        {i: min(1.0, part / kernels[i].part) for i, part in area.held.items() if kernels[i].working}
        for area in areas
    ]
    for area, wish in zip(areas, wishes, strict=True):
        for i, wanted in wish.items():
            usable[i] += area.size * wanted
    for area, wish in zip(areas, wishes, strict=True):
        capped = [wanted * min(1.0, kernels[i].cap / usable[i]) for i, wanted in wish.items()]
        granted = fair(capped, 1.0, [area.held[i] for i in wish])
        for i, grant in zip(wish, granted, strict=True):
            shares[i] += area.size * grant
    return shares


def speeds(kernels: Sequence[Kernel], shares: Sequence[float], bandwidth: float) -> list[float]:
    """The speed of each kernel, as a fraction of its work per nanosecond.

    Roofline: the smaller of what its SMs allow and what its part of the bandwidth allows.

    Args:
        kernels: those that are working; each has work to do.
        shares: how many SMs' worth each computes with.
        bandwidth: of the device, bytes a second.
    """
    per_ns = bandwidth / 1e9
    alone = [
        1.0 / max(k.cost.sm_ns / share, k.cost.dram_bytes / per_ns)
        for k, share in zip(kernels, shares, strict=True)
    ]
    wanted = [k.cost.dram_bytes * speed for k, speed in zip(kernels, alone, strict=True)]
    if sum(wanted) <= per_ns:
        return alone
    granted = fair(wanted, per_ns, [1.0] * len(wanted))
    return [
        min(speed, grant / k.cost.dram_bytes) if k.cost.dram_bytes else speed
        for k, speed, grant in zip(kernels, alone, granted, strict=True)
    ]


def fair(wanted: Sequence[float], capacity: float, weights: Sequence[float]) -> list[float]:
    """Weighted max-min: small wishes are met, the rest share what is left by their weights."""
    granted = [0.0] * len(wanted)
    left = capacity
    # Those who ask most for their weight come last; summed from there, no weight is lost.
    order = sorted(range(len(wanted)), key=lambda i: wanted[i] / weights[i], reverse=True)
    waiting = list(accumulate(weights[i] for i in order))
    for index, weight in zip(reversed(order), reversed(waiting), strict=True):
        granted[index] = min(wanted[index], left * weights[index] / weight)
        left -= granted[index]
    return granted


def bits(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]
