"""Ask a real GPU which signal of completion is the fastest, and what each call costs.

`python -m benchmarks.probes.completion` needs cuda-bindings and Linux, and no compiler: the kernel
is PTX. It prints a table, and ends itself after four minutes: a lost wake-up must not keep the GPU.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import signal
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import cuda.bindings
from cuda.bindings import driver as drv

from benchmarks.probes.device import CudaError, ok

#: Seconds after which the process ends, whatever it waits for.
MOST_S = 240
PTX = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 ns)
{ .reg .u64 %a<5>; .reg .pred %p<2>;
 ld.param.u64 %a1,[ns]; mov.u64 %a2,%globaltimer;
L: mov.u64 %a3,%globaltimer; sub.u64 %a4,%a3,%a2; setp.lt.u64 %p1,%a4,%a1; @%p1 bra L; ret; }
\0"""
#: Microseconds of the kernels that are awaited; and how many of each, of which some warm up.
LENGTHS_US = 2, 20, 100, 1000
NUMBER, WARM_UP = 220, 20

Wait = Callable[[int], Awaitable[None]]


class Gpu:
    """Device 0: a kernel that spins, two streams, two events, pinned words, and an eventfd.

    A host function on a stream writes to the eventfd: it is libc's `fflush` of a buffered byte, so
    that no Python runs on the driver's thread.
    """

    def __init__(self) -> None:
        ok(drv.cuInit(0))
        self.context = ok(drv.cuDevicePrimaryCtxRetain(ok(drv.cuDeviceGet(0))))
        ok(drv.cuCtxSetCurrent(self.context))
        self.function = ok(drv.cuModuleGetFunction(ok(drv.cuModuleLoadData(PTX)), b"spin"))
        self.stream, self.side = ok(drv.cuStreamCreate(1)), ok(drv.cuStreamCreate(1))
        self.event = ok(drv.cuEventCreate(2))  # without timing
        self.blocking_event = ok(drv.cuEventCreate(2 | 1))  # and with BLOCKING_SYNC
        host = int(ok(drv.cuMemHostAlloc(4096, 1 | 2)))  # portable, with a device address
        ctypes.memset(host, 0, 4096)
        self.word_address = ok(drv.cuMemHostGetDevicePointer(host, 0))
        self.words = memoryview((ctypes.c_uint32 * 1024).from_address(host)).cast("B").cast("I")
        self._value = (ctypes.c_uint64 * 1)(0)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._value))
        self.values = ctypes.addressof(self._pointers)
        self._make_eventfd()
        self.host_function = self._entry(b"cuLaunchHostFunc", 13000)
        self.host_function_v2 = self._entry(b"cuLaunchHostFunc_v2", 13020, ctypes.c_uint)

    def _make_eventfd(self) -> None:
        libc = ctypes.CDLL(None)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        libc.fdopen.restype = pointer
        libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
        libc.setvbuf.argtypes = [pointer, pointer, ctypes.c_int, size]
        libc.fwrite.argtypes = [pointer, size, size, pointer]
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK)
        self.file = libc.fdopen(os.dup(self.eventfd), b"w")
        libc.setvbuf(self.file, None, 0, 64)
        self.flush = ctypes.cast(libc.fflush, pointer).value
        self._one = (ctypes.c_uint64 * 1)(1)
        self._libc = libc

    @staticmethod
    def _entry(name: bytes, version: int, *more: Any) -> Any:
        """Return the driver's own entry point; None: this driver has none."""
        try:
            address = int(ok(drv.cuGetProcAddress(name, version, 0))[0])
        except CudaError:
            return None
        pointer = ctypes.c_void_p
        return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, *more)(address)

    def launch(self, ns: int) -> None:
        """Launch a kernel of so many nanoseconds."""
        self._value[0] = ns
        ok(drv.cuLaunchKernel(self.function, 1, 1, 1, 1, 1, 1, 0, self.stream, self.values, 0))

    def buffer_a_byte(self) -> None:
        """Have the next flush write to the eventfd."""
        self._libc.fwrite(self._one, 8, 1, self.file)


# -- what each call costs -----------------------------------------------------------------------


def costs(gpu: Gpu) -> None:
    """Print the host's time of each call, the clock's own included."""
    stream, side, event, word = gpu.stream, gpu.side, gpu.event, gpu.word_address
    geometry = (1, 1, 1, 1, 1, 1, 0)
    calls: dict[str, Callable[[], object]] = {
        "cuLaunchKernel packed once, 1 arg": partial(
            drv.cuLaunchKernel, gpu.function, *geometry, stream, gpu.values, 0
        ),
        "cuLaunchKernel tuple, 1 arg": partial(
            drv.cuLaunchKernel, gpu.function, *geometry, stream, ((0,), (ctypes.c_uint64,)), 0
        ),
        "cuEventRecord": partial(drv.cuEventRecord, event, stream),
        "cuStreamWriteValue32 -> pinned word": partial(
            drv.cuStreamWriteValue32, stream, word, 1, 0
        ),
        "cuEventQuery (done)": partial(drv.cuEventQuery, event),
        "cuStreamQuery": partial(drv.cuStreamQuery, stream),
        "pinned word read": partial(gpu.words.__getitem__, 0),
        "cuCtxGetCurrent": drv.cuCtxGetCurrent,
        "cuCtxSetCurrent": partial(drv.cuCtxSetCurrent, gpu.context),
        "cuStreamWaitEvent(side)": partial(drv.cuStreamWaitEvent, side, event, 0),
        "host function enqueued (raw pointer, fflush)": partial(
            gpu.host_function, int(stream), gpu.flush, gpu.file
        ),
        "nothing": lambda: None,
    }
    print("host cost per call (the clock included)")
    for name, call in calls.items():
        _print_cost(gpu, name, call)


def _print_cost(gpu: Gpu, name: str, call: Callable[[], object], number: int = 2000) -> None:
    samples = []
    for count in range(1, number + 1):
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
        if count % 200 == 0:
            ok(drv.cuStreamSynchronize(gpu.stream))
            ok(drv.cuStreamSynchronize(gpu.side))
    samples.sort()
    middle, late = statistics.median(samples), samples[int(number * 0.99)]
    print(f"  {name:60s} median {middle:8.0f} ns p99 {late:8.0f}")


# -- ways to wait -------------------------------------------------------------------------------


class Ways:
    """Ways to launch a kernel and go on when it is done."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.loop = asyncio.get_running_loop()
        self.ticket = 0
        self.future: asyncio.Future[None] | None = None
        self.loop.add_reader(gpu.eventfd, self._signalled)
        self._queue: queue.SimpleQueue[tuple[Any, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._wait_for_events, daemon=True).start()

    def all(self) -> dict[str, Wait]:
        """Return the ways that this driver has, by name; the first is the lower bound."""
        event, blocking = self.gpu.event, self.gpu.blocking_event
        ways: dict[str, Wait] = {
            "cuStreamSynchronize on the loop (lower bound, stalls the loop)": self.synchronized,
            "poll pinned word": self.polled_word,
            "poll cuEventQuery": self.polled_event,
            "to_thread cuEventSynchronize, default event": partial(self.in_thread, event=event),
            "to_thread cuEventSynchronize, BLOCKING_SYNC": partial(self.in_thread, event=blocking),
            "waiter thread, default event": partial(self.by_waiter, event=event),
            "waiter thread, BLOCKING_SYNC": partial(self.by_waiter, event=blocking),
            "host function -> eventfd, same stream": self.by_host_function,
            "host function -> eventfd, side stream": self.by_side_stream,
        }
        if self.gpu.host_function_v2 is not None:
            ways["host function v2 BLOCKING -> eventfd"] = partial(self.by_host_function_v2, mode=0)
            ways["host function v2 SPINWAIT -> eventfd"] = partial(self.by_host_function_v2, mode=1)
        return ways

    async def synchronized(self, ns: int) -> None:
        self.gpu.launch(ns)
        ok(drv.cuStreamSynchronize(self.gpu.stream))

    async def polled_word(self, ns: int) -> None:
        self.gpu.launch(ns)
        self.ticket += 1
        ok(drv.cuStreamWriteValue32(self.gpu.stream, self.gpu.word_address, self.ticket, 0))
        words, sleep = self.gpu.words, asyncio.sleep
        while words[0] < self.ticket:
            await sleep(0)

    async def polled_event(self, ns: int) -> None:
        self.gpu.launch(ns)
        ok(drv.cuEventRecord(self.gpu.event, self.gpu.stream))
        while drv.cuEventQuery(self.gpu.event)[0]:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def in_thread(self, ns: int, event: Any) -> None:
        self.gpu.launch(ns)
        ok(drv.cuEventRecord(event, self.gpu.stream))
        await asyncio.to_thread(self._synchronize, event)

    async def by_waiter(self, ns: int, event: Any) -> None:
        self.gpu.launch(ns)
        ok(drv.cuEventRecord(event, self.gpu.stream))
        future = self.loop.create_future()
        self._queue.put((event, future))
        await future

    async def by_host_function(self, ns: int) -> None:
        future = self._expected()
        self.gpu.launch(ns)
        self.gpu.host_function(int(self.gpu.stream), self.gpu.flush, self.gpu.file)
        await future

    async def by_side_stream(self, ns: int) -> None:
        future = self._expected()
        self.gpu.launch(ns)
        ok(drv.cuEventRecord(self.gpu.event, self.gpu.stream))
        ok(drv.cuStreamWaitEvent(self.gpu.side, self.gpu.event, 0))
        self.gpu.host_function(int(self.gpu.side), self.gpu.flush, self.gpu.file)
        await future

    async def by_host_function_v2(self, ns: int, mode: int) -> None:
        future = self._expected()
        self.gpu.launch(ns)
        self.gpu.host_function_v2(int(self.gpu.stream), self.gpu.flush, self.gpu.file, mode)
        await future

    def _expected(self) -> asyncio.Future[None]:
        self.gpu.buffer_a_byte()
        self.future = self.loop.create_future()
        return self.future

    def _signalled(self) -> None:
        try:
            os.read(self.gpu.eventfd, 8)
        except BlockingIOError:
            return
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    def _synchronize(self, event: Any) -> None:
        ok(drv.cuCtxSetCurrent(self.gpu.context))
        ok(drv.cuEventSynchronize(event))

    def _wait_for_events(self) -> None:
        while True:
            event, future = self._queue.get()
            self._synchronize(event)
            self.loop.call_soon_threadsafe(future.set_result, None)


async def waits(gpu: Gpu) -> None:
    """Print the time from submitting a kernel until the task runs again, for each way to wait."""
    ways = Ways(gpu).all()
    for us in LENGTHS_US:
        print(f"submit -> resumed, kernel of {us} us")
        base = 0.0
        for name, wait in ways.items():
            samples, busy, began = [], time.process_time(), time.perf_counter()
            for _ in range(NUMBER):
                start = time.perf_counter_ns()
                await wait(us * 1000)
                samples.append(time.perf_counter_ns() - start)
            cpu = (time.process_time() - busy) / (time.perf_counter() - began)
            kept = sorted(samples[WARM_UP:])
            median, late = statistics.median(kept) / 1e3, kept[int(len(kept) * 0.99)] / 1e3
            base = base or median
            print(
                f"  {name:62s} median {median:8.1f} us p99 {late:8.1f} "
                f"ratio {median / base:5.2f} cpu {cpu:.2f}"
            )


def host_function_beside_kernels(gpu: Gpu) -> None:
    """Print whether a host function on one stream delays kernels on another."""

    def measured(*, is_pending: bool) -> float:
        samples = []
        for _ in range(200):
            ok(drv.cuStreamSynchronize(gpu.stream))
            ok(drv.cuStreamSynchronize(gpu.side))
            if is_pending:
                gpu.buffer_a_byte()
                gpu.host_function(int(gpu.side), gpu.flush, gpu.file)
            start = time.perf_counter_ns()
            gpu.launch(0)
            ok(drv.cuStreamSynchronize(gpu.stream))
            samples.append(time.perf_counter_ns() - start)
        return statistics.median(samples) / 1e3

    alone, beside = measured(is_pending=False), measured(is_pending=True)
    print(
        f"empty kernel + sync alone {alone:.1f} us, "
        f"with a host function pending on another stream {beside:.1f} us"
    )


def main() -> None:
    if sys.argv[1:]:
        sys.exit(f"usage: python -m benchmarks.probes.completion\n\n{__doc__}")
    signal.alarm(MOST_S)
    gpu = Gpu()
    print("cuda-bindings", cuda.bindings.__version__, "python", sys.version.split()[0])
    costs(gpu)
    os.set_blocking(gpu.eventfd, False)
    asyncio.run(waits(gpu))
    host_function_beside_kernels(gpu)
    sys.stdout.flush()
    os._exit(0)  # a thread may wait in the driver


if __name__ == "__main__":
    main()
