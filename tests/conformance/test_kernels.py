"""The built-in kernels agree with numpy, by device code or by their reference."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from greensched import LaunchConfig, Partition, Pool, kernels
from greensched.kernels import Kernel
from helpers.backend import Backend

IS_VERSIONED = False

pytestmark = pytest.mark.runs_device_code

Floats = npt.NDArray[np.float32]

SHAPES = [LaunchConfig(grid=1, block=1), LaunchConfig(grid=(3, 2), block=(7, 5, 3))]


async def through(
    p: Partition, kernel: Kernel, config: LaunchConfig, out: Floats, *inputs: object
) -> Floats:
    """Return what a kernel writes into its one output, which is None in the arguments."""
    buffers = [await p.upload(i) if isinstance(i, np.ndarray) else i for i in inputs]
    with await p.upload(out) as result:
        p.launch(config, kernel, *(result if b is None else b for b in buffers))
        found = await p.download(result)
    for buffer in buffers:
        if hasattr(buffer, "close"):
            buffer.close()
    return found


@pytest.mark.parametrize("config", SHAPES, ids=str)
def test_flat_kernels(backend: Backend, config: LaunchConfig) -> None:
    """`fill`, `saxpy` and `reduce_sum` are right for any geometry and write nothing beyond n."""

    async def main() -> None:
        rng = np.random.default_rng(1)
        x, y = (rng.standard_normal(1003, dtype=np.float32) for _ in range(2))
        async with backend.pool() as pool, pool.partition(8) as p:
            found = await through(p, kernels.fill, config, y, None, 2.5, 1000)
            np.testing.assert_array_equal(found, [2.5] * 1000 + [*y[1000:]])
            found = await through(p, kernels.saxpy, config, y, 3.0, x, None, 1000)
            wanted = np.concatenate([np.float32(3) * x[:1000] + y[:1000], y[1000:]])
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
            found = await through(
                p, kernels.reduce_sum, config, np.ones(1, np.float32), x, None, 1000
            )
            np.testing.assert_allclose(found[0], 1 + math.fsum(x[:1000]), rtol=1e-4)

    backend.run(main)


@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 53, 3), (64, 64, 1)], ids=str)
@pytest.mark.parametrize("sigma", [0.0, 0.7, 3.0])
def test_gaussian_blur(backend: Backend, shape: tuple[int, int, int], sigma: float) -> None:
    """A blur is the weighted mean of the neighbourhood, with clamped edges."""

    async def main() -> None:
        image = np.random.default_rng(2).random(shape, dtype=np.float32)
        config = LaunchConfig(grid=8, block=(16, 8))
        async with backend.pool() as pool, pool.partition(8) as p:
            arguments = (image, None, *shape, sigma)
            found = await through(
                p, kernels.gaussian_blur, config, np.zeros_like(image), *arguments
            )
        np.testing.assert_allclose(found, _blurred(image, sigma), rtol=1e-4, atol=1e-5)

    backend.run(main)


def _blurred(image: Floats, sigma: float) -> npt.NDArray[np.float64]:
    """Return the blur by its definition, one direction after the other, in double precision."""
    radius = math.ceil(3 * sigma)
    if radius == 0:
        return image.astype(float)
    at = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (at / sigma) ** 2)
    weights /= weights.sum()
    result = image.astype(float)
    for axis in (0, 1):
        last = image.shape[axis] - 1
        index = np.clip(np.arange(image.shape[axis])[:, None] + at, 0, last)
        taken = np.take(result, index, axis=axis)
        result = np.moveaxis(np.tensordot(taken, weights, axes=([axis + 1], [0])), 0, 0)
    return result


@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 65, 17), (128, 96, 64)], ids=str)
def test_matmul(backend: Backend, sizes: tuple[int, int, int]) -> None:
    """`matmul` gives numpy's product multiplied by the number of passes."""
    m, n, k = sizes

    async def main() -> None:
        rng = np.random.default_rng(3)
        a = rng.standard_normal((m, k), dtype=np.float32)
        b = rng.standard_normal((k, n), dtype=np.float32)
        config = LaunchConfig(grid=4, block=(16, 16))
        async with backend.pool() as pool, pool.partition(8) as p:
            out = np.full((m, n), np.nan, np.float32)
            found = await through(p, kernels.matmul, config, out, a, b, None, m, n, k, 3)
        np.testing.assert_allclose(found, 3 * (a.astype(float) @ b), rtol=1e-4, atol=1e-4)

    backend.run(main)


def test_spin_takes_its_time(backend: Backend) -> None:
    """A spin of two milliseconds takes at least as long by the device's clock."""

    async def main() -> None:
        driver = backend.driver()
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            await p.launch(LaunchConfig(grid=1, block=1), kernels.spin, 0)  # loaded
            began = driver.time()
            await p.launch(LaunchConfig(grid=8, block=32), kernels.spin, 2_000_000)
            assert driver.time() - began > 0.0019  # the device's clock ticks in microseconds

    backend.run(main)


def test_latch_waits_for_the_host_or_its_limit(backend: Backend) -> None:
    """A latch runs until the host sets its word, or until its limit."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty_pinned(1, np.uint32) as word:
                config = LaunchConfig(grid=2, block=32)
                await p.launch(config, kernels.latch, word, 1_000_000)
                held = p.launch(config, kernels.latch, word, 10_000_000_000)
                assert not held.done()
                word.array[0] = 1
                await held

    backend.run(main)


def test_smids_names_the_partitions_sms(backend: Backend) -> None:
    """With enough blocks, `smids` sees as many SMs as the partition has."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            config = LaunchConfig(grid=2 * p.sm_count, block=1024)
            seen = await through(p, kernels.smids, config, np.zeros(64, np.uint32), None, 200_000)
            assert int(np.unpackbits(seen.view(np.uint8)).sum()) == p.sm_count

    backend.run(main)
