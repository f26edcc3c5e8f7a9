"""The calls of the CUDA driver, through the real bindings, on the stand-in."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from greensched import errors
from greensched.driver.cuda import memory as cuda_memory
from greensched.driver.cuda.bindings import cuda
from greensched.driver.interface import Driver
from greensched.driver.types import CodeImage, StreamHandle
from greensched.typing import CacheConfig, CaptureMode, ContextFlags, Limit

if TYPE_CHECKING:
    from driver_cuda.conftest import Arguments, Standin

pytestmark = pytest.mark.standin

UNKNOWN = 12345


# -- devices and contexts --------------------------------------------------------------------------


def test_device_facts(driver: Driver) -> None:
    """The facts of a device are read without making a context."""
    facts = driver.device_facts(0)
    assert driver.device_count() >= 1
    assert (facts.ordinal, facts.sm_count, facts.arch) == (0, 132, "sm_90")
    assert facts.name
    assert "\0" not in facts.name
    assert re.fullmatch(r"GPU(-[0-9a-f]{4,12}){5}", facts.uuid)
    assert len(facts.uuid) == 40
    assert facts.memory_bytes > 2**30
    assert facts.max_shared_bytes > 48 * 1024
    assert facts.max_block == (1024, 1024, 64)
    assert facts.max_grid[1:] == (65535, 65535)
    assert (facts.warp_size, facts.max_threads_per_block) == (32, 1024)
    assert facts.l2_bytes > 0
    assert facts.max_threads_per_sm > 0
    assert facts.copy_engines > 0
    assert driver.primary_state(0) == (0, False)


def test_a_device_that_is_not_there(driver: Driver) -> None:
    """A device beyond the last one is INVALID_DEVICE."""
    with pytest.raises(errors.CUDAError, match="device 99") as raised:
        driver.device_facts(99)
    assert (raised.value.status, raised.value.name) == (101, "INVALID_DEVICE")
    assert raised.value.call == "cuDeviceGet"


def test_the_primary_context_is_counted(driver: Driver, standin: Standin) -> None:
    """The primary context lives from the first retain to the last release."""
    first = driver.retain_primary(0)
    assert driver.retain_primary(0) == first
    driver.release_primary(0)
    assert driver.primary_state(0)[1]
    driver.release_primary(0)
    assert not driver.primary_state(0)[1]
    with pytest.raises(errors.CUDAError, match="INVALID_CONTEXT"):
        driver.release_primary(0)
    assert standin.misuse("primary_context_released_too_often") == standin.misuse() == 1
    standin.clear()


def test_what_is_current_is_the_threads(driver: Driver, primary: Any) -> None:
    """The current context belongs to its thread, and None means none."""
    assert driver.current() == primary
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(driver.current()))
    thread.start()
    thread.join()
    assert seen == [None]
    driver.set_current(None)
    assert driver.current() is None
    driver.set_current(None)
    driver.set_current(primary)


def test_the_stack_is_the_threads(driver: Driver, primary: Any) -> None:
    """What is pushed is current until it is popped; an empty stack has nothing to pop."""
    own = driver.create_context(0, ContextFlags.SCHED_AUTO)
    assert driver.current() == primary, "making one makes nothing current"
    driver.push_current(own)
    assert driver.current() == own
    assert driver.pop_current() == own
    assert driver.pop_current() == primary
    with pytest.raises(errors.CUDAError, match="INVALID_CONTEXT"):
        driver.pop_current()
    driver.destroy_context(own)
    driver.set_current(primary)


def test_a_context_of_its_own(driver: Driver, standin: Standin, primary: Any) -> None:
    """It has its flags and its device, and a failed pop leaves none behind."""
    flags = ContextFlags.SCHED_SPIN | ContextFlags.MAP_HOST | ContextFlags.LMEM_RESIZE_TO_MAX
    own = driver.create_context(0, flags)
    assert driver.context_device(own) == 0
    driver.push_current(own)
    assert driver.context_flags() == flags
    driver.pop_current()
    driver.destroy_context(own)
    before = standin.live("contexts")
    standin.fail("cuCtxPopCurrent:1:999")
    with pytest.raises(errors.CUDAError, match="UNKNOWN"):
        driver.create_context(0, flags)
    assert standin.live("contexts") == before
    assert driver.current() == primary
    with pytest.raises(errors.CUDAError, match="INVALID_VALUE"):
        driver.create_context(0, ContextFlags(3))


def test_a_flag_that_the_header_lost_is_reported(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag that the wheel's header no longer has is NotSupported."""
    kept = {flag.name: flag for flag in cuda.CUctx_flags if "LMEM" not in flag.name}
    monkeypatch.setattr(cuda, "CUctx_flags", SimpleNamespace(**kept))
    driver.destroy_context(driver.create_context(0, ContextFlags.MAP_HOST))
    with pytest.raises(errors.NotSupported, match="LMEM_RESIZE_TO_MAX"):
        driver.create_context(0, ContextFlags.LMEM_RESIZE_TO_MAX)


def test_the_primarys_flags(driver: Driver, primary: Any) -> None:
    """The primary's state returns the flags that were set, and the active context has them."""
    driver.set_primary_flags(0, ContextFlags.SCHED_YIELD)
    assert driver.primary_state(0) == (ContextFlags.SCHED_YIELD, True)
    assert driver.context_flags() & 7 == ContextFlags.SCHED_YIELD
    driver.set_primary_flags(0, ContextFlags.SCHED_AUTO)


def test_the_state_of_a_context(driver: Driver, standin: Standin, primary: Any) -> None:
    """Limits and cache configuration are read back; a limit the device lacks says so."""
    for limit in Limit:
        before = driver.limit(limit)
        driver.set_limit(limit, 1 << 16)
        assert driver.limit(limit) == 1 << 16
        driver.set_limit(limit, before)
    for config in reversed(CacheConfig):
        driver.set_cache_config(config)
        assert driver.cache_config() is config
    standin.fail("cuCtxSetLimit:1:215,cuCtxGetLimit:1:215")
    with pytest.raises(errors.NotSupported, match="PERSISTING_L2"):
        driver.set_limit(Limit.PERSISTING_L2, 1)
    standin.fail("cuCtxSetLimit:1:2")
    with pytest.raises(errors.OutOfMemory):
        driver.set_limit(Limit.MALLOC_HEAP, 1 << 40)


def test_priorities(driver: Driver, primary: Any) -> None:
    """The range goes from the least urgent down to the most urgent."""
    least, greatest = driver.priority_range()
    assert least >= greatest
    driver.destroy_stream(driver.create_stream(None, greatest))


# -- resources -------------------------------------------------------------------------------------


def test_a_split_gives_what_it_made(driver: Driver) -> None:
    """A split returns as many groups as the driver made."""
    whole = driver.device_resource(0)
    assert driver.resource_facts(whole).sm_count == 132
    assert driver.resource_facts(whole).min_partition_size == 8
    groups, rest = driver.split_by_count(whole, 20, 8)
    assert [driver.resource_facts(group).sm_count for group in groups] == [8] * 16
    assert rest is not None
    assert driver.resource_facts(rest).sm_count == 4


def test_a_split_into_as_many_as_there_can_be(driver: Driver) -> None:
    """With groups=None all possible groups are made."""
    groups, rest = driver.split_by_count(driver.device_resource(0), None, 16)
    assert len(groups) == 8
    assert rest is not None
    assert driver.resource_facts(rest).sm_count == 4


def test_a_split_without_a_remainder(driver: Driver) -> None:
    """An empty remainder is None, and finer groups need no coscheduling."""
    groups, rest = driver.split_by_count(
        driver.device_resource(0), None, 2, ignore_coscheduling=True
    )
    assert len(groups) == 66
    assert rest is None


@pytest.mark.parametrize("groups", [0, 1, None])
def test_an_impossible_split(driver: Driver, groups: int | None) -> None:
    """An impossible split is INVALID_RESOURCE_CONFIGURATION in each form."""
    with pytest.raises(errors.CUDAError) as raised:
        driver.split_by_count(driver.device_resource(0), groups, 133)
    assert raised.value.name == "INVALID_RESOURCE_CONFIGURATION"


def test_resources_outlive_what_they_came_from(driver: Driver) -> None:
    """A resource keeps its facts when its context is collected."""
    groups, _ = driver.split_by_count(driver.device_resource(0), None, 8)
    del _
    gc.collect()
    scrap = [driver.split_by_count(driver.device_resource(0), None, 16) for _ in range(50)]
    assert {driver.resource_facts(group).sm_count for group in groups} == {8}
    assert len(scrap) == 50
    driver.describe(groups)


def test_a_green_context_has_what_it_was_given(driver: Driver, primary: Any) -> None:
    """A green context over two groups has their SMs."""
    groups, _ = driver.split_by_count(driver.device_resource(0), None, 8)
    green = driver.create_green(driver.describe(groups[:2]), 0)
    view = driver.green_context(green)
    assert view != primary
    assert driver.green_context(green) == view
    assert driver.resource_facts(driver.context_resource(view)).sm_count == 16
    assert driver.current() == primary
    driver.synchronize_context(view)
    driver.destroy_green(green)


def test_groups_of_two_splits_do_not_mix(driver: Driver) -> None:
    """The driver's refusal of outputs of two splits has our words."""
    (first,), _ = driver.split_by_count(driver.device_resource(0), 1, 8)
    (second,), _ = driver.split_by_count(driver.device_resource(0), 1, 8)
    with pytest.raises(errors.CUDAError, match="cuDevResourceGenerateDesc"):
        driver.describe([first, second])


# -- streams ---------------------------------------------------------------------------------------


def test_a_stream_held_by_a_word(
    driver: Driver, stream: StreamHandle, word: tuple[int, memoryview]
) -> None:
    """A stream that waits for a word is done only after the host writes it."""
    address, number = word
    driver.wait_value(stream, address, 5)
    driver.bind_mark(stream, address + 4)(7)
    number[0] = 4
    assert not driver.query_stream(stream)
    assert number[1] == 0
    number[0] = 6
    driver.synchronize_stream(stream)
    assert driver.query_stream(stream)
    assert number[1] == 7


def test_a_mark_takes_every_ticket(
    driver: Driver, stream: StreamHandle, word: tuple[int, memoryview]
) -> None:
    """A bound mark writes any 32-bit number, including the largest."""
    address, number = word
    mark = driver.bind_mark(stream, address)
    for ticket in (1, 2**31, 2**32 - 1, 0):
        mark(ticket)
        driver.synchronize_stream(stream)
        assert number[0] == ticket


def test_a_stream_waits_for_an_event(
    driver: Driver,
    stream: StreamHandle,
    other_stream: StreamHandle,
    word: tuple[int, memoryview],
) -> None:
    """Work after another stream's event runs only after that event."""
    address, number = word
    event = driver.create_event()
    assert driver.query_event(event)
    driver.wait_value(other_stream, address, 1)
    driver.record_event(event, other_stream)
    driver.wait_event(stream, event)
    driver.bind_mark(stream, address + 4)(1)
    assert not driver.query_event(event)
    assert not driver.query_stream(stream)
    number[0] = 1
    driver.synchronize_event(event)
    driver.synchronize_stream(stream)
    assert number[1] == 1
    driver.destroy_event(event)


def test_the_address_of_a_stream(driver: Driver, stream: StreamHandle) -> None:
    """The address of a stream is its CUstream as a number."""
    assert cuda.CUstream(driver.stream_address(stream)) == stream


def test_event_times(driver: Driver, stream: StreamHandle) -> None:
    """Timing events give seconds; events without timing give none."""
    start, end = driver.create_event(timing=True), driver.create_event(timing=True, blocking=True)
    plain = driver.create_event(blocking=True)
    for event in (start, end, plain):
        driver.record_event(event, stream)
    driver.synchronize_stream(stream)
    assert driver.elapsed(start, end) >= 0
    with pytest.raises(errors.CUDAError, match="cuEventElapsedTime"):
        driver.elapsed(start, plain)
    for event in (start, end, plain):
        driver.destroy_event(event)


# -- captures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(CaptureMode))
def test_the_capture_mode_is_exchanged(driver: Driver, mode: CaptureMode) -> None:
    """A thread's capture mode is set, and the previous one is returned."""
    before = driver.exchange_capture_mode(mode)
    assert isinstance(before, CaptureMode)
    assert driver.exchange_capture_mode(before) is mode


@pytest.mark.parametrize("mode", list(CaptureMode))
def test_a_capture(
    driver: Driver, stream: StreamHandle, word: tuple[int, memoryview], mode: CaptureMode
) -> None:
    """A stream captures between begin and end, and what it captured does not run."""
    address, number = word
    driver.begin_capture(stream, mode)
    assert driver.is_capturing(stream)
    driver.bind_mark(stream, address)(1)
    graph = driver.end_capture(stream)
    assert not driver.is_capturing(stream)
    driver.synchronize_stream(stream)
    assert number[0] == 0
    driver.destroy_graph(graph)


def test_a_graph_is_launched(
    driver: Driver, stream: StreamHandle, word: tuple[int, memoryview]
) -> None:
    """Each launch does the captured work in order, even after the graph is destroyed."""
    address, number = word
    mark = driver.bind_mark(stream, address)
    driver.begin_capture(stream, CaptureMode.RELAXED)
    empty = driver.end_capture(stream)
    assert driver.node_count(empty) == 0
    driver.destroy_graph(empty)
    driver.begin_capture(stream, CaptureMode.RELAXED)
    mark(5)
    mark(7)
    graph = driver.end_capture(stream)
    assert driver.node_count(graph) == 2
    executable = driver.instantiate_graph(graph, stream)
    driver.destroy_graph(graph)
    for _ in range(3):
        mark(2000)
        driver.launch_graph(executable, stream)
        driver.synchronize_stream(stream)
        assert number[0] == 7
    driver.destroy_executable(executable)


def test_a_spoilt_capture_is_over(driver: Driver, standin: Standin, primary: Any) -> None:
    """Ending an invalidated capture raises, and the stream no longer captures."""
    (group,), _ = driver.split_by_count(driver.device_resource(0), 1, 8)
    green = driver.create_green(driver.describe([group]), 0)
    driver.set_current(driver.green_context(green))
    event = driver.create_event()
    stream = driver.create_stream(green)
    driver.begin_capture(stream, CaptureMode.RELAXED)
    with pytest.raises(errors.CUDAError, match="STREAM_CAPTURE_UNSUPPORTED"):
        driver.record_green(green, event)
    assert driver.is_capturing(stream)
    with pytest.raises(errors.CUDAError, match="STREAM_CAPTURE_INVALIDATED"):
        driver.end_capture(stream)
    assert not driver.is_capturing(stream)
    driver.record_green(green, event)
    driver.synchronize_event(event)
    driver.set_current(primary)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.destroy_green(green)
    standin.clear()


# -- memory ----------------------------------------------------------------------------------------


def test_bytes_go_there_and_back(driver: Driver, stream: StreamHandle) -> None:
    """Bytes survive copies to, within and from the device."""
    pool = driver.create_memory_pool(0)
    host = driver.allocate_host(256)
    host.view[:128] = bytes(range(128))
    first = driver.allocate(pool, 128, stream)
    second = driver.allocate(pool, 128, stream)
    assert driver.reserved_bytes(pool) >= 256
    threshold = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    assert int(cuda.cuMemPoolGetAttribute(pool, threshold)[1]) == 2**64 - 1
    driver.copy_to_device(first, host.address, 128, stream)
    driver.copy(second, first, 128, stream)
    driver.set_bytes(second, 0xAB, 8, stream)
    driver.copy_to_host(host.address + 128, second, 128, stream)
    driver.synchronize_stream(stream)
    assert bytes(host.view[128:]) == b"\xab" * 8 + bytes(range(8, 128))
    driver.free(first, stream)
    driver.free(second, stream)
    driver.synchronize_stream(stream)
    driver.free_host(host)
    driver.destroy_memory_pool(pool)


def test_pinned_memory(driver: Driver, primary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is portable and mapped, zeroed, and writable through its view."""
    register = cuda.cuMemHostRegister
    asked: list[tuple[int, int]] = []

    def noted(address: int, nbytes: int, flags: int) -> Any:
        asked.append((nbytes, flags))
        return register(address, nbytes, flags)

    monkeypatch.setattr(cuda, "cuMemHostRegister", noted)
    memory = driver.allocate_host(100)
    flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
    assert asked == [(mmap.PAGESIZE, flags)]
    assert memory.nbytes == len(memory.view) == 100
    assert memory.view.format == "B"
    assert not memory.view.readonly
    assert bytes(memory.view) == bytes(100)
    memory.view[7] = 9
    assert ctypes.c_ubyte.from_address(memory.address + 7).value == 9
    assert memory.device_address
    driver.free_host(memory)


def test_a_view_outlives_its_pinned_memory(driver: Driver, primary: Any) -> None:
    """A view that is used after free_host reads valid memory."""
    memory = driver.allocate_host(64)
    view = memory.view.cast("I")
    view[3] = 7
    driver.free_host(memory)
    del memory
    assert view[3] == 7


def test_memory_runs_out(driver: Driver, stream: StreamHandle) -> None:
    """OutOfMemory has the requested bytes, and the pool goes on."""
    free, total = driver.memory_info()
    assert 0 < free <= total
    pool = driver.create_memory_pool(0)
    with pytest.raises(errors.OutOfMemory) as raised:
        driver.allocate(pool, total + 1, stream)
    assert raised.value.asked == total + 1
    assert not isinstance(raised.value, errors.DeviceFault)
    driver.free(driver.allocate(pool, 16, stream), stream)
    driver.synchronize_stream(stream)
    driver.destroy_memory_pool(pool)


def test_pinned_memory_runs_out(driver: Driver, standin: Standin, primary: Any) -> None:
    """OutOfMemory has the requested bytes."""
    standin.fail("cuMemHostRegister:1:2")
    with pytest.raises(errors.OutOfMemory) as raised:
        driver.allocate_host(1024)
    assert raised.value.asked == 1024


@pytest.mark.fault("S5")
def test_memory_that_stays_registered_is_not_used_again(
    driver: Driver, standin: Standin, primary: Any
) -> None:
    """Pinned memory that cannot be unregistered is never reused."""
    before = standin.injected()
    standin.fail("cuMemHostGetDevicePointer:1:1,cuMemHostUnregister:1:1")
    with pytest.raises(errors.CUDAError):
        driver.allocate_host(4096)
    assert standin.injected() == before + 2
    several = [driver.allocate_host(4096) for _ in range(8)]
    (left,) = set(cuda_memory._registered) - {each.address for each in several}
    for each in several:
        driver.free_host(each)
    cuda.cuMemHostUnregister(left)
    del cuda_memory._registered[left]


# -- code ------------------------------------------------------------------------------------------


def test_a_kernel_is_loaded_before_its_launch(
    driver: Driver, standin: Standin, kernel: Any
) -> None:
    """Loading a kernel makes the driver load its function for the current context, now."""
    before = standin.calls("cuKernelGetFunction"), standin.calls("cuFuncLoad")
    driver.load_kernel(kernel)
    after = standin.calls("cuKernelGetFunction"), standin.calls("cuFuncLoad")
    assert after == (before[0] + 1, before[1] + 1)


def test_a_kernel_tells_its_layout(driver: Driver, primary: Any, code: CodeImage) -> None:
    """Parameters, limits and shared memory are known without a launch."""
    library = driver.load_code(code)
    kernel = driver.get_kernel(library, "store")
    assert driver.kernel_layout(kernel) == ((0, 8), (8, 4))
    assert driver.kernel_layout(driver.get_kernel(library, "nothing")) == ()
    limits = driver.kernel_limits(kernel, 0)
    assert (limits.max_threads_per_block, limits.static_shared_bytes) == (512, 16)
    driver.allow_shared(kernel, 0, 64 * 1024)
    with pytest.raises(errors.CUDAError, match="of shared memory"):
        driver.allow_shared(kernel, 0, 2**30)
    driver.unload_code(library)


def test_code_that_is_not_there(driver: Driver, primary: Any, code: CodeImage) -> None:
    """An unknown kernel is NOT_FOUND, and code without a binary is no image."""
    library = driver.load_code(code)
    with pytest.raises(errors.CUDAError, match="saxpy") as raised:
        driver.get_kernel(library, "saxpy")
    assert raised.value.name == "NOT_FOUND"
    driver.unload_code(library)
    with pytest.raises(errors.CUDAError, match="empty has no machine code") as raised:
        driver.load_code(CodeImage("empty", {}))
    assert raised.value.name == "INVALID_IMAGE"


def test_a_bound_launch_reads_its_parameters_anew(
    driver: Driver,
    stream: StreamHandle,
    kernel: Any,
    word: tuple[int, memoryview],
    arguments: type[Arguments],
) -> None:
    """Each call uses the present parameters, in stream order."""
    address, number = word
    given = arguments(address, 0)
    launch = driver.bind_launch(stream, kernel, (1, 1, 1), (32, 1, 1), 0, given.pointers)
    for value in (41, 42):
        given.value.value = value
        launch()
        driver.synchronize_stream(stream)
        assert number[0] == value


def test_a_launch_needs_no_current_context(
    driver: Driver,
    stream: StreamHandle,
    kernel: Any,
    word: tuple[int, memoryview],
    arguments: type[Arguments],
) -> None:
    """A bound launch and a mark work without a current context."""
    address, number = word
    given = arguments(address, 3)
    launch = driver.bind_launch(stream, kernel, (1, 1, 1), (32, 1, 1), 0, given.pointers)
    mark = driver.bind_mark(stream, address + 4)

    def elsewhere() -> None:
        assert driver.current() is None
        launch()
        mark(4)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    driver.synchronize_stream(stream)
    assert list(number[:2]) == [3, 4]


def test_a_failed_launch_tells_its_geometry(
    driver: Driver, standin: Standin, stream: StreamHandle, kernel: Any
) -> None:
    """A refused launch raises with its grid, block and shared memory."""
    launch = driver.bind_launch(stream, kernel, (3, 1, 1), (64, 2, 1), 96, 0)
    for failure in (701, UNKNOWN):
        standin.fail(f"cuLaunchKernel:1:{failure}")
        with pytest.raises(errors.CUDAError) as raised:
            launch()
        assert raised.value.status == failure
        assert "grid (3, 1, 1), block (64, 2, 1), 96 bytes" in str(raised.value)
