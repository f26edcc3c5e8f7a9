"""Choose kernels for matrix products by measuring them on the SMs of a partition.

cuBLAS chooses a kernel and its tiles for all SMs of the GPU. On a partition the choice can be bad:
128 tiles are one wave of 132 SMs, but two of 116. `cublasSetSmCountTarget` tells cuBLAS another
number of SMs. The best number is not always that of the partition, so several are measured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as nn
from torch.overrides import TorchFunctionMode

import greensched.integrations.torch as gs_torch

#: The functions whose products are measured; torch calls cuBLAS for them.
PRODUCTS = (nn.linear, torch.Tensor.addmm_)
#: SM counts are tried in steps of 8, up to this far from the partition's.
NEAR = 24
#: Calls of a product with each SM count.
TIMES = 5
#: Bytes written before each call, so that the L2 cache does not hold the weights: other products
#: run before it in a pass, too.
WRITTEN = 128 << 20


class FastestProducts(TorchFunctionMode):
    """Within the block, cuBLAS has the SM count with which each matrix product was fastest.

    The first call of each product measures it, so it must not be in a capture.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Of each product: the SM count that cuBLAS is told; 0: all of the GPU.
        self._counts: dict[Any, int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = functools.partial(function, *args, **(kwargs or {}))
        if function not in PRODUCTS:
            return call()
        product = function, *(getattr(part, "shape", None) for part in args)  # None: no bias
        if product not in self._counts:
            self._counts[product] = fastest_count(function, args)
        set_sm_count(self._counts[product])
        try:
            return call()
        finally:
            set_sm_count(0)


def fastest_count(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Return the SM count with which a product takes the least time; 0: all of the GPU."""
    sms, nearest = gs_torch.sm_count(), gs_torch.sm_count() // 8 * 8
    most = gpu_sm_count(args[0].device)
    near = range(max(8, nearest - NEAR), min(most, nearest + NEAR) + 1, 8)
    args = args[0].clone(), *args[1:]  # addmm_ changes it
    times = {}
    for count in (0, sms, *near):
        set_sm_count(count)
        times[count] = median_time(functools.partial(function, *args))
    set_sm_count(0)
    return min(times, key=times.__getitem__)


def gpu_sm_count(device: Any) -> int:
    """Return the SM count of a GPU; cuBLAS refuses a larger one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def median_time(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call on the current stream."""
    call()
    written, spans = torch.empty(WRITTEN, dtype=torch.uint8, device="cuda"), []
    for _ in range(TIMES):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        written.zero_()
        began.record()
        call()
        ended.record()
        spans.append((began, ended))
    ended.synchronize()
    return sorted(began.elapsed_time(ended) for began, ended in spans)[TIMES // 2]


def set_sm_count(count: int) -> None:
    """Have cuBLAS choose kernels for so many SMs in this thread; 0: for all of the GPU.

    torch has one handle of cuBLAS for each thread and stream.
    """
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    if status := cublas().cublasSetSmCountTarget(handle, count):
        raise RuntimeError(f"cublasSetSmCountTarget failed with status {status}")


@functools.cache
def cublas() -> Any:
    """Return cuBLAS as torch has loaded it.

    Raises:
        RuntimeError: this process has not loaded it.
    """
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            if "/libcublas.so" in line:
                return ctypes.CDLL(line.split()[-1])
    raise RuntimeError("torch has not loaded libcublas.so, whose products the model needs")
