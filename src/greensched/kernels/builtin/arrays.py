"""Kernels over flat float32 arrays of `n` items: fill, saxpy, reduce_sum.

They are correct on any grid and block. All three are memory-bound, so their costs are their bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from greensched.kernels.builtin.common import ITEMS, NUMBERING, blocks_for, first, roofline
from greensched.kernels.program import Program
from greensched.typing import Cost, CostModel, LaunchFacts

if TYPE_CHECKING:
    import numpy as np

    from greensched.kernels.builtin.common import Floats

_SOURCE = (
    NUMBERING
    + ITEMS
    + r"""
extern "C" __global__ void fill(float *out, float value, size_t n) {
    for (size_t i = first_item(); i < n; i += item_step()) out[i] = value;
}

extern "C" __global__ void saxpy(float a, const float *x, float *y, size_t n) {
    for (size_t i = first_item(); i < n; i += item_step()) y[i] = a * x[i] + y[i];
}

extern "C" __global__ void reduce_sum(const float *x, float *out, size_t n) {
    __shared__ float parts[1024];
    const unsigned me = thread_number();
    float sum = 0.0f;
    for (size_t i = first_item(); i < n; i += item_step()) sum += x[i];
    parts[me] = sum;
    __syncthreads();
    // Any number of threads: the upper half is added to the lower; an odd middle one is left alone.
    for (unsigned live = thread_count(); live > 1; live = (live + 1) / 2) {
        const unsigned half = (live + 1) / 2;
        if (me + half < live) parts[me] += parts[me + half];
        __syncthreads();
    }
    if (me == 0) atomicAdd(out, parts[0]);
}
"""
)

_program = Program(_SOURCE, name="greensched/arrays.cu")

#: `fill(float *out, float value, size_t n)`: sets n items.
fill = _program.kernel("fill")
#: `saxpy(float a, const float *x, float *y, size_t n)`: y = a * x + y over n items.
saxpy = _program.kernel("saxpy")
#: `reduce_sum(const float *x, float *out, size_t n)`: adds the sum of n items to out[0]. The
#: order of the sum, and so its last bits, are undefined.
reduce_sum = _program.kernel("reduce_sum")


@fill.reference
def _fill(_launch: LaunchFacts, out: Floats, value: np.float32, n: np.uint64) -> None:
    first(out, n)[:] = value


@saxpy.reference
def _saxpy(_launch: LaunchFacts, a: np.float32, x: Floats, y: Floats, n: np.uint64) -> None:
    first(y, n)[:] += a * first(x, n)


@reduce_sum.reference
def _reduce_sum(_launch: LaunchFacts, x: Floats, out: Floats, n: np.uint64) -> None:
    out[0] += first(x, n).sum()


def _streaming(nbytes: int) -> CostModel:
    """Make the cost of moving bytes for each item; two operations per item are negligible."""

    def cost(launch: LaunchFacts, *arguments: Any) -> Cost:
        n = int(arguments[-1])
        blocks = blocks_for(launch, n)
        return roofline(launch, blocks=blocks, flops=2.0 * n, efficiency=1.0, nbytes=nbytes * n)

    return cost


fill.cost(_streaming(4))
saxpy.cost(_streaming(12))
reduce_sum.cost(_streaming(4))
