"""The GPU that is asked, its kernels, and what all questions use."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cuda.bindings
import numpy as np
from cuda.bindings import driver as drv
from cuda.bindings import nvrtc

Answer = dict[str, Any]

SOURCE = r"""
extern "C" __global__ void null_kernel() {}

extern "C" __global__ void smids(unsigned *seen) {
    unsigned id; asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    if (threadIdx.x == 0) atomicOr(&seen[id >> 5], 1u << (id & 31));
    unsigned long long t0, t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); } while (t - t0 < 200000ull);
}

extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long t0, t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); } while (t - t0 < ns);
}

extern "C" __global__ void fma_burn(float *out, int iters) {
    float a = threadIdx.x, b = 1.0001f, c = 0.5f, d = blockIdx.x;
    for (int i = 0; i < iters; ++i) { a = fmaf(a, b, c); d = fmaf(d, b, a); }
    if (a + d == 12345.678f) out[0] = a;
}

extern "C" __global__ void latch(volatile unsigned *word) { while (*word == 0u) { } }
extern "C" __global__ void first_use_only() {}

extern "C" __global__ void stream_copy(const float4 *src, float4 *dst, size_t n) {
    size_t stride = (size_t)gridDim.x * blockDim.x;
    size_t first = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t i = first; i < n; i += stride) dst[i] = src[i];
}

extern "C" __global__ void narrow_copy(const float *src, float *dst, size_t n) {
    size_t stride = (size_t)gridDim.x * blockDim.x;
    size_t first = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t i = first; i < n; i += stride) dst[i] = src[i];
}
"""
#: Words of a bitmap of SMs: enough for 2048.
SM_WORDS = 64


class CudaError(RuntimeError):
    """A call of the driver that failed, by the name and number of its status."""


def ok(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver returned behind its status: nothing, a value, or a tuple.

    Raises:
        CudaError: the status is an error.
    """
    status, *values = result
    if int(status) != 0:
        raise CudaError(f"{status.name} ({int(status)})")
    return values[0] if len(values) == 1 else (tuple(values) if values else None)


def compiled(source: str, capability: tuple[int, int]) -> bytes:
    """Compile a source to a cubin.

    Raises:
        RuntimeError: NVRTC refused it.
    """

    def checked(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if int(status) != 0:
            raise RuntimeError(f"NVRTC: {status.name} ({int(status)})")
        return values[0] if values else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"probe.cu", 0, [], []))
    arch = "-arch=sm_{}{}".format(*capability).encode()
    checked(nvrtc.nvrtcCompileProgram(program, 1, [arch]))
    image = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, image))
    return bytes(image)


def timed(call: Callable[[], object], number: int) -> Answer:
    """Return percentiles of the microseconds of so many calls."""
    samples = []
    for _ in range(number):
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    samples.sort()
    last = samples[int(0.99 * (number - 1))]
    return {"p50": round(statistics.median(samples), 3), "p99": round(last, 3), "n": number}


def percentiles(samples: Sequence[float]) -> Answer:
    """Return percentiles of samples, and how many there were."""
    found = sorted(samples)

    def at(part: float) -> float:
        return round(found[min(len(found) - 1, int(part * len(found)))], 3)

    return {
        "p50": at(0.5),
        "p90": at(0.9),
        "p99": at(0.99),
        "max": round(found[-1], 3),
        "n": len(found),
    }


class Gpu:
    """Device 0: its primary context, its SMs, and the kernels above.

    Attributes:
        quick: ask with fewer samples.
        device, primary: handles.
        sm: the SM resource of the device.
        capability: the compute capability.
        image: the cubin of the kernels; `kernels` are those that are loaded, by name.
    """

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        ok(drv.cuInit(0))
        self.device = ok(drv.cuDeviceGet(0))
        self.primary = ok(drv.cuDevicePrimaryCtxRetain(self.device))
        ok(drv.cuCtxSetCurrent(self.primary))
        kind = drv.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self.sm = ok(drv.cuDeviceGetDevResource(self.device, kind))
        self.capability = (
            self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        self.image = b""
        self.kernels: dict[str, Any] = {}

    def _attribute(self, name: str) -> int:
        attribute = getattr(drv.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(ok(drv.cuDeviceGetAttribute(attribute, self.device)))

    def facts(self) -> Answer:
        """Return what the device and the bindings say of themselves."""
        found = {
            "driver": ok(drv.cuDriverGetVersion()),
            "name": ok(drv.cuDeviceGetName(100, self.device)).split(b"\0")[0].decode(),
            "cc": self.capability,
            "sm_count": self.sm.sm.smCount,
            "priority_range": ok(drv.cuCtxGetStreamPriorityRange()),
            "l2_bytes": self._attribute("L2_CACHE_SIZE"),
            "stream_mem_ops_64": self._attribute("CAN_USE_64_BIT_STREAM_MEM_OPS_V1"),
        }
        for name in ("minSmPartitionSize", "smCoscheduledAlignment", "flags"):
            found[name] = getattr(self.sm.sm, name, "absent in these bindings")
        return found | {"cuda_bindings": cuda.bindings.__version__}

    def compile(self) -> Answer:
        """Compile the kernels."""
        start = time.perf_counter()
        self.image = compiled(SOURCE, self.capability)
        took = (time.perf_counter() - start) * 1e3
        return {"compile_ms": round(took, 1), "cubin_bytes": len(self.image)}

    def load(self) -> Answer:
        """Load the kernels, but for the one whose first use is a question."""
        start = time.perf_counter()
        library = ok(drv.cuLibraryLoadData(self.image, [], [], 0, [], [], 0))
        self.kernels = {
            name: ok(drv.cuLibraryGetKernel(library, name.encode()))
            for name in (
                "null_kernel",
                "smids",
                "spin",
                "fma_burn",
                "stream_copy",
                "narrow_copy",
                "latch",
            )
        }
        return {"load_ms": round((time.perf_counter() - start) * 1e3, 2)}

    def launch(
        self, name: str, grid: int, block: int, stream: Any, values: Iterable[Any] = (),
        types: Iterable[Any] = (),
    ) -> None:  # fmt: skip
        """Launch one of the kernels."""
        packed = (tuple(values), tuple(types)) if values else 0
        geometry = (grid, 1, 1, block, 1, 1)
        ok(drv.cuLaunchKernel(self.kernels[name], *geometry, 0, stream, packed, 0))

    def smids_of(self, stream: Any, blocks: int | None = None) -> set[int]:
        """Return the SMs that a kernel on a stream runs on."""
        memory = ok(drv.cuMemAlloc(SM_WORDS * 4))
        ok(drv.cuMemsetD32(memory, 0, SM_WORDS))
        self.launch("smids", blocks or 8 * self.sm.sm.smCount, 1024, stream, (memory,), (None,))
        ok(drv.cuStreamSynchronize(stream))
        seen = self.sms_in(memory)
        ok(drv.cuMemFree(memory))
        return seen

    def sms_in(self, memory: Any) -> set[int]:
        """Return the SMs of a bitmap in device memory."""
        words = np.zeros(SM_WORDS, np.uint32)
        ok(drv.cuMemcpyDtoH(words.ctypes.data, memory, SM_WORDS * 4))
        return {32 * i + bit for i in range(SM_WORDS) for bit in range(32) if words[i] >> bit & 1}

    def green(self, resources: Iterable[Any]) -> Any:
        """Create a green context over resources."""
        given = list(resources)
        descriptor = ok(drv.cuDevResourceGenerateDesc(given, len(given)))
        flags = drv.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        return ok(drv.cuGreenCtxCreate(descriptor, self.device, flags))

    def stream_on(self, green: Any, priority: int = 0) -> Any:
        """Create a stream of a green context."""
        flags = drv.CUstream_flags.CU_STREAM_NON_BLOCKING
        return ok(drv.cuGreenCtxStreamCreate(green, flags, priority))

    def split(self, count: int, flags: int = 0) -> tuple[list[Any], Any]:
        """Split the device into as many groups of so many SMs as there are, and a remainder."""
        _, number, _ = ok(drv.cuDevSmResourceSplitByCount(0, self.sm, flags, count))
        groups, number, rest = ok(drv.cuDevSmResourceSplitByCount(number, self.sm, flags, count))
        return list(groups)[:number], rest

    def pinned_words(self, number: int = 64) -> tuple[memoryview, int]:
        """Return pinned words, and their device address.

        Word i of a stream k is at index 16 * k: a cache line each.
        """
        flags = drv.CU_MEMHOSTALLOC_DEVICEMAP | drv.CU_MEMHOSTALLOC_PORTABLE
        host = int(ok(drv.cuMemHostAlloc(4096 * 16, flags)))
        ctypes.memset(host, 0, 4096 * 16)
        device = int(ok(drv.cuMemHostGetDevicePointer(host, 0)))
        words = (ctypes.c_uint32 * (16 * number)).from_address(host)
        return memoryview(words).cast("B").cast("I"), device
