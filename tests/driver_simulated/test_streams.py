"""Streams and events: order, marks and waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.driver import simulated
from greensched.driver.simulated.machine import QUEUE_DEPTH
from greensched.errors import CUDAError, DriverMisuse, NotSupported
from greensched.typing import Feature

from .machine import LAUNCH_NS, Machine, Word

Make = Callable[..., Machine]


# -- order --------------------------------------------------------------------------------------


def test_a_stream_does_one_thing_after_another(machine: Machine) -> None:
    """Work of one stream keeps its order and never overlaps."""
    stream = machine.stream()
    for i in range(5):
        machine.run(stream, f"k{i}", fixed_ns=1_000 * (5 - i))
    machine.finish()
    times = machine.times()
    assert list(times) == [f"k{i}" for i in range(5)]
    starts = [times[f"k{i}"][0] for i in range(1, 5)]
    ends = [times[f"k{i}"][1] for i in range(4)]
    assert starts == ends


def test_streams_are_independent(machine: Machine) -> None:
    """A blocked stream blocks no other."""
    driver = machine.driver
    green, other = machine.greens(2)
    held, beside, elsewhere = machine.stream(green), machine.stream(green), machine.stream(other)

    def body() -> None:
        gate = machine.hold(held)
        for stream in (beside, elsewhere):
            machine.run(stream, "free", fixed_ns=10)
            driver.synchronize_stream(stream)
            assert driver.query_stream(stream)
        assert not driver.query_stream(held)
        gate.value = 1
        driver.synchronize_stream(held)
        assert driver.query_stream(held)

    machine.inside(body)


def test_a_destroyed_streams_work_still_runs(machine: Machine) -> None:
    """Queued work is done, and the stream ends with it."""
    driver = machine.driver
    word, stream = machine.word(), machine.stream()
    machine.run(stream, "before", fixed_ns=1_000)
    driver.bind_mark(stream, word.address)(5)
    driver.destroy_stream(stream)
    machine.finish()
    assert word.value == 5
    assert driver.devices[0].streams == {}


def test_a_full_stream_blocks(machine: Machine) -> None:
    """A submission to a full launch queue waits for room."""
    driver = machine.driver
    word, stream = machine.word(), machine.stream()
    mark = driver.bind_mark(stream, word.address)

    def body() -> None:
        gate = machine.hold(stream)
        for i in range(QUEUE_DEPTH - 1):
            mark(i)
        assert word.value == 0
        gate.value = 1  # seen as soon as this thread waits
        mark(QUEUE_DEPTH)
        assert word.value == QUEUE_DEPTH - 2
        driver.synchronize_stream(stream)
        assert word.value == QUEUE_DEPTH

    machine.inside(body)


# -- marks and waits ----------------------------------------------------------------------------


def test_a_mark_comes_behind_the_streams_work(machine: Machine) -> None:
    """The word has the number only when all earlier work is done."""
    driver = machine.driver
    word, stream = machine.word(), machine.stream()
    mark = driver.bind_mark(stream, word.address)

    def body() -> None:
        for ticket in (1, 2, 3):
            machine.run(stream, f"k{ticket}", fixed_ns=1_000)
            mark(ticket)
        for ticket in (1, 2, 3):
            driver.clock.sleep(LAUNCH_NS + 1_000 * ticket - 1 - driver.clock.now())
            assert word.value == ticket - 1
            driver.clock.sleep(1)
            assert word.value == ticket

    machine.inside(body)


def test_a_mark_wraps_where_its_numbers_do(machine: Machine) -> None:
    """The largest 32-bit number and then 0 can be written, and no other values."""
    driver = machine.driver
    word, stream = machine.word(), machine.stream()
    mark = driver.bind_mark(stream, word.address)
    mark(0xFFFFFFFF)
    machine.finish()
    assert word.value == 0xFFFFFFFF
    mark(0)
    machine.finish()
    assert word.value == 0
    for wrong in (-1, 1 << 32):
        with pytest.raises(DriverMisuse, match="32 bits"):
            mark(wrong)
        with pytest.raises(DriverMisuse, match="32 bits"):
            driver.wait_value(stream, word.address, wrong)


def test_marks_need_a_live_aligned_word(machine: Machine) -> None:
    """A word is 4 aligned bytes of live memory, at the binding and at each mark."""
    driver = machine.driver
    stream, memory = machine.stream(), machine.pinned(8)
    for address in (memory.address + 2, memory.address + 8, 4096):
        with pytest.raises(DriverMisuse):
            driver.bind_mark(stream, address)
        with pytest.raises(DriverMisuse):
            driver.wait_value(stream, address, 1)
    mark = driver.bind_mark(stream, memory.address + 4)
    mark(1)
    machine.finish()
    driver.free_host(memory)
    with pytest.raises(DriverMisuse, match="freed"):
        mark(2)


def test_a_driver_may_lack_marks(make: Make) -> None:
    """Without the feature, binding a mark is refused."""
    machine = make(without=[Feature.WRITE_VALUE])
    with pytest.raises(NotSupported):
        machine.driver.bind_mark(machine.stream(), machine.word().address)


@given(value=st.integers(0, 0xFFFFFFFF), ahead=st.integers(-(1 << 31), (1 << 31) - 1))
def test_wait_value_compares_by_signed_difference(value: int, ahead: int) -> None:
    """A stream continues when the word is at least the value, across wraps."""
    machine = Machine(clock=simulated.VirtualClock())
    word, stream = machine.word(), machine.stream()
    word.value = (value + ahead) & 0xFFFFFFFF
    machine.driver.wait_value(stream, word.address, value)
    machine.inside(lambda: machine.driver.clock.sleep(1_000))
    assert machine.driver.query_stream(stream) is (ahead >= 0)
    machine.close()


def test_a_stream_can_wait_for_another_through_memory(machine: Machine) -> None:
    """A word of one stream releases another at the same device time."""
    driver = machine.driver
    word, writer, waiter = machine.word(), machine.stream(), machine.stream()
    driver.wait_value(waiter, word.address, 1)
    machine.run(waiter, "after", fixed_ns=10)
    machine.run(writer, "before", fixed_ns=50_000)
    driver.bind_mark(writer, word.address)(1)
    machine.finish()
    assert machine.times()["after"][0] == machine.times()["before"][1] == LAUNCH_NS + 50_000


# -- events -------------------------------------------------------------------------------------


def test_an_event_is_done_when_what_it_captured_is(machine: Machine) -> None:
    """Later work of the stream does not delay it."""
    driver = machine.driver
    stream, event = machine.stream(), machine.event()

    def body() -> None:
        machine.run(stream, "captured", fixed_ns=1_000)
        driver.record_event(event, stream)
        gate = machine.hold(stream)
        assert not driver.query_event(event)
        driver.synchronize_event(event)
        assert driver.query_event(event)
        assert list(machine.times()) == ["captured"]
        assert not driver.query_stream(stream)
        gate.value = 1
        driver.synchronize_stream(stream)

    machine.inside(body)


def test_an_event_never_recorded_is_done(machine: Machine) -> None:
    """Queries and waits for it return at once."""
    driver = machine.driver
    event, stream = machine.event(), machine.stream()
    assert driver.query_event(event)
    driver.synchronize_event(event)
    driver.wait_event(stream, event)
    driver.synchronize_stream(stream)


def test_recording_again_captures_anew(machine: Machine) -> None:
    """A new record replaces the old one, except for waits that have begun."""
    driver = machine.driver
    stream, waiter, event = machine.stream(), machine.stream(), machine.event()

    def body() -> None:
        first = machine.hold(stream)
        driver.record_event(event, stream)
        driver.wait_event(waiter, event)
        second = machine.hold(stream)
        driver.record_event(event, stream)
        first.value = 1
        driver.synchronize_stream(waiter)
        assert not driver.query_event(event)
        second.value = 1
        driver.synchronize_event(event)

    machine.inside(body)


@pytest.mark.parametrize("here", ["green", "primary"])
@pytest.mark.parametrize("there", ["stream", "context", "device"])
def test_a_stream_waits_for_an_event_of_another(make: Make, here: str, there: str) -> None:
    """The later work begins at the event, across contexts and devices."""
    machine = make("h200x2")
    driver = machine.driver
    one, two = machine.greens(2)
    mine = one if here == "green" else None
    theirs = {"stream": mine, "context": two, "device": machine.green(device=1)}[there]
    before, after, event = machine.stream(mine), machine.stream(theirs), machine.event(mine)
    machine.run(before, "before", fixed_ns=20_000)
    driver.record_event(event, before)
    driver.wait_event(after, event)
    machine.run(after, "after", fixed_ns=10)
    driver.synchronize_stream(after)
    assert machine.times()["after"][0] == machine.times()["before"][1]


@pytest.mark.parametrize(
    ("version", "option", "strict"),
    [
        ("13.4", None, True),
        ("13.0", None, False),
        ("13.1", None, True),
        ("13.4", False, False),
        ("13.0", True, True),
    ],
)
def test_where_an_event_may_be_recorded(
    make: Make, version: str, option: bool | None, strict: bool
) -> None:
    """Strictly, on its own context's streams; as on 13.0, on any of its device."""
    machine = make(f"h200x2@{version}", strict_events=option)
    driver = machine.driver
    one, two = machine.greens(2)
    streams = [machine.stream(one), machine.stream(two), machine.stream()]
    events = [machine.event(one), machine.event(two), machine.event()]
    for i, event in enumerate(events):
        for j, stream in enumerate(streams):
            if i == j or not strict:
                driver.record_event(event, stream)
                driver.synchronize_event(event)
            else:
                with pytest.raises(CUDAError, match="INVALID_HANDLE"):
                    driver.record_event(event, stream)
                assert driver.query_event(event)
    there = machine.stream(machine.green(device=1))
    with pytest.raises(CUDAError, match="INVALID_HANDLE"):
        driver.record_event(events[0], there)


def test_recording_a_green_context_captures_all_its_streams(machine: Machine) -> None:
    """The event is done with the last of its streams, and no other context's."""
    driver = machine.driver
    green, other = machine.greens(2)
    for i in range(3):
        machine.run(machine.stream(green), f"k{i}", fixed_ns=1_000 * (i + 1))
    gate = machine.hold(machine.stream(other))
    event = machine.event()  # of the primary: that suffices

    def body() -> None:
        driver.record_green(green, event)
        assert not driver.query_event(event)
        driver.synchronize_event(event)
        assert list(machine.times()) == ["k0", "k1", "k2"]
        driver.record_green(green, event)
        assert driver.query_event(event), "nothing is left to do"

    machine.inside(body)
    gate.value = 1


def test_recording_a_green_context_leaves_out_what_only_waits_for_an_event(
    machine: Machine,
) -> None:
    """The stream is not idle, but the context's event is done; a kernel behind the wait counts."""
    driver, (green, other) = machine.driver, machine.greens(2)
    held, waits = machine.stream(other), machine.stream(green)
    gate, before, event = machine.hold(held), machine.event(), machine.event()

    def body() -> None:
        driver.record_event(before, held)
        driver.wait_event(waits, before)
        driver.record_green(green, event)
        assert driver.query_event(event)
        assert not driver.query_stream(waits)
        machine.run(waits, "behind", fixed_ns=10)
        driver.record_green(green, event)
        assert not driver.query_event(event)
        gate.value = 1
        driver.synchronize_event(event)
        assert driver.query_stream(waits)

    machine.inside(body)


def test_an_event_of_another_device_records_no_green_context(make: Make) -> None:
    """It is an invalid handle."""
    machine = make("h200x2")
    with pytest.raises(CUDAError, match="INVALID_HANDLE"):
        machine.driver.record_green(machine.green(device=1), machine.event())


def test_elapsed_time(machine: Machine) -> None:
    """Two timing events give the device's seconds between them."""
    driver = machine.driver
    stream = machine.stream()
    start, end = machine.event(timing=True), machine.event(timing=True)

    def body() -> None:
        driver.record_event(start, stream)
        machine.run(stream, "timed", fixed_ns=1_000_000)
        driver.record_event(end, stream)
        with pytest.raises(CUDAError, match="NOT_READY"):
            driver.elapsed(start, end)
        driver.synchronize_event(end)
        assert driver.elapsed(start, end) == pytest.approx((1_000_000 + LAUNCH_NS) / 1e9)
        assert driver.elapsed(end, start) == -driver.elapsed(start, end)

    machine.inside(body)
    plain, never = machine.event(), machine.event(timing=True)
    driver.record_event(plain, stream)
    machine.finish()
    for first, second in ((plain, end), (start, plain), (never, end)):
        with pytest.raises(CUDAError, match="INVALID_HANDLE"):
            driver.elapsed(first, second)


def test_an_event_can_be_destroyed_during_a_wait(machine: Machine) -> None:
    """The wait stays valid, and the handle does not."""
    driver = machine.driver
    stream, waiter, event = machine.stream(), machine.stream(), machine.event()

    def body() -> None:
        gate = machine.hold(stream)
        driver.record_event(event, stream)
        driver.wait_event(waiter, event)
        driver.destroy_event(event)
        with pytest.raises(DriverMisuse, match="after its end"):
            driver.query_event(event)
        assert not driver.query_stream(waiter)
        gate.value = 1
        driver.synchronize_stream(waiter)

    machine.inside(body)


def test_events_and_words_leave_nothing_behind(machine: Machine) -> None:
    """After thousands of records, waits and marks the timeline is empty."""
    driver = machine.driver
    one, two, event, word = machine.stream(), machine.stream(), machine.event(), machine.word()
    mark = driver.bind_mark(one, word.address)
    for i in range(2_000):
        driver.record_event(event, one)
        driver.wait_event(two, event)
        mark(i)
        if i % 100 == 0:
            machine.finish()
    machine.finish()
    timeline = driver.machine.timeline
    assert (timeline.held, timeline._due, list(timeline._ended)) == ({}, [], [])
    assert Word(machine.pinned()).value == 0
