"""What a user writes without greensched: launches and events on a stream, as tight as possible.

On CUDA, real or stood in for, these are the raw calls of `cuda.bindings`; on a simulated device,
which has none, the calls of the driver interface. Kernel, geometry and number of SMs are the same
on both sides.

Each call is a `functools.partial` of the driver's function, with every argument looked up and
packed beforehand: no lambda, no method, no helper that checks a status. A loop over such calls
checks each status in place, as `if launch()[0]: raise RuntimeError`.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from greensched import Buffer, LaunchConfig, Pool
from greensched.device.arguments import KernelArguments
from greensched.driver.interface import Driver
from greensched.kernels import saxpy

Call = Callable[[], tuple[Any, ...]]

SMS = 16
CONFIG = LaunchConfig(grid=1, block=128)
ITEMS = 128


@dataclass(frozen=True, slots=True)
class RawCalls:
    """Calls on one stream, one event and one kernel. The first item of an answer is the status.

    Attributes:
        stream: the stream's address, for libraries that take one.
        launch: launches with arguments that were packed once.
        pack_and_launch: packs the arguments and launches.
        record: records the event behind what was launched.
        mark: has the stream write a number behind what was launched, as a ticket is.
        query: asks the driver about the event; its answer is not looked at.
        poll: waits for the event: asks about it once in each turn of the loop.
        sync: blocks until the event is reached.
    """

    stream: int
    launch: Call
    pack_and_launch: Call
    record: Call
    mark: Call
    query: Call
    poll: Callable[[], Awaitable[None]]
    sync: Call


def arguments(buffer: Buffer) -> tuple[object, ...]:
    """Return what `saxpy` is launched with, on both sides: four arguments, two of them buffers."""
    return 0.0, buffer, buffer, ITEMS


@asynccontextmanager
async def raw_calls(driver: Driver, pool: Pool) -> AsyncIterator[RawCalls]:
    """Provide raw calls on SMs of their own."""
    make = _on_cuda if driver.name == "cuda" else _on_the_interface
    async with pool.partition(SMS) as p:
        with await p.empty(ITEMS) as buffer, await p.empty_pinned(1, np.uint32) as word:
            await p.launch(CONFIG, saxpy, *arguments(buffer))  # loads the kernel
            kernel = p.context.loader.loaded(saxpy)
            with closing(await p.run(p.context.create_event)) as event:
                values = packed(p.device_id, buffer)
                yield make(
                    driver, p.stream.handle, kernel, event.handle, buffer, values, word.address
                )


def packed(device_id: int, buffer: Buffer) -> KernelArguments:
    """Return the arguments in memory of their own: a launch reads them at their address."""
    values = KernelArguments(saxpy, device_id)
    values.fill(arguments(buffer))
    return values


def _on_the_interface(
    driver: Driver,
    stream: Any,
    kernel: Any,
    event: Any,
    buffer: Buffer,
    values: KernelArguments,
    word: int,
) -> RawCalls:
    launch = driver.bind_launch(stream, kernel, CONFIG.grid3, CONFIG.block3, 0, values.address)
    query = partial(driver.query_event, event)

    def answering(call: Callable[[], object]) -> Call:
        def answer() -> tuple[int, object]:
            return 0, call()

        return answer

    def pack_and_launch() -> None:
        values.fill((0.0, buffer, buffer, ITEMS))
        launch()

    async def poll() -> None:
        while not query():  # noqa: ASYNC110  without a library there is nothing to wait for
            await asyncio.sleep(0)

    return RawCalls(
        driver.stream_address(stream),
        answering(launch),
        answering(pack_and_launch),
        answering(partial(driver.record_event, event, stream)),
        answering(partial(driver.bind_mark(stream, word), 1)),
        answering(query),
        poll,
        answering(partial(driver.synchronize_event, event)),
    )


def _on_cuda(
    _: Driver,
    stream: Any,
    kernel: Any,
    event: Any,
    buffer: Buffer,
    values: KernelArguments,
    word: int,
) -> RawCalls:
    """As the examples of `cuda.bindings` do it: values and their types as tuples."""
    from cuda.bindings import driver as cuda  # type: ignore[import-untyped]  # ships no types

    function, address = cuda.CUfunction(int(kernel)), buffer.address
    launch = partial(cuda.cuLaunchKernel, function, *CONFIG.grid3, *CONFIG.block3, 0, stream)
    types = (ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    query = partial(cuda.cuEventQuery, event)
    not_ready = cuda.CUresult.CUDA_ERROR_NOT_READY

    def pack_and_launch(keep: KernelArguments = values) -> tuple[Any, ...]:  # noqa: ARG001  read
        status: tuple[Any, ...] = launch(((0.0, address, address, ITEMS), types), 0)
        return status

    async def poll() -> None:
        while status := query()[0]:
            if status != not_ready:
                raise RuntimeError(status)
            await asyncio.sleep(0)

    return RawCalls(
        int(stream),
        partial(launch, values.address, 0),
        pack_and_launch,
        partial(cuda.cuEventRecord, event, stream),
        partial(cuda.cuStreamWriteValue32, stream, cuda.CUdeviceptr(word), 1, 0),
        query,
        poll,
        partial(cuda.cuEventSynchronize, event),
    )
