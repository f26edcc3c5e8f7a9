"""The same work on as many SMs by other libraries, and without a pool.

Each is written as its users can write it best, and skipped where it is not installed, and on a
simulated device:

* **cuda.core**: `launch` of a kernel object of its own, of the same code, on the stream of the raw
  calls. It packs its arguments each time, as our `launch` does; `bind` packed them once.
* **A callback of the driver**, by which numba's `Stream.async_done` wakes the loop, behind a launch
  that was packed once. The call itself, because numba-cuda 0.30.4 raises `AttributeError` on every
  stream.
* **A split per call**, by FlashInfer's `split_device_green_ctx`, which compiles nothing when
  called; then a launch on its stream, polled. It also creates a context and a stream over the
  remainder, and has no call that destroys them, so they are destroyed here after the clock is read
  (a device holds some 26,000). Programs that ask for the same sizes keep them; this is for those
  that cannot. Where FlashInfer is not installed (it brings gigabytes), the same calls of the driver
  in the same order, as read in flashinfer-python 0.7.2: device, its SMs, split, then a descriptor,
  a context and a stream for each part.
* **torch.cuda.green_contexts**: created before, set for one element-wise operation and popped, an
  event behind it polled, and a semaphore around that: a context is current once. Beside a lease
  with that operation in a block of `greensched.integrations.torch`.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, RawCalls, arguments, raw_calls
from benchmarks.lib.timing import Comparison, Row, Work, compare, table
from benchmarks.micro.launch import BURST
from greensched import Buffer, Partition, Pool
from greensched import driver as drivers
from greensched.device.arguments import KernelArguments
from greensched.driver.cuda.init import symbol_address
from greensched.driver.interface import Driver
from greensched.kernels import saxpy

#: Source: cuda.h, CUhostFn and cuLaunchHostFunc.
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_LAUNCH_HOST_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, _HOST_FUNCTION, ctypes.c_void_p
)


async def measure(driver: Driver) -> list[Row]:
    """Return the median and p99 of each that is installed."""
    if driver.name != "cuda":
        return []
    found: list[Comparison] = []
    async with Pool([0], driver=driver, prepare=[saxpy]) as pool:
        async with raw_calls(driver, pool) as raw, pool.partition(SMS) as p:
            with await p.empty(ITEMS) as buffer:
                if (core := _library("cuda.core")) is not None:
                    found += await _beside_cuda_core(core, p, buffer, raw)
                found.append(await _beside_a_callback(p, buffer, raw))
        found.append(await _beside_a_split_per_call(driver, pool))
        if (torch := _library("torch")) is not None and torch.cuda.is_available():
            found.append(await _beside_torch(torch, pool))
    return [c.row(part, "us") for c in found for part in (0.5, 0.99)]


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _once(step: Callable[[], Awaitable[object]]) -> Work:
    async def work() -> float:
        start = perf_counter()
        await step()
        return perf_counter() - start

    return work


async def _beside_cuda_core(
    core: Any, p: Partition, buffer: Buffer, raw: RawCalls
) -> list[Comparison]:
    device = core.Device(p.device_id)
    device.set_current()
    major, minor = device.compute_capability
    code = core.ObjectCode.from_cubin(saxpy.program.compile(f"sm_{major}{minor}"))
    kernel = code.get_kernel(saxpy.name)
    config = core.LaunchConfig(grid=CONFIG.grid, block=CONFIG.block)
    stream = core.Stream.from_handle(raw.stream)
    number, items = ctypes.c_float(0.0), ctypes.c_size_t(ITEMS)
    values = arguments(buffer)

    def burst(launch: Callable[[], object], finish: Callable[[], Awaitable[object]]) -> Work:
        async def work() -> float:
            start = perf_counter()
            for _ in range(BURST):
                launch()
            took = perf_counter() - start
            await finish()
            return took / BURST

        return work

    async def end() -> None:
        raw.record()
        await raw.poll()

    address = buffer.address
    theirs = burst(
        lambda: core.launch(stream, config, kernel, number, address, address, items), end
    )
    # Launches first: one on a buffer that a bound launch uses has to keep its order behind that.
    launches = burst(lambda: p.launch(CONFIG, saxpy, *values), p.keep_alive)
    launched = await compare("launch | cuda.core launch", launches, theirs)
    bound = burst(p.bind(CONFIG, saxpy, *values), p.keep_alive)
    return [launched, await compare("bound launch | cuda.core launch", bound, theirs)]


async def _beside_a_callback(p: Partition, buffer: Buffer, raw: RawCalls) -> Comparison:
    values = arguments(buffer)
    # By its address: wheels up to 13.4 put Python code of their own around the callback.
    launch_host_function = _LAUNCH_HOST_FUNCTION(symbol_address("cuLaunchHostFunc", 10000))
    loop = asyncio.get_running_loop()

    async def ours() -> None:
        await p.launch(CONFIG, saxpy, *values)

    waiting: list[asyncio.Future[None]] = []
    wake = _HOST_FUNCTION(
        lambda _: loop.call_soon_threadsafe(lambda: waiting.pop().set_result(None))
    )

    async def theirs() -> None:
        raw.launch()
        waiting.append(loop.create_future())
        if launch_host_function(raw.stream, wake, None):
            raise RuntimeError
        await waiting[0]

    what = "launch, await | raw launch, the driver's callback (numba async_done)"
    return await compare(what, _once(ours), _once(theirs))


async def _beside_a_split_per_call(driver: Driver, pool: Pool) -> Comparison:
    async with pool.partition(SMS) as p:
        buffer = await p.empty(ITEMS)
        await p.launch(CONFIG, saxpy, *arguments(buffer))
        kernel = pool.devices[p.device_id].loader.loaded(saxpy)
        assert kernel is not None
    packed = KernelArguments(saxpy, pool.devices[0].ordinal)
    packed.fill(arguments(buffer))
    geometry = (CONFIG.grid3, CONFIG.block3, 0, packed.address)
    split, name = _flashinfer()

    async def ours() -> None:
        async with pool.partition(SMS) as p:
            await p.launch(CONFIG, saxpy, *arguments(buffer))

    async def theirs() -> float:
        start = perf_counter()
        streams = split()
        stream = driver.foreign_stream(streams[0])
        driver.bind_launch(stream, kernel, *geometry)()
        while not driver.query_stream(stream):  # noqa: ASYNC110  as in byraw.py
            await asyncio.sleep(0)
        took = perf_counter() - start
        _end(streams)
        return took

    with buffer:
        return await compare(f"lease, launch, await | {name}", _once(ours), theirs)


def _flashinfer() -> tuple[Callable[[], list[int]], str]:
    """Return a function that splits device 0 and returns its streams, and its name."""
    flashinfer, torch = _library("flashinfer.green_ctx"), _library("torch")
    if flashinfer is not None and torch.cuda.is_available():
        device = torch.device("cuda:0")

        def split() -> list[int]:
            streams, _ = flashinfer.split_device_green_ctx(device, 1, SMS)
            return [stream.cuda_stream for stream in streams]

        return split, "FlashInfer's split per call"
    return _as_flashinfer, "a split per call"


def _as_flashinfer() -> list[int]:
    from cuda.bindings import driver as cuda

    sms = cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    default = cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    apart = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
    device = _asked(cuda.cuDeviceGet(0))
    whole = _asked(cuda.cuDeviceGetDevResource(device, sms))
    groups, _, rest = _asked(cuda.cuDevSmResourceSplitByCount(1, whole, 0, SMS))
    streams = []
    for part in (*groups, rest):
        descriptor = _asked(cuda.cuDevResourceGenerateDesc([part], 1))
        green = _asked(cuda.cuGreenCtxCreate(descriptor, device, default))
        streams.append(int(_asked(cuda.cuGreenCtxStreamCreate(green, apart, 0))))
    return streams


def _end(streams: list[int]) -> None:
    """Destroy streams and their green contexts."""
    from cuda.bindings import driver as cuda

    for stream in map(cuda.CUstream, streams):
        green = _asked(cuda.cuStreamGetGreenCtx(stream))
        _asked(cuda.cuStreamDestroy(stream))
        _asked(cuda.cuGreenCtxDestroy(green))


def _asked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status:
        raise RuntimeError(status)
    return values[0] if len(values) == 1 else tuple(values)


async def _beside_torch(torch: Any, pool: Pool) -> Comparison:
    from greensched.integrations import torch as gs_torch

    green = torch.cuda.green_contexts.GreenContext.create(num_sms=SMS, device_id=0)
    x = torch.ones(ITEMS, device="cuda")
    y = torch.ones(ITEMS, device="cuda")
    event, semaphore = torch.cuda.Event(), asyncio.Semaphore(1)

    async def ours() -> None:
        async with pool.partition(SMS) as p:
            with gs_torch.current(p):
                y.add_(x, alpha=0.0)

    async def theirs() -> None:
        async with semaphore:
            green.set_context()
            try:
                y.add_(x, alpha=0.0)
                event.record()
            finally:
                green.pop_context()
            while not event.query():  # noqa: ASYNC110  as in byraw.py
                await asyncio.sleep(0)

    what = "lease, torch operation, await | torch green context, polled event"
    return await compare(what, _once(ours), _once(theirs))


if __name__ == "__main__":
    print(table(asyncio.run(measure(drivers.open("cuda")))))
