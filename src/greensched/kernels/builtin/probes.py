"""Kernels without results: `spin` takes time, `smids` records SMs, `latch` waits for the host.

`%globaltimer` is the clock of the device in nanoseconds; its resolution depends on the device (1 us
on many). Source: PTX ISA, "Special Registers: %globaltimer, %smid".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from greensched.kernels.program import Program
from greensched.typing import Cost, LaunchFacts

if TYPE_CHECKING:
    import numpy as np

    from greensched.kernels.builtin.common import Words

_SOURCE = r"""
static __device__ unsigned long long now() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

static __device__ void stay(unsigned long long ns) {
    const unsigned long long start = now();
    while (now() - start < ns) { }
}

extern "C" __global__ void spin(unsigned long long ns) { stay(ns); }

extern "C" __global__ void smids(unsigned *seen, unsigned long long ns) {
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0) atomicOr(&seen[sm / 32], 1u << sm % 32);
    stay(ns);
}

extern "C" __global__ void latch(const unsigned *word, unsigned long long timeout_ns) {
    // One thread of a block polls, with pauses, because each read crosses the bus.
    if (threadIdx.x + threadIdx.y + threadIdx.z != 0) return;
    const volatile unsigned *look = word;
    const unsigned long long start = now();
    while (*look == 0 && (timeout_ns == 0 || now() - start < timeout_ns)) __nanosleep(100);
}
"""

_program = Program(_SOURCE, name="greensched/probes.cu")

#: `spin(unsigned long long ns)`: each block is busy for this time.
spin = _program.kernel("spin")
#: `smids(unsigned *seen, unsigned long long ns)`: each block sets the bit of its SM in the bit mask
#: `seen` (bit 0 of word 0 is SM 0; 32 SMs per word, zeroed by the caller) and runs for `ns`
#: nanoseconds, so that the blocks spread over all SMs that they may use. With as many threads as a
#: block can have, two or more blocks per SM are enough.
smids = _program.kernel("smids")
#: `latch(const unsigned *word, unsigned long long timeout_ns)`: runs until the word, in pinned host
#: memory, is not 0, or the timeout has passed (0: no timeout).
latch = _program.kernel("latch")

#: The most blocks on an SM at a time, by compute capability; 32 if not listed. Source: CUDA C++
#: programming guide, "Technical Specifications per Compute Capability".
_BLOCKS_PER_SM = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}


@spin.reference
@latch.reference
def _nothing(_launch: LaunchFacts, *_arguments: Any) -> None:
    """Do nothing: only the time matters."""


@smids.reference
def _smids(launch: LaunchFacts, seen: Words, _ns: np.uint64) -> None:
    # Blocks go to idle SMs first, so fewer blocks than SMs mark as many SMs as there are blocks.
    for sm in launch.sms[: math.prod(launch.grid)]:
        seen[sm // 32] |= seen.dtype.type(1 << sm % 32)


@spin.cost
@smids.cost
def _timed(launch: LaunchFacts, *arguments: Any) -> Cost:
    return Cost(fixed_ns=_rounds(launch) * float(arguments[-1]))


@latch.cost
def _latch_cost(_launch: LaunchFacts, word: Words, timeout_ns: np.uint64) -> Cost:
    return Cost(until=lambda: bool(word[0]), limit_ns=float(timeout_ns) or None)


def _rounds(launch: LaunchFacts) -> int:
    """Return how many times the SMs fill up. Blocks that only wait do not slow each other."""
    device = launch.device
    threads = math.prod(launch.block)
    per_sm = min(
        device.max_threads_per_sm // threads, _BLOCKS_PER_SM.get(device.compute_capability, 32)
    )
    if launch.shared_bytes:
        per_sm = min(per_sm, device.max_shared_bytes // launch.shared_bytes)
    return math.ceil(math.prod(launch.grid) / (len(launch.sms) * max(per_sm, 1)))
