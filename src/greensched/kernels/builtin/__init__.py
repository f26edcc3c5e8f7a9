"""Built-in kernels, for examples, tests, measurements and `pool.verify()`.

Each kernel's CUDA source, numpy reference and cost are in one file, so that it runs on a GPU and on
the simulated driver. Numbers are float32. Every grid and block is valid.
"""

from __future__ import annotations

from greensched.kernels.builtin.arrays import fill, reduce_sum, saxpy
from greensched.kernels.builtin.blur import gaussian_blur
from greensched.kernels.builtin.probes import latch, smids, spin
from greensched.kernels.builtin.product import matmul

__all__ = ["fill", "gaussian_blur", "latch", "matmul", "reduce_sum", "saxpy", "smids", "spin"]
