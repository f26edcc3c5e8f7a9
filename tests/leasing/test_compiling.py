"""Leases whose kernels are still being compiled when they end."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from greensched import ALL, LaunchConfig, Partition, Pool
from greensched.driver import simulated
from greensched.errors import PartitionClosed
from greensched.kernels import Cost, Kernel, Program
from helpers.devices import DEVICE


class SlowCompiler:
    """A compiler that completes each program when the test says so."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.finish = threading.Event()

    def compile(self, arch: str) -> bytes:
        self.started.set()
        self.finish.wait()
        return b"cubin"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    """Yield a compiler of the binaries that this simulated driver needs."""
    compiler = SlowCompiler()
    monkeypatch.setattr(Program, "compile", lambda program, arch: compiler.compile(arch))
    monkeypatch.setattr(simulated.SimulatedDriver, "needs_binary", True)
    yield compiler
    compiler.finish.set()


def new_kernel() -> Kernel:
    kernel = Program('extern "C" __global__ void f() {}').kernel("f")
    kernel.reference(lambda _: None)
    kernel.cost(lambda _: Cost())
    return kernel


async def launch(p: Partition, kernel: Kernel) -> None:
    await p.launch(LaunchConfig(grid=1, block=1), kernel)


async def prepare(p: Partition, kernel: Kernel) -> None:
    await p.prepare(LaunchConfig(grid=1, block=1), kernel)


async def launch_and_leave(p: Partition, kernel: Kernel) -> None:
    p.launch(LaunchConfig(grid=1, block=1), kernel)


@pytest.mark.fault("I11")
@pytest.mark.parametrize("work", [launch, prepare, launch_and_leave])
def test_a_cancelled_lease_does_not_wait_for_the_compiler(
    compiler: SlowCompiler, work: Callable[[Partition, Kernel], Awaitable[None]]
) -> None:
    """Its SMs are granted again while its kernel is still compiling."""

    async def main() -> None:
        async with Pool(driver=simulated.open([DEVICE])) as pool:

            async def lease() -> None:
                async with pool.partition(ALL) as p:
                    await work(p, new_kernel())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lease)
                await anyio.to_thread.run_sync(compiler.started.wait)
                tasks.cancel_scope.cancel()
            async with pool.partition(ALL):
                assert not compiler.finish.is_set()
            compiler.finish.set()

    anyio.run(main)


@pytest.mark.fault("I11")
def test_a_job_of_a_cancelled_lease_says_why_it_did_not_run(
    compiler: SlowCompiler,
) -> None:
    """Other waiters get PartitionClosed; the job of a lease that ends normally runs."""

    async def main() -> None:
        async with Pool(driver=simulated.open([DEVICE])) as pool:
            with pytest.raises(LookupError):
                async with pool.partition(ALL) as p:
                    job = p.launch(LaunchConfig(grid=1, block=1), new_kernel())
                    await anyio.to_thread.run_sync(compiler.started.wait)
                    raise LookupError
            with pytest.raises(PartitionClosed):
                await job
            compiler.finish.set()
            async with pool.partition(ALL) as p:
                job = p.launch(LaunchConfig(grid=1, block=1), new_kernel())
            assert job.exception() is None

    anyio.run(main)
