"""`matmul`: a matrix product in float32, bound by arithmetic; typical of throughput work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from greensched.kernels.builtin.common import NUMBERING, roofline
from greensched.kernels.program import Program
from greensched.typing import Cost, LaunchFacts

if TYPE_CHECKING:
    import numpy as np

    from greensched.kernels.builtin.common import Floats

_TILE = 32

#: The fraction of an SM's arithmetic that the kernel reaches: an assumption. Each thread reads four
#: shared words for four multiply-adds, and shared memory serves one warp per clock where four could
#: multiply; barriers take the rest.
_EFFICIENCY = 0.2

_SOURCE = (
    NUMBERING
    + f"#define TILE {_TILE}\n"
    + r"""
#define HALF (TILE / 2)
#define PLACES (HALF * HALF)

// A block computes one tile of c at a time, four items per thread: fastest with 256 threads. With
// fewer threads the tile takes several sweeps; with more, some threads only load.
extern "C" __global__ void __launch_bounds__(1024)
matmul(const float *a, const float *b, float *c, int m, int n, int k, int passes) {
    __shared__ float left[TILE][TILE], right[TILE][TILE];
    const unsigned me = thread_number(), threads = thread_count();
    const size_t across = ((size_t)n + TILE - 1) / TILE, down = ((size_t)m + TILE - 1) / TILE;
    for (size_t tile = block_number(); tile < across * down; tile += block_count()) {
        const size_t top = tile / across * TILE, edge = tile % across * TILE;
        for (unsigned sweep = 0; sweep < PLACES; sweep += threads) {
            const unsigned place = sweep + me, row = place / HALF, column = place % HALF;
            float sum[2][2] = {};
            // The barriers prevent the compiler from computing one pass and multiplying.
            for (int pass = 0; pass < passes; ++pass) {
                for (size_t step = 0; step < k; step += TILE) {
                    __syncthreads();
                    for (unsigned i = me; i < TILE * TILE; i += threads) {
                        const size_t y = i / TILE, x = i % TILE;
                        const size_t ay = top + y, ax = step + x, by = step + y, bx = edge + x;
                        left[y][x] = ay < m && ax < k ? a[ay * k + ax] : 0.0f;
                        right[y][x] = by < k && bx < n ? b[by * n + bx] : 0.0f;
                    }
                    __syncthreads();
                    if (place < PLACES) {
                        for (int i = 0; i < TILE; ++i) {
                            const float y0 = left[row][i], y1 = left[row + HALF][i];
                            const float x0 = right[i][column], x1 = right[i][column + HALF];
                            sum[0][0] += y0 * x0; sum[0][1] += y0 * x1;
                            sum[1][0] += y1 * x0; sum[1][1] += y1 * x1;
                        }
                    }
                }
            }
            if (place < PLACES) {
                for (int i = 0; i < 2; ++i) for (int j = 0; j < 2; ++j) {
                    const size_t y = top + row + i * HALF, x = edge + column + j * HALF;
                    if (y < m && x < n) c[y * n + x] = sum[i][j];
                }
            }
        }
    }
}
"""
)

_program = Program(_SOURCE, name="greensched/product.cu")

#: `matmul(const float *a, const float *b, float *c, int m, int n, int k, int passes)`: c = passes *
#: (a @ b) with a (m, k), b (k, n) and c (m, n) in row-major order; c must not overlap the others.
#: The GPU computes and adds every pass, so `passes` sets how long it is busy. The reference
#: computes one pass and multiplies, so that it is fast enough on a CPU.
matmul = _program.kernel("matmul")


@matmul.reference
def _matmul(
    _launch: LaunchFacts,
    a: Floats,
    b: Floats,
    c: Floats,
    m: np.int32,
    n: np.int32,
    k: np.int32,
    passes: np.int32,
) -> None:
    import numpy as np

    rows, columns, inner = int(m), int(n), int(k)
    result = c[: rows * columns].reshape(rows, columns)
    left = a[: rows * inner].reshape(rows, inner)
    right = b[: inner * columns].reshape(inner, columns)
    np.matmul(left, right, out=result)
    result *= max(int(passes), 0)


@matmul.cost
def _matmul_cost(
    launch: LaunchFacts,
    _a: Floats,
    _b: Floats,
    _c: Floats,
    m: np.int32,
    n: np.int32,
    k: np.int32,
    passes: np.int32,
) -> Cost:
    rows, columns, inner = int(m), int(n), int(k)
    return roofline(
        launch,
        blocks=math.ceil(rows / _TILE) * math.ceil(columns / _TILE),
        flops=2.0 * rows * columns * inner * int(passes),
        efficiency=_EFFICIENCY,
        # Each matrix once: repeated reads come from L2.
        nbytes=4.0 * (rows * inner + inner * columns + rows * columns),
    )
