"""Stream captures: which calls a thread may make meanwhile, and what invalidates a capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from greensched.driver.simulated import Crash
from greensched.driver.types import ExecutableHandle, StreamHandle
from greensched.errors import CUDAError, DriverMisuse
from greensched.typing import CaptureMode

from .machine import LAUNCH_NS, Machine, on_thread

Make = Callable[..., Machine]
GLOBAL, THREAD_LOCAL, RELAXED = CaptureMode


def unsafe_calls(machine: Machine, stream: StreamHandle) -> dict[str, Callable[[], object]]:
    """Return calls on another stream that may invalidate a capture."""
    driver, event = machine.driver, machine.event()
    return {
        "allocate_host": machine.pinned,
        "allocate": lambda: machine.device_memory(64, stream),
        "create_memory_pool": lambda: driver.create_memory_pool(0),
        "query_event": lambda: driver.query_event(event),
        "query_stream": lambda: driver.query_stream(stream),
        "synchronize_event": lambda: driver.synchronize_event(event),
        "synchronize_stream": lambda: driver.synchronize_stream(stream),
        "synchronize_context": lambda: driver.synchronize_context(machine.primary),
    }


def test_a_capture_records_instead_of_running(machine: Machine) -> None:
    """Captured work does not run, then or later; the graph can be destroyed."""
    driver = machine.driver
    stream, word = machine.stream(), machine.word()
    kernel = machine.kernel()
    machine.launch(stream, kernel)
    assert not driver.is_capturing(stream)
    driver.begin_capture(stream, RELAXED)
    assert driver.is_capturing(stream)
    machine.launch(stream, kernel)
    driver.bind_mark(stream, word.address)(1)
    graph = driver.end_capture(stream)
    assert not driver.is_capturing(stream)
    machine.finish()
    assert word.value == 0
    assert len(machine.spans) == 1
    assert driver.live()["graph"] == 1
    driver.destroy_graph(graph)
    assert driver.live()["graph"] == 0


def test_captures_begin_and_end_in_turn(machine: Machine) -> None:
    """A second begin, and an end without a begin, are refused."""
    driver = machine.driver
    stream = machine.stream()
    with pytest.raises(CUDAError, match="not capturing"):
        driver.end_capture(stream)
    driver.begin_capture(stream, GLOBAL)
    with pytest.raises(CUDAError, match="capturing already"):
        driver.begin_capture(stream, GLOBAL)
    driver.destroy_graph(driver.end_capture(stream))


@pytest.mark.parametrize("name", ["query_stream", "synchronize_stream"])
def test_asking_a_capturing_stream_spoils_its_capture(machine: Machine, name: str) -> None:
    """In any mode the query answers 900, and the end of the capture 901."""
    driver = machine.driver
    driver.exchange_capture_mode(RELAXED)
    stream = machine.stream()
    driver.begin_capture(stream, RELAXED)
    with pytest.raises(CUDAError, match="900"):
        getattr(driver, name)(stream)
    assert driver.is_capturing(stream), "spoilt, and still to be ended"
    with pytest.raises(CUDAError, match="901"):
        driver.end_capture(stream)
    assert not driver.is_capturing(stream)
    assert driver.query_stream(stream)


def test_recording_a_whole_context_spoils_its_captures(machine: Machine) -> None:
    """The record answers 900, its captures' ends 901; other contexts are unaffected."""
    driver = machine.driver
    driver.exchange_capture_mode(RELAXED)
    one, two = machine.greens(2)
    spoilt, fine, event = machine.stream(one), machine.stream(two), machine.event()
    for stream in (spoilt, fine):
        driver.begin_capture(stream, RELAXED)
    with pytest.raises(CUDAError, match="900"):
        driver.record_green(one, event)
    with pytest.raises(CUDAError, match="901"):
        driver.end_capture(spoilt)
    driver.destroy_graph(driver.end_capture(fine))
    driver.record_green(one, event)
    driver.synchronize_event(event)


# -- modes --------------------------------------------------------------------------------------


def test_modes_are_each_threads_own(machine: Machine) -> None:
    """A thread begins with GLOBAL, and an exchange returns the previous mode."""
    driver = machine.driver
    assert driver.exchange_capture_mode(RELAXED) is GLOBAL
    assert driver.exchange_capture_mode(THREAD_LOCAL) is RELAXED
    assert on_thread(lambda: driver.exchange_capture_mode(RELAXED)) is GLOBAL
    assert driver.exchange_capture_mode(GLOBAL) is THREAD_LOCAL


def is_allowed(caller: CaptureMode, capture: CaptureMode, *, own: bool) -> bool:
    """Return the manual's rule for an unsafe call (cuThreadExchangeStreamCaptureMode)."""
    if caller is RELAXED:
        return True
    if own:
        return capture is RELAXED
    return caller is THREAD_LOCAL or capture is not GLOBAL


@pytest.mark.parametrize("own", [True, False], ids=["own", "another's"])
@pytest.mark.parametrize("capture", CaptureMode)
@pytest.mark.parametrize("caller", CaptureMode)
def test_which_threads_may_spoil_which_captures(
    machine: Machine, caller: CaptureMode, capture: CaptureMode, own: bool
) -> None:
    """An unsafe call passes or is refused, and invalidates or not, by the manual's rule."""
    driver = machine.driver
    stream, other = machine.stream(), machine.stream()
    machine.device_memory(64, other)
    for name, call in unsafe_calls(machine, other).items():

        def attempt(call: Callable[[], object] = call) -> str:
            driver.set_current(machine.primary)
            driver.exchange_capture_mode(caller)
            try:
                call()
            except CUDAError as error:
                return error.name
            finally:
                driver.exchange_capture_mode(GLOBAL)
            return "passed"

        driver.begin_capture(stream, capture)
        answer = attempt() if own else on_thread(attempt)
        allowed = is_allowed(caller, capture, own=own)
        assert answer == ("passed" if allowed else "STREAM_CAPTURE_UNSUPPORTED"), name
        if allowed:
            driver.destroy_graph(driver.end_capture(stream))
        else:
            with pytest.raises(CUDAError, match="901"):
                driver.end_capture(stream)


def test_the_rule_knows_no_devices(make: Make) -> None:
    """A capture on one device also prohibits unsafe calls on another."""
    machine = make("h200x2")
    driver = machine.driver
    stream = machine.stream(machine.green(device=1))
    driver.begin_capture(stream, GLOBAL)
    with pytest.raises(CUDAError, match="900"):
        machine.pinned()
    with pytest.raises(CUDAError, match="901"):
        driver.end_capture(stream)


def test_launches_and_marks_elsewhere_are_safe(machine: Machine) -> None:
    """Work on other streams goes on during a capture of any mode."""
    driver = machine.driver
    stream, other, word, event = (
        machine.stream(),
        machine.stream(),
        machine.word(),
        machine.event(),
    )
    mark, kernel = driver.bind_mark(other, word.address), machine.kernel()
    driver.begin_capture(stream, GLOBAL)
    machine.launch(other, kernel)
    mark(3)
    driver.record_event(event, other)
    driver.wait_event(other, event)
    driver.destroy_graph(driver.end_capture(stream))
    machine.finish()
    assert word.value == 3


def test_destroying_a_capturing_stream_ends_its_capture(machine: Machine) -> None:
    """The capture of a destroyed stream blocks no other call."""
    stream = machine.stream()
    machine.driver.begin_capture(stream, GLOBAL)
    machine.driver.destroy_stream(stream)
    machine.pinned()


# -- events in captures -------------------------------------------------------------------------


def test_an_event_recorded_in_a_capture_is_no_event_to_wait_for(machine: Machine) -> None:
    """It answers 907, and 1 behind the capture, until it is recorded outside again.

    A query of it or a wait for it invalidates the capture. Source: tests/gpu/test_graphs_on_sms.py.
    """
    driver = machine.driver
    driver.exchange_capture_mode(RELAXED)
    stream, other, event = machine.stream(), machine.stream(), machine.event(timing=True)

    def capture() -> None:
        driver.begin_capture(stream, RELAXED)
        driver.record_event(event, stream)

    capture()
    for call in (
        lambda: driver.wait_event(other, event),
        lambda: driver.elapsed(event, event),
    ):
        with pytest.raises(CUDAError, match="CAPTURED_EVENT"):
            call()
    driver.destroy_graph(driver.end_capture(stream))
    for call, answer in (
        (driver.query_event, "CAPTURED_EVENT"),
        (driver.synchronize_event, "INVALID_VALUE"),
    ):
        capture()
        with pytest.raises(CUDAError, match=answer):
            call(event)
        with pytest.raises(CUDAError, match="INVALIDATED"):
            driver.end_capture(stream)
        with pytest.raises(CUDAError, match="INVALID_VALUE"):
            driver.query_event(event)
    driver.record_event(event, stream)
    driver.synchronize_event(event)
    assert driver.query_event(event)


# -- graphs ---------------------------------------------------------------------------------------


def captured(
    machine: Machine, stream: StreamHandle, work: Callable[[], object]
) -> ExecutableHandle:
    """Return a graph of the work that was put on a stream."""
    driver = machine.driver
    driver.begin_capture(stream, RELAXED)
    work()
    graph = driver.end_capture(stream)
    executable = driver.instantiate_graph(graph, stream)
    driver.destroy_graph(graph)
    return executable


def test_a_graph_runs_where_it_was_captured(machine: Machine) -> None:
    """Its kernels run in order, for their times, on the captured SMs, on any stream."""
    driver = machine.driver
    here, there = (machine.stream(green) for green in machine.greens(2))

    def work() -> None:
        machine.run(here, "first", fixed_ns=1_000)
        machine.run(here, "second", fixed_ns=2_000)

    graph = captured(machine, here, work)
    assert not machine.spans
    driver.launch_graph(graph, there)
    machine.finish()
    first, second, whole = machine.spans
    assert (first.name, second.name, whole.kind) == ("first", "second", "graph")
    assert first.sms == second.sms == whole.sms == here.sms != there.sms  # type: ignore[attr-defined]
    assert first.stream == whole.stream == there.ident  # type: ignore[attr-defined]
    assert first.green == here.green  # type: ignore[attr-defined]
    assert first.end - first.start == 1_000
    assert second.start == first.end
    assert second.end - second.start == 2_000
    assert whole.start == first.start == whole.enqueued + LAUNCH_NS
    assert whole.end == second.end
    driver.destroy_executable(graph)
    assert not driver.live()["executable graph"]
    assert not driver.live()["graph"]


def test_a_graph_does_its_work_anew_each_time(machine: Machine) -> None:
    """It uses the present bytes, and the values of its capture."""
    driver, stream = machine.driver, machine.stream()
    one, two = machine.pinned(), machine.pinned()
    address = machine.device_memory(64, stream)

    def work() -> None:
        driver.copy_to_device(address, one.address, 64, stream)
        driver.copy_to_host(two.address, address, 32, stream)
        driver.set_bytes(address, 7, 64, stream)

    graph = captured(machine, stream, work)
    for value in (1, 2, 3):
        one.view[:64] = bytes([value] * 64)
        driver.launch_graph(graph, stream)
        machine.finish()
        assert bytes(two.view[:64]) == bytes([value] * 32 + [0] * 32)
    driver.destroy_executable(graph)


def test_a_graph_is_launched_after_its_last_launch(machine: Machine) -> None:
    """Two launches of one graph never overlap, on any streams."""
    driver = machine.driver
    streams = [machine.stream(), machine.stream()]
    graph = captured(
        machine, streams[0], lambda: machine.run(streams[0], "work", blocks=1, fixed_ns=5_000)
    )
    for stream in streams:
        driver.launch_graph(graph, stream)
    driver.destroy_executable(graph)  # what was launched runs all the same
    machine.finish()
    first, second = (span for span in machine.spans if span.kind == "kernel")
    assert second.start >= first.end
    with pytest.raises(DriverMisuse, match="after its end"):
        driver.launch_graph(graph, streams[0])


def test_a_ticket_in_a_graph_turns_the_word_back(machine: Machine) -> None:
    """As on an H200, a captured ticket lowers the word, so none is captured."""
    driver, stream, word = machine.driver, machine.stream(), machine.word()
    mark = driver.bind_mark(stream, word.address)
    graph = captured(machine, stream, lambda: mark(7))
    mark(2000)
    machine.finish()
    assert word.value == 2000
    driver.launch_graph(graph, stream)
    machine.finish()
    assert word.value == 7
    driver.destroy_executable(graph)


def test_a_graph_of_memory_that_is_gone_is_refused(machine: Machine) -> None:
    """A real device would write to the freed memory."""
    driver, stream = machine.driver, machine.stream()
    address = machine.device_memory(64, stream)
    graph = captured(machine, stream, lambda: driver.set_bytes(address, 1, 64, stream))
    driver.free(address, stream)
    with pytest.raises(DriverMisuse):
        driver.launch_graph(graph, stream)
    driver.destroy_executable(graph)


def test_what_is_recorded_is_counted(machine: Machine) -> None:
    """Work is a node; a recorded event is only a dependency."""
    driver, stream, event = machine.driver, machine.stream(), machine.event()
    for number in (0, 2):
        driver.begin_capture(stream, RELAXED)
        driver.record_event(event, stream)
        for _ in range(number):
            machine.launch(stream, machine.kernel())
        graph = driver.end_capture(stream)
        assert driver.node_count(graph) == number
        driver.destroy_graph(graph)


def test_nothing_crosses_into_a_capture(machine: Machine) -> None:
    """Waiting for outside work answers 905 and invalidates; no graph is launched in it."""
    driver, stream, other, event = (
        machine.driver,
        machine.stream(),
        machine.stream(),
        machine.event(),
    )
    graph = captured(machine, other, lambda: machine.run(other, "work"))
    driver.record_event(event, other)
    for call, status in (
        (lambda: driver.wait_event(stream, event), "905"),
        (lambda: driver.launch_graph(graph, stream), "900"),
    ):
        driver.begin_capture(stream, RELAXED)
        with pytest.raises(CUDAError, match=status):
            call()
        with pytest.raises(CUDAError, match="901"):
            driver.end_capture(stream)
    driver.destroy_executable(graph)


def test_a_graph_may_fail_and_hang(make: Make) -> None:
    """A kernel that crashes at its third start does so in the third launch."""
    machine = make(faults=[Crash("work", nth=3)])
    driver, stream = machine.driver, machine.stream()
    graph = captured(machine, stream, lambda: machine.run(stream, "work"))
    for _ in range(2):
        driver.launch_graph(graph, stream)
        machine.finish()
    driver.launch_graph(graph, stream)
    with pytest.raises(CUDAError, match="ILLEGAL_ADDRESS"):
        machine.finish()


def test_many_launches_of_a_large_graph_never_block(machine: Machine) -> None:
    """Each launch is a few entries of a stream, however large the graph is."""
    driver, stream = machine.driver, machine.stream()

    def work() -> None:
        for number in range(100):
            machine.run(stream, f"{number}", fixed_ns=10)

    graph = captured(machine, stream, work)
    for _ in range(100):
        driver.launch_graph(graph, stream)
    driver.synchronize_stream(stream)
    assert len(machine.spans) == 100 * 101
    driver.destroy_executable(graph)
