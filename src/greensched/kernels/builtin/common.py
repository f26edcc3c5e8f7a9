"""Code for all built-in kernels: the numbering of threads, and the cost of work.

The costs are rooflines: operations and bytes per nanosecond of each SM, and the shared bandwidth
of the device's memory. They are for simulations, where the *proportions* between kernels and
between partition sizes matter. All devices use the rates of an H200.
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

#: Arithmetic of one SM: float32 operations per nanosecond; a fused multiply-add counts as two.
#: Source: NVIDIA H200 data sheet, 67 TFLOP/s of FP32, over its 132 SMs.
SM_FLOPS_PER_NS = 67_000 / 132

#: Bytes that one SM moves to or from L2 or device memory per nanosecond: an assumption, 32 bytes
#: per clock at 1.98 GHz. 75 of the 132 SMs of an H200 then saturate its 4.8 TB/s (data sheet).
SM_BYTES_PER_NS = 64.0

#: CUDA code that numbers blocks and threads in one dimension, so that a kernel is correct on any
#: grid and block.
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

#: CUDA code after `NUMBERING`: the items of a thread, in strides of the whole grid.
ITEMS = r"""
static __device__ size_t first_item() { return block_number() * thread_count() + thread_number(); }
static __device__ size_t item_step() { return block_count() * thread_count(); }
"""


def first(array: NDArray[Item], n: int | np.integer[Any]) -> NDArray[Item]:
    """Return the first n items of an array.

    Raises:
        IndexError: The array has fewer items.
    """
    if n > array.size:
        raise IndexError(f"{n} items of a buffer that holds {array.size}")
    return array[: int(n)]


def roofline(
    launch: LaunchFacts, *, blocks: int, flops: float, efficiency: float, nbytes: float
) -> Cost:
    """Return the cost of a kernel that is bound by arithmetic or by bytes.

    Args:
        launch: The launch; its grid limits how many SMs the kernel can use.
        blocks: How many blocks have work; further blocks in the grid are idle.
        flops: float32 operations.
        efficiency: The fraction of an SM's arithmetic that the kernel reaches.
        nbytes: Bytes moved to or from device memory.
    """
    arithmetic = flops / (SM_FLOPS_PER_NS * efficiency)
    usable = min(blocks, math.prod(launch.grid))
    return Cost(
        sm_ns=max(arithmetic, nbytes / SM_BYTES_PER_NS), sms=max(usable, 1), dram_bytes=nbytes
    )


def blocks_for(launch: LaunchFacts, items: int) -> int:
    """Return how many blocks have work if each thread takes one item."""
    return math.ceil(items / math.prod(launch.block))
