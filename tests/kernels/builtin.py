"""The kernels that come with the package, in one list."""

from __future__ import annotations

from greensched import kernels

BUILTIN = [
    kernels.fill,
    kernels.gaussian_blur,
    kernels.latch,
    kernels.matmul,
    kernels.reduce_sum,
    kernels.saxpy,
    kernels.smids,
    kernels.spin,
]
