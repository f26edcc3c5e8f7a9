"""torch without a GPU: on the CPU beside a simulated device, by the same program."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import greensched
from greensched import InvalidArray, LaunchConfig, Pool, current_call
from greensched.driver import simulated
from greensched.driver.simulated import cost
from greensched.kernels import saxpy
from greensched.typing import Cost

torch = pytest.importorskip("torch", reason="torch is not installed: make test-integrations")
gs_torch = pytest.importorskip("greensched.integrations.torch")

CONFIG = LaunchConfig(grid=4, block=128)


def run(main: Any) -> Any:
    clock = simulated.VirtualClock(seed=1)
    driver = simulated.open("h200", clock=clock)
    try:
        return clock.run(main, driver)
    finally:
        assert not driver.live()


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("README.md", r"16 torch.Size\(\[8, 4096\]\)\n"),
        ("docs/how-to/arrays.md", r"tensor\(0\..*\)\n"),
    ],
)
def test_the_program_of_a_page_runs(page: str, printed: str) -> None:
    """Without a GPU, torch's tensors are on the CPU and the partition is simulated."""
    text = (Path(__file__).parents[3] / page).read_text()
    program = re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        program = program.replace(".cuda()", "").replace(', device="cuda"', "")
        environment["GREENSCHED_DRIVER"] = "simulated:h200"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(printed, done.stdout)


def test_a_model_runs_in_a_partition() -> None:
    """`p.run` returns what the model returns, with gradients, and takes its cost."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    x = torch.randn(4, 8)
    expected = model(x)

    @cost(lambda given: Cost(sm_ns=1e6 * 16 * len(given)))
    def forward_and_backward(given: Any) -> tuple[Any, Any]:
        y = model(given)
        y.sum().backward()
        return y.detach(), model[0].weight.grad.clone()

    async def main(driver: Any) -> tuple[Any, Any, float]:
        async with Pool(driver=driver) as pool, pool.partition(16) as p:
            began = driver.time()
            y, grad = await p.run(forward_and_backward, x)
            return y, grad, driver.time() - began

    y, grad, took = run(main)
    assert torch.equal(y, expected)
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(grad, model[0].weight.grad)
    assert took == pytest.approx(4e-3, rel=0.01)


def test_tensors_go_to_the_device_and_back() -> None:
    """CPU tensors can be uploaded, copied into a buffer, and filled by a download."""

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            x = torch.arange(8, dtype=torch.float32)
            with await p.upload(x) as a:
                await p.launch(CONFIG, saxpy, 2.0, a, a, a.size)
                out = torch.empty(8)
                await p.download(a, out.numpy())
                assert torch.equal(out, 3 * x)
                await p.copy(a, x)
                np.testing.assert_array_equal(await p.download(a), x.numpy())
                with pytest.raises(greensched.ArgumentMismatch, match=r"p\.upload"):
                    p.launch(CONFIG, saxpy, 2.0, x, a, 8)
                with pytest.raises(InvalidArray, match=r"p\.upload"):
                    p.download(x)

    run(main)


def test_blocks_leave_torch_as_it_is_where_the_gpu_is_simulated() -> None:
    """`current` and `take` are blocks as usual, but there is no stream for torch."""

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool, pool.partition(16) as p:
            x = torch.ones(3)
            with gs_torch.current(p, x) as stream:
                assert stream is None
                assert gs_torch.sm_count() == 16
                y = x + 1
            gs_torch.take(p, y)
            assert y.tolist() == [2, 2, 2]
            with pytest.raises(greensched.InvalidRequest, match="simulated"):
                gs_torch.stream(p)
        with pytest.raises(greensched.InvalidRequest, match=r"no p\.run is running"):
            gs_torch.stream()

    run(main)


def test_a_library_is_told_how_many_sms_there_are() -> None:
    """In a call, `sized` sets a library's SM count, and restores it after errors, too."""
    told: list[int] = []
    deep_gemm = types.SimpleNamespace(get_num_sms=lambda: 132, set_num_sms=told.append)

    def call(fails: bool) -> int:
        with gs_torch.sized(deep_gemm) as count:
            if fails:
                raise ZeroDivisionError
            call_ = current_call()
            assert call_ is not None
            assert call_.sm_count == count
        return int(count)

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool, pool.partitions(16, 32) as (p, q):
            assert await p.run(call, False) == 16
            with pytest.raises(ZeroDivisionError):
                await q.run(call, True)

    run(main)
    assert told == [16, 132, 32, 132]


def test_torch_takes_what_a_capsule_of_ours_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch reads our DLPack capsules, here as host memory, with the right values."""
    from greensched.device import dlpack

    array = np.arange(6, dtype=np.float32)
    returned: list[int] = []
    monkeypatch.setattr(dlpack, "CUDA", 1)
    for newest in (None, (1, 0)):
        capsule = dlpack.make(
            array.ctypes.data,
            (2, 3),
            array.dtype,
            0,
            newest=newest,
            released=lambda: returned.append(1),
        )
        tensor = torch.from_dlpack(capsule)
        assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
        tensor += 1
        assert array[0] == 1
        array -= 1
        before = len(returned)
        del capsule
        assert len(returned) == before
        del tensor
        assert len(returned) == before + 1
    view = dlpack.read(torch.ones(3, 2, dtype=torch.bfloat16).T.__dlpack__())
    assert (view.shape, view.strides, view.kind) == ((2, 3), (2, 4), "bfloat16")


class FakeCuda:
    """What the integration uses of torch.cuda: a current stream for each thread, and a log."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self._here = threading.local()
        self._default = self.ExternalStream("default", 0)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def is_current_stream_capturing(self) -> bool:
        return False

    def current_stream(self, device: int = 0) -> Any:
        return getattr(self._here, "stream", self._default)

    def ExternalStream(self, address: Any, device: int) -> Any:  # noqa: N802  as torch has it
        return types.SimpleNamespace(
            address=address,
            wait_event=lambda event: self.log.append((address, "waits", event.of.address)),
        )

    def Event(self) -> Any:  # noqa: N802  as torch has it
        event = types.SimpleNamespace()
        event.record = functools.partial(setattr, event, "of")
        return event

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self._here.stream = self.current_stream(0), stream
        try:
            yield
        finally:
            self._here.stream = before


class FakeTensor:
    """A tensor on the GPU that notes the streams on which it was recorded."""

    is_cuda = True

    def __init__(self) -> None:
        self.on: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.on.append(stream.address)


def test_streams_are_handed_over_by_events(
    cuda_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which stream waits for which, is current where, and which tensors are recorded on which.

    Never on ours: torch marks such a stream when the tensor goes, whenever that is.
    torch's part is played: the CPU's torch has no streams. tests/gpu has the real one.
    """
    cuda = FakeCuda()
    fake = types.SimpleNamespace(cuda=cuda, Tensor=FakeTensor)
    monkeypatch.setattr(gs_torch, "torch", fake)
    gs_torch._has_cuda.cache_clear()
    x, y = FakeTensor(), FakeTensor()

    def call(given: Any) -> Any:
        return cuda.current_stream(0).address, {"y": [y]}

    async def main() -> None:
        async with cuda_pool as pool, pool.partition(8) as p:
            run = p._open_lease().executor.call_stream.stream.address
            address, _ = await p.run(call, x)
            assert address == run
            assert (cuda.log, x.on, y.on) == ([(run, "waits", "default")], [], ["default"])
            cuda.log.clear()
            with gs_torch.current(p, x) as ours:
                assert cuda.current_stream(0) is ours
                assert gs_torch.sm_count() == 8
            launch = p.stream.address
            assert (cuda.log, x.on) == ([(launch, "waits", "default")], [])
            y.on.clear()
            cuda.log.clear()
            gs_torch.take(p, y)
            assert (cuda.log, y.on) == ([("default", "waits", launch)], ["default"])
            with gs_torch.current(p), pytest.raises(greensched.InvalidRequest, match="block"):
                gs_torch.take(p, y)

    try:
        anyio.run(main)
    finally:
        gs_torch._has_cuda.cache_clear()
