"""On the stand-in: a partition's stream stays valid after its pool, until the exit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.standin

PROGRAM = """
    import asyncio, atexit, ctypes
    from cuda.bindings import driver as cuda
    from greensched import Pool

    standin = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    for name in ("stubcuda_calls", "stubcuda_misuse"):
        getattr(standin, name).restype = ctypes.c_longlong
    seen, made = set(), []

    def record():
        cuda.cuCtxPushCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
        for address in seen:
            event = cuda.cuEventCreate(0)[1]
            assert not cuda.cuEventRecord(event, address)[0]
            cuda.cuEventDestroy(event)
        cuda.cuCtxPopCurrent()

    async def use():
        async with Pool(driver="cuda") as pool, pool.partitions(8, 16) as partitions:
            seen.update(p.stream.address for p in partitions)

    for _ in range(3):
        asyncio.run(use())
        record()
        made.append(standin.stubcuda_calls(b"cuGreenCtxCreate"))
    assert made[0] == made[2], made
    atexit.register(lambda: (record(), print(standin.stubcuda_misuse(None))))
"""


def test_an_event_can_be_recorded_until_the_interpreter_ends(python: Callable[..., str]) -> None:
    """On each stream, between pools, after them and at exit."""
    assert python(PROGRAM) == "0"
