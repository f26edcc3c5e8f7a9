"""Kernels: the arguments of their references, and what is refused."""

from __future__ import annotations

import asyncio
import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from greensched import LaunchConfig, Pool, Program
from greensched.driver.simulated import Crash, VirtualClock
from greensched.driver.types import CodeImage, KernelSpec
from greensched.errors import (
    CUDAError,
    DriverMisuse,
    InvalidRequest,
    LoopWouldBlock,
    NotSimulable,
    ReferenceFailed,
)
from greensched.kernels import fill
from greensched.typing import Cost, LaunchFacts, Parameter

from .machine import LAUNCH_NS, Machine, Packed, spin

Make = Callable[..., Machine]

SAXPY = (
    Parameter("a", "f4"),
    Parameter("x", "f4", pointer=True, const=True),
    Parameter("y", "f4", pointer=True),
    Parameter("n", "u8"),
)


def saxpy(launch: LaunchFacts, a: Any, x: Any, y: Any, n: Any) -> None:
    y[:n] += a * x[:n]


def array(machine: Machine, values: Any) -> tuple[int, np.ndarray]:
    """Return pinned memory with these values: its address and its bytes."""
    data = np.asarray(values)
    memory = machine.pinned(data.nbytes)
    view = np.frombuffer(memory.view, data.dtype)
    view[:] = data
    return memory.device_address, view


# -- running ------------------------------------------------------------------------------------


def test_a_reference_runs_on_real_bytes(machine: Machine) -> None:
    """Scalars and arrays arrive as in CUDA, and written values stay."""
    x, _ = array(machine, np.arange(100, dtype=np.float32))
    y, result = array(machine, np.ones(100, np.float32))
    machine.launch(machine.stream(), machine.kernel("saxpy", SAXPY, saxpy), 2.0, x, y, 50)
    assert result[49] == 1
    machine.finish()
    np.testing.assert_array_equal(result[:50], 1 + 2 * np.arange(50))
    np.testing.assert_array_equal(result[50:], 1)


def test_what_a_reference_is_given(machine: Machine) -> None:
    """Typed scalars, and arrays to the end of their allocation; const ones are read-only."""
    seen: dict[str, Any] = {}

    def reference(launch: LaunchFacts, *arguments: Any) -> None:
        seen.update(launch=launch, arguments=arguments)

    parameters = (
        Parameter("small", "i1"),
        Parameter("large", "u8"),
        Parameter("const", "f4", pointer=True, const=True),
        Parameter("out", "i8", pointer=True),
        Parameter("raw", "V1", pointer=True),
        Parameter("null", "f4", pointer=True),
    )
    x, _ = array(machine, np.zeros(10, np.float32))
    stream = machine.stream(machine.green(16))
    kernel = machine.kernel("look", parameters, reference)
    memory = machine.pinned(30)
    machine.launch(
        stream, kernel, -3, 2**64 - 1, x + 8, memory.address, memory.address + 7, 0, blocks=7
    )
    machine.finish()
    small, large, const, out, raw, null = seen["arguments"]
    assert (small, large) == (-3, 2**64 - 1)
    assert (small.dtype, large.dtype) == (np.int8, np.uint64)
    assert (const.dtype, len(const), const.flags.writeable) == (np.float32, 8, False)
    assert (out.dtype, len(out), out.flags.writeable) == (np.int64, 3, True)
    assert (raw.dtype.itemsize, len(raw)) == (1, 23)
    assert (len(null), null.dtype) == (0, np.float32)
    launch = seen["launch"]
    assert (launch.grid, launch.block, launch.shared_bytes) == ((7, 1, 1), (128, 1, 1), 0)
    assert launch.device == machine.driver.device_facts(0)
    assert len(launch.sms) == 16


def test_a_reference_that_writes_to_a_const_parameter_fails(machine: Machine) -> None:
    """A const parameter cannot be written."""

    def reference(launch: LaunchFacts, x: Any) -> None:
        x[0] = 1

    x, data = array(machine, np.zeros(4, np.float32))
    kernel = machine.kernel("writes", [Parameter("x", "f4", pointer=True, const=True)], reference)
    stream = machine.stream()
    machine.launch(stream, kernel, x)
    with pytest.raises(ReferenceFailed, match="kernel 'writes' raised ValueError"):
        machine.driver.synchronize_stream(stream)
    assert data[0] == 0


def test_values_are_read_at_each_launch(machine: Machine) -> None:
    """A bound launch's values may be changed between launches."""
    y, result = array(machine, np.zeros(3, np.int32))

    def reference(launch: LaunchFacts, y: Any, i: Any) -> None:
        y[i] = i + 10

    parameters = [Parameter("y", "i4", pointer=True), Parameter("i", "i4")]
    packed = Packed(parameters, (y, 0))
    kernel = machine.kernel("put", parameters, reference)
    one = (1, 1, 1)
    launch = machine.driver.bind_launch(machine.stream(), kernel, one, one, 0, packed.address)
    for i in range(3):
        ctypes.c_int32.from_buffer(packed.cells[1]).value = i
        launch()
    machine.finish()
    assert result.tolist() == [10, 11, 12]


def test_what_a_launch_was_given_when_it_was_made_counts(machine: Machine) -> None:
    """The cost sees the launch's bytes; the reference runs later."""
    y, data = array(machine, np.zeros(1, np.int32))
    asked: list[int] = []

    def cost(launch: LaunchFacts, y: Any) -> Cost:
        asked.append(int(y[0]))
        return Cost(fixed_ns=10)

    def reference(launch: LaunchFacts, y: Any) -> None:
        y[0] += 1

    kernel = machine.kernel("count", [Parameter("y", "i4", pointer=True)], reference, cost)
    stream = machine.stream()
    for _ in range(3):
        machine.launch(stream, kernel, y)
    machine.finish()
    assert asked == [0, 0, 0]
    assert data[0] == 3


# -- the first use ------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [VirtualClock, lambda: None])
def test_a_first_use_waits_until_nothing_runs(make: Make, clock: Callable[[], Any]) -> None:
    """A kernel is loaded when all work of the device is done, and used at once from then on.

    On either clock: the work ends only once a thread has seen the load begin.
    """
    machine = make(clock=clock())
    driver = machine.driver
    one, two = (machine.stream(green) for green in machine.greens(2))
    kernel = machine.kernel("fresh", loaded=False)
    word = machine.hold(one)
    machine.run(one, "behind", until=lambda: word.value == 2)

    def release() -> None:
        for value in (1, 2):
            spin(lambda: driver.script.calls["load_kernel"])
            word.value = value

    thread = driver.start_thread(release, "release")
    driver.load_kernel(kernel)
    assert word.value == 2
    machine.run(one, "again", until=lambda: word.value == 3)
    machine.launch(two, kernel)
    driver.load_kernel(kernel)
    driver.synchronize_stream(two)
    assert {*machine.times()} == {"behind", "fresh"}
    word.value = 3
    machine.finish()
    thread.join()


def test_a_first_launch_counts_what_was_launched_before_it(machine: Machine) -> None:
    """It also waits for kernels that have not begun."""
    green = machine.green()
    one, two, three = (machine.stream(green) for _ in range(3))
    machine.run(one, "full", threads=1024, fixed_ns=1_000)
    machine.run(two, "next", threads=1024, fixed_ns=1_000)
    machine.launch(three, machine.kernel("fresh", loaded=False))
    machine.finish()
    times = machine.times()
    assert times["fresh"][0] == times["next"][1] + LAUNCH_NS


def test_asking_for_parameters_is_a_first_use(machine: Machine) -> None:
    """It may block, so it is refused on a loop until the first use."""
    kernel = machine.kernel("fresh", loaded=False)

    async def on_loop() -> object:
        return machine.driver.kernel_layout(kernel)

    with pytest.raises(LoopWouldBlock, match="kernel_layout: the first use of 'fresh'"):
        asyncio.run(on_loop())
    assert machine.driver.kernel_layout(kernel) == ()
    assert asyncio.run(on_loop()) == ()


def test_a_first_use_is_one_of_each_device(make: Make) -> None:
    """Each device loads for itself, and does not wait for others."""
    machine = make("h200x2")
    driver = machine.driver
    here, there = machine.stream(machine.green()), machine.stream(machine.green(device=1))
    kernel = machine.kernel("fresh", loaded=False)

    def body() -> None:
        machine.run(here, "busy", fixed_ns=1e6)
        machine.launch(there, kernel)
        driver.synchronize_stream(there)
        machine.launch(here, kernel)
        machine.finish()

    machine.inside(body)
    assert [span.name for span in machine.spans] == ["fresh", "busy", "fresh"]
    assert machine.spans[2].enqueued == machine.spans[1].end


def test_a_first_use_ends_with_its_device(make: Make) -> None:
    """A device that fails meanwhile ends the wait with its fault."""
    machine = make(faults=[Crash("wild")])
    one, two = machine.stream(), machine.stream()
    machine.run(two, "endless", sm_ns=math.inf)
    machine.run(one, "wild", fixed_ns=1_000)
    with pytest.raises(CUDAError, match="ILLEGAL_ADDRESS"):
        machine.driver.load_kernel(machine.kernel("fresh", loaded=False))


def test_a_first_use_comes_again_with_a_new_primary(machine: Machine) -> None:
    """The next primary context loads the code again."""
    driver = machine.driver
    kernel = machine.kernel("kernel", loaded=False)
    driver.load_kernel(kernel)
    driver.set_current(None)
    driver.release_primary(0)
    driver.set_current(driver.retain_primary(0))
    stream = machine.stream()
    machine.run(stream, "busy", fixed_ns=1e6)
    driver.load_kernel(kernel)
    assert driver.query_stream(stream)


# -- refusals -----------------------------------------------------------------------------------


def test_a_kernel_without_reference_or_cost_cannot_run(machine: Machine) -> None:
    """The error says which is missing and how to add it."""
    driver = machine.driver
    bare = KernelSpec("bare", ())
    with_reference = KernelSpec("half", (), reference=lambda launch: None)
    library = driver.load_code(CodeImage("test", {"bare": bare, "half": with_reference}))
    for name, lacks in (("bare", "reference"), ("half", "cost")):
        kernel = driver.get_kernel(library, name)
        with pytest.raises(NotSimulable, match=f"has no {lacks}.*@kernel.{lacks}"):
            driver.bind_launch(machine.stream(), kernel, (1, 1, 1), (1, 1, 1), 0, 0)
    with_reference.cost = lambda launch: Cost()
    bound = driver.bind_launch(
        machine.stream(), driver.get_kernel(library, "half"), (1, 1, 1), (1, 1, 1), 0, 0
    )
    bound()


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        ((0, 1, 1), (1, 1, 1), 0),
        ((2**31, 1, 1), (1, 1, 1), 0),
        ((1, 65536, 1), (1, 1, 1), 0),
        ((1, 1, 65536), (1, 1, 1), 0),
        ((1, 1, 1), (0, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (32, 33, 1), 0),
        ((1, 1, 1), (1, 1, 65), 0),
        ((1, 1, 1), (-1, -1, 1), 0),
        ((1, 1, 1), (1, 1, 1), -1),
        ((1, 1, 1), (1, 1, 1), 48 * 1024 + 1),
    ],
)
def test_a_geometry_beyond_the_limits_is_invalid(
    machine: Machine, grid: Any, block: Any, shared: int
) -> None:
    """Grids, blocks and shared memory beyond the limits are INVALID_VALUE."""
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        machine.driver.bind_launch(machine.stream(), machine.kernel(), grid, block, shared, 0)


def test_the_largest_geometry_is_valid(machine: Machine) -> None:
    """The limits are allowed, and more shared memory if it was allowed before."""
    driver, stream, kernel = machine.driver, machine.stream(), machine.kernel()
    most = driver.device_facts(0).max_shared_bytes
    driver.bind_launch(stream, kernel, (2**31 - 1, 65535, 65535), (1024, 1, 1), 48 * 1024, 0)
    driver.bind_launch(stream, kernel, (1, 1, 1), (4, 4, 64), 0, 0)
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        driver.allow_shared(kernel, 0, most + 1)
    driver.allow_shared(kernel, 0, most)
    launch = driver.bind_launch(stream, kernel, (1, 1, 1), (1, 1, 1), most, 0)
    launch()
    driver.allow_shared(kernel, 0, most - 1)
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        launch()


def test_arguments_that_are_no_memory_are_refused(machine: Machine) -> None:
    """The launch refuses bad pointers and names the argument."""
    driver, stream = machine.driver, machine.stream()
    kernel = machine.kernel("take", [Parameter("x", "f8", pointer=True)])
    address = machine.device_memory(64, stream)
    machine.launch(stream, kernel, address)
    with pytest.raises(DriverMisuse, match=r"'take', argument 'x'.*not aligned to 8"):
        machine.launch(stream, kernel, address + 4)
    driver.free(address, stream)
    for wrong in (address, np.zeros(8).ctypes.data, 8):
        with pytest.raises(DriverMisuse, match="'take', argument 'x'"):
            machine.launch(stream, kernel, wrong)


def test_memory_of_another_device_is_refused(make: Make) -> None:
    """A kernel reaches its own device's memory and pinned memory only."""
    machine = make("h200x2")
    driver = machine.driver
    kernel = machine.kernel("take", [Parameter("x", "f8", pointer=True)])
    there = machine.stream(machine.green(device=1))
    pool = driver.create_memory_pool(1)
    machine.launch(there, kernel, driver.allocate(pool, 64, there))
    machine.launch(there, kernel, machine.pinned(64).address)
    with pytest.raises(DriverMisuse, match="memory of device 0"):
        machine.launch(there, kernel, machine.device_memory(64, machine.stream()))
    with pytest.raises(DriverMisuse, match="memory of device 1"):
        machine.launch(machine.stream(), kernel, driver.allocate(pool, 64, there))


# -- libraries ----------------------------------------------------------------------------------


def test_kernels_of_a_library(machine: Machine) -> None:
    """A name gives the same kernel each time, until its library ends."""
    driver = machine.driver
    spec = KernelSpec("k", (), lambda launch: None, lambda launch: Cost())
    library = driver.load_code(CodeImage("lib", {"k": spec}))
    kernel = driver.get_kernel(library, "k")
    assert driver.get_kernel(library, "k") is kernel
    with pytest.raises(CUDAError, match=r"NOT_FOUND.*no 'other' in lib"):
        driver.get_kernel(library, "other")
    launch = driver.bind_launch(machine.stream(), kernel, (1, 1, 1), (1, 1, 1), 0, 0)
    launch()
    machine.finish()
    driver.unload_code(library)
    for call in (
        launch,
        lambda: driver.get_kernel(library, "k"),
        lambda: driver.load_kernel(kernel),
        lambda: driver.unload_code(library),
    ):
        with pytest.raises(DriverMisuse, match="after its end"):
            call()


def test_parameters_lie_as_cuda_lays_them(machine: Machine) -> None:
    """Each parameter is at a multiple of its own size."""
    parameters = [
        Parameter("a", "i1"),
        Parameter("b", "f8"),
        Parameter("c", "i2"),
        Parameter("d", "f4", pointer=True),
        Parameter("e", "i4"),
    ]
    layout = machine.driver.kernel_layout(machine.kernel("k", parameters))
    assert layout == ((0, 1), (8, 8), (16, 2), (24, 8), (32, 4))
    assert machine.driver.kernel_layout(machine.kernel()) == ()


def test_limits_of_a_kernel(machine: Machine) -> None:
    """They are the device's, because a reference needs no registers or static memory."""
    limits = machine.driver.kernel_limits(machine.kernel(), 0)
    assert (limits.max_threads_per_block, limits.static_shared_bytes) == (1024, 0)


@pytest.mark.parametrize(
    "cost",
    [
        lambda launch, n: Cost(sm_ns=float("nan")),
        lambda launch, n: Cost(fixed_ns=float("inf")),
        lambda launch, n: Cost(dram_bytes=-1.0),
        lambda launch, n: Cost(sms=0),
        lambda launch, n: Cost(sm_ns="5"),  # type: ignore[arg-type]
        lambda launch, n: 5.0,
        lambda launch, n: 1 / int(n - n),
    ],
    ids=["nan", "infinite", "negative", "no SM", "a string", "a number", "failing"],
)  # fmt: skip
def test_a_cost_that_is_none_is_refused(cost: Any) -> None:
    """A launch whose cost is not a finite number fails by name."""
    kernel = Program('extern "C" __global__ void k(int n) {}').kernel("k")
    kernel.reference(lambda launch, n: None)
    kernel.cost(cost)

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            with pytest.raises(InvalidRequest, match="cost of kernel 'k'"):
                await p.launch(LaunchConfig(grid=1, block=1), kernel, 3)
            assert pool.is_ready

    asyncio.run(main())


def test_a_reference_that_fails_fails_its_job_alone() -> None:
    """The job raises ReferenceFailed; other jobs and the pool go on."""
    kernel = Program('extern "C" __global__ void k(int n) {}').kernel("k")
    kernel.cost(lambda launch, n: Cost())

    @kernel.reference
    def wrong(launch: Any, n: Any) -> None:
        raise IndexError("beyond the end")

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            config = LaunchConfig(grid=1, block=1)
            before = p.launch(config, fill, x := await p.empty(4, "f4"), 1.0, 4)
            job = p.launch(config, kernel, 3)
            after = p.launch(config, fill, x, 2.0, 4)
            with pytest.raises(ReferenceFailed, match=r"kernel 'k' raised IndexError: beyond"):
                await job
            with pytest.raises(ReferenceFailed) as again:
                await job
            assert isinstance(again.value.__cause__, IndexError)
            await before
            await after
            assert (await p.download(x)).tolist() == [2.0] * 4
            assert pool.is_ready

    asyncio.run(main())


def test_a_failed_reference_that_no_task_awaited_is_raised_at_the_end_of_the_block() -> None:
    """It is raised once, and the next lease is not affected."""
    kernel = Program('extern "C" __global__ void k() {}').kernel("k")
    kernel.cost(lambda launch: Cost())

    @kernel.reference
    def wrong(launch: Any) -> None:
        raise IndexError("beyond the end")

    async def main() -> None:
        config = LaunchConfig(grid=1, block=1)
        async with Pool(driver="simulated:h200") as pool:
            with pytest.raises(ReferenceFailed, match="kernel 'k'"):
                async with pool.partition(8) as p:
                    p.launch(config, kernel)
            with pytest.raises(KeyError):
                async with pool.partition(8) as p:
                    p.launch(config, kernel)
                    raise KeyError
            async with pool.partition(8) as p:
                x = await p.empty(4, "f4")
                await p.launch(config, fill, x, 1.0, 4)
                x.close()

    asyncio.run(main())
