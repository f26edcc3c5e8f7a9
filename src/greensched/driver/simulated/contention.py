"""How kernels on one device share its SMs and its memory bandwidth. Pure arithmetic.

*Occupancy.* The threads of a kernel's blocks occupy part of each SM, first come, first served:
blocks of a later kernel start in the space that earlier kernels leave; if there is none, the kernel
waits. So a short kernel after a large grid waits for that grid, but not on SMs of its own.

*Waves.* A grid larger than the space runs in waves. Once only its last, partial wave is left, the
rest of the space is free. At the end of a wave, a waiting kernel of higher stream priority
precedes the blocks that have not begun: it waits for one wave, not for the grid.

*Arithmetic.* The blocks on an SM share its compute by their numbers of threads, as its warp
schedulers do, but none gets more than it can use; a block alone on an SM gets all of it.

*Bandwidth* is shared by all kernels in proportion to the bytes that each has in flight (Little's
law): small demands are met, and the rest is shared. No SM draws more than its own bytes in flight
allow, and a kernel near the device's bandwidth waits longer for each byte (`SATURATION`).

*Power.* The board lowers the clock of all SMs until its power, idle plus dynamic, is within the
limit. Dynamic power grows with the cube of the clock (frequency times voltage squared).

This is a model, not a promise. Blocks are counted in fractions, and all blocks of a wave end
together. Only threads take space: registers, shared memory and L2 are not modelled, nor effects of
a real memory system on two tenants apart from bandwidth.

Source for the order: "leftover" block scheduling. CUDA programming guide, green contexts: even a
high-priority kernel waits for resident blocks, but starts at once on SMs of its own.
Source for the power: an H200 beside training on 16, 84 and 132 SMs
(docs/measurements/h200-580/workloads.txt); the cube is within 3 % of its clocks.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from greensched.typing import Cost

#: The rounding error within which fractions of blocks count as a whole block.
ROUNDING = 1e-9
#: How one kernel's bandwidth passes from its SMs' limit to the device's: the exponent that combines
#: them. Fitted to copies of 16 bytes a thread on 8 to 120 SMs of an H100, within 6 %; for
#: 4 bytes a thread it is within 23 % (docs/measurements/h100-580/bandwidth.json).
SATURATION = 2.5
#: The exponent of a kernel's bytes in flight in its share, because ports of few SMs are less
#: crowded. Fitted to the splits of 32 and 96 SMs there; for the held-out ones of 16 and 64, within
#: 15 %.
CROWDING = 0.9


class HasCost(Protocol):
    """What `speeds` needs from a kernel."""

    cost: Cost


class Kernel(HasCost, Protocol):
    """What the arithmetic needs from a kernel.

    Attributes:
        sms: A mask of the SMs that it may use.
        cap: The most SMs that it can use at once.
        part: The fraction of an SM that one block occupies.
        occupancy: How many SMs all its blocks occupy, in whole-SM equivalents.
        working: Whether it is in the phase that SM time or bytes determine; otherwise it only
            occupies its SMs.
        cost: Its total cost.
        started: Whether it has begun.
        priority: The priority of its stream; less is more urgent.
        yields: Whether, having begun, its next blocks come after those of more urgent kernels.
    """

    sms: int
    cap: int
    part: float
    occupancy: float
    working: bool
    started: bool
    priority: int
    yields: bool


class Area:
    """SMs that the same kernels may use. `free` and `held` are fractions of each of these SMs.

    Attributes:
        sms: A mask of the SMs.
        free: The free fraction.
        held: The fraction that each kernel holds, by its number.
    """

    __slots__ = ("free", "held", "size", "sms")

    def __init__(self, sms: int, free: float, held: dict[int, float]) -> None:
        self.sms = sms
        self.size = sms.bit_count()
        self.free = free
        self.held = held

    def cut(self, sms: int) -> Area:
        """Keep these SMs, and return the others as a new area."""
        rest = Area(self.sms & ~sms, self.free, dict(self.held))
        self.sms &= sms
        self.size = self.sms.bit_count()
        return rest


def settle(kernels: Sequence[Kernel]) -> tuple[list[bool], list[float], list[float]]:
    """Return, for each kernel, whether it has space to run, and the compute and space it gets.

    Compute and space are in whole-SM equivalents.

    Args:
        kernels: All kernels on the device, in the order of their arrival.
    """
    runs = [True] * len(kernels)
    shares = [float(kernel.cap) if kernel.working else 0.0 for kernel in kernels]
    spaces = [kernel.occupancy for kernel in kernels]
    indices = _crowd(kernels)
    if not indices:
        return runs, shares, spaces
    if len({kernels[i].priority for i in indices}) > 1:
        indices.sort(key=lambda i: _precedence(kernels[i]))
    crowd = [kernels[i] for i in indices]
    areas, occupied = _place(crowd)
    computed = _compute(crowd, areas)
    for index, kernel, space, share in zip(indices, crowd, occupied, computed, strict=True):
        runs[index] = space >= kernel.part * (1 - ROUNDING)
        shares[index] = share
        spaces[index] = space
    return runs, shares, spaces


def _precedence(kernel: Kernel) -> tuple[bool, int]:
    """Return the sort key of kernels by priority; resident blocks precede all others."""
    resident = kernel.started and not kernel.yields
    return (not resident, 0 if resident else kernel.priority)


def _crowd(kernels: Sequence[Kernel]) -> list[int]:
    """Return the kernels that share an SM with another kernel; the rest need no arithmetic."""
    union = crowded = 0
    for kernel in kernels:
        crowded |= union & kernel.sms
        union |= kernel.sms
    return [i for i, kernel in enumerate(kernels) if kernel.sms & crowded] if crowded else []


def _place(kernels: Sequence[Kernel]) -> tuple[list[Area], list[float]]:
    """Distribute the space in the order of arrival: return the areas and each kernel's space.

    A kernel's need is spread over its SMs in proportion to their free space. A kernel that lacks
    space takes what there is, so that no later kernel overtakes it on its SMs. Space grows only
    when a kernel ends, so a kernel that has begun never loses any.
    """
    areas = [Area(functools.reduce(operator.or_, (k.sms for k in kernels)), 1.0, {})]
    occupied = []
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
        occupied.append(min(kernel.occupancy, free))
        taken = min(1.0, kernel.occupancy / free) if mine else 0.0
        for area in mine:
            area.held[number] = area.free * taken
            area.free *= 1.0 - taken
    return areas, occupied


def _compute(kernels: Sequence[Kernel], areas: Sequence[Area]) -> list[float]:
    """Distribute the SMs' compute: return each kernel's share in whole-SM equivalents."""
    # One block can use a whole SM, but all blocks of a kernel together at most `cap` SMs.
    usable, shares = [0.0] * len(kernels), [0.0] * len(kernels)
    demands = [
        {i: min(1.0, part / kernels[i].part) for i, part in area.held.items() if kernels[i].working}
        for area in areas
    ]
    for area, demand in zip(areas, demands, strict=True):
        for i, wanted in demand.items():
            usable[i] += area.size * wanted
    for area, demand in zip(areas, demands, strict=True):
        capped = [wanted * min(1.0, kernels[i].cap / usable[i]) for i, wanted in demand.items()]
        granted = fair(capped, 1.0, [area.held[i] for i in demand])
        for i, grant in zip(demand, granted, strict=True):
            shares[i] += area.size * grant
    return shares


def speeds(
    kernels: Sequence[HasCost],
    shares: Sequence[float],
    bandwidth: float,
    sm_bandwidth: float = math.inf,
    clock: float = 1.0,
) -> list[float]:
    """Return the speed of each kernel, as the fraction of its work done per nanosecond.

    Roofline: the smaller of the speeds that its SMs and its share of the bandwidth allow.

    Args:
        kernels: The kernels, which all have work to do.
        shares: The compute that each gets, in whole-SM equivalents.
        bandwidth: The device's bandwidth, in bytes a second.
        sm_bandwidth: The most that an SM draws, in bytes a second.
        clock: The SMs' clock as a fraction of the highest.
    """
    per_ns = bandwidth / 1e9
    flows = [
        share * (k.cost.sm_bandwidth or sm_bandwidth) / 1e9
        for k, share in zip(kernels, shares, strict=True)
    ]
    alone = [
        1.0 / max(k.cost.sm_ns / (share * clock), k.cost.dram_bytes / _drawn(flow, per_ns))
        for k, share, flow in zip(kernels, shares, flows, strict=True)
    ]
    wanted = [k.cost.dram_bytes * speed for k, speed in zip(kernels, alone, strict=True)]
    if sum(wanted) <= per_ns:
        return alone
    weights = [flow**CROWDING for flow in (flows if max(flows) < math.inf else shares)]
    granted = fair(wanted, per_ns, weights)
    return [
        min(speed, grant / k.cost.dram_bytes) if k.cost.dram_bytes else speed
        for k, speed, grant in zip(kernels, alone, granted, strict=True)
    ]


def _drawn(flow: float, per_ns: float) -> float:
    """Return the bandwidth that a kernel alone draws, from the limits of its SMs and device."""
    if math.isinf(flow):
        return per_ns
    return float((flow**-SATURATION + per_ns**-SATURATION) ** (-1 / SATURATION))


def clock(watts: float, idle: float, limit: float) -> float:
    """Return the clock that keeps a board within its power limit, as a fraction of the highest.

    Args:
        watts: The power of its SMs at the highest clock, beyond an idle board.
        idle: The power of an idle board.
        limit: The most power that the board may draw.
    """
    left = limit - idle
    return 1.0 if watts <= left else float((left / watts) ** (1 / 3))


def fair(wanted: Sequence[float], capacity: float, weights: Sequence[float]) -> list[float]:
    """Divide by weighted max-min fairness: meet small demands, share the rest by weight."""
    granted = [0.0] * len(wanted)
    left = capacity
    # The largest demands per weight come last; summed from there, no weight is lost.
    order = sorted(range(len(wanted)), key=lambda i: wanted[i] / weights[i], reverse=True)
    waiting = list(accumulate(weights[i] for i in order))
    for index, weight in zip(reversed(order), reversed(waiting), strict=True):
        granted[index] = min(wanted[index], left * weights[index] / weight)
        left -= granted[index]
    return granted


def bits(mask: int) -> list[int]:
    """Return the positions of the set bits."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]
