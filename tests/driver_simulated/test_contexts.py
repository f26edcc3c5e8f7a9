"""Contexts: which is current where, how users are counted, and what may be destroyed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from greensched import Context
from greensched.driver import simulated
from greensched.driver.blocking import DRIVER_CALLS
from greensched.driver.simulated.contexts import LIMITS
from greensched.errors import CUDAError, DriverMisuse, NotSupported
from greensched.typing import CacheConfig, CaptureMode, ContextFlags, Limit

from .machine import Machine, Word, on_thread

Make = Callable[..., Machine]


# -- the primary context ------------------------------------------------------------------------


def test_the_primary_counts_its_users(machine: Machine) -> None:
    """Retaining returns the same handle, and the last release ends it."""
    driver = machine.driver
    assert driver.primary_state(0) == (0, True)
    assert driver.retain_primary(0) is machine.primary
    driver.release_primary(0)
    assert driver.primary_state(0) == (0, True)
    driver.set_current(None)
    driver.release_primary(0)
    assert driver.primary_state(0) == (0, False)
    with pytest.raises(CUDAError, match="INVALID_CONTEXT"):
        driver.release_primary(0)
    again = driver.retain_primary(0)
    assert again is not machine.primary
    with pytest.raises(DriverMisuse, match="after its end"):
        driver.set_current(machine.primary)


def test_a_green_context_retains_its_primary(machine: Machine) -> None:
    """The primary stays active while a green context lives."""
    driver = machine.driver
    green = machine.green()
    driver.set_current(None)
    driver.release_primary(0)
    assert driver.primary_state(0) == (0, True)
    driver.destroy_green(green)
    assert driver.primary_state(0) == (0, False)


def test_devices_have_primaries_of_their_own(make: Make) -> None:
    """Retaining one device's primary says nothing about another's."""
    driver = make("h200x2").driver
    assert driver.primary_state(1) == (0, False)
    other = driver.retain_primary(1)
    assert other is not driver.current()
    driver.release_primary(1)
    assert driver.primary_state(0) == (0, True)


def test_a_primary_does_not_end_before_its_children(machine: Machine) -> None:
    """Ending it while streams or memory live is refused with their names."""
    machine.stream()
    machine.driver.set_current(None)
    with pytest.raises(DriverMisuse, match="'stream': 1"):
        machine.driver.release_primary(0)


def test_a_primary_does_not_end_while_it_is_current(machine: Machine) -> None:
    """It is current on a thread."""
    with pytest.raises(DriverMisuse, match="ended while current on"):
        machine.driver.release_primary(0)


# -- the current context ------------------------------------------------------------------------


def test_what_is_current_is_each_threads_own(machine: Machine) -> None:
    """A new thread has no current context, and its changes stay its own."""
    driver = machine.driver
    green = driver.green_context(machine.green())

    def elsewhere() -> tuple[object, object]:
        before = driver.current()
        driver.set_current(green)
        return before, driver.current()

    assert on_thread(elsewhere) == (None, green)
    assert driver.current() is machine.primary


def test_none_pops_and_a_context_replaces(machine: Machine) -> None:
    """Setting a context replaces the top; None pops it, even from an empty stack."""
    driver = machine.driver
    green = driver.green_context(machine.green())
    driver.set_current(green)
    assert driver.current() is green
    driver.set_current(None)
    assert driver.current() is None
    driver.set_current(None)
    assert driver.current() is None


def test_a_green_context_has_one_view(machine: Machine) -> None:
    """Its context is the same each time, and not the primary."""
    driver = machine.driver
    green = machine.green()
    assert driver.green_context(green) is driver.green_context(green)
    assert driver.green_context(green) is not machine.primary
    assert driver.current() is machine.primary, "making one makes nothing current"


def test_a_green_context_is_current_on_one_thread_at_most(machine: Machine) -> None:
    """A second thread is refused until the first has left it; the primary is not limited."""
    driver = machine.driver
    green = driver.green_context(machine.green())
    driver.set_current(green)
    with pytest.raises(DriverMisuse, match="current on another thread"):
        on_thread(lambda: driver.set_current(green))
    driver.set_current(green)
    driver.set_current(machine.primary)
    on_thread(lambda: driver.set_current(green))
    on_thread(lambda: driver.set_current(machine.primary))


def test_a_thread_that_ends_takes_its_current_context_with_it(machine: Machine) -> None:
    """A green context of an ended thread can be used and ended."""
    driver = machine.driver
    green = machine.green()
    on_thread(lambda: driver.set_current(driver.green_context(green)))
    driver.set_current(driver.green_context(green))
    driver.set_current(machine.primary)
    driver.destroy_green(green)


@pytest.mark.parametrize(
    "name", [name for name, mark in DRIVER_CALLS.items() if mark.needs_context]
)
def test_a_driver_call_that_needs_a_current_context_says_so(machine: Machine, name: str) -> None:
    """Without one it answers INVALID_CONTEXT for any arguments."""
    with pytest.raises(CUDAError, match="INVALID_CONTEXT"):
        on_thread(getattr(machine.driver, name))


@pytest.mark.parametrize("name", sorted(set(DRIVER_CALLS) - {"initialise"}))
def test_no_driver_call_works_before_initialise_or_after_close(make: Make, name: str) -> None:
    """Calls answer NOT_INITIALIZED before, and DEINITIALIZED after."""
    machine = make()
    machine.driver.machine.initialised = False
    with pytest.raises(CUDAError, match="NOT_INITIALIZED"):
        getattr(machine.driver, name)()
    machine.driver.initialise()
    machine.driver.close()
    machine.driver.close()
    with pytest.raises(CUDAError, match="DEINITIALIZED"):
        getattr(machine.driver, name)()


def test_priorities(machine: Machine) -> None:
    """The range is the measured one, and a stream's priority is clamped to it."""
    driver = machine.driver
    assert driver.priority_range() == (0, -5)
    green = machine.green()
    for asked, given in ((-9, -5), (-5, -5), (-1, -1), (0, 0), (3, 0)):
        assert driver.create_stream(green, asked).priority == given  # type: ignore[attr-defined]


# -- green contexts -----------------------------------------------------------------------------


def test_green_contexts_over_one_split_are_disjoint(machine: Machine) -> None:
    """Fifteen green contexts over the groups of one split share no SM."""
    masks = [green.mask for green in machine.greens(15, 8)]  # type: ignore[attr-defined]
    assert not any(one & other for one, other in combinations(masks, 2))


def test_an_sm_may_be_in_several_green_contexts(machine: Machine) -> None:
    """One resource can make any number of green contexts."""
    driver = machine.driver
    descriptor = driver.describe([machine.cells()[0]])
    one, two = (driver.create_green(descriptor, 0) for _ in range(2))
    assert one is not two
    assert one.mask == two.mask  # type: ignore[attr-defined]


def test_a_green_context_does_not_end_in_use(machine: Machine) -> None:
    """It is refused while it is current or its streams have work."""
    driver = machine.driver
    green = machine.green()
    stream = machine.stream(green)
    driver.set_current(driver.green_context(green))
    with pytest.raises(DriverMisuse, match="destroyed while current on"):
        driver.destroy_green(green)
    driver.set_current(machine.primary)
    word = machine.hold(stream)
    with pytest.raises(DriverMisuse, match="work in flight"):
        driver.destroy_green(green)
    word.value = 1
    driver.synchronize_stream(stream)
    driver.destroy_stream(stream)
    driver.destroy_green(green)
    for call in (driver.destroy_green, driver.green_context, driver.create_stream):
        with pytest.raises(DriverMisuse, match="after its end"):
            call(green)


@pytest.mark.parametrize(("version", "status"), [("13.0", 709), ("13.1", 917), ("13.4", 917)])
def test_streams_that_outlive_their_green_context(make: Make, version: str, status: int) -> None:
    """Every call on them answers 709 up to 13.0, and 917 from 13.1 on."""
    machine = make(f"h200@{version}")
    driver = machine.driver
    green = machine.green()
    stream, event, word = machine.stream(green), machine.event(green), machine.word()
    driver.destroy_green(green)
    for call in (
        lambda: driver.query_stream(stream),
        lambda: driver.synchronize_stream(stream),
        lambda: driver.wait_event(stream, event),
        lambda: driver.record_event(event, stream),
        lambda: driver.bind_mark(stream, word.address),
        lambda: driver.wait_value(stream, word.address, 1),
        lambda: driver.begin_capture(stream, CaptureMode.RELAXED),
        lambda: driver.is_capturing(stream),
        lambda: machine.run(stream, "late"),
    ):
        with pytest.raises(CUDAError) as caught:
            call()
        assert caught.value.status == status
    if version == "13.0":
        with pytest.raises(CUDAError) as caught:
            driver.destroy_stream(stream)
        assert caught.value.status == status
        assert driver.live()["stream"] == 1, "there is no way to end it: it leaks"
    else:
        driver.destroy_stream(stream)
        assert driver.live()["stream"] == 0


def test_what_was_bound_to_a_stream_ends_with_it(machine: Machine) -> None:
    """Bound marks and launches of a destroyed stream are refused."""
    driver = machine.driver
    green = machine.green()
    one, two, word = machine.stream(green), machine.stream(green), machine.word()
    marks = [driver.bind_mark(stream, word.address) for stream in (one, two)]
    launch = driver.bind_launch(two, machine.kernel(), (1, 1, 1), (1, 1, 1), 0, 0)
    driver.destroy_stream(one)
    with pytest.raises(DriverMisuse, match="after its end"):
        marks[0](1)
    driver.destroy_green(green)
    for call in (lambda: marks[1](1), launch):
        with pytest.raises(CUDAError, match="CONTEXT_IS_DESTROYED"):
            call()
    assert word.value == 0


def test_destroying_a_green_context_ends_its_captures(machine: Machine) -> None:
    """An open capture on its streams ends and blocks no call."""
    driver = machine.driver
    green = machine.green()
    driver.begin_capture(machine.stream(green), CaptureMode.GLOBAL)
    with pytest.raises(CUDAError, match="CAPTURE"):
        machine.pinned()
    driver.destroy_green(green)
    machine.pinned()


# -- waiting for a context ----------------------------------------------------------------------


def test_synchronising_a_context(machine: Machine) -> None:
    """A green context waits for its own streams, the primary for every stream."""
    driver = machine.driver

    def body() -> None:
        one, two = machine.greens(2)
        machine.run(machine.stream(one), "short", fixed_ns=1_000)
        machine.run(machine.stream(two), "long", fixed_ns=5_000)
        driver.synchronize_context(driver.green_context(one))
        assert set(machine.times()) == {"short"}
        driver.synchronize_context(machine.primary)
        assert set(machine.times()) == {"short", "long"}

    machine.inside(body)


def test_synchronising_waits_for_what_is_there_and_not_for_more(machine: Machine) -> None:
    """It does not wait for work that is submitted meanwhile."""
    driver = machine.driver
    stream = machine.stream(machine.green())
    first, second = machine.hold(stream), machine.word()

    def submit_more() -> None:
        driver.wait_value(stream, second.address, 1)
        first.value = 1

    thread = driver.start_thread(submit_more, "more")
    driver.synchronize_context(machine.primary)
    thread.join()
    assert not driver.query_stream(stream)
    second.value = 1
    driver.synchronize_stream(stream)


def test_synchronising_waits_for_streams_that_were_destroyed(machine: Machine) -> None:
    """Queued work of a destroyed stream still runs, and is waited for."""
    driver = machine.driver
    green = machine.green()
    stream = machine.stream(green)
    machine.run(stream, "last", fixed_ns=1_000)
    driver.destroy_stream(stream)
    driver.synchronize_context(driver.green_context(green))
    assert set(machine.times()) == {"last"}
    driver.destroy_green(green)
    assert driver.devices[0].streams == {}, "and then it is forgotten"


# -- handles ------------------------------------------------------------------------------------


def test_handles_of_the_wrong_kind_are_refused(machine: Machine) -> None:
    """Every call refuses a wrong handle, where a real driver would crash."""
    driver = machine.driver
    stream, event, green = machine.stream(), machine.event(), machine.green()
    for call, wrong in (
        (driver.set_current, green),
        (driver.destroy_green, stream),
        (driver.destroy_stream, event),
        (driver.query_stream, machine.primary),
        (driver.query_event, stream),
        (driver.destroy_event, None),
        (driver.synchronize_context, 0x5100),
        (driver.destroy_memory_pool, "pool"),
        (driver.unload_code, machine.kernel()),
        (driver.load_kernel, object()),
        (driver.destroy_graph, event),
    ):
        with pytest.raises(DriverMisuse, match="expected a"):
            call(wrong)  # type: ignore[operator]


def test_handles_of_another_driver_are_refused(make: Make) -> None:
    """Two simulated machines refuse each other's handles."""
    here, there = make("h200x2"), make()
    driver = there.driver
    for call in (
        lambda: driver.set_current(here.primary),
        lambda: driver.destroy_stream(here.stream()),
        lambda: driver.destroy_event(here.event()),
        lambda: driver.destroy_green(here.green()),
        lambda: driver.set_current(here.driver.green_context(here.green())),
        lambda: driver.split_by_count(here.driver.device_resource(1), None, 8),
        lambda: driver.describe(here.cells()[:1]),
        lambda: driver.create_green(here.driver.describe(here.cells()[:1]), 0),
        lambda: driver.destroy_memory_pool(here.pool),
        lambda: driver.load_kernel(here.kernel()),
        lambda: driver.record_event(there.event(), here.stream()),
    ):
        with pytest.raises(DriverMisuse, match="of another driver"):
            call()


def test_destroying_twice_is_refused(machine: Machine) -> None:
    """Streams, events, pools and libraries end once."""
    driver = machine.driver
    for made, end in (
        (machine.stream(), driver.destroy_stream),
        (machine.event(), driver.destroy_event),
        (machine.pool, driver.destroy_memory_pool),
    ):
        end(made)  # type: ignore[operator]
        with pytest.raises(DriverMisuse, match="after its end"):
            end(made)  # type: ignore[operator]


def test_live_objects_are_counted(machine: Machine) -> None:
    """`live` counts what exists, and is empty after an orderly end."""
    driver = machine.driver
    green = machine.green()
    stream, event, memory = machine.stream(green), machine.event(green), machine.pinned()
    address = machine.device_memory(100, stream)
    assert driver.live() == {
        "primary": 1,
        "green context": 1,
        "stream": 1,
        "event": 1,
        "memory pool": 1,
        "allocation": 1,
        "pinned memory": 1,
    }
    driver.free(address, stream)
    driver.synchronize_stream(stream)
    driver.free_host(memory)
    driver.destroy_memory_pool(machine.pool)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.destroy_green(green)
    driver.set_current(None)
    driver.release_primary(0)
    assert driver.live() == {}


def test_raw_streams_have_numbers_of_their_own(machine: Machine) -> None:
    """Stream addresses are unique, and none is 0, the NULL stream."""
    addresses = {machine.driver.stream_address(machine.stream()) for _ in range(5)}
    assert len(addresses) == 5
    assert 0 not in addresses


def test_words_are_words(machine: Machine) -> None:
    """The driver sees the words that the tests write."""
    word = Word(machine.pinned())
    machine.driver.bind_mark(machine.stream(), word.address)(7)
    machine.finish()
    assert word.value == 7


# -- the stack, and contexts of their own -------------------------------------------------------


def test_pushing_and_popping(machine: Machine) -> None:
    """A push keeps the previous context below, a pop restores it; an empty stack refuses."""
    driver = machine.driver
    green = driver.green_context(machine.green())
    driver.push_current(green)
    driver.push_current(machine.primary)
    driver.set_current(green)
    assert driver.pop_current() is green
    assert driver.pop_current() is green
    assert driver.pop_current() is machine.primary
    assert driver.current() is None
    with pytest.raises(CUDAError, match="INVALID_CONTEXT"):
        driver.pop_current()


def test_a_popped_context_floats_to_another_thread(machine: Machine) -> None:
    """A green context can be pushed elsewhere once it is popped here."""
    driver = machine.driver
    green = driver.green_context(machine.green())
    driver.push_current(green)
    with pytest.raises(DriverMisuse, match="another thread"):
        on_thread(lambda: driver.push_current(green))
    driver.pop_current()
    on_thread(lambda: driver.push_current(green))


def test_a_context_of_its_own_is_made_floating(machine: Machine) -> None:
    """A new context is current nowhere, has its flags, and ends once."""
    driver = machine.driver
    own = driver.create_context(0, ContextFlags.SCHED_BLOCKING_SYNC)
    assert driver.current() is machine.primary
    assert driver.context_device(own) == 0
    driver.set_current(None)
    driver.release_primary(0)
    driver.set_current(own)
    assert driver.context_flags() == ContextFlags.SCHED_BLOCKING_SYNC | ContextFlags.MAP_HOST
    with pytest.raises(DriverMisuse, match="while current"):
        driver.destroy_context(own)
    stream = driver.create_stream(None)
    driver.set_current(None)
    with pytest.raises(DriverMisuse, match="1 streams and events"):
        driver.destroy_context(own)
    driver.destroy_stream(stream)
    driver.destroy_context(own)
    assert driver.live() == {}
    with pytest.raises(DriverMisuse, match="after its end"):
        driver.set_current(own)


def test_only_a_context_of_its_own_is_destroyed(machine: Machine) -> None:
    """Destroying the primary or a green context's view is refused."""
    driver = machine.driver
    for context in (machine.primary, driver.green_context(machine.green())):
        with pytest.raises(DriverMisuse, match="not one of its own"):
            driver.destroy_context(context)


@pytest.mark.parametrize("flags", [ContextFlags(3), ContextFlags(6), ContextFlags(64)])
def test_a_context_waits_one_way(machine: Machine, flags: ContextFlags) -> None:
    """Two ways to wait, or an unknown flag, are INVALID_VALUE."""
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        machine.driver.create_context(0, flags)
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        machine.driver.set_primary_flags(0, flags)


def test_the_primarys_flags(make: Make) -> None:
    """They apply to the active primary and to the next one."""
    driver = make("h200x2").driver
    spin = ContextFlags.SCHED_SPIN
    for device in (0, 1):  # active, and not
        driver.set_primary_flags(device, spin)
        assert driver.primary_state(device) == (spin, device == 0)
    assert driver.context_flags() == spin | ContextFlags.MAP_HOST
    driver.set_current(driver.retain_primary(1))
    assert driver.context_flags() == spin | ContextFlags.MAP_HOST


@pytest.mark.parametrize("spec", ["h200@13.0", "h200@13.4"])
def test_events_of_a_context_of_its_own_stay_there(make: Make, spec: str) -> None:
    """An event is recorded on streams of its own context only."""
    machine = make(spec)
    driver, green = machine.driver, machine.green()
    elsewhere = machine.stream(green), machine.stream()
    event = machine.event()
    driver.set_current(driver.create_context(0, ContextFlags.SCHED_AUTO))
    stream, own = driver.create_stream(None), driver.create_event()
    driver.record_event(own, stream)
    for other in elsewhere:
        with pytest.raises(CUDAError, match="INVALID_HANDLE"):
            driver.record_event(own, other)
    with pytest.raises(CUDAError, match="INVALID_HANDLE"):
        driver.record_event(event, stream)
    with pytest.raises(CUDAError, match="INVALID_HANDLE"):
        driver.record_green(green, own)


def test_a_context_waits_for_its_own_streams(machine: Machine) -> None:
    """One of its own waits for its streams, the primary for every stream but those."""
    driver = machine.driver
    own = driver.create_context(0, ContextFlags.SCHED_AUTO)
    driver.set_current(own)
    mine = driver.create_stream(None)
    driver.set_current(machine.primary)
    theirs = machine.stream()
    word = machine.hold(mine)
    driver.synchronize_context(machine.primary)
    assert not driver.query_stream(mine)
    word.value = 1
    driver.synchronize_context(own)
    assert driver.query_stream(mine)
    word = machine.hold(theirs)
    driver.synchronize_context(own)
    assert not driver.query_stream(theirs)
    word.value = 1
    machine.finish()


def test_limits_are_a_contexts_own(machine: Machine) -> None:
    """A limit can be read back in its context, and a green context shares it."""
    driver = machine.driver
    driver.set_limit(Limit.STACK, 4096)
    assert driver.limit(Limit.PERSISTING_L2) == 11_796_480  # as an H200 says
    driver.set_limit(Limit.PERSISTING_L2, 1 << 20)
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        driver.set_limit(Limit.PERSISTING_L2, 1 << 40)
    driver.set_cache_config(CacheConfig.PREFER_L1)
    driver.set_current(driver.green_context(machine.green()))
    assert driver.limit(Limit.STACK) == 4096
    assert driver.limit(Limit.PERSISTING_L2) == 3_932_160  # a sixteenth of L2
    assert driver.cache_config() is CacheConfig.PREFER_L1
    driver.set_current(driver.create_context(0, ContextFlags.SCHED_AUTO))
    assert driver.limit(Limit.STACK) == LIMITS[Limit.STACK]
    assert driver.cache_config() is CacheConfig.PREFER_NONE


def test_no_persisting_l2_below_8_0(make: Make) -> None:
    """A device without persisting L2 says what it needs."""
    driver = make("t4").driver
    with pytest.raises(NotSupported, match=r"8\.0; this is one of 7\.5"):
        driver.limit(Limit.PERSISTING_L2)
    with pytest.raises(NotSupported):
        driver.set_limit(Limit.PERSISTING_L2, 1)


def test_nothing_is_current_before_the_driver_is_initialised() -> None:
    """The query returns None and initialises nothing."""
    driver = simulated.open("h200")
    assert Context.current(driver) is None
    with pytest.raises(CUDAError, match="NOT_INITIALIZED"):
        driver.current()
    driver.close()
