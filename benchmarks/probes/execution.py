"""Questions about launches, completion, isolation, graphs and memory."""

from __future__ import annotations

import asyncio
import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as drv

from benchmarks.probes.device import Answer, CudaError, Gpu, ok, percentiles, timed


def host_calls(gpu: Gpu) -> Answer:
    """Ask what each call takes on the host."""
    groups, _ = gpu.split(8)
    g = gpu.green([groups[0]])
    c, s = ok(drv.cuCtxFromGreenCtx(g)), gpu.stream_on(g)
    e = ok(drv.cuEventCreate(drv.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    n = 2000
    word = ctypes.c_uint64(1)
    arg = ctypes.addressof(word)
    packed = np.array([arg], dtype=np.uint64)
    f = gpu.kernels["null_kernel"]
    spin = gpu.kernels["spin"]
    word.value = 0

    def sync_every(fn, k=200):
        count = [0]

        def inner():
            fn()
            count[0] += 1
            if count[0] % k == 0:
                drv.cuStreamSynchronize(s)

        return inner

    out = {
        "cuCtxGetCurrent": timed(drv.cuCtxGetCurrent, n),
        "cuCtxSetCurrent same": timed(lambda: drv.cuCtxSetCurrent(gpu.primary), n),
        "cuCtxSetCurrent primary<->green": timed(
            lambda: (drv.cuCtxSetCurrent(c), drv.cuCtxSetCurrent(gpu.primary)), n
        ),
        "launch no params": timed(
            sync_every(lambda: drv.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, 0, 0)), n
        ),
        "launch tuple params": timed(
            sync_every(
                lambda: drv.cuLaunchKernel(
                    spin, 1, 1, 1, 1, 1, 1, 0, s, ((0,), (ctypes.c_uint64,)), 0
                )
            ),
            n,
        ),
        "launch packed params": timed(
            sync_every(
                lambda: drv.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, int(packed.ctypes.data), 0)
            ),
            n,
        ),
        "cuEventRecord": timed(sync_every(lambda: drv.cuEventRecord(e, s)), n),
        "cuEventQuery": timed(lambda: drv.cuEventQuery(e), n),
        "cuStreamQuery": timed(lambda: drv.cuStreamQuery(s), n),
        "launch + event + spin on cuEventQuery": None,
        "launch + cuStreamSynchronize": timed(
            lambda: (
                drv.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, 0, 0),
                drv.cuStreamSynchronize(s),
            ),
            n,
        ),
    }

    def spin_query():
        drv.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, 0, 0)
        drv.cuEventRecord(e, s)
        while int(drv.cuEventQuery(e)[0]) != 0:
            pass

    out["launch + event + spin on cuEventQuery"] = timed(spin_query, n)
    return out


def completion(gpu: Gpu) -> Answer:
    """Ask how long it is from the launch of an empty kernel until the host knows its end."""
    groups, _ = gpu.split(8)
    g = gpu.green([groups[0]])
    s = gpu.stream_on(g)
    f = gpu.kernels["null_kernel"]
    n = 500
    out = {}

    block = ok(
        drv.cuEventCreate(
            drv.CUevent_flags.CU_EVENT_BLOCKING_SYNC | drv.CUevent_flags.CU_EVENT_DISABLE_TIMING
        )
    )

    def blocking():
        drv.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, 0, 0)
        drv.cuEventRecord(block, s)
        drv.cuEventSynchronize(block)

    out["blocking event"] = timed(blocking, n)

    try:
        host = ok(
            drv.cuMemHostAlloc(64, drv.CU_MEMHOSTALLOC_DEVICEMAP | drv.CU_MEMHOSTALLOC_PORTABLE)
        )
        flag = np.frombuffer((ctypes.c_uint64 * 8).from_address(int(host)), np.uint64)
        daddr = ok(drv.cuMemHostGetDevicePointer(host, 0))
        seq = [0]

        def write_value():
            seq[0] += 1
            drv.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, 0, 0)
            ok(drv.cuStreamWriteValue64(s, daddr, seq[0], 0))
            while flag[0] < seq[0]:
                pass

        out["stream write value, host polls memory"] = timed(write_value, n)
    except Exception as exc:
        out["stream write value, host polls memory"] = str(exc)

    try:
        libc = ctypes.CDLL("libc.so.6", use_errno=True)
        sem = ctypes.create_string_buffer(64)
        libc.sem_init(sem, 0, 0)
        fn = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
        hostfn = drv.CUhostFn(fn)

        def host_func():
            drv.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, 0, 0)
            ok(drv.cuLaunchHostFunc(s, hostfn, ctypes.addressof(sem)))
            libc.sem_wait(sem)

        out["host function sem_post, sem_wait"] = timed(host_func, n)
    except Exception as exc:
        out["host function sem_post, sem_wait"] = str(exc)

    async def through_loop():
        loop = asyncio.get_running_loop()
        samples = []
        stop = threading.Event()
        ready = threading.Semaphore(0)
        box: list = []

        def waiter():
            while True:
                ready.acquire()
                if stop.is_set():
                    return
                drv.cuEventSynchronize(block)
                fut = box.pop()
                loop.call_soon_threadsafe(fut.set_result, None)

        t = threading.Thread(target=waiter, daemon=True)
        t.start()
        for _ in range(n):
            fut = loop.create_future()
            t0 = time.perf_counter_ns()
            drv.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, 0, 0)
            drv.cuEventRecord(block, s)
            box.append(fut)
            ready.release()
            await fut
            samples.append((time.perf_counter_ns() - t0) / 1e3)
        stop.set()
        ready.release()
        t.join()
        return percentiles(samples)

    out["asyncio: waiter thread on a blocking event"] = asyncio.run(through_loop())
    return out


def isolation(gpu: Gpu) -> Answer:
    """Ask for the latency of a small kernel alone, and beside a saturating one."""
    groups, _ = gpu.split(8)
    small = gpu.green(groups[:2])
    big = gpu.green(groups[2:])
    lo, hi = ok(drv.cuCtxGetStreamPriorityRange())
    n_bytes = 1 << 30
    src, dst = ok(drv.cuMemAlloc(n_bytes)), ok(drv.cuMemAlloc(n_bytes))
    out_mem = ok(drv.cuMemAlloc(4))
    reps = 100 if gpu.quick else 400

    def small_job(s):
        gpu.launch("fma_burn", 16, 256, s, (out_mem, 20000), (None, ctypes.c_int))

    def background(kind, s):
        if kind == "compute":
            gpu.launch("fma_burn", 132 * 16, 1024, s, (out_mem, 40000), (None, ctypes.c_int))
        else:
            gpu.launch(
                "stream_copy",
                132 * 16,
                1024,
                s,
                (src, dst, n_bytes // 16),
                (None, None, ctypes.c_size_t),
            )

    def measure(s_small, s_big, kind):
        lat = []
        depth = 0
        for i in range(reps):
            if kind:
                while depth < 4:
                    background(kind, s_big)
                    depth += 1
            t = time.perf_counter_ns()
            small_job(s_small)
            ok(drv.cuStreamSynchronize(s_small))
            lat.append((time.perf_counter_ns() - t) / 1e3)
            if kind and i % 4 == 3:
                depth = 0
        ok(drv.cuCtxSynchronize())
        ok(drv.cuStreamSynchronize(s_big))
        return percentiles(lat)

    nb = drv.CUstream_flags.CU_STREAM_NON_BLOCKING
    plain_a, plain_b = ok(drv.cuStreamCreate(nb)), ok(drv.cuStreamCreate(nb))
    prio_a, prio_b = (
        ok(drv.cuStreamCreateWithPriority(nb, hi)),
        ok(drv.cuStreamCreateWithPriority(nb, lo)),
    )
    green_a, green_b = gpu.stream_on(small), gpu.stream_on(big)
    res = {}
    for kind in (None, "compute", "memory"):
        res[f"{kind or 'alone'}: plain streams"] = measure(plain_a, plain_b, kind)
        res[f"{kind or 'alone'}: priority streams"] = measure(prio_a, prio_b, kind)
        res[f"{kind or 'alone'}: green contexts 16 + the rest"] = measure(green_a, green_b, kind)
    ok(drv.cuMemFree(src))
    ok(drv.cuMemFree(dst))
    ok(drv.cuMemFree(out_mem))
    return res


def scaling(gpu: Gpu) -> Answer:
    """Ask for the time of kernels by the number of SMs, by arithmetic and by memory."""
    groups, _ = gpu.split(8)
    n_bytes = 1 << 30
    src, dst, out_mem = (
        ok(drv.cuMemAlloc(n_bytes)),
        ok(drv.cuMemAlloc(n_bytes)),
        ok(drv.cuMemAlloc(4)),
    )
    start, end = ok(drv.cuEventCreate(0)), ok(drv.cuEventCreate(0))
    res = {}
    for k in (1, 2, 4, 8, len(groups)):
        g = gpu.green(groups[:k])
        s = gpu.stream_on(g)
        row = {}
        for name, args in (
            ("fma_burn", ((out_mem, 20000), (None, ctypes.c_int))),
            ("stream_copy", ((src, dst, n_bytes // 16), (None, None, ctypes.c_size_t))),
        ):
            times = []
            for _ in range(7):
                ok(drv.cuEventRecord(start, s))
                gpu.launch(name, 132 * 8, 512, s, *args)
                ok(drv.cuEventRecord(end, s))
                ok(drv.cuEventSynchronize(end))
                times.append(ok(drv.cuEventElapsedTime(start, end)))
            row[name + "_ms"] = round(statistics.median(times), 3)
        res[f"{8 * k} SMs"] = row
        ok(drv.cuStreamDestroy(s))
        ok(drv.cuGreenCtxDestroy(g))
    ok(drv.cuMemFree(src))
    ok(drv.cuMemFree(dst))
    ok(drv.cuMemFree(out_mem))
    return res


def graphs(gpu: Gpu) -> Answer:
    """Ask on which SMs a captured graph runs."""
    groups, _ = gpu.split(8)
    g1, g2 = gpu.green([groups[0]]), gpu.green([groups[1]])
    s1, s2 = gpu.stream_on(g1), gpu.stream_on(g2)
    own = gpu.smids_of(s1)
    words = 64
    mem = ok(drv.cuMemAlloc(words * 4))

    def seen():
        host = np.zeros(words, np.uint32)
        ok(drv.cuMemcpyDtoH(host.ctypes.data, mem, words * 4))
        ok(drv.cuMemsetD32(mem, 0, words))
        return {i * 32 + b for i in range(words) for b in range(32) if host[i] >> b & 1}

    ok(drv.cuMemsetD32(mem, 0, words))
    ok(drv.cuStreamBeginCapture(s1, drv.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    gpu.launch("smids", 1024, 1024, s1, (mem,), (None,))
    graph = ok(drv.cuStreamEndCapture(s1))
    exe = ok(drv.cuGraphInstantiate(graph, 0))
    ok(drv.cuGraphLaunch(exe, s1))
    ok(drv.cuStreamSynchronize(s1))
    a = seen()
    ok(drv.cuGraphLaunch(exe, s2))
    ok(drv.cuStreamSynchronize(s2))
    b = seen()
    return {
        "replayed on its own stream keeps its SMs": a == own,
        "replayed on another partition's stream runs on": "the capturing SMs"
        if b == own
        else f"{len(b)} other SMs",
        "replay_us": timed(lambda: (drv.cuGraphLaunch(exe, s1), drv.cuStreamSynchronize(s1)), 50),
    }


def pooled_memory(gpu: Gpu) -> Answer:
    """Ask whether pool memory of one partition can be used and freed on another."""
    groups, _ = gpu.split(8)
    g1, g2 = gpu.green([groups[0]]), gpu.green([groups[1]])
    s1, s2 = gpu.stream_on(g1), gpu.stream_on(g2)
    p = ok(drv.cuMemAllocAsync(1 << 20, s1))
    ok(drv.cuMemsetD32Async(p, 7, 1 << 18, s1))
    ok(drv.cuStreamSynchronize(s1))
    ok(drv.cuMemsetD32Async(p, 9, 1 << 18, s2))
    ok(drv.cuStreamSynchronize(s2))
    ok(drv.cuMemFreeAsync(p, s2))
    return {
        "allocated on one partition, used and freed on another": "works",
        "alloc_free_async_us": timed(
            lambda: drv.cuMemFreeAsync(ok(drv.cuMemAllocAsync(1 << 20, s1)), s1), 500
        ),
    }


def words_on_green_streams(gpu: Gpu) -> Answer:
    """Ask whether tickets by cuStreamWriteValue32 arrive in order.

    By many streams at once, after large copies, and around captures.
    """
    groups, _ = gpu.split(8)
    words, device = gpu.pinned_words(len(groups))
    pairs = [(g := gpu.green([r]), gpu.stream_on(g)) for r in groups]
    out = {}
    rounds, backwards, worst = 300, 0, 0.0
    for ticket in range(1, rounds + 1):
        for k, (_, s) in enumerate(pairs):
            ok(drv.cuLaunchKernel(gpu.kernels["null_kernel"], 1, 1, 1, 1, 1, 1, 0, s, 0, 0))
            ok(drv.cuStreamWriteValue32(s, device + 64 * k, ticket, 0))
        t = time.perf_counter()
        while any(words[16 * k] != ticket for k in range(len(pairs))):
            backwards += any(words[16 * k] > ticket for k in range(len(pairs)))
            if time.perf_counter() - t > 5:
                return {
                    "error": f"ticket {ticket} not seen within 5 s",
                    "words": [words[16 * k] for k in range(len(pairs))],
                }
        worst = max(worst, time.perf_counter() - t)
    out["streams writing at once"] = {
        "streams": len(pairs),
        "tickets": rounds,
        "out_of_order": backwards,
        "worst_ms": round(worst * 1e3, 3),
    }

    n = 64 << 20
    src = ok(drv.cuMemAlloc(n))
    dst = ok(drv.cuMemHostAlloc(n, drv.CU_MEMHOSTALLOC_PORTABLE))
    tail = memoryview((ctypes.c_uint32 * 4).from_address(int(dst) + n - 16)).cast("B").cast("I")
    _, s = pairs[0]
    torn = 0
    for i in range(1, 21):
        ok(drv.cuMemsetD32Async(src, i, n // 4, s))
        ok(drv.cuMemcpyDtoHAsync(dst, src, n, s))
        ok(drv.cuStreamWriteValue32(s, device, 1000 + i, 0))
        while words[0] != 1000 + i:
            pass
        torn += list(tail) != [i] * 4
    out["64 MiB copy then ticket: last bytes wrong at first sight"] = f"{torn} of 20"

    try:
        ok(drv.cuStreamBeginCapture(s, drv.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        status = drv.cuStreamWriteValue32(s, device, 7, 0)[0].name
        ended, graph = (*drv.cuStreamEndCapture(s), None)[:2]
        out["write-value on a capturing stream"] = {"call": status, "end": ended.name}
        if int(ended) == 0:
            exe = ok(drv.cuGraphInstantiate(graph, 0))
            ok(drv.cuStreamWriteValue32(s, device, 2000, 0))
            ok(drv.cuGraphLaunch(exe, s))
            ok(drv.cuStreamSynchronize(s))
            out["... and after a replay the word went from 2000 to"] = words[0]
    except CudaError as exc:
        out["capture"] = str(exc)
    ok(drv.cuMemFree(src))
    ok(drv.cuMemFreeHost(dst))
    for g, stream in pairs:
        ok(drv.cuStreamDestroy(stream))
        ok(drv.cuGreenCtxDestroy(g))
    return out


def call_contention(gpu: Gpu) -> Answer:
    """Ask whether a blocking call on one thread delays launches on another."""
    groups, _ = gpu.split(8)
    _, device = gpu.pinned_words()
    g, h = gpu.green([groups[0]]), gpu.green([groups[1]])
    s, t = gpu.stream_on(g), gpu.stream_on(h)
    hctx = ok(drv.cuCtxFromGreenCtx(h))
    desc = ok(drv.cuDevResourceGenerateDesc([groups[2]], 1))
    flag = drv.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    small, ns = 1 << 20, (2_000_000,)

    def alloc_free():
        ok(drv.cuMemFree(ok(drv.cuMemAlloc(small))))

    def load():
        ok(drv.cuLibraryUnload(ok(drv.cuLibraryLoadData(gpu.image, [], [], 0, [], [], 0))))

    def green():
        ok(drv.cuGreenCtxDestroy(ok(drv.cuGreenCtxCreate(desc, gpu.device, flag))))

    def synchronise():
        gpu.launch("spin", 1, 1, t, ns, (ctypes.c_uint64,))
        ok(drv.cuStreamSynchronize(t))

    def synchronise_context():
        gpu.launch("spin", 1, 1, t, ns, (ctypes.c_uint64,))
        ok(drv.cuCtxPushCurrent(hctx))
        ok(drv.cuCtxSynchronize())
        ok(drv.cuCtxPopCurrent())

    meanwhile: dict[str, Callable[[], None] | None] = {
        "nothing": None,
        "cuMemAlloc + Free": alloc_free,
        "library load + unload": load,
        "green context create + destroy": green,
        "cuStreamSynchronize, 2 ms": synchronise,
        "cuCtxSynchronize of a green context, 2 ms": synchronise_context,
    }
    return {name: _launched_beside(gpu, s, device, call) for name, call in meanwhile.items()}


def _launched_beside(gpu: Gpu, stream: Any, word: int, call: Callable[[], None] | None) -> Answer:
    """Time launches with a ticket while another thread repeats a call."""
    stop, failures = threading.Event(), []

    def repeat() -> None:
        try:
            ok(drv.cuCtxSetCurrent(gpu.primary))
            while call is not None and not stop.is_set():
                call()
        except Exception as error:
            failures.append(str(error))

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    samples, ticket = [], 0
    end = time.perf_counter() + (0.5 if gpu.quick else 3)
    while time.perf_counter() < end:
        ticket += 1
        start = time.perf_counter_ns()
        drv.cuLaunchKernel(gpu.kernels["null_kernel"], 1, 1, 1, 1, 1, 1, 0, stream, 0, 0)
        drv.cuStreamWriteValue32(stream, word, ticket, 0)
        samples.append((time.perf_counter_ns() - start) / 1e3)
        if ticket % 200 == 0:
            drv.cuStreamSynchronize(stream)
    stop.set()
    thread.join(10)
    row = percentiles(samples)
    row["p99.9"] = round(sorted(samples)[int(0.999 * (len(samples) - 1))], 1)
    return row | ({"failed": failures[0]} if failures else {})


def many_contexts(gpu: Gpu) -> Answer:
    """Ask for isolation with few and with many green contexts alive."""
    groups, _ = gpu.split(8)
    out_mem = ok(drv.cuMemAlloc(4))
    reps = 100 if gpu.quick else 400

    def measure(loaded):
        small, big = gpu.green(groups[:2]), gpu.green(groups[2:])
        s, b = gpu.stream_on(small), gpu.stream_on(big)
        lat = []
        for i in range(reps):
            if loaded and i % 4 == 0:
                for _ in range(4):
                    gpu.launch(
                        "fma_burn", 132 * 16, 1024, b, (out_mem, 40000), (None, ctypes.c_int)
                    )
            t = time.perf_counter()
            gpu.launch("fma_burn", 16, 256, s, (out_mem, 20000), (None, ctypes.c_int))
            ok(drv.cuStreamSynchronize(s))
            lat.append((time.perf_counter() - t) * 1e6)
        ok(drv.cuStreamSynchronize(b))
        for x, y in ((s, small), (b, big)):
            ok(drv.cuStreamDestroy(x))
            ok(drv.cuGreenCtxDestroy(y))
        return percentiles(lat)

    out = {
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
        "2 contexts, alone": measure(False),
        "2 contexts, loaded": measure(True),
    }
    cached = []
    for i in range(62):
        first = i % (len(groups) - 1)
        g = gpu.green(groups[first : first + 1 + i % 3])
        cached += [(g, gpu.stream_on(g), gpu.stream_on(g))]
    for _, a, b in cached:
        gpu.launch("null_kernel", 1, 1, a)
        gpu.launch("null_kernel", 1, 1, b)
    ok(drv.cuCtxSynchronize())
    out["64 contexts x 2 streams, alone"] = measure(False)
    out["64 contexts x 2 streams, loaded"] = measure(True)
    for g, a, b in cached:
        ok(drv.cuStreamDestroy(a))
        ok(drv.cuStreamDestroy(b))
        ok(drv.cuGreenCtxDestroy(g))
    ok(drv.cuMemFree(out_mem))
    return out


def first_launch_beside_a_latch(gpu: Gpu) -> Answer:
    """Ask how long a first launch takes while a kernel holds 8 SMs for two seconds."""
    groups, _ = gpu.split(8)
    words, device = gpu.pinned_words()
    g, h = gpu.green([groups[0]]), gpu.green([groups[1]])
    s, t = gpu.stream_on(g), gpu.stream_on(h)
    library = ok(drv.cuLibraryLoadData(gpu.image, [], [], 0, [], [], 0))
    fresh = ok(drv.cuLibraryGetKernel(library, b"first_use_only"))
    warm = gpu.kernels["null_kernel"]
    ok(drv.cuLaunchKernel(warm, 1, 1, 1, 1, 1, 1, 0, t, 0, 0))
    ok(drv.cuStreamSynchronize(t))
    words[0] = 0
    gpu.launch("latch", 1, 1, s, (device,), (ctypes.c_uint64,))
    threading.Timer(2.0, lambda: words.__setitem__(0, 1)).start()
    t0 = time.perf_counter()
    ok(drv.cuLaunchKernel(warm, 1, 1, 1, 1, 1, 1, 0, t, 0, 0))
    ok(drv.cuStreamSynchronize(t))
    t1 = time.perf_counter()
    ok(drv.cuLaunchKernel(fresh, 1, 1, 1, 1, 1, 1, 0, t, 0, 0))
    t2 = time.perf_counter()
    ok(drv.cuMemFree(ok(drv.cuMemAlloc(1 << 20))))
    t3 = time.perf_counter()
    ok(drv.cuStreamSynchronize(s))
    return {
        "warm kernel ms": round((t1 - t0) * 1e3, 2),
        "first launch ms": round((t2 - t1) * 1e3, 2),
        "alloc and free ms": round((t3 - t2) * 1e3, 2),
    }
