"""Questions about torch on green contexts; they are asked where it is installed."""

from __future__ import annotations

import time

from cuda.bindings import driver as drv

from benchmarks.probes.device import Answer, Gpu, ok, timed


def torch_interop(gpu: Gpu) -> Answer:
    """Ask for the time of a torch product on external streams of several sizes."""
    import torch

    groups, _ = gpu.split(8)
    torch.cuda.init()
    out = {"torch": torch.__version__}
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for k in (2, 8, len(groups)):
        g = gpu.green(groups[:k])
        s = gpu.stream_on(g)
        ext = torch.cuda.ExternalStream(int(s))
        with torch.cuda.stream(ext):
            for _ in range(3):
                a @ a
            ext.synchronize()
            t = time.perf_counter()
            for _ in range(20):
                a @ a
            ext.synchronize()
            out[f"bf16 4096^3 matmul on {8 * k} SMs, ms"] = round(
                (time.perf_counter() - t) / 20 * 1e3, 3
            )
    if hasattr(torch.cuda, "green_contexts"):
        gc = getattr(torch.cuda.green_contexts, "GreenContext", None)
        if gc is not None:
            out["torch GreenContext.create us"] = timed(
                lambda: gc.create(num_sms=16, device_id=0), 10
            )
    return out


def torch_current(gpu: Gpu) -> Answer:
    """Ask whether torch is confined under a green context, and on an external stream."""
    import torch

    groups, _ = gpu.split(8)
    g = gpu.green(groups[:2])
    ctx, stream = ok(drv.cuCtxFromGreenCtx(g)), gpu.stream_on(g)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def matmul_ms():
        for _ in range(2):
            a @ a
        torch.cuda.current_stream().synchronize()
        t = time.perf_counter()
        for _ in range(5):
            a @ a
        torch.cuda.current_stream().synchronize()
        return round((time.perf_counter() - t) / 5 * 1e3, 3)

    def guarded():
        with torch.cuda.device(0):
            return matmul_ms()

    def side():
        with torch.cuda.stream(torch.cuda.Stream()):
            return matmul_ms()

    def autograd():
        x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
        t = time.perf_counter()
        (x @ x).sum().backward()
        torch.cuda.current_stream().synchronize()
        return round((time.perf_counter() - t) * 1e3, 3)

    def graph():
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            a @ a
        captured.replay()
        torch.cuda.current_stream().synchronize()
        t = time.perf_counter()
        captured.replay()
        torch.cuda.current_stream().synchronize()
        return round((time.perf_counter() - t) * 1e3, 3)

    cases = {
        "allocate": lambda: float(torch.ones(1 << 20, device="cuda").sum()),
        "current stream": matmul_ms,
        "device guard": guarded,
        "new side stream": side,
        "autograd": autograd,
        "graph": graph,
    }
    out = {"whole device": matmul_ms()}
    for name, enter in {"green current": ctx, "primary current + ExternalStream": None}.items():
        row = {}
        for case, fn in cases.items():
            try:
                if enter is not None:
                    ok(drv.cuCtxPushCurrent(enter))
                    row[case] = fn()
                    row[case + ": current afterwards"] = (
                        "green" if int(ok(drv.cuCtxGetCurrent())) == int(ctx) else "another"
                    )
                else:
                    with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
                        row[case] = fn()
            except Exception as exc:
                row[case] = f"{type(exc).__name__}: {exc}"[:200]
            finally:
                drv.cuCtxSetCurrent(gpu.primary)
        out[name] = row
    return out
