"""What the built-in kernels share: how their threads are numbered, and what work costs.

The costs are rooflines: per SM so much arithmetic and so many bytes a nanosecond, and together
what the device's memory gives. They are for simulations, where the *proportions* between kernels
and between partition sizes matter; the rates are an H200's, whatever the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from greensched.typing import Cost, LaunchFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float32]
    Words: TypeAlias = NDArray[np.uint32]
    Item = TypeVar("Item", bound=np.generic)

#: Arithmetic of one SM: float32 operations in a nanosecond, a fused multiply-add counting as two.
#: Source: NVIDIA H200 data sheet, 67 TFLOP/s of FP32, over its 132 SMs.
SM_FLOPS_PER_NS = 67_000 / 132

#: Bytes one SM moves between itself and L2 or device memory in a nanosecond: an assumption, 32
#: bytes a clock at 1.98 GHz. 75 of an H200's 132 SMs then use up its 4.8 TB/s (data sheet).
SM_BYTES_PER_NS = 64.0

#: CUDA: numbers blocks and threads in one row, so that a kernel is right on a grid of any size and
#: blocks of any shape.
NUMBERING = r"""
static __device__ size_t block_number() {
    return blockIdx.x + (size_t)gridDim.x * (blockIdx.y + (size_t)gridDim.y * blockIdx.z);
}
static __device__ size_t block_count() { return (size_t)gridDim.x * gridDim.y * gridDim.z; }
static __device__ unsigned thread_number() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
static __device__ unsigned thread_count() { return blockDim.x * blockDim.y * blockDim.z; }
"""

#: CUDA, behind `NUMBERING`: a thread's items, in strides of the whole grid.
ITEMS = r"""
static __device__ size_t first_item() { return block_number() * thread_count() + thread_number(); }
static __device__ size_t item_step() { return block_count() * thread_count(); }
"""


def first(array: NDArray[Item], n: int | np.integer[Any]) -> NDArray[Item]:
    """Its first n items; going beyond a buffer is a fault here as on a GPU.

    Raises:
        IndexError: it has fewer.
    """
    if n > array.size:
        raise IndexError(f"{n} items of a buffer that holds {array.size}")
    return array[: int(n)]


def roofline(
    launch: LaunchFacts, *, blocks: int, flops: float, efficiency: float, nbytes: float
) -> Cost:
    """The cost of a kernel that does arithmetic and moves bytes, whichever takes longer.

    Args:
        launch: its grid bounds how many SMs it can use.
        blocks: how many blocks have anything to do; more in the grid are idle.
        flops: float32 operations.
        efficiency: the share of an SM's arithmetic the kernel reaches.
        nbytes: bytes that must come from device memory or go there.
    """
    arithmetic = flops / (SM_FLOPS_PER_NS * efficiency)
    usable = min(blocks, math.prod(launch.grid))
    return Cost(
        sm_ns=max(arithmetic, nbytes / SM_BYTES_PER_NS), sms=max(usable, 1), dram_bytes=nbytes
    )


def blocks_for(launch: LaunchFacts, items: int) -> int:
    """How many blocks have something to do if each thread takes one item."""
    return math.ceil(items / math.prod(launch.block))
