"""Errors that other code leaves in the state of the CUDA runtime."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from greensched import LaunchConfig, Pool
from greensched.kernels import fill

pytestmark = pytest.mark.gpu


@pytest.mark.fault("C15")
def test_an_error_that_other_code_left_is_no_jobs() -> None:
    """A failed runtime call around or in a call fails no job."""
    runtime = pytest.importorskip("cuda.bindings.runtime")

    def fail() -> None:
        (status,) = runtime.cudaSetDevice(10_000)
        assert status != runtime.cudaError_t.cudaSuccess

    async def main() -> None:
        fail()
        async with Pool(driver="cuda", devices=[0]) as pool, pool.partition(8) as p:
            await p.run(fail)
            with await p.upload(np.ones(8, np.float32)) as b:
                fail()
                await p.launch(LaunchConfig(grid=1, block=8), fill, b, 2.0, 8)
                assert (await p.download(b)).tolist() == [2.0] * 8

    anyio.run(main)
