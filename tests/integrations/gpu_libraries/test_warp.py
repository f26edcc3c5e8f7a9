"""Warp's arrays and streams, on the CUDA driver or the stand-in."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from greensched import Pool

warp = pytest.importorskip("warp", reason="warp-lang is not installed: the extra warp")
gs_warp = pytest.importorskip("greensched.integrations.warp")

ONES = np.ones(64, np.float32)


def test_its_arrays_are_ours_and_ours_its(cuda_pool: Pool) -> None:
    """A Warp array is each end of a copy, and Warp runs on a partition's stream."""

    async def main() -> None:
        async with cuda_pool as pool, pool.partition(8) as p:
            warp.config.quiet = True
            warp.init()
            device = warp.get_cuda_device(0)
            assert gs_warp.stream(p).cuda_stream == p.stream.address
            assert await p.run(lambda: gs_warp.stream().cuda_stream) not in (0, p.stream.address)
            with await p.upload(ONES) as x:
                # Warp allocates nothing on the stand-in, which lacks what it asks for.
                theirs = warp.array(ptr=x.address, shape=(64,), dtype=warp.float32, device=device)
                np.testing.assert_array_equal(await p.download(theirs), ONES)
                await p.copy(theirs, 2 * ONES)
                np.testing.assert_array_equal(await p.download(x), 2 * ONES)
                viewed = warp.from_dlpack(x)
                assert (viewed.ptr, viewed.shape) == (x.address, (64,))
                del viewed, theirs

    anyio.run(main)
