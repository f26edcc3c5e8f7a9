"""How kernels that run at the same time share SMs and memory bandwidth. Pure arithmetic.

Roofline, shared: a kernel's speed is the smaller of what its SMs allow and what its part of the
memory bandwidth allows. An SM with k kernels on it gives each 1/k; the bandwidth is given out
fairly (who asks little gets it all, the others share what is left). L2 is not modelled. A model,
not a promise: nothing here says what a real GPU's memory system does to two tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from greensched.typing import Cost


class Kernel(Protocol):
    """What of a running kernel matters here: its SMs (a mask), the most it can use, its cost."""

    sms: int
    cap: int
    cost: Cost


def speeds(kernels: Sequence[Kernel], bandwidth: float) -> list[float]:
    """The speed of each kernel, as a fraction of its work per nanosecond.

    Args:
        kernels: all that run on the device now; each has work to do.
        bandwidth: of the device, bytes a second.
    """
    per_ns = bandwidth / 1e9
    alone = [
        1.0 / max(k.cost.sm_ns / share, k.cost.dram_bytes / per_ns)
        for k, share in zip(kernels, sm_shares(kernels), strict=True)
    ]
    wanted = [k.cost.dram_bytes * speed for k, speed in zip(kernels, alone, strict=True)]
    if sum(wanted) <= per_ns:
        return alone
    granted = fair(wanted, per_ns)
    return [
        min(speed, grant / k.cost.dram_bytes) if k.cost.dram_bytes else speed
        for k, speed, grant in zip(kernels, alone, granted, strict=True)
    ]


def sm_shares(kernels: Sequence[Kernel]) -> list[float]:
    """How many SMs' worth each kernel gets, and no more than it has blocks for."""
    union = crowded = 0
    for kernel in kernels:
        crowded |= union & kernel.sms
        union |= kernel.sms
    if not crowded:
        return [float(kernel.cap) for kernel in kernels]
    users = {sm: sum(1 for k in kernels if k.sms >> sm & 1) for sm in bits(crowded)}
    return [
        min(
            float(k.cap),
            (k.sms & ~crowded).bit_count() + sum(1 / users[sm] for sm in bits(k.sms & crowded)),
        )
        for k in kernels
    ]


def fair(wanted: Sequence[float], capacity: float) -> list[float]:
    """Max-min fair: the smallest wishes are met, the rest share what is left."""
    granted = [0.0] * len(wanted)
    left = capacity
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for rank, index in enumerate(order):
        granted[index] = min(wanted[index], left / (len(order) - rank))
        left -= granted[index]
    return granted


def bits(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]
