"""Questions about splits, green contexts, and which of them is current."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from cuda.bindings import driver as drv

from benchmarks.probes.device import Answer, CudaError, Gpu, compiled, ok, percentiles


def splits(gpu: Gpu) -> Answer:
    """Ask which groups and remainder a split by count gives, for several counts and flags."""
    out = {}
    for flags in (0, 1, 2):
        for count in (2, 4, 8, 16, 32, 64):
            try:
                groups, rest = gpu.split(count, flags)
                out[f"flags={flags} min={count}"] = {
                    "groups": len(groups),
                    "sizes": sorted({g.sm.smCount for g in groups}),
                    "rest": rest.sm.smCount,
                }
            except CudaError as exc:
                out[f"flags={flags} min={count}"] = str(exc)
    return out


def combine(gpu: Gpu) -> Answer:
    """Ask whether outputs of one split can share a descriptor, and outputs of two splits."""
    groups, rest = gpu.split(8)
    again, _ = gpu.split(8)
    cases = {
        "two neighbours": [groups[0], groups[1]],
        "first and last": [groups[0], groups[-1]],
        "one group and the remainder": [groups[0], rest],
        "all groups": groups,
        "all groups and the remainder": [*groups, rest],
        "the remainder alone": [rest],
        "outputs of two splits": [groups[0], again[1]],
        "the same group twice": [groups[0], groups[0]],
    }
    out = {}
    for name, resources in cases.items():
        try:
            g = gpu.green(resources)
            got = ok(
                drv.cuGreenCtxGetDevResource(g, drv.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
            ).sm.smCount
            s = gpu.stream_on(g)
            seen = gpu.smids_of(s)
            out[name] = {"sm_count": got, "smids_seen": len(seen)}
            ok(drv.cuStreamDestroy(s))
            ok(drv.cuGreenCtxDestroy(g))
        except CudaError as exc:
            out[name] = str(exc)
    return out


def disjoint(gpu: Gpu) -> Answer:
    """Ask whether the groups of one split run on disjoint SMs."""
    groups, _ = gpu.split(8)
    sets = []
    for r in groups:
        g = gpu.green([r])
        s = gpu.stream_on(g)
        sets.append(gpu.smids_of(s))
        ok(drv.cuStreamDestroy(s))
        ok(drv.cuGreenCtxDestroy(g))
    union = set().union(*sets)
    return {
        "atoms": [sorted(s) for s in sets],
        "sum": sum(map(len, sets)),
        "union": len(union),
        "disjoint": bool(union) and sum(map(len, sets)) == len(union),
    }


def nested_split(gpu: Gpu) -> Answer:
    """Ask whether the resource of a green context can be split again."""
    groups, _ = gpu.split(32)
    g = gpu.green([groups[0]])
    inner = ok(drv.cuGreenCtxGetDevResource(g, drv.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    parts, n, rest = ok(drv.cuDevSmResourceSplitByCount(4, inner, 0, 8))
    out = {"inner_groups": n, "rest": rest.sm.smCount}
    g2 = gpu.green([parts[0]])
    s, s2 = gpu.stream_on(g), gpu.stream_on(g2)
    a, b = gpu.smids_of(s), gpu.smids_of(s2)
    out |= {"outer": len(a), "inner": len(b), "inner_within_outer": b <= a}
    return out


def costs(gpu: Gpu) -> Answer:
    """Ask what a descriptor, a green context and its stream take to create and destroy."""
    groups, _ = gpu.split(8)
    free0, _total = ok(drv.cuMemGetInfo())
    made, create, stream, desc_us = [], [], [], []
    for i in range(8 if gpu.quick else 64):
        mask = [groups[j] for j in range(len(groups)) if (i + 1) >> j & 1] or [groups[0]]
        t = time.perf_counter_ns()
        desc = ok(drv.cuDevResourceGenerateDesc(mask, len(mask)))
        t1 = time.perf_counter_ns()
        g = ok(
            drv.cuGreenCtxCreate(
                desc, gpu.device, drv.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            )
        )
        t2 = time.perf_counter_ns()
        s = gpu.stream_on(g)
        t3 = time.perf_counter_ns()
        desc_us.append((t1 - t) / 1e3)
        create.append((t2 - t1) / 1e3)
        stream.append((t3 - t2) / 1e3)
        made.append((g, s))
    free1, _total = ok(drv.cuMemGetInfo())
    destroy = []
    for g, s in made:
        t = time.perf_counter_ns()
        ok(drv.cuStreamDestroy(s))
        ok(drv.cuGreenCtxDestroy(g))
        destroy.append((time.perf_counter_ns() - t) / 1e3)
    return {
        "descriptor": percentiles(desc_us),
        "green_ctx": percentiles(create),
        "stream": percentiles(stream),
        "destroy_both": percentiles(destroy),
        "bytes_each": (free0 - free1) // len(made),
    }


def how_many(gpu: Gpu) -> Answer:
    """Ask how many green contexts with a stream can be alive at once."""
    groups, _ = gpu.split(8)
    made, stop = [], None
    limit = 64 if gpu.quick else 1024
    t = time.perf_counter()
    try:
        while len(made) < limit and time.perf_counter() - t < 60:
            g = gpu.green([groups[len(made) % len(groups)]])
            made.append((g, gpu.stream_on(g)))
    except CudaError as exc:
        stop = str(exc)
    n = len(made)
    for g, s in made:
        ok(drv.cuStreamDestroy(s))
        ok(drv.cuGreenCtxDestroy(g))
    return {"contexts_with_a_stream": n, "stopped_by": stop or "the probe's own limit"}


def current_context(gpu: Gpu) -> Answer:
    """Ask which SMs a launch on a green stream uses, whatever context is current."""
    groups, _ = gpu.split(8)
    g1, g2 = gpu.green([groups[0]]), gpu.green([groups[1]])
    s1, s2 = gpu.stream_on(g1), gpu.stream_on(g2)
    ok(drv.cuCtxSetCurrent(gpu.primary))
    base1, base2 = gpu.smids_of(s1), gpu.smids_of(s2)
    c2 = ok(drv.cuCtxFromGreenCtx(g2))
    out = {"primary current": len(base1)}
    try:
        ok(drv.cuCtxSetCurrent(c2))
        out["other green context current: stays on its stream's SMs"] = gpu.smids_of(s1) == base1
        plain = ok(drv.cuStreamCreate(drv.CUstream_flags.CU_STREAM_NON_BLOCKING))
        out["plain stream created under a green context uses its SMs"] = (
            gpu.smids_of(plain) == base2
        )
        out["its green context is reported"] = int(ok(drv.cuStreamGetGreenCtx(plain))) == int(g2)
        out["null stream under a green context"] = len(gpu.smids_of(drv.CUstream(0)))
    except CudaError as exc:
        out["with another current"] = str(exc)
    try:
        ok(drv.cuCtxSetCurrent(drv.CUcontext(0)))
        gpu.launch("null_kernel", 1, 1, s1)
        ok(drv.cuStreamSynchronize(s1))
        out["launch of a CUkernel with no context current"] = "works"
    except CudaError as exc:
        out["launch of a CUkernel with no context current"] = str(exc)
    ok(drv.cuCtxSetCurrent(gpu.primary))
    same = [int(ok(drv.cuCtxFromGreenCtx(g1))) for _ in range(2)]
    out["cuCtxFromGreenCtx gives the same handle"] = same[0] == same[1]
    return out


def destroy_in_flight(gpu: Gpu) -> Answer:
    """Ask what destroying a green context with a kernel in flight does."""
    groups, _ = gpu.split(8)
    g = gpu.green([groups[0]])
    s = gpu.stream_on(g)
    gpu.launch("spin", 1, 1, s, (50_000_000,), (ctypes.c_uint64,))
    t = time.perf_counter()
    err = drv.cuGreenCtxDestroy(g)[0]
    took = (time.perf_counter() - t) * 1e3
    after = {
        "cuStreamQuery": drv.cuStreamQuery(s)[0].name,
        "cuStreamSynchronize": drv.cuStreamSynchronize(s)[0].name,
    }
    after["cuStreamDestroy"] = drv.cuStreamDestroy(s)[0].name
    return {
        "cuGreenCtxDestroy with a 50 ms kernel in flight": err.name,
        "took_ms": round(took, 2),
        "then": after,
    }


def driver_edges(gpu: Gpu) -> Answer:
    """Ask what the documentation leaves open; each answer is the name of a status."""

    def name(result: tuple[Any, ...]) -> str:
        return str(result[0].name)

    groups, _ = gpu.split(8)
    g, h = gpu.green([groups[0]]), gpu.green([groups[1]])
    s, t = gpu.stream_on(g), gpu.stream_on(h)
    c = ok(drv.cuCtxFromGreenCtx(g))
    out = {}
    primary_event = ok(drv.cuEventCreate(drv.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    out["record an event of the primary context on a green stream"] = name(
        drv.cuEventRecord(primary_event, s)
    )
    ok(drv.cuCtxPushCurrent(c))
    own_event = ok(drv.cuEventCreate(drv.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    ok(drv.cuCtxPopCurrent())
    out["record an event of its own green context on a green stream"] = name(
        drv.cuEventRecord(own_event, s)
    )
    out["record it on another green context's stream"] = name(drv.cuEventRecord(own_event, t))
    out["record the whole green context in a primary event"] = name(
        drv.cuGreenCtxRecordEvent(g, primary_event)
    )
    out["split a raw split result again"] = name(
        drv.cuDevSmResourceSplitByCount(1, gpu.split(32)[0][0], 0, 8)
    )
    desc = ok(drv.cuDevResourceGenerateDesc([groups[2]], 1))
    try:
        made = drv.cuGreenCtxCreate(desc, gpu.device, 0)
        out["create a green context with flags 0"] = name(made)
        if int(made[0]) == 0:
            ok(drv.cuGreenCtxDestroy(made[1]))
    except Exception as exc:
        out["create a green context with flags 0"] = f"{type(exc).__name__}: {exc}"
    for attr in ("CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG", "CU_DEV_RESOURCE_TYPE_WORKQUEUE"):
        kind = getattr(drv.CUdevResourceType, attr, None)
        out[attr] = (
            "absent in these bindings"
            if kind is None
            else name(drv.cuDeviceGetDevResource(gpu.device, kind))
        )
    for symbol in (
        "cuDevSmResourceSplit",
        "cuStreamGetDevResource",
        "cuGreenCtxGetId",
        "cuLaunchHostFunc_v2",
    ):
        try:
            out[f"{symbol} address"] = bool(
                int(ok(drv.cuGetProcAddress(symbol.encode(), 13010, 0))[0])
            )
        except Exception as exc:
            out[f"{symbol} address"] = f"{type(exc).__name__}: {exc}"
    # does synchronising a green context wait for a sibling?
    gpu.launch("spin", 1, 1, t, (30_000_000,), (ctypes.c_uint64,))
    ok(drv.cuCtxPushCurrent(c))
    t0 = time.perf_counter()
    out["cuCtxSynchronize with a green context current"] = name(drv.cuCtxSynchronize())
    out["... and it waited for a sibling's 30 ms kernel"] = (time.perf_counter() - t0) > 0.02
    ok(drv.cuCtxPopCurrent())
    ok(drv.cuStreamSynchronize(t))
    # a kernel on the primary context's stream: does it enter a partition's SMs?
    plain = ok(drv.cuStreamCreate(drv.CUstream_flags.CU_STREAM_NON_BLOCKING))
    out["a primary-context kernel runs on this many SMs"] = len(gpu.smids_of(plain))
    out["... including every SM of a live partition"] = gpu.smids_of(s) <= gpu.smids_of(plain)
    # module functions (CUfunction) on a green stream with the primary context current
    module = ok(drv.cuModuleLoadData(gpu.image))
    function = ok(drv.cuModuleGetFunction(module, b"null_kernel"))
    out["launch a CUfunction of the primary on a green stream"] = name(
        drv.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, s, 0, 0)
    )
    # cooperative launch: device-wide or partition-wide limit?
    for blocks in (8, 16, 132, 264):
        out[f"cooperative launch of {blocks} full blocks on 8 SMs"] = name(
            drv.cuLaunchCooperativeKernel(
                gpu.kernels["null_kernel"], blocks, 1, 1, 1024, 1, 1, 0, s, 0
            )
        )
    ok(drv.cuStreamSynchronize(s))
    # destroy while current, and destroy a stream after its context
    ok(drv.cuCtxPushCurrent(ok(drv.cuCtxFromGreenCtx(h))))
    out["destroy a green context while it is current"] = name(drv.cuGreenCtxDestroy(h))
    out["... what is current then"] = name(drv.cuCtxSynchronize())
    drv.cuCtxPopCurrent()
    out["... destroy its stream afterwards"] = name(drv.cuStreamDestroy(t))
    ok(drv.cuCtxSetCurrent(gpu.primary))
    return out


def churn(gpu: Gpu) -> Answer:
    """Ask whether creating and destroying the same green context loses memory or slows down."""
    groups, _ = gpu.split(8)
    desc = ok(drv.cuDevResourceGenerateDesc([groups[0], groups[1]], 2))
    flag = drv.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    n = 100 if gpu.quick else 1000
    free0 = ok(drv.cuMemGetInfo())[0]
    took = []
    for _ in range(n):
        t = time.perf_counter_ns()
        g = ok(drv.cuGreenCtxCreate(desc, gpu.device, flag))
        s = gpu.stream_on(g)
        ok(drv.cuStreamDestroy(s))
        ok(drv.cuGreenCtxDestroy(g))
        took.append((time.perf_counter_ns() - t) / 1e3)
    return {
        "first 10": percentiles(took[:10]),
        "last 10": percentiles(took[-10:]),
        "device_bytes_lost": free0 - ok(drv.cuMemGetInfo())[0],
    }


def pending_waits(gpu: Gpu) -> Answer:
    """Ask whether a stream and its green context are idle whose only work is a wait."""
    words, word = gpu.pinned_words()
    groups, _ = gpu.split(8)
    event = ok(drv.cuEventCreate(drv.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def asked(green: Any, stream: Any) -> Answer:
        ok(drv.cuGreenCtxRecordEvent(green, event))
        return {
            "cuStreamQuery": drv.cuStreamQuery(stream)[0].name,
            "the green context's event": drv.cuEventQuery(event)[0].name,
        }

    holding, waiting = gpu.green([groups[0]]), gpu.green([groups[1]])
    held, behind = gpu.stream_on(holding), gpu.stream_on(waiting)
    gpu.launch("null_kernel", 1, 1, behind)  # its first launch would wait for the device
    ok(drv.cuStreamSynchronize(behind))
    flags = drv.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    ok(drv.cuStreamWaitValue32(held, word, 1, flags))
    out = {"a wait for a word": asked(holding, held)}
    before = ok(drv.cuEventCreate(drv.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    ok(drv.cuEventRecord(before, held))
    out["an event recorded behind it"] = {"cuEventQuery": drv.cuEventQuery(before)[0].name}
    ok(drv.cuStreamWaitEvent(behind, before, 0))
    out["a wait for that event, on another green context"] = asked(waiting, behind)
    gpu.launch("null_kernel", 1, 1, behind)
    out["the same and a kernel"] = asked(waiting, behind)
    words[0] = 1
    ok(drv.cuCtxSynchronize())
    out["when the word is written"] = asked(waiting, behind)
    return out


def poison(gpu: Gpu) -> Answer:
    """Ask whether a fault in one green context ends its siblings. Last: nothing works after it."""
    source = r'extern "C" __global__ void wild() { *(volatile int *)0x10 = 1; }'
    lib = ok(drv.cuLibraryLoadData(compiled(source, gpu.capability), [], [], 0, [], [], 0))
    wild = ok(drv.cuLibraryGetKernel(lib, b"wild"))
    groups, _ = gpu.split(8)
    g, h = gpu.green([groups[0]]), gpu.green([groups[1]])
    s, t = gpu.stream_on(g), gpu.stream_on(h)
    ok(drv.cuLaunchKernel(wild, 1, 1, 1, 1, 1, 1, 0, s, 0, 0))
    out = {"the faulting stream": drv.cuStreamSynchronize(s)[0].name}
    out["a sibling partition's stream"] = drv.cuStreamSynchronize(t)[0].name
    out["an allocation on the primary"] = drv.cuMemAlloc(256)[0].name
    out["destroying the sibling"] = drv.cuGreenCtxDestroy(h)[0].name
    return out
