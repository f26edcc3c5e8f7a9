"""What one writes without greensched: a launch and an event on a stream of one's own.

On CUDA, real or stood in for, these are the raw calls of `cuda.bindings`; on a simulated device,
which has no such thing, the verbs of the port underneath. Kernel, geometry and number of SMs are
the same on both sides.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from greensched import Buffer, LaunchConfig, Pool
from greensched.device.launch import KernelArguments
from greensched.driver.interface import Driver
from greensched.kernels import saxpy

SMS = 16
CONFIG = LaunchConfig(grid=1, block=128)
ITEMS = 128


@dataclass(frozen=True, slots=True)
class ByHand:
    """One stream, one event, one kernel."""

    #: The stream's address, for libraries that take one.
    stream: int
    #: Launches with arguments packed once.
    launch: Callable[[], object]
    #: Packs the arguments and launches.
    pack_and_launch: Callable[[], object]
    #: Records the event behind what was launched.
    record: Callable[[], object]
    #: Has the stream write a number behind what was launched, as our tickets are.
    mark: Callable[[], object]
    #: Asks the driver for the event; what it answers, nobody reads.
    query: Callable[[], object]
    #: Whether the event has come.
    is_done: Callable[[], bool]
    #: Blocks until it has.
    sync: Callable[[], object]

    async def poll(self) -> None:
        """Waits for the event by looking once in each turn of the loop."""
        while not self.is_done():  # noqa: ASYNC110  this is how it is done without a library
            await asyncio.sleep(0)


def arguments(buffer: Buffer) -> tuple[object, ...]:
    """What `saxpy` is launched with, on both sides: four arguments, two of them buffers."""
    return 0.0, buffer, buffer, ITEMS


@asynccontextmanager
async def by_hand(driver: Driver, pool: Pool) -> AsyncIterator[ByHand]:
    """On SMs of its own, beside our side's."""
    made = _cuda if driver.name == "cuda" else _on_the_port
    async with pool.partition(SMS) as p:
        with await p.empty(ITEMS) as buffer, await p.empty_pinned(1, np.uint32) as word:
            await p.launch(CONFIG, saxpy, *arguments(buffer))  # loads it
            kernel = pool.devices[p.device_id].loader.loaded(saxpy)
            with closing(await p.run(p.context.create_event)) as event:
                yield made(driver, p.stream.handle, kernel, event.handle, buffer, word.address)


def _packed(buffer: Buffer) -> KernelArguments:
    packed = KernelArguments(saxpy, buffer.device)
    packed.fill(arguments(buffer))
    return packed


def _on_the_port(
    driver: Driver, stream: Any, kernel: Any, event: Any, buffer: Buffer, word: int
) -> ByHand:
    packed = _packed(buffer)
    mark = driver.bind_mark(stream, word)
    launch = driver.bind_launch(stream, kernel, CONFIG.grid3, CONFIG.block3, 0, packed.address)

    def pack_and_launch() -> None:
        packed.fill(arguments(buffer))
        launch()

    def ask() -> bool:
        return driver.query_event(event)

    return ByHand(
        driver.stream_address(stream),
        launch,
        pack_and_launch,
        lambda: driver.record_event(event, stream),
        lambda: mark(1),
        ask,
        ask,
        lambda: driver.synchronize_event(event),
    )


def _cuda(_: Driver, stream: Any, kernel: Any, event: Any, buffer: Buffer, word: int) -> ByHand:
    """As the examples of `cuda.bindings` do it: values and their types as tuples."""
    from cuda.bindings import driver as cuda  # type: ignore[import-untyped]  # ships no types

    packed = _packed(buffer)
    function = cuda.CUfunction(int(kernel))
    geometry = (*CONFIG.grid3, *CONFIG.block3, 0, stream)
    types = (ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    address = cuda.CUdeviceptr(word)

    def pack_and_launch() -> None:
        values = (0.0, buffer.address, buffer.address, ITEMS)
        check(cuda.cuLaunchKernel(function, *geometry, (values, types), 0))

    def check(answer: tuple[Any, ...]) -> None:
        if answer[0]:
            raise RuntimeError(answer[0])

    return ByHand(
        int(stream),
        lambda: check(cuda.cuLaunchKernel(function, *geometry, packed.address, 0)),
        pack_and_launch,
        lambda: check(cuda.cuEventRecord(event, stream)),
        lambda: check(cuda.cuStreamWriteValue32(stream, address, 1, 0)),
        partial(cuda.cuEventQuery, event),
        lambda: not cuda.cuEventQuery(event)[0],
        lambda: check(cuda.cuEventSynchronize(event)),
    )
