"""On a real GPU: torch and CuPy on a partition's stream, and their arrays as arguments."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from greensched import LaunchConfig, Pool
from greensched.kernels import saxpy

pytestmark = pytest.mark.gpu

CONFIG = LaunchConfig(grid=64, block=256)
SIZE = 1 << 20


@pytest.fixture
def torch() -> Any:
    """Return torch with CUDA."""
    found = pytest.importorskip("torch", reason="torch is not on this machine")
    if not found.cuda.is_available():
        pytest.skip("torch on this machine was built without CUDA")
    import greensched.integrations.torch  # noqa: F401  calls have torch's stream by this

    return found


@pytest.mark.fault("E7")
def test_tensors_are_arguments_in_order(torch: Any) -> None:
    """The kernel waits for torch's tensor, and torch for the kernel."""
    from greensched.integrations import torch as gs_torch

    async def main() -> None:
        async with Pool([0], prepare=[saxpy]) as pool, pool.partition(16) as p:
            x = torch.ones(SIZE, device="cuda")
            for _ in range(50):
                x = x * 1.0 + 0.0
            y = torch.zeros(SIZE, device="cuda")
            job = p.launch(CONFIG, saxpy, 2.0, x, y, SIZE)
            del x
            gs_torch.take(p)
            z = y + 1
            await job
            assert torch.equal(z, torch.full((SIZE,), 3.0, device="cuda"))
            np.testing.assert_array_equal(await p.download(y), np.full(SIZE, 2, np.float32))

    anyio.run(main)


def test_a_call_has_torchs_current_stream(torch: Any) -> None:
    """In p.run torch's stream is the partition's, with right results and gradients."""
    model = torch.nn.Linear(256, 256).cuda()
    x = torch.randn(64, 256, device="cuda")

    def step(given: Any) -> tuple[int, Any, Any]:
        model.zero_grad()
        y = model(given)
        y.square().sum().backward()
        return torch.cuda.current_stream().cuda_stream, y.detach(), model.weight.grad.clone()

    async def main() -> None:
        _, expected, gradient = step(x)
        async with Pool([0]) as pool, pool.partitions(16, 32) as (p, q):
            streams = set()
            for one in (p, q, p):
                stream, y, grad = await one.run(step, x * 1.0)
                streams.add(stream)
                torch.testing.assert_close(y, expected)
                torch.testing.assert_close(grad, gradient)
            assert len(streams) == 2
            assert torch.cuda.current_stream().cuda_stream not in streams
            _, first, _ = await p.run(step, x)
            _, again, _ = await p.run(step, x)
            assert torch.equal(first, again)

    anyio.run(main)


def test_a_block_has_torchs_current_stream(torch: Any) -> None:
    """Inside `current` torch uses the partition's stream; `take` orders later work."""
    from greensched.integrations import torch as gs_torch

    async def main() -> None:
        async with Pool([0]) as pool, pool.partition(16) as p:
            x = torch.ones(SIZE, device="cuda")
            with gs_torch.current(p, x):
                assert torch.cuda.current_stream().cuda_stream == p.stream.address
                assert gs_torch.sm_count() == p.sm_count
                y = x + 1
            gs_torch.take(p, y)
            assert float((y * 2).sum()) == 4 * SIZE

    anyio.run(main)


def test_a_graph_is_captured_in_a_call(torch: Any) -> None:
    """A CUDA graph that p.run captured replays on the partition's SMs."""
    x = torch.ones(SIZE, device="cuda")
    held: dict[str, Any] = {}

    def capture() -> None:
        (x * 2).sum()  # what loads lazily must not do so in a capture
        torch.cuda.synchronize()
        held["graph"] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(held["graph"], stream=torch.cuda.current_stream()):
            held["y"] = x * 2

    def replay() -> float:
        held["graph"].replay()
        return float(held["y"].sum())

    async def main() -> None:
        async with Pool([0]) as pool, pool.partition(16) as p:
            await p.run(capture)
            assert await p.run(replay) == 2 * SIZE
            held.clear()

    anyio.run(main)


def test_torch_takes_a_buffer(torch: Any) -> None:
    """`from_dlpack` waits for the writing kernel, and keeps a closed buffer's memory."""

    async def main() -> None:
        async with Pool([0], prepare=[saxpy]) as pool, pool.partition(16) as p:
            x = await p.upload(np.ones(SIZE, np.float32))
            p.launch(CONFIG, saxpy, 1.0, x, x, SIZE)
            tensor = torch.from_dlpack(x)
            x.close()
            assert float(tensor.sum()) == 2 * SIZE
            del tensor

    anyio.run(main)


def test_cupy_works_on_a_partitions_stream() -> None:
    """CuPy's current stream is the partition's, and its arrays are arguments."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not on this machine")
    from greensched.integrations import cupy as gs_cupy

    async def main() -> None:
        async with Pool([0], prepare=[saxpy]) as pool, pool.partition(16) as p:
            x = cupy.ones(SIZE, cupy.float32)
            y = await p.run(lambda: (int(cupy.cuda.get_current_stream().ptr), x + 1))
            assert y[0] != 0
            with gs_cupy.current(p) as stream:
                assert stream.ptr == p.stream.address
                z = x * 3
            await p.launch(CONFIG, saxpy, 1.0, y[1], z, SIZE)
            np.testing.assert_array_equal(await p.download(z), np.full(SIZE, 5, np.float32))

    anyio.run(main)
