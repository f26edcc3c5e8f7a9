"""On a real GPU: kernels of numba-cuda and of Warp on a partition's SMs, in order."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from greensched import Buffer, LaunchConfig, Partition, Pool
from greensched.kernels import fill

pytestmark = pytest.mark.gpu

BLOCKS, THREADS = 1024, 256
SIZE = BLOCKS * THREADS
#: What their kernels ask the hardware: the SM that a thread runs on.
SMID = "mov.u32 {}, %smid;"

#: Launches a kernel on a partition: it adds 1 to an array, and says where each thread ran.
Launch = Callable[[Partition, Buffer, Buffer], None]


@contextlib.contextmanager
def numba_launch() -> Iterator[Launch]:
    """Return numba-cuda's launch."""
    cuda = pytest.importorskip("numba.cuda", reason="numba-cuda is not on this machine")
    from llvmlite import ir
    from numba.core import types

    try:
        import numba.cuda.cudaimpl  # noqa: F401  what compiling loads
        from numba.cuda.extending import intrinsic
    except AttributeError as error:
        pytest.skip(f"this numba-cuda does not compile beside this numpy: {error}")

    import greensched.integrations.numba as gs_numba

    @intrinsic
    def smid(_: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [])
            return builder.call(ir.InlineAsm(kind, SMID.format("$0"), "=r", side_effect=True), [])

        return types.uint32(), code

    @cuda.jit
    def seen(y: Any, where: Any) -> None:
        i = cuda.grid(1)
        y[i] += 1.0
        where[i] = smid()

    def launch(p: Partition, y: Buffer, where: Buffer) -> None:
        with gs_numba.on(p) as stream:
            arrays = [cuda.as_cuda_array(each) for each in (y, where)]
            seen[BLOCKS, THREADS, stream](*arrays)

    yield launch


@contextlib.contextmanager
def warp_launch() -> Iterator[Launch]:
    """Return Warp's launch."""
    wp = pytest.importorskip("warp", reason="warp-lang is not on this machine")
    import greensched.integrations.warp as gs_warp

    wp.config.quiet = True

    @wp.func_native(
        'unsigned int id; asm volatile("' + SMID.format("%0").replace("%s", "%%s") + '" '
        ': "=r"(id)); return id;'
    )
    def smid() -> wp.uint32: ...

    @wp.kernel
    def seen(y: wp.array(dtype=wp.float32), where: wp.array(dtype=wp.uint32)):  # type: ignore[no-untyped-def, valid-type]  # Warp's way
        i = wp.tid()
        y[i] = y[i] + 1.0
        where[i] = smid()

    def launch(p: Partition, y: Buffer, where: Buffer) -> None:
        arrays = [wp.from_dlpack(each) for each in (y, where)]
        wp.launch(seen, dim=SIZE, inputs=arrays, stream=gs_warp.stream(p))

    yield launch


@pytest.mark.parametrize("library", [numba_launch, warp_launch])
def test_a_kernel_of_theirs_runs_on_a_partitions_sms(
    library: Callable[[], Any],
) -> None:
    """After our kernel, before our download, on the partition's SMs alone."""

    async def ran(p: Partition, launch: Launch) -> set[int]:
        with (
            await p.upload(np.ones(SIZE, np.float32)) as y,
            await p.upload(np.zeros(SIZE, np.uint32)) as where,
        ):
            filled = p.launch(LaunchConfig(grid=64, block=256), fill, y, 2.0, SIZE)
            for _ in range(3):
                launch(p, y, where)
            np.testing.assert_array_equal(await p.download(y), np.full(SIZE, 5, np.float32))
            await filled
            return set(np.unique(await p.download(where)).tolist())

    async def main(launch: Launch) -> None:
        async with Pool([0], prepare=[fill]) as pool, pool.partitions(16, 32) as (p, q):
            mine, theirs = await ran(p, launch), await ran(q, launch)
            assert 0 < len(mine) <= p.sm_count
            assert 0 < len(theirs) <= q.sm_count
            assert not mine & theirs

    with library() as launch:
        anyio.run(main, launch)
