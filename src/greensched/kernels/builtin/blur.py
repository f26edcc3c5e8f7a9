"""`gaussian_blur`: an image filter, bound by arithmetic; typical of small latency-critical work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from greensched.kernels.builtin.common import ITEMS, NUMBERING, blocks_for, roofline
from greensched.kernels.program import Program
from greensched.typing import Cost, LaunchFacts

if TYPE_CHECKING:
    import numpy as np

    from greensched.kernels.builtin.common import Floats

#: The largest radius in pixels, reached at sigma = 21.3. It bounds the weights in shared memory,
#: and the time that a wrong sigma can take.
MOST_RADIUS = 64

#: The fraction of an SM's arithmetic that the kernel reaches: an assumption. A tap costs about
#: eight instructions (clamping, address, two loads), one of which is the multiply-add.
_EFFICIENCY = 1 / 8

#: Output rows that the reference computes with one matrix product: enough for BLAS to be fast, few
#: enough that the zeros outside the band cost little (measured: 64 is best, 32 to 128 similar).
_STRIP = 64

_SOURCE = (
    NUMBERING
    + ITEMS
    + f"#define MOST_RADIUS {MOST_RADIUS}\n"
    + r"""
extern "C" __global__ void gaussian_blur(const float *src, float *dst, int height, int width,
                                         int channels, float sigma) {
    __shared__ float weight[2 * MOST_RADIUS + 1];
    const int radius = sigma > 0.0f ? (int)fminf(ceilf(3.0f * sigma), (float)MOST_RADIUS) : 0;
    for (int i = thread_number(); i <= 2 * radius; i += thread_count()) {
        // Divide first: the square of a tiny sigma would be 0.
        const float distance = i == radius ? 0.0f : (i - radius) / sigma;
        weight[i] = expf(-0.5f * distance * distance);
    }
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i <= 2 * radius; ++i) total += weight[i];

    const size_t row = (size_t)width * channels, count = row * height;
    for (size_t item = first_item(); item < count; item += item_step()) {
        const int y = (int)(item / row), x = (int)(item % row) / channels;
        const int channel = (int)(item % row) % channels;
        float sum = 0.0f;
        for (int dy = -radius; dy <= radius; ++dy) {
            const float *line = src + min(max(y + dy, 0), height - 1) * row + channel;
            float across = 0.0f;
            for (int dx = -radius; dx <= radius; ++dx) {
                const size_t near = min(max(x + dx, 0), width - 1);
                across += weight[dx + radius] * line[near * channels];
            }
            sum += weight[dy + radius] * across;
        }
        dst[item] = sum / (total * total);
    }
}
"""
)

_program = Program(_SOURCE, name="greensched/blur.cu")

#: `gaussian_blur(const float *src, float *dst, int height, int width, int channels, float sigma)`:
#: blurs an image in (height, width, channels) order; src and dst must not overlap. sigma in
#: pixels, the radius is ceil(3 sigma), at most 64; edges are clamped; sigma <= 0 copies.
#: On the GPU it is the direct two-dimensional sum, so its work grows with sigma squared. The
#: reference is separable, so that it is fast enough on a CPU.
gaussian_blur = _program.kernel("gaussian_blur")


@gaussian_blur.reference
def _gaussian_blur(
    _launch: LaunchFacts,
    src: Floats,
    dst: Floats,
    height: np.int32,
    width: np.int32,
    channels: np.int32,
    sigma: np.float32,
) -> None:
    h, w, c = int(height), int(width), int(channels)
    if h * w * c == 0:
        return
    band = _band(sigma, min(_STRIP, max(h, w)))
    down = _along_rows(src[: h * w * c].reshape(h, w * c), band)
    turned = down.reshape(h, w, c).swapaxes(0, 1).reshape(w, h * c)
    across = _along_rows(turned, band).reshape(w, h, c).swapaxes(0, 1)
    dst[: h * w * c].reshape(h, w, c)[...] = across


@gaussian_blur.cost
def _gaussian_blur_cost(
    launch: LaunchFacts,
    _src: Floats,
    _dst: Floats,
    height: np.int32,
    width: np.int32,
    channels: np.int32,
    sigma: np.float32,
) -> Cost:
    items = int(height) * int(width) * int(channels)
    taps = (2 * _radius(sigma) + 1) ** 2
    return roofline(
        launch,
        blocks=blocks_for(launch, items),
        flops=2.0 * taps * items,
        efficiency=_EFFICIENCY,
        nbytes=8.0 * items,
    )


def _radius(sigma: np.float32) -> int:
    if not sigma > 0:  # also if it is NaN
        return 0
    if sigma >= MOST_RADIUS:
        return MOST_RADIUS
    # In float32, as on the GPU, so that rounding up gives the same integer.
    return min(math.ceil(sigma * type(sigma)(3)), MOST_RADIUS)


def _band(sigma: np.float32, rows: int) -> Floats:
    """Return the filter as a matrix (rows, rows + 2 radius): row i has its weights at column i."""
    import numpy as np

    radius = _radius(sigma)
    distances = np.arange(-radius, radius + 1) / (float(sigma) if radius else 1.0)
    weights = np.exp(-0.5 * distances**2)
    band = np.zeros((rows, rows + 2 * radius), np.float32)
    diagonals = np.lib.stride_tricks.as_strided(
        band,
        (rows, 2 * radius + 1),
        (band.strides[0] + band.strides[1], band.strides[1]),
    )
    diagonals[...] = weights / weights.sum()
    return band


def _along_rows(image: Floats, band: Floats) -> Floats:
    """Filter a matrix along its first axis, a strip of rows at a time.

    The long steps are matrix products and copies, in which numpy releases the GIL.
    """
    import numpy as np

    height = image.shape[0]
    reach = band.shape[1] - band.shape[0]
    padded = np.take(image, np.arange(-(reach // 2), height + reach // 2), axis=0, mode="clip")
    result = np.empty_like(image)
    for top in range(0, height, band.shape[0]):
        rows = min(band.shape[0], height - top)
        strip = padded[top : top + rows + reach]
        np.matmul(band[:rows, : rows + reach], strip, out=result[top : top + rows])
    return result
