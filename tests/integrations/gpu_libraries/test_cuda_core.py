"""cuda.core's objects as arguments of ours, on the CUDA driver or the stand-in."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

import greensched
from greensched import Device, LaunchConfig, Pool
from greensched.kernels import Parameter, fill
from helpers.backend import standin_library

core = pytest.importorskip("cuda.core", reason="cuda.core is not installed: make test-integrations")

CONFIG = LaunchConfig(grid=4, block=128)
ONES = np.ones(64, np.float32)


def test_a_buffer_of_theirs_is_memory(cuda_pool: Pool) -> None:
    """A cuda.core buffer is a kernel's argument and each end of a copy, after its stream."""

    async def main() -> None:
        async with cuda_pool as pool, pool.partition(8) as p:
            device = core.Device(0)
            device.set_current()
            stream = device.create_stream()
            theirs = device.memory_resource.allocate(256, stream=stream)
            p.stream.follow(stream)
            await p.copy(theirs, ONES.view(np.int8))
            found = await p.download(theirs)
            np.testing.assert_array_equal(found.view(np.float32), ONES)
            with await p.upload(theirs) as ours:
                assert ours.nbytes == 256
                await p.copy(ours, theirs)
            await p.launch(CONFIG, fill, theirs, 2.0, 64)
            if standin_library() is None:
                np.testing.assert_array_equal((await p.download(theirs)).view(np.float32), 2 * ONES)
            theirs.close(stream)
            stream.close()

    anyio.run(main)


def test_a_partition_is_a_stream_of_theirs(cuda_pool: Pool) -> None:
    """cuda.core takes a partition as its stream, and a partition can follow its streams."""

    async def main() -> None:
        async with cuda_pool as pool, pool.partition(8) as p:
            device = core.Device(0)
            device.set_current()
            theirs = device.create_stream(p)
            assert int(theirs.handle) == p.stream.address
            other = device.create_stream()
            p.stream.follow(other)
            p.stream.follow(theirs)
            with await p.upload(ONES) as x:
                memory = device.memory_resource.allocate(256, stream=other)
                x_of_theirs = core.utils.StridedMemoryView.from_any_interface(x, stream_ptr=-1)
                assert (x_of_theirs.ptr, x_of_theirs.shape) == (x.address, (64,))
                del x_of_theirs
                memory.close(other)
            other.close()

    anyio.run(main)


def test_a_device_of_theirs_is_one_of_ours(cuda_pool: Pool) -> None:
    """`Device` and `Pool(devices=...)` take a cuda.core device."""

    async def main() -> None:
        async with Pool(driver="cuda", devices=[core.Device(0)]) as pool:
            assert [device.ordinal for device in pool.devices] == [0]

    anyio.run(main)
    ours = Device(core.Device(0), driver="cuda")
    assert ours.ordinal == 0
    ours.close()


def test_their_code_becomes_a_program(cuda_pool: Pool) -> None:
    """A cuda.core cubin becomes a Program; code without a device is refused."""
    from greensched.integrations import cuda_core

    pointer = Parameter("out", "u4", pointer=True)
    parameters = {"store": (pointer, Parameter("value", "u4"))}
    with pytest.raises(greensched.InvalidRequest, match="ptx"):
        cuda_core.program(
            core.ObjectCode.from_ptx(b".version 9.0"), arch="sm_90", parameters=parameters
        )
    if standin_library() is None:
        source = 'extern "C" __global__ void store(unsigned *out, unsigned v) { *out = v; }'
        arch = f"sm_{core.Device(0).arch}"
        options = core.ProgramOptions(arch=arch)
        code: Any = core.Program(source, code_type="c++", options=options).compile("cubin")
    else:
        arch = "sm_90"
        code = core.ObjectCode.from_cubin(
            b"STUBCUDA 1\nkernel store params=8,4 do=store32:@0,@1\n\0"
        )
    kernel = cuda_core.program(code, arch=arch, parameters=parameters).kernel("store")

    async def main() -> None:
        async with cuda_pool as pool, pool.partition(8) as p:
            with await p.upload(np.zeros(1, np.uint32)) as x:
                await p.launch(LaunchConfig(grid=1, block=1), kernel, x, 7)
                assert (await p.download(x)).tolist() == [7]

    anyio.run(main)
