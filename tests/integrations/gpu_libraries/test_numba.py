"""numba-cuda's arrays and streams, on the CUDA driver or the stand-in."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from greensched import LaunchConfig, Pool
from greensched.kernels import fill

cuda = pytest.importorskip("numba.cuda", reason="numba-cuda is not installed: the extra numba")
gs_numba = pytest.importorskip("greensched.integrations.numba")

ONES = np.ones(64, np.float32)


def test_its_arrays_are_ours(cuda_pool: Pool) -> None:
    """A numba device array is an argument and each end of a copy, after its stream."""

    async def main() -> None:
        async with cuda_pool as pool, pool.partition(8) as p:
            stream = cuda.stream()
            theirs = cuda.to_device(ONES, stream=stream)
            assert theirs.__cuda_array_interface__["stream"] is not None
            np.testing.assert_array_equal(await p.download(theirs), ONES)
            await p.copy(theirs, 2 * ONES)
            np.testing.assert_array_equal(theirs.copy_to_host(stream=stream), 2 * ONES)
            await p.launch(LaunchConfig(grid=1, block=64), fill, theirs, 1.0, 64)
            with await p.upload(theirs) as ours:
                viewed = cuda.as_cuda_array(ours)
                assert viewed.shape == (64,)
                del viewed

    anyio.run(main)


def test_it_copies_on_a_partitions_stream(cuda_pool: Pool) -> None:
    """Copies of numba with the partition's stream are the partition's work."""

    def call() -> list[float]:
        with gs_numba.on() as stream:
            theirs = cuda.to_device(ONES, stream=stream)
            return list(theirs.copy_to_host(stream=stream)[:2])

    async def main() -> None:
        async with cuda_pool as pool, pool.partition(8) as p:
            with gs_numba.on(p) as stream:
                theirs = cuda.to_device(ONES, stream=stream)
                assert theirs.__cuda_array_interface__["stream"] == p.stream.address
            np.testing.assert_array_equal(await p.download(theirs), ONES)
            assert await p.run(call) == [1, 1]

    anyio.run(main)
