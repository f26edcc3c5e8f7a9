"""Fault scripts, and the effects of a device fault."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from greensched.driver.blocking import DRIVER_CALLS, Blocking
from greensched.driver.simulated import Crash, Fail, Hang, Slow
from greensched.driver.simulated.faults import BOUND, FaultScript
from greensched.errors import CUDAError, DeviceFault, InvalidRequest, OutOfMemory, ReferenceFailed
from greensched.typing import CaptureMode, Cost, LaunchFacts

from .machine import LAUNCH_NS, Machine, on_thread

Make = Callable[..., Machine]


# -- scripts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sorted(set(DRIVER_CALLS) - {"initialise", "retain_primary", "set_current"})
)
def test_every_driver_call_can_fail(machine: Machine, name: str) -> None:
    """The chosen call answers its status and does nothing; the next one works."""
    driver = machine.driver
    before = driver.live()
    nth = driver.script.calls[name] + 1
    driver.script.add(Fail(name, nth, "NOT_PERMITTED"))
    with pytest.raises(CUDAError, match="NOT_PERMITTED") as caught:
        getattr(driver, name)()
    assert caught.value.call == name
    assert driver.live() == before
    try:
        getattr(driver, name)()
    except Exception as error:
        assert "NOT_PERMITTED" not in str(error)  # noqa: PT017  it may pass, too


@pytest.mark.parametrize("name", BOUND)
def test_bound_calls_can_fail(machine: Machine, name: str) -> None:
    """The calls that `bind_launch` and `bind_mark` return can fail, too."""
    driver = machine.driver
    driver.script.add(Fail(name, 2, "OUT_OF_MEMORY"))
    stream, word = machine.stream(), machine.word()
    kernel = machine.kernel()
    mark = driver.bind_mark(stream, word.address)
    calls = {"mark": lambda: mark(1), "launch": lambda: machine.launch(stream, kernel)}
    calls[name]()
    machine.finish()
    spans, value = len(machine.spans), word.value
    with pytest.raises(OutOfMemory):
        calls[name]()
    machine.finish()
    assert (len(machine.spans), word.value) == (spans, value)
    calls[name]()


def test_a_driver_call_can_fail_for_a_while(make: Make) -> None:
    """It fails from the nth call to the last one given."""
    machine = make(faults=[Fail("create_event", nth=2, status="OUT_OF_MEMORY", last=4)])
    outcomes = []
    for _ in range(6):
        try:
            machine.event()
            outcomes.append(True)
        except OutOfMemory:
            outcomes.append(False)
    assert outcomes == [True, False, False, False, True, True]


def test_a_slow_driver_call_takes_longer(make: Make) -> None:
    """It takes the extra time on the driver's clock, then does its work."""
    machine = make(faults=[Slow("allocate_host", 2.5), Slow("synchronize_stream", 0.5)])

    def body() -> None:
        before = machine.driver.time()
        machine.pinned()
        assert machine.driver.time() - before == pytest.approx(2.5)
        machine.driver.synchronize_stream(machine.stream())
        assert machine.driver.time() - before == pytest.approx(3.0)

    machine.inside(body)


@pytest.mark.parametrize(
    "fault",
    [
        lambda: Fail("cuInit"),
        lambda: Fail("initialise", status="BROKEN"),
        lambda: Slow("cuInit", 1.0),
        lambda: Crash("k", status="BROKEN"),
        lambda: Crash("k", status="OUT_OF_MEMORY"),
        *(
            lambda name=name: Slow(name, 1.0)  # type: ignore[misc]
            for name, mark in DRIVER_CALLS.items()
            if mark.blocking is Blocking.NEVER
        ),
    ],
)
def test_a_script_that_makes_no_sense_is_refused(fault: Callable[[], object]) -> None:
    """Unknown calls and statuses, and impossible scripts, are refused."""
    with pytest.raises(InvalidRequest):
        fault()


def test_scripts_count_from_many_threads() -> None:
    """The nth call fails on whichever thread makes it, and no other call."""
    script = FaultScript([Fail("mark", nth) for nth in range(1, 400, 2)])

    def count() -> int:
        return sum(script.call("mark")[0] is not None for _ in range(100))

    def several() -> int:
        with ThreadPoolExecutor(4) as executor:
            return sum(future.result() for future in [executor.submit(count) for _ in range(4)])

    assert on_thread(several) == 200
    assert script.calls["mark"] == 400


# -- kernels that go wrong ----------------------------------------------------------------------


def test_a_hung_kernel_never_ends(make: Make) -> None:
    """The nth start of a kernel keeps its room for ever, and other streams go on."""
    machine = make(faults=[Hang("k", nth=2)])
    one, two = machine.greens(2)
    stream, beside, elsewhere = machine.stream(one), machine.stream(one), machine.stream(two)
    kernel = machine.kernel("k", cost=Cost(sm_ns=16_000))

    def body() -> None:
        machine.launch(stream, kernel)
        machine.driver.synchronize_stream(stream)
        machine.launch(stream, kernel, blocks=128)  # half of the space
        machine.run(beside, "beside", sm_ns=16_000)
        machine.run(elsewhere, "elsewhere", sm_ns=16_000)
        for each in (beside, elsewhere):
            machine.driver.synchronize_stream(each)
        machine.driver.clock.sleep(10**12)
        assert not machine.driver.query_stream(stream)
        assert not machine.driver.query_event(recorded(machine, stream))

    machine.inside(body)
    took = {name: end - start for name, (start, end) in machine.times().items()}
    assert took == {"k": 1_000, "beside": 2_000, "elsewhere": 1_000}


def recorded(machine: Machine, stream: Any) -> Any:
    event = machine.event(stream.context.green)
    machine.driver.record_event(event, stream)
    return event


def everything(machine: Machine) -> dict[str, Callable[[], object]]:
    """Prepare calls that reach device 0 while it is healthy."""
    driver = machine.driver
    green = machine.green()
    stream, event, word = machine.stream(green), machine.event(green), machine.word()
    timed = [machine.event(timing=True) for _ in range(2)]
    address, memory = machine.device_memory(64, stream), machine.pinned(64)
    mark, kernel = driver.bind_mark(stream, word.address), machine.kernel("fine")
    pool, victim = machine.pool, machine.event()
    doomed, spare, spare_pool = machine.stream(), machine.pinned(), driver.create_memory_pool(0)
    descriptor = driver.describe(machine.cells()[:1])
    return {
        "retain_primary": lambda: driver.retain_primary(0),
        "synchronize_context": lambda: driver.synchronize_context(machine.primary),
        "priority_range": driver.priority_range,
        "create_green": lambda: driver.create_green(descriptor, 0),
        "record_green": lambda: driver.record_green(green, event),
        "create_stream": lambda: driver.create_stream(green),
        "destroy_stream": lambda: driver.destroy_stream(doomed),
        "query_stream": lambda: driver.query_stream(stream),
        "synchronize_stream": lambda: driver.synchronize_stream(stream),
        "wait_event": lambda: driver.wait_event(stream, event),
        "bind_mark": lambda: driver.bind_mark(stream, word.address),
        "mark": lambda: mark(1),
        "wait_value": lambda: driver.wait_value(stream, word.address, 0),
        "begin_capture": lambda: driver.begin_capture(stream, CaptureMode.RELAXED),
        "create_event": machine.event,
        "destroy_event": lambda: driver.destroy_event(victim),
        "record_event": lambda: driver.record_event(event, stream),
        "query_event": lambda: driver.query_event(event),
        "synchronize_event": lambda: driver.synchronize_event(event),
        "elapsed": lambda: driver.elapsed(*timed),
        "create_memory_pool": lambda: driver.create_memory_pool(0),
        "destroy_memory_pool": lambda: driver.destroy_memory_pool(spare_pool),
        "reserved_bytes": lambda: driver.reserved_bytes(pool),
        "allocate": lambda: driver.allocate(pool, 64, stream),
        "free": lambda: driver.free(address, stream),
        "allocate_host": machine.pinned,
        "free_host": lambda: driver.free_host(spare),
        "memory_info": driver.memory_info,
        "copy_to_device": lambda: driver.copy_to_device(address, memory.address, 64, stream),
        "copy_to_host": lambda: driver.copy_to_host(memory.address, address, 64, stream),
        "copy": lambda: driver.copy(address, address, 64, stream),
        "set_bytes": lambda: driver.set_bytes(address, 0, 64, stream),
        "load_kernel": lambda: driver.load_kernel(kernel),
        "launch": lambda: machine.launch(stream, kernel),
    }


def crash(machine: Machine, stream: Any = None) -> None:
    """Let a kernel fault, and wait for it."""
    stream = stream or machine.stream()
    machine.driver.script.add(Crash("bad", status="ILLEGAL_ADDRESS"))
    machine.run(stream, "bad", fixed_ns=1_000)
    with pytest.raises(DeviceFault):
        machine.driver.synchronize_stream(stream)


def test_after_a_fault_everything_on_the_device_answers_it(machine: Machine) -> None:
    """Every call answers the fault's status, with the first fault as the cause."""
    calls = everything(machine)
    crash(machine)
    for name, call in calls.items():
        with pytest.raises(DeviceFault) as caught:
            call()
        error = caught.value
        assert (error.status, error.name) == (700, "ILLEGAL_ADDRESS"), name
        assert isinstance(error.__cause__, DeviceFault), name
        assert "kernel 'bad'" in str(error.__cause__), name


def test_what_is_ended_after_a_fault_is_ended(machine: Machine) -> None:
    """Ending an object answers the fault or succeeds, and nothing is left."""
    driver = machine.driver
    green = machine.green()
    stream, event, memory = machine.stream(green), machine.event(green), machine.pinned()
    machine.device_memory(64, stream)
    pool = machine.pool
    crash(machine, stream)
    for end in (
        lambda: driver.destroy_event(event),
        lambda: driver.destroy_stream(stream),
        lambda: driver.free_host(memory),
        lambda: driver.destroy_memory_pool(pool),
    ):
        with pytest.raises(DeviceFault):
            end()
    driver.destroy_green(green)
    driver.set_current(None)
    driver.release_primary(0)
    assert driver.live() == {"allocation": 1}, "there is no freeing on a stream that is lost"


def test_after_a_fault_nothing_comes_to_pass(machine: Machine) -> None:
    """Words do not advance, and copies do not arrive."""
    driver = machine.driver
    word, target = machine.word(), machine.pinned(4)
    one, two, three = machine.stream(), machine.stream(), machine.stream()
    address, large = machine.device_memory(4, two), machine.pinned(1 << 20)
    driver.copy_to_host(large.address, machine.device_memory(1 << 20, three), 1 << 20, three)
    driver.script.add(Crash("bad"))
    machine.run(two, "busy", fixed_ns=5_000)
    for stream in (one, two):
        if stream is one:
            machine.run(stream, "bad", fixed_ns=1_000)
        driver.bind_mark(stream, word.address)(7)
        driver.copy_to_host(target.address, address, 4, stream)
    with pytest.raises(DeviceFault):
        machine.finish()
    machine.inside(lambda: driver.clock.sleep(10**9))
    assert (word.value, bytes(target.view)) == (0, bytes(4))
    assert not any(large.view), "it was in flight"
    assert machine.spans == []


def test_a_fault_wakes_waiting_threads(machine: Machine) -> None:
    """Threads that are blocked in the driver get the fault."""
    driver = machine.driver
    stream, event = machine.stream(), machine.event()
    machine.hold(stream)
    driver.record_event(event, stream)
    met: list[DeviceFault] = []
    waits = [
        lambda: driver.synchronize_stream(stream),
        lambda: driver.synchronize_event(event),
        lambda: driver.synchronize_context(machine.primary),
        lambda: [driver.wait_event(stream, event) for _ in range(2_000)],
    ]

    def waiter(wait: Callable[[], object]) -> None:
        with pytest.raises(DeviceFault) as caught:
            wait()
        met.append(caught.value)

    def body() -> None:
        for wait in waits:
            driver.start_thread(functools.partial(waiter, wait), "waiter")
        driver.clock.sleep(1_000)
        assert met == []
        crash(machine)
        driver.clock.sleep(1_000)

    machine.inside(body)
    assert [error.status for error in met] == [700] * len(waits)


def test_the_other_devices_of_the_process_have_the_fault_soon(make: Make) -> None:
    """CUDA ends for the process, so work on other devices never ends."""
    machine = make("h200x2")
    there = machine.stream(machine.green(device=1))
    machine.run(there, "before", fixed_ns=10_000)
    machine.run(there, "too long", fixed_ns=10_000_000)
    crash(machine)
    with pytest.raises(DeviceFault) as caught:
        machine.driver.synchronize_stream(there)
    assert caught.value.status == 700
    assert set(machine.times()) == {"before"}
    with pytest.raises(DeviceFault):
        machine.driver.retain_primary(1)


@pytest.mark.parametrize("status", ["ILLEGAL_ADDRESS", "LAUNCH_FAILED", "ASSERT", 719])
def test_the_first_fault_is_the_fault(machine: Machine, status: int | str) -> None:
    """Every later call has the first fault's status."""
    driver = machine.driver
    driver.script.add(Crash("bad", 1, status))
    driver.script.add(Crash("bad", 2, "MISALIGNED_ADDRESS"))
    kernel = machine.kernel("bad", cost=Cost(fixed_ns=10))
    for _ in range(2):
        machine.launch(machine.stream(), kernel)
    with pytest.raises(DeviceFault) as caught:
        machine.finish()
    assert status in (caught.value.status, caught.value.name)


def test_a_reference_that_raises_fails_its_stream_once(machine: Machine) -> None:
    """The next wait for the stream raises it; the device stays usable."""

    def reference(launch: LaunchFacts) -> None:
        raise ZeroDivisionError("on purpose")

    driver, stream, event = machine.driver, machine.stream(), machine.event()
    kernel = machine.kernel("buggy", reference=reference)
    for wait in (
        lambda: driver.synchronize_stream(stream),
        lambda: driver.synchronize_event(event),
    ):
        machine.launch(stream, kernel)
        driver.record_event(event, stream)
        with pytest.raises(ReferenceFailed, match="'buggy' raised ZeroDivisionError") as caught:
            wait()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        driver.synchronize_stream(stream)
        driver.synchronize_event(event)
    machine.run(machine.stream(), "next", fixed_ns=10)
    machine.finish()
    assert machine.times()["next"]


def test_failed_references_are_reported_to_the_owner_of_a_stream(machine: Machine) -> None:
    """An owner gets them instead of a wait, even from a graph."""

    def reference(launch: LaunchFacts) -> None:
        raise ZeroDivisionError("on purpose")

    driver, stream = machine.driver, machine.stream()
    failures: list[Exception] = []
    driver.report_reference_errors(stream, failures.append)
    kernel = machine.kernel("buggy", reference=reference)
    machine.launch(stream, kernel)
    driver.begin_capture(stream, CaptureMode.RELAXED)
    machine.launch(stream, kernel)
    graph = driver.end_capture(stream)
    executable = driver.instantiate_graph(graph, stream)
    driver.launch_graph(executable, stream)
    driver.synchronize_stream(stream)
    assert [type(error.__cause__) for error in failures] == [ZeroDivisionError] * 2


def test_a_condition_that_raises_fails_its_stream(machine: Machine) -> None:
    """An error in the condition of a waiting kernel fails its stream."""
    stream = machine.stream()
    machine.run(stream, "latch", until=lambda: bool(1 // 0))
    with pytest.raises(ReferenceFailed, match=r"the cost\.until of kernel 'latch'") as caught:
        machine.driver.synchronize_stream(stream)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_cost_that_raises_is_the_callers(machine: Machine) -> None:
    """The launch raises it with the kernel and the cause, and launches nothing."""

    def cost(launch: LaunchFacts) -> Cost:
        raise KeyError("no such thing")

    with pytest.raises(InvalidRequest, match="'odd' failed: KeyError"):
        machine.launch(machine.stream(), machine.kernel("odd", cost=cost))
    machine.finish()
    assert machine.spans == []


def test_starts_are_counted_by_name(make: Make) -> None:
    """The nth start of a kernel crashes, on any stream."""
    machine = make(faults=[Crash("k", nth=3)])
    stream = machine.stream()
    for name in ("k", "other", "k", "other"):
        machine.run(stream, name, fixed_ns=10)
    machine.finish()
    machine.run(stream, "k", fixed_ns=10)
    with pytest.raises(DeviceFault):
        machine.finish()
    assert machine.times()["other"][1] > LAUNCH_NS
