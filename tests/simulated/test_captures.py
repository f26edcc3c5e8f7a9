"""Stream captures: who may do what beside one, and what spoils it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from greensched.errors import CUDAError
from greensched.typing import CaptureMode, StreamHandle

from .machine import Machine, on_thread

Make = Callable[..., Machine]
GLOBAL, THREAD_LOCAL, RELAXED = CaptureMode


def unsafe_calls(machine: Machine, stream: StreamHandle) -> dict[str, Callable[[], object]]:
    """What may spoil a capture, on another stream than the one that is capturing."""
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
    """Work submitted meanwhile is not done, then or later; the graph can be destroyed."""
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
    """A second beginning and an end without a beginning are refused."""
    driver = machine.driver
    stream = machine.stream()
    with pytest.raises(CUDAError, match="not capturing"):
        driver.end_capture(stream)
    driver.begin_capture(stream, GLOBAL)
    with pytest.raises(CUDAError, match="capturing already"):
        driver.begin_capture(stream, GLOBAL)
    driver.destroy_graph(driver.end_capture(stream))


@pytest.mark.parametrize("verb", ["query_stream", "synchronize_stream"])
def test_asking_a_capturing_stream_spoils_its_capture(machine: Machine, verb: str) -> None:
    """Whatever the modes: 900 for who asks, and 901 at the end of the capture."""
    driver = machine.driver
    driver.exchange_capture_mode(RELAXED)
    stream = machine.stream()
    driver.begin_capture(stream, RELAXED)
    with pytest.raises(CUDAError, match="900"):
        getattr(driver, verb)(stream)
    assert driver.is_capturing(stream), "spoilt, and still to be ended"
    with pytest.raises(CUDAError, match="901"):
        driver.end_capture(stream)
    assert not driver.is_capturing(stream)
    assert driver.query_stream(stream)


def test_recording_a_whole_context_spoils_its_captures(machine: Machine) -> None:
    """900 for the record and 901 at the end; captures of other contexts are left alone."""
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
    """A thread begins with GLOBAL; exchanging returns what it had."""
    driver = machine.driver
    assert driver.exchange_capture_mode(RELAXED) is GLOBAL
    assert driver.exchange_capture_mode(THREAD_LOCAL) is RELAXED
    assert on_thread(lambda: driver.exchange_capture_mode(RELAXED)) is GLOBAL
    assert driver.exchange_capture_mode(GLOBAL) is THREAD_LOCAL


def is_allowed(caller: CaptureMode, capture: CaptureMode, *, own: bool) -> bool:
    """The manual's rule for a call that may be unsafe (cuThreadExchangeStreamCaptureMode)."""
    if caller is RELAXED:
        return True
    if own:
        return capture is RELAXED
    return caller is THREAD_LOCAL or capture is not GLOBAL


@pytest.mark.parametrize("own", [True, False], ids=["own", "another's"])
@pytest.mark.parametrize("capture", CaptureMode)
@pytest.mark.parametrize("caller", CaptureMode)
def test_who_may_spoil_whose_capture(
    machine: Machine, caller: CaptureMode, capture: CaptureMode, own: bool
) -> None:
    """An unsafe call passes or is refused, and spoils the capture or not, by the manual's rule."""
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
    """A capture on one device prohibits unsafe calls on another: the rule speaks of threads."""
    machine = make("h200x2")
    driver = machine.driver
    stream = machine.stream(machine.green(device=1))
    driver.begin_capture(stream, GLOBAL)
    with pytest.raises(CUDAError, match="900"):
        machine.pinned()
    with pytest.raises(CUDAError, match="901"):
        driver.end_capture(stream)


def test_launches_and_marks_elsewhere_are_safe(machine: Machine) -> None:
    """Work on other streams goes on beside a capture of any mode."""
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
    """Nobody is held up by the capture of a stream that is gone."""
    stream = machine.stream()
    machine.driver.begin_capture(stream, GLOBAL)
    machine.driver.destroy_stream(stream)
    machine.pinned()


# -- events in captures -------------------------------------------------------------------------


def test_an_event_recorded_in_a_capture_is_no_event_to_wait_for(machine: Machine) -> None:
    """Asking, waiting and timing it answer 907, until it is recorded outside again."""
    driver = machine.driver
    driver.exchange_capture_mode(RELAXED)
    stream, other, event = machine.stream(), machine.stream(), machine.event(timing=True)
    driver.begin_capture(stream, RELAXED)
    driver.record_event(event, stream)
    for call in (
        lambda: driver.query_event(event),
        lambda: driver.synchronize_event(event),
        lambda: driver.wait_event(other, event),
        lambda: driver.elapsed(event, event),
    ):
        with pytest.raises(CUDAError, match="CAPTURED_EVENT"):
            call()
    driver.destroy_graph(driver.end_capture(stream))
    driver.record_event(event, stream)
    driver.synchronize_event(event)
    assert driver.query_event(event)
