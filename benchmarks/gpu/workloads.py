"""The workloads of `sharing`, W1, W2, W7 and W8, as kernel launches.

Times in the comments are of an H200. On a simulated device the arrays are small, because it
computes the kernels' references on the host.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from benchmarks.gpu.strategies import Launch, Work, filled
from benchmarks.model.two_users import kept, lent, shared
from greensched import LaunchConfig, Partition, PinnedBuffer, Program, ServiceClass
from greensched.kernels import matmul, saxpy, spin
from greensched.typing import Cost, LaunchFacts

_SOURCE = r"""
extern "C" __global__ void stamp(unsigned *started, float *x, size_t n) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *(volatile unsigned *)started = 1;
        __threadfence_system();
    }
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1.0f;
}

extern "C" __global__ void copy(const float *source, float *target, size_t n) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    // 16 bytes a thread: with 4 too few are under way for all the bandwidth there is.
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n / 4; i += step)
        ((float4 *)target)[i] = ((const float4 *)source)[i];
}
"""
_program = Program(_SOURCE, name="benchmarks/workloads.cu")

#: Tells the host that it has begun, then adds 1 to n items.
stamp = _program.kernel("stamp")
#: Copies n items, a multiple of 4: bound by memory, it takes all the bandwidth.
copy = _program.kernel("copy")

KERNELS = (spin, matmul, saxpy, stamp, copy)


@stamp.reference
def _stamp(_: LaunchFacts, started: Any, x: Any, n: np.uint64) -> None:
    started[0] = 1
    x[: int(n)] += 1


@stamp.cost
def _stamp_cost(_: LaunchFacts, _started: Any, _x: Any, _n: np.uint64) -> Cost:
    return Cost(fixed_ns=2_000)


@copy.reference
def _copy(_: LaunchFacts, source: Any, target: Any, n: np.uint64) -> None:
    target[: int(n)] = source[: int(n)]


@copy.cost
def _copy_cost(_: LaunchFacts, _source: Any, _target: Any, n: np.uint64) -> Cost:
    return Cost(sm_ns=8 * float(n) / 64, dram_bytes=8 * float(n))


@dataclass(slots=True)
class WorkloadLaunches:
    """One workload's launches, on buffers of one pool.

    Attributes:
        critical: one request of the critical user.
        others: one piece of the other user's work, by case.
        started: the word that `stamp` sets.
        keep: buffers, closed with the pool.
    """

    critical: Work
    others: dict[str, Work]
    started: PinnedBuffer | None = None
    keep: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Workload:
    """One of the four.

    Attributes:
        cases: the name of each, and the load of the critical user: the part of the time in which
            that user alone would be busy.
        measures: what is timed: until a kernel begins (one request after another, with pauses),
            or requests at Poisson times, each from when it was due.
        other: the other user is busy without pause, or has requests like the first.
        request: seconds of a request alone, to which its launches are repeated. 0: once.
        share: its part of the time.
        variants: our strategies: the classes of each, given the critical user's SMs.
    """

    name: str
    about: str
    build: Callable[[Partition, bool], Awaitable[WorkloadLaunches]]
    cases: dict[str, float]
    sweep: str
    measures: Literal["begin", "requests"]
    other: Literal["keep_busy", "requests"]
    share: float
    variants: dict[str, Callable[[int], list[ServiceClass]]]
    request: float = 0.0
    holds: bool = False
    same_sms: bool = False


def _block_spin(milliseconds: float) -> Launch:
    """Return a kernel that fills an H200 (two blocks of 1024 threads for each SM).

    In several waves of at least 10 us, as real large grids have: a priority stream comes between.
    """
    waves = int(min(max(milliseconds * 1e3 / 20, 2), 32))
    config = LaunchConfig(grid=264 * waves, block=1024)
    return Launch(spin, config, (int(milliseconds * 1e6 / waves),))


async def _w1(p: Partition, small: bool) -> WorkloadLaunches:  # noqa: ARG001  its arrays are small anyway
    (x,) = await filled(p, 1024)
    started = await p.empty_pinned(1, np.uint32)
    others = {f"spin {ms:g} ms": [_block_spin(ms)] for ms in (0.04, 0.25, 2, 10)}
    half = LaunchConfig(grid=66, block=1024)
    others["spin 2 ms on half"] = [Launch(spin, half, (2_000_000,))]
    stamped = Launch(stamp, LaunchConfig(grid=4, block=256), (started, x, 1024))
    return WorkloadLaunches([stamped], others, started, [x, started])


async def _w2(p: Partition, small: bool) -> WorkloadLaunches:
    side, passes = (128, 8) if small else (256, 8)  # some 70 us, on at most 64 SMs
    a, b, c = await filled(p, side * side, side * side, side * side)
    tiles = (side // 32, side // 32)
    little = Launch(
        matmul, LaunchConfig(grid=tiles, block=(16, 16)), (a, b, c, side, side, side, passes)
    )
    # A step of training: six products of half a millisecond that fill the GPU, and an update that
    # is bound by memory.
    m, k, times, weights = (512, 64, 216, 1 << 18) if small else (1536, 64, 24, 1 << 24)
    left, right, product, gradient, weight = await filled(p, m * k, k * m, m * m, weights, weights)
    grid = LaunchConfig(grid=(m // 32, m // 32), block=(16, 16))
    large = Launch(matmul, grid, (left, right, product, m, m, k, times))
    update = Launch(saxpy, LaunchConfig(grid=1056, block=512), (-1e-6, gradient, weight, weights))
    step = [large] * 6 + [update]
    buffers = [a, b, c, left, right, product, gradient, weight]
    return WorkloadLaunches([little], dict.fromkeys(W2.cases, step), None, buffers)


async def _w7(p: Partition, small: bool) -> WorkloadLaunches:
    n, large = (1 << 16, 1 << 18) if small else (1 << 24, 1 << 26)  # 192 and 512 MiB moved
    x, y, source = await filled(p, n, n, large)
    target = await p.empty(large)
    reads = Launch(saxpy, LaunchConfig(grid=1056, block=512), (1e-6, x, y, n))
    copies = Launch(copy, LaunchConfig(grid=1056, block=1024), (source, target, large))
    return WorkloadLaunches([reads], {"copy": [copies]}, None, [x, y, source, target])


async def _w8(p: Partition, small: bool) -> WorkloadLaunches:
    side, passes = (64, 8) if small else (160, 8)  # 25 blocks: both together leave most SMs idle
    buffers = await filled(p, *[side * side] * 6)
    config = LaunchConfig(grid=(side // 32, side // 32), block=(16, 16))

    def product(a: Any, b: Any, c: Any) -> Launch:
        return Launch(matmul, config, (a, b, c, side, side, side, passes))

    return WorkloadLaunches(
        [product(*buffers[:3])], {"two small": [product(*buffers[3:])]}, None, list(buffers)
    )


W1 = Workload(
    "W1",
    "critical: one kernel of 1024 items, from the request until the host sees it begin; other: "
    "spin kernels that fill the device (or half of its SMs), two in flight",
    _w1,
    dict.fromkeys(
        ("spin 0.04 ms", "spin 0.25 ms", "spin 2 ms", "spin 10 ms", "spin 2 ms on half"), 0.0
    ),
    "spin 2 ms",
    "begin",
    "keep_busy",
    0.2,
    {"greensched, a lease each": kept},
    holds=True,
)
W2 = Workload(
    "W2",
    "critical: requests of some 4 ms of small kernels, Poisson; other: a loop like training",
    _w2,
    {"load 0.25": 0.25, "load 0.5": 0.5, "load 0.75": 0.75},
    "load 0.5",
    "requests",
    "keep_busy",
    0.52,
    {
        "greensched, reserve kept": kept,
        "greensched, reserve lent": lent,
        "greensched, reserve lent, 1.5 ms": partial(lent, seconds=0.0015),
    },
    request=0.004,
    same_sms=True,
)
W7 = Workload(
    "W7",
    "critical: requests of ten memory-bound kernels, Poisson at load 0.3; other: copies that "
    "take all memory bandwidth",
    _w7,
    {"copy": 0.3},
    "copy",
    "requests",
    "keep_busy",
    0.1,
    {"greensched": kept},
    request=0.0006,
    same_sms=True,
)
W8 = Workload(
    "W8",
    "control: two users with requests of small kernels, Poisson at load 0.3 each; nothing "
    "saturates, and plain streams should win",
    _w8,
    {"two small": 0.3},
    "two small",
    "requests",
    "requests",
    0.12,
    {"greensched, shared": shared, "greensched, reserves": kept},
    request=0.001,
)
#: In the order in which they are measured: the longest has the time that is left.
WORKLOADS = {each.name: each for each in (W1, W7, W8, W2)}
