"""Copies between two devices of the stand-in, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.standin

PROGRAM = """
    import asyncio, ctypes, os
    import numpy as np
    from greensched import Pool
    from greensched import driver as drivers
    from greensched.driver.cuda.driver import CudaDriver

    standin = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    HAS_A_WAY = {has_a_way}
    if not HAS_A_WAY:  # the stand-in's devices always have one
        CudaDriver.can_access_peer = lambda *_: False
    SIZES = (5, 100_000, 3_000_000)

    async def main():
        async with Pool(driver="cuda") as pool:
            async with pool.partition(8, device=0) as p, pool.partition(8, device=1) as q:
                for size in SIZES:
                    array = np.arange(size, dtype=np.float32)
                    with await p.upload(array) as here, await q.empty_like(array) as there:
                        await p.copy(there, here)
                        await p.copy(here, array * 0)
                        await q.copy(here, there)
                        assert (await p.download(here) == array).all()
                        await p.copy(here, array * 0)
                        told = []
                        await p.copy(here, there, progress=lambda *x: told.append(x))
                        assert told[-1] == (array.nbytes, array.nbytes), told
                        assert (await p.download(here) == array).all()

    asyncio.run(main())
    standin.stubcuda_calls.restype = standin.stubcuda_live.restype = ctypes.c_longlong
    standin.stubcuda_misuse.restype = ctypes.c_longlong
    standin.stubcuda_report(b"{report}")
    driver = drivers.open("cuda")
    kept = sum(driver.kept.count(0).values()) + sum(driver.kept.count(1).values())
    print(standin.stubcuda_live(None) - kept, standin.stubcuda_misuse(None))
"""


@pytest.mark.parametrize("has_a_way", [True, False])
def test_copies_between_two_devices(
    python: Callable[..., str], tmp_path: Path, has_a_way: bool
) -> None:
    """Directly with peer access, which is enabled once; otherwise through the host."""
    report = tmp_path / "report.json"
    program = PROGRAM.replace("{has_a_way}", str(has_a_way)).replace("{report}", str(report))
    assert python(program, STUBCUDA_DEVICES="2") == "0 0"
    calls = json.loads(report.read_text())["calls"]
    assert calls.get("cuMemcpyPeerAsync", 0) == (9 if has_a_way else 0)
    assert calls.get("cuMemPoolSetAccess", 0) == (2 if has_a_way else 0)
