"""Questions about what partitions share: memory bandwidth, and the power of the board."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as drv

from benchmarks.lib.report import smi
from benchmarks.probes.device import Answer, Gpu, ok

#: Bytes of the array that is copied, far more than any L2.
NBYTES = 1 << 28
#: Seconds of load before the clock and the power are read: the board's control takes a second.
SETTLE_S = 1.5
#: Iterations of `fma_burn` for some milliseconds on all SMs.
ITERATIONS = 20_000

#: A kernel's name, its grid and block, its arguments and their types.
Load = tuple[str, int, int, tuple[Any, ...], tuple[Any, ...]]


def _copies(gpu: Gpu) -> tuple[Load, Load, list[Any]]:
    """Return a copy by 16 bytes a thread, one by 4, and their memory."""
    memory = [ok(drv.cuMemAlloc(NBYTES)) for _ in range(4)]
    sms = int(gpu.sm.sm.smCount)
    wide: Load = (
        "stream_copy",
        8 * sms,
        512,
        (*memory[:2], NBYTES // 16),
        (None, None, ctypes.c_size_t),
    )
    narrow: Load = (
        "narrow_copy",
        8 * sms,
        512,
        (*memory[2:], NBYTES // 4),
        (None, None, ctypes.c_size_t),
    )
    return wide, narrow, memory


def _gigabytes(gpu: Gpu, streams: list[Any], loads: list[Load], seconds: float) -> list[float]:
    """Return the gigabytes a second, read and written, of each load on its stream, all at once."""
    done = [0] * len(streams)
    took = [0.0] * len(streams)
    stop = time.perf_counter() + seconds

    def drive(index: int) -> None:
        ok(drv.cuCtxSetCurrent(gpu.primary))
        name, grid, block, values, types = loads[index]
        began = time.perf_counter()
        while time.perf_counter() < stop:
            for _ in range(8):
                gpu.launch(name, grid, block, streams[index], values, types)
            ok(drv.cuStreamSynchronize(streams[index]))
            done[index] += 8
        took[index] = time.perf_counter() - began

    threads = [threading.Thread(target=drive, args=(i,)) for i in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [round(2 * NBYTES * n / t / 1e9, 1) for n, t in zip(done, took, strict=True)]


def bandwidth(gpu: Gpu) -> Answer:
    """Ask for the bandwidth by SMs of one partition, and of two that copy at the same time."""
    groups, rest = gpu.split(8)
    wide, narrow, memory = _copies(gpu)
    seconds = 0.15 if gpu.quick else 0.4
    out: Answer = {}
    for count in (1, 2, 3, 4, 6, 8, 10, 12, len(groups)):
        with_rest = [*groups[:count], rest] if count == len(groups) else groups[:count]
        with _Part(gpu, with_rest) as stream:
            for name, load in (("16 bytes a thread", wide), ("4 bytes a thread", narrow)):
                (found,) = _gigabytes(gpu, [stream], [load], seconds)
                out[f"{8 * count} SMs, {name}, GB/s"] = found
    for count in (2, 4, 8, 12):
        with _Part(gpu, groups[:count]) as one, _Part(gpu, groups[count:]) as other:
            for name, loads in (
                ("both 16 bytes", [wide, wide]),
                ("4 bytes beside 16", [narrow, wide]),
            ):
                found = _gigabytes(gpu, [one, other], loads, seconds)
                out[f"{8 * count} SMs beside {120 - 8 * count}, {name}, GB/s"] = found
    for each in memory:
        ok(drv.cuMemFree(each))
    return out


def power(gpu: Gpu) -> Answer:
    """Ask for the clock and the power by SMs at work: arithmetic, copies, and products of torch."""
    groups, _ = gpu.split(8)
    wide, _, memory = _copies(gpu)
    target = ok(drv.cuMemAlloc(4))
    burn: Load = (
        "fma_burn",
        8 * int(gpu.sm.sm.smCount),
        512,
        (target, ITERATIONS),
        (None, ctypes.c_int),
    )
    out: Answer = {"before the loads": smi("clocks.sm,power.draw,power.limit")}
    for count in (2, 4, 8, len(groups)):
        with _Part(gpu, groups[:count]) as stream:
            for name, load in (("arithmetic", burn), ("copies", wide)):
                submit = _launcher(gpu, load, stream)
                out[f"{8 * count} SMs, {name}"] = _loaded(gpu, submit, stream)
            product = _product(stream)
            if product is not None:
                out[f"{8 * count} SMs, bf16 products"] = _loaded(gpu, product, stream)
    for each in (*memory, target):
        ok(drv.cuMemFree(each))
    return out


def _launcher(gpu: Gpu, load: Load, stream: Any) -> Callable[[], None]:
    name, grid, block, values, types = load
    return lambda: gpu.launch(name, grid, block, stream, values, types)


def _product(stream: Any) -> Callable[[], None] | None:
    """Return a product of torch on a stream; None without torch on a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    external = torch.cuda.ExternalStream(int(stream))
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()

    def product() -> None:
        with torch.cuda.stream(external):
            torch.mm(a, a)

    return product


def _loaded(gpu: Gpu, submit: Callable[[], None], stream: Any) -> Answer:
    """Run a load for a while; return milliseconds of a launch, and clock and power at the end."""
    times: list[float] = []
    read: list[str] = []

    def work_for(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end or reader.is_alive():
            for _ in range(16):
                submit()
            ok(drv.cuStreamSynchronize(stream))
            times.append((time.perf_counter() - began) / 16)

    reader = threading.Thread(target=lambda: read.append(smi("clocks.sm,power.draw")))
    work_for(0.3 if gpu.quick else SETTLE_S)
    reader.start()
    work_for(0)  # at work while nvidia-smi reads
    return {"ms": round(1e3 * statistics.median(times), 4), "clock, power": read[0]}


class _Part:
    """A green context over resources, with a stream."""

    def __init__(self, gpu: Gpu, resources: list[Any]) -> None:
        self._gpu, self._resources = gpu, resources

    def __enter__(self) -> Any:
        self._green = self._gpu.green(self._resources)
        self._stream = self._gpu.stream_on(self._green)
        return self._stream

    def __exit__(self, *_: object) -> None:
        ok(drv.cuStreamDestroy(self._stream))
        ok(drv.cuGreenCtxDestroy(self._green))
