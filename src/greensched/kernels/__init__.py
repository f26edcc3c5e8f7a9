"""Kernels: CUDA source to cubin to `Kernel`, with a cache; and the built-in kernels.

Importing loads neither numpy nor NVRTC: a source is compiled when a device first needs it.
"""

from __future__ import annotations

from greensched.kernels.builtin import (
    fill,
    gaussian_blur,
    latch,
    matmul,
    reduce_sum,
    saxpy,
    smids,
    spin,
)
from greensched.kernels.loader import Abandonment, Loader
from greensched.kernels.program import Kernel, Program
from greensched.typing import Cost, LaunchFacts, Parameter

__all__ = [
    "Abandonment",
    "Cost",
    "Kernel",
    "LaunchFacts",
    "Loader",
    "Parameter",
    "Program",
    "fill",
    "gaussian_blur",
    "latch",
    "matmul",
    "reduce_sum",
    "saxpy",
    "smids",
    "spin",
]
