"""Interference of kernels on disjoint SMs, by (victim, aggressor).

Kernels share memory, L2 and power. The effect is not symmetric: a GEMM beside a mixture of experts
is up to 1.46 x slower, while the mixture of experts hardly changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from greensched.capacity.latency_tables import MOE, MOE_BESIDE_GEMM

#: Slowdown factors by the SMs of the victim.
Factors = tuple[tuple[int, ...], tuple[float, ...]]
#: Factors by (victim, aggressor), which are names of curves.
Guard = Mapping[tuple[str, str], Factors]

#: GEMM: its time beside the fused MoE kernel, relative to that beside MLA decoding, as published;
#: on 132 SMs it is alone. MoE: the ratio of its two columns. Pairs without measurements have no
#: effect here, and a report lists them.
PUBLISHED: Guard = {
    ("gemm", "moe"): (
        (16, 24, 32, 48, 64, 80, 96, 112, 120, 132),
        (1.42, 1.46, 1.32, 1.28, 1.21, 1.15, 1.09, 1.02, 1.01, 1.00),
    ),
    ("moe", "gemm"): (
        MOE.sms,
        tuple(a / b for a, b in zip(MOE_BESIDE_GEMM, MOE.ms, strict=True)),
    ),
}


def factor(factors: Factors, sms: float) -> float:
    """Interpolate the factor for this many SMs. It is constant beyond the measured sizes."""
    sizes, values = factors
    if sms <= sizes[0]:
        return values[0]
    if sms >= sizes[-1]:
        return values[-1]
    high = bisect_left(sizes, sms)
    part = (sms - sizes[high - 1]) / (sizes[high] - sizes[high - 1])
    return values[high - 1] + part * (values[high] - values[high - 1])


def slowdowns(
    guard: Guard, kinds: Mapping[str, str]
) -> Callable[[Sequence[tuple[str, float]]], list[float]]:
    """Return the `interference` of a device model; each kernel's worst aggressor counts.

    Args:
        guard: The factors.
        kinds: The kind of work of each kernel, by the kernel's name.
    """

    def slowed(at_work: Sequence[tuple[str, float]]) -> list[float]:
        working = [kinds.get(name, "") for name, _ in at_work]
        slowdowns_by_kernel = []
        for i, (_, sms) in enumerate(at_work):
            others = {kind for j, kind in enumerate(working) if j != i}
            pair_factors = [
                guard[working[i], other] for other in others if (working[i], other) in guard
            ]
            slowdowns_by_kernel.append(
                max((factor(factors, sms) for factors in pair_factors), default=1.0)
            )
        return slowdowns_by_kernel

    return slowed
