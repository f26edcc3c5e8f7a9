"""Bad input: each a typed error that says what to do, before anything is queued or submitted.

What other files of the suite have is not here again: sizes that are none (test_leases), numbers
and kinds of arguments, geometries (test_jobs), layouts and shapes (test_transfers).
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import greensched
from greensched import ALL, REST, Job, LaunchConfig, Partition, Pool, Program, ServiceClass
from greensched.kernels import Cost, Parameter, fill, saxpy
from helpers.backend import Backend

CONFIG = LaunchConfig(grid=4, block=128)


@asynccontextmanager
async def untouched(pool: Pool, p: Partition | None = None) -> AsyncIterator[None]:
    """Check that the block changes no statistics, submits nothing, and that later work is right."""
    before = pool.statistics()
    tickets = () if p is None else _tickets(p)
    yield
    assert pool.statistics() == before
    if p is not None:
        assert _tickets(p) == tickets
        with await p.empty(8) as b:
            await p.launch(CONFIG, fill, b, 1.0, b.size)


def _tickets(p: Partition) -> tuple[int, ...]:
    executor = p._open_lease().executor
    return executor.launch_stream.issued, executor.call_stream.issued


# -- sizes ------------------------------------------------------------------------------------

NO_SIZES = [0, -1, True, 1.5, "16", float("nan"), [8], (8, 8.0), (8, 16, 32), {8}, b"8"]


@pytest.mark.fault("B1")
def test_what_is_no_size_is_refused_wherever_it_is_said(backend: Backend) -> None:
    """Every way to request SMs refuses an invalid size at once and queues nothing."""

    async def main() -> None:
        async with backend.pool() as pool, untouched(pool):
            for sms in NO_SIZES:
                for ask in (
                    pool.partition,
                    pool.partition_nowait,
                    functools.partial(pool.partitions, 8),
                ):
                    with pytest.raises(greensched.InvalidSize, match="positive int") as refused:
                        ask(sms)
                    assert refused.value.value is sms
                with pytest.raises(greensched.InvalidSize):
                    await pool.run(int, sms=sms)
                with pytest.raises(greensched.InvalidSize):
                    await pool.launch(CONFIG, fill, sms=sms)

    backend.run(main)


#: Of a device with 132 SMs; on a larger one some can be.
TOO_MANY = [(133,), (10**9,), ((133, 200),), (100, 100), (64, 64, 64), (132, REST)]


@pytest.mark.fault("B2")
def test_more_than_there_ever_is_says_how_many_there_are(backend: Backend) -> None:
    """A request above the device is refused at once, and the error gives the most."""

    async def main() -> None:
        async with backend.pool() as pool:
            most = pool.devices[0].sm_count
            instead = []
            async with untouched(pool):
                for sizes in TOO_MANY if most == 132 else TOO_MANY[1:2]:
                    with pytest.raises(greensched.TooManySMs, match="at most") as refused:
                        async with pool.partitions(*sizes):
                            raise AssertionError("granted")
                    if refused.value.nearest:  # several parts: what packs may be less
                        assert refused.value.most <= most
                        instead.append((refused.value.nearest, refused.value.most))
                    else:
                        assert refused.value.most == most
            for nearest, total in instead:
                async with pool.partitions(*nearest) as parts:
                    assert sum(p.sm_count for p in parts) >= total

    backend.run(main)


def test_what_can_never_be_granted_together_is_refused(backend: Backend) -> None:
    """An invalid joint request is refused at once, and the error says what is valid."""
    pool = backend.pool()
    for sizes, said in (
        ((), "at least one"),
        ((ALL, 8), "use REST"),
        ((ALL, REST), "use REST"),
        ((REST, REST), "once"),
    ):
        with pytest.raises(greensched.InvalidRequest, match=said):
            pool.partitions(*sizes)


# -- the rest of a request --------------------------------------------------------------------


def test_an_option_that_no_request_has_says_which_there_are(backend: Backend) -> None:
    """An unknown option's error names it, lists the options, and says what limits waiting."""
    pool = backend.pool()
    requests: list[Any] = [pool.partition, pool.partitions]
    for request in requests:
        with pytest.raises(TypeError, match=r"'timeout': give device.*use asyncio\.timeout"):
            request(16, timeout=1.0)


def test_a_deadline_that_is_none_is_refused(backend: Backend) -> None:
    """A deadline must be a number of seconds above 0; nothing is queued otherwise."""

    async def main() -> None:
        async with backend.pool() as pool, untouched(pool):
            for deadline in (0, -1, -0.0, float("nan"), float("-inf")):
                with pytest.raises(greensched.InvalidRequest, match="seconds from now"):
                    pool.partition(8, deadline=deadline)
                with pytest.raises(greensched.InvalidRequest, match="seconds from now"):
                    pool.partitions(8, 8, deadline=deadline)
                with pytest.raises(greensched.InvalidRequest, match="seconds from now"):
                    await pool.run(int, sms=8, deadline=deadline)

    backend.run(main)


@pytest.mark.fault("B6")
def test_an_unknown_service_is_refused(backend: Backend) -> None:
    """An unknown service class is refused with the names of the pool's classes."""

    async def main() -> None:
        services = [ServiceClass(name="decode", priority=1), ServiceClass(name="batch")]
        async with backend.pool(services=services) as pool, untouched(pool):
            with pytest.raises(greensched.InvalidRequest, match="decode, batch"):
                pool.partition(8, service="encode")
            with pytest.raises(greensched.InvalidRequest, match="encode"):
                pool.partition_nowait(8, service="encode")
        async with backend.pool() as pool, untouched(pool):
            with pytest.raises(greensched.InvalidRequest, match="has none"):
                pool.partition(8, service="decode")

    backend.run(main)


def test_a_device_that_is_none_of_the_pools_is_refused(backend: Backend) -> None:
    """A request for a device that the pool does not have is refused and not queued."""
    no_devices: list[Any] = [-1, 7, True, 0.0, "0", (0,)]

    async def main() -> None:
        async with backend.pool() as pool, untouched(pool):
            for device in no_devices:
                with pytest.raises(greensched.InvalidRequest, match="device"):
                    async with pool.partition(8, device=device):
                        raise AssertionError("granted")
                with pytest.raises(greensched.InvalidRequest, match="device"):
                    pool.partition_nowait(8, device=device)

    backend.run(main)


# -- pools ------------------------------------------------------------------------------------


def test_devices_that_are_none_are_refused(backend: Backend) -> None:
    """`devices` must have at least one ordinal, each once."""
    no_devices: list[Any] = [0, [], [0, 0], ["a"], [-1], [True], [0.0], "0", [None], [[0]], {}]
    no_devices.append(np.array(0))
    for devices in no_devices:
        with pytest.raises(greensched.InvalidRequest, match=r"ordinals.*such as \[0, 1\]"):
            backend.pool(devices=devices)


def test_an_option_of_a_pool_that_is_none_is_refused(backend: Backend) -> None:
    """The constructor refuses an invalid policy or limit, with the valid ones."""
    for policy in ("lifo", ""):
        with pytest.raises(greensched.InvalidRequest, match="give one of fifo"):
            backend.pool(policy=policy)
    for bound in (-1, 1.5, True, "9", None):
        with pytest.raises(greensched.InvalidRequest, match=f"max_waiting={bound!r}"):
            backend.pool(max_waiting=bound)


def test_a_device_beyond_the_last_is_refused_and_leaves_the_rest(backend: Backend) -> None:
    """If one of its devices does not exist, a pool opens none."""

    async def main() -> None:
        driver = backend.driver()
        with pytest.raises(greensched.InvalidRequest, match="device 99 does not exist"):
            await Pool([0, 99], driver=driver).open()
        async with Pool([0], driver=driver) as pool:
            assert pool.is_ready

    backend.run(main)


# -- launches ---------------------------------------------------------------------------------


SOURCE = 'extern "C" __global__ void f(float *x, int n) { }\n'


#: What cannot be launched, with p a partition.
NO_LAUNCHES: list[tuple[str, Callable[[Any], Any]]] = [
    ("got Kernel, LaunchConfig", lambda p: p.launch(fill, CONFIG)),
    ("got tuple, Kernel", lambda p: p.launch((4, 128), fill, 1.0)),
    ("got list, Kernel", lambda p: p.launch([4, 128], fill, 1.0)),
    ("got int, Kernel", lambda p: p.launch(4, fill, 1.0)),
    ("got LaunchConfig, str", lambda p: p.launch(CONFIG, "fill")),
    ("got LaunchConfig, Program", lambda p: p.launch(CONFIG, Program(SOURCE))),
    ("got LaunchConfig, NoneType", lambda p: p.launch(CONFIG, None)),
    ("got LaunchConfig, list", lambda p: p.launch(CONFIG, [])),
    ("got LaunchConfig, builtin_function_or_method", lambda p: p.launch(CONFIG, len)),
    ("got Kernel, LaunchConfig", lambda p: p.prepare(fill, CONFIG)),
    ("got Kernel, LaunchConfig", lambda p: p.bind(fill, CONFIG)),
    ("got NoneType, Kernel", lambda p: p.prepare(None, fill)),
    ("got dict, Kernel", lambda p: p.bind({"grid": 1, "block": 1}, fill)),
]


def test_what_cannot_be_launched_is_refused(backend: Backend) -> None:
    """A wrong kernel or geometry is refused by name before anything is submitted."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            for _ in range(2):  # also once the kernel was used
                async with untouched(pool, p):
                    for said, launch in NO_LAUNCHES:
                        with pytest.raises(greensched.InvalidRequest, match=said):
                            launch(p)

    backend.run(main)


#: Arguments for saxpy(float a, const float *x, float *y, int n), with b a good buffer.
NO_ARGUMENTS: list[tuple[str, Callable[[Any, Any], tuple[Any, ...]]]] = [
    ("argument 1 .*must be a Buffer .*await", lambda p, b: (2.0, p.empty(8), b, 8)),
    ("argument 2 .*must be a Buffer", lambda p, b: (2.0, b, [1.0], 8)),
    ("argument 2 .*must be a Buffer", lambda p, b: (2.0, b, None, 8)),
    ("argument 1 .*must be a Buffer", lambda p, b: (2.0, b.address, b, 8)),
    ("argument 0 .*must be a number, of float32", lambda p, b: (b, b, b, 8)),
    ("argument 0 .*float32", lambda p, b: (1j, b, b, 8)),
    ("argument 0 .*float32", lambda p, b: (None, b, b, 8)),
    ("argument 3 .*whole number", lambda p, b: (2.0, b, b, "8")),
    ("argument 3 .*whole number", lambda p, b: (2.0, b, b, 8.0)),
    (f"argument 3 .*whole number from 0 to {2**64 - 1}", lambda p, b: (2.0, b, b, -1)),
    ("takes 4 arguments .*but got 5", lambda p, b: (2.0, b, b, 8, 9)),
    ("takes 4 arguments .*but got 1", lambda p, b: ((2.0, b, b, 8),)),
]


def test_an_argument_of_the_wrong_kind_is_refused(backend: Backend) -> None:
    """An argument of a wrong kind, such as a job, is refused with the right kind."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b:
                for _ in range(2):
                    for said, made in NO_ARGUMENTS:
                        given = made(p, b)
                        async with untouched(pool, p):
                            with pytest.raises(greensched.ArgumentMismatch, match=said) as refused:
                                p.launch(CONFIG, saxpy, *given)
                            assert refused.value.kernel == "saxpy"
                        for job in (value for value in given if isinstance(value, Job)):
                            (await job).close()
                    await p.prepare(CONFIG, saxpy)

    backend.run(main)


@pytest.mark.fault("C6")
def test_a_block_beyond_the_kernel_says_so(backend: Backend) -> None:
    """A block with more threads than the device allows is refused with the limit."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, untouched(pool, p):
            for _ in range(2):
                with pytest.raises(greensched.InvalidLaunch) as refused:
                    p.launch(LaunchConfig(grid=1, block=(64, 4, 8)), fill, None, 1.0, 8)
                assert "64 x 4 x 8" in str(refused.value)
                assert (refused.value.value, refused.value.limit) == (2048, 1024)

    backend.run(main)


BROKEN = """
extern "C" __global__ void broken(float *x, int n) {
    x[0] = undefined_here;
}
"""


def test_source_that_does_not_compile_is_told_with_its_line(backend: Backend) -> None:
    """Source that does not compile fails that job with log and line; where none is compiled, not.

    A simulation compiles nothing: there the reference is what runs.
    """
    program = Program(BROKEN, name="mine.cu")
    kernel = program.kernel("broken")

    @kernel.reference
    def reference(launch: Any, x: Any, n: Any) -> None:
        x[0] = n

    @kernel.cost
    def cost(launch: Any, x: Any, n: Any) -> Cost:
        return Cost()

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b:
                if backend.is_simulated:
                    await p.launch(CONFIG, kernel, b, 3)
                    assert (await p.download(b))[0] == 3
                else:
                    for _ in range(2):
                        with pytest.raises(greensched.CompileFailed) as failed:
                            await p.launch(CONFIG, kernel, b, 3)
                        assert "mine.cu(3): error" in failed.value.log
                        assert "undefined_here" in str(failed.value)
                    with pytest.raises(greensched.CompileFailed):
                        await p.prepare(CONFIG, kernel)
                await p.launch(CONFIG, fill, b, 1.0, b.size)

    backend.run(main)


def test_a_kernel_without_a_meaning_cannot_be_simulated(backend: Backend) -> None:
    """Simulated, a kernel without reference or cost is refused; the error says how to add one.

    On CUDA it needs neither.
    """
    kernel = Program(SOURCE).kernel("f")

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b:
                if not backend.is_simulated:
                    await p.launch(CONFIG, kernel, b, 8)
                    return
                async with untouched(pool, p):
                    for use in (p.launch, p.bind):
                        with pytest.raises(greensched.NotSimulable, match=r"@kernel\.reference"):
                            use(CONFIG, kernel, b, 8)
                    with pytest.raises(greensched.NotSimulable, match=r"@kernel\.reference"):
                        p.prepare(CONFIG, kernel)
                kernel.reference(lambda launch, x, n: None)
                async with untouched(pool, p):
                    with pytest.raises(greensched.NotSimulable, match=r"@kernel\.cost"):
                        p.launch(CONFIG, kernel, b, 8)

    backend.run(main)


@pytest.mark.fault("C8")
def test_a_cubin_for_another_gpu_fails_its_job(backend: Backend) -> None:
    """Code for another architecture fails the job that needs it, and says which it is for.

    A simulation runs no code, and needs none.
    """
    parameters = {"f": [Parameter("x", "f4", pointer=True)]}
    kernel = Program.from_cubin(b"", arch="sm_75", parameters=parameters).kernel("f")
    kernel.reference(lambda launch, x: None)
    kernel.cost(lambda launch, x: Cost())

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b:
                if backend.is_simulated:
                    await p.launch(CONFIG, kernel, b)
                    return
                with pytest.raises(greensched.NotSupported, match="sm_75"):
                    await p.launch(CONFIG, kernel, b)
                await p.launch(CONFIG, fill, b, 1.0, b.size)

    backend.run(main)


# -- arrays -----------------------------------------------------------------------------------

NO_DTYPES = {
    "objects": (object, "Python objects"),
    "a field of objects": ([("a", "f4"), ("b", "O")], "Python objects"),
    "big-endian": (">f4", "big-endian"),
    "a big-endian field": ([("a", ">i8")], "big-endian"),
}


def test_a_dtype_that_cannot_be_is_refused_everywhere(backend: Backend) -> None:
    """Every call refuses an array that device memory cannot hold, and says why."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(3) as b:
                async with untouched(pool, p):
                    for dtype, said in NO_DTYPES.values():
                        array = np.zeros(3, dtype)
                        for use, *given in (
                            (p.upload, array),
                            (p.empty, 3, dtype),
                            (p.empty_pinned, 3, dtype),
                            (p.empty_like, array),
                            (p.copy, b, array),
                        ):
                            with pytest.raises(greensched.InvalidArray, match=said):
                                use(*given)

    backend.run(main)


def test_what_is_no_buffer_is_refused(backend: Backend) -> None:
    """Where a buffer is required, another object is refused by its type."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            job = p.empty(8)
            with await job as b:
                async with untouched(pool, p):
                    for wrong, said in (
                        (job, "Job: did you forget `await`"),
                        (p, "Partition"),
                        (np.zeros(8), "ndarray"),
                        (None, "NoneType"),
                        (b.address, "int"),
                    ):
                        with pytest.raises(greensched.InvalidArray, match=f"give a Buffer.*{said}"):
                            p.download(wrong)
                        with pytest.raises(greensched.InvalidArray, match=f"give a Buffer.*{said}"):
                            p.copy(wrong, b)

    backend.run(main)


def test_a_buffer_of_another_device_is_refused(backend: Backend) -> None:
    """Every use of another device's buffer is refused, and the error names its device."""

    async def main() -> None:
        async with backend.pair() as pool, pool.partition(8, device=0) as p:
            with await p.empty(8) as mine:
                with pytest.raises(
                    greensched.WrongDevice, match="device 0, but is used on device 1"
                ):
                    mine.check(1)
            async with pool.partition(8, device=1) as q:
                with await q.empty(8) as b:
                    async with untouched(pool, p):
                        for use in (
                            lambda: p.launch(CONFIG, fill, b, 1.0, 8),
                            lambda: p.download(b),
                            lambda: p.copy(b, b),
                            lambda: p.copy(b, np.ones(8, np.float32)),
                            lambda: p.run(id, b),
                        ):
                            with pytest.raises(greensched.WrongDevice, match="device 1") as refused:
                                use()
                            assert (refused.value.has, refused.value.wants) == (1, 0)

    backend.run(main)


# -- calls ------------------------------------------------------------------------------------


async def _coroutine() -> None:
    raise AssertionError("it was called")


def test_a_coroutine_function_is_refused(backend: Backend) -> None:
    """`run` refuses a coroutine function and does not call it."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            for function in (_coroutine, functools.partial(_coroutine)):
                async with untouched(pool, p):
                    with pytest.raises(greensched.InvalidRequest, match="await"):
                        p.run(function)
                with pytest.raises(greensched.InvalidRequest, match="await"):
                    await pool.run(function, sms=8)

    backend.run(main)


# -- after the end ----------------------------------------------------------------------------


def uses_of(p: Partition, b: Any) -> dict[str, Callable[[], Any]]:
    """Return every way to use a partition."""
    return {
        "launch": lambda: p.launch(CONFIG, fill, b, 1.0, 8),
        "prepare": lambda: p.prepare(CONFIG, fill),
        "bind": lambda: p.bind(CONFIG, fill, b, 1.0, 8),
        "empty": lambda: p.empty(8),
        "empty_like": lambda: p.empty_like(np.zeros(8)),
        "empty_pinned": lambda: p.empty_pinned(8),
        "upload": lambda: p.upload(np.zeros(8)),
        "download": lambda: p.download(b),
        "copy": lambda: p.copy(b, np.zeros(8, np.float32)),
        "run": lambda: p.run(int),
        "sm_count": lambda: p.sm_count,
        "device": lambda: p.device,
        "stream": lambda: p.stream,
        "context": lambda: p.context,
        "__cuda_stream__": p.__cuda_stream__,
    }


@pytest.mark.fault("A10")
def test_every_use_after_the_block_is_refused(backend: Backend) -> None:
    """After its block every use of a partition raises PartitionClosed, `ready` too."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition(8) as p:
                b = await p.empty(8)
            with b:
                async with untouched(pool):
                    for use in uses_of(p, b).values():
                        with pytest.raises(greensched.PartitionClosed):
                            use()
                    with pytest.raises(greensched.PartitionClosed):
                        await p.drain()
                assert "closed" in repr(p)

    backend.run(main)


def test_every_use_before_the_block_is_refused(backend: Backend) -> None:
    """Before its block every use of a partition says to write `async with`."""

    async def main() -> None:
        async with backend.pool() as pool:
            p = pool.partition(8)
            async with untouched(pool):
                for use in uses_of(p, None).values():
                    with pytest.raises(greensched.PartitionClosed, match="async with"):
                        use()
                with pytest.raises(greensched.PartitionClosed, match="async with"):
                    await p.drain()
            assert "not granted" in repr(p)

    backend.run(main)


@pytest.mark.fault("A10")
def test_every_use_after_the_pools_end_is_refused(backend: Backend) -> None:
    """After the pool's end it, its partitions and its buffers raise errors and never hang."""

    async def main() -> None:
        pool = backend.pool()
        async with pool:
            async with pool.partition(8) as p:
                b, pinned = await p.empty(8), await p.empty_pinned(8)
        for ask in (
            lambda: pool.partition(8).__aenter__(),
            lambda: pool.partitions(8, 8).__aenter__(),
            lambda: pool.run(int, sms=8),
            lambda: pool.launch(CONFIG, fill, b, 1.0, 8, sms=8),
            pool.verify,
            pool.open,
        ):
            with pytest.raises(greensched.PoolClosed):
                await ask()
        with pytest.raises(greensched.PoolClosed):
            pool.partition_nowait(8)
        for use in uses_of(p, b).values():
            with pytest.raises(greensched.Closed):
                use()
        with pytest.raises(greensched.BufferClosed):
            _ = b.__cuda_array_interface__
        b.close()
        pinned.close()
        assert not pool.is_ready

    backend.run(main)


def test_every_use_of_a_closed_buffer_is_refused(backend: Backend) -> None:
    """Every use of a closed buffer is refused, for pinned and for device memory."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            b, pinned, kept = await p.empty(8), await p.empty_pinned(8), await p.empty(8)
            await p.prepare(CONFIG, fill)
            b.close()
            pinned.close()
            async with untouched(pool, p):
                for closed in (b, pinned):
                    for use in (
                        lambda closed=closed: p.launch(CONFIG, fill, closed, 1.0, 8),
                        lambda closed=closed: p.bind(CONFIG, fill, closed, 1.0, 8),
                        lambda closed=closed: p.run(id, closed),
                        lambda closed=closed: p.run(dict, key=closed),
                    ):
                        with pytest.raises(greensched.BufferClosed):
                            use()
                for use in (
                    lambda: p.download(b),
                    lambda: p.copy(b, kept),
                    lambda: p.copy(kept, b),
                    lambda: b.__cuda_array_interface__,
                ):
                    with pytest.raises(greensched.BufferClosed):
                        use()
            kept.close()

    backend.run(main)


def test_a_refused_launch_has_not_used_its_buffers(backend: Backend) -> None:
    """The buffers of a refused launch are free as before."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            config = LaunchConfig(grid=1, block=8)
            with await p.empty(8) as x, await p.empty(8) as y:
                await p.launch(config, saxpy, 1.0, x, y, 8)
                await p.launch(config, saxpy, 1.0, x, y, 8)
                for wrong in ((1.0, x, y, "8"), (1.0, x, None, 8), ("1", x, y, 8)):
                    with pytest.raises(greensched.ArgumentMismatch):
                        p.launch(config, saxpy, *wrong)
                    uses = (*x.uses(), *y.uses())
                    assert uses
                    assert all(track.reached(ticket) for track, ticket in uses)

    backend.run(main)
