"""The real clock: work waits for words in memory, and threads wait in the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from greensched.driver import simulated
from greensched.driver.simulated import Crash, cost, real_clock
from greensched.driver.simulated.driver import current_driver
from greensched.errors import CUDAError, DeviceFault
from greensched.typing import Cost, LaunchFacts, Parameter

from .machine import LAUNCH_NS, Machine, on_thread, spin

Make = Callable[..., Machine]


@pytest.fixture
def machine(make: Make) -> Machine:
    return make(clock=None)


def clock_threads() -> int:
    return sum(thread.name == "greensched-simulated-gpu" for thread in threading.enumerate())


def test_modelled_time_does_not_depend_on_references(machine: Machine) -> None:
    """The host's time in a reference does not change the device's times."""
    driver, stream = machine.driver, machine.stream()

    def slow(launch: LaunchFacts) -> None:
        until = driver.clock.now() + 3_000_000
        while driver.clock.now() < until:
            pass

    gate = machine.hold(stream)
    for name in ("one", "two", "three"):
        machine.launch(stream, machine.kernel(name, (), slow, Cost(fixed_ns=10_000)))
    spin(lambda: driver.machine.timeline.held)  # the device has come to the gate
    gate.value = 1
    driver.synchronize_stream(stream)
    one, two, three = machine.spans
    assert [span.end - span.start for span in machine.spans] == [10_000] * 3
    assert (two.start, three.start) == (one.end, two.end)
    for i, span in enumerate(machine.spans):
        assert span.enqueued <= span.start <= span.end <= span.seen
        assert span.seen >= one.end + (i + 1) * 3_000_000


def test_a_reference_is_run_off_the_callers_thread(machine: Machine) -> None:
    """References run on the device's own thread only."""
    seen: list[threading.Thread] = []

    def reference(launch: LaunchFacts) -> None:
        seen.append(threading.current_thread())

    machine.launch(machine.stream(), machine.kernel("k", (), reference))
    machine.finish()
    assert seen[0] is not threading.current_thread()
    assert seen[0].daemon


def test_a_held_stream_is_let_go_by_a_word(machine: Machine) -> None:
    """Work after a wait runs once the host writes the word."""
    driver, stream, word = machine.driver, machine.stream(), machine.word()
    driver.wait_value(stream, word.address, 3)
    machine.run(stream, "held", fixed_ns=10)
    beside = machine.stream()
    machine.run(beside, "beside", fixed_ns=10)
    driver.synchronize_stream(beside)
    assert list(machine.times()) == ["beside"]
    word.value = 2
    assert not driver.query_stream(stream)
    word.value = 3
    driver.synchronize_stream(stream)
    assert list(machine.times()) == ["beside", "held"]


def test_a_short_kernel_is_not_slept_through(machine: Machine) -> None:
    """An earlier event is handled in time while the device waits for a later one."""
    machine.run(machine.stream(), "an hour", fixed_ns=3.6e12)
    stream = machine.stream()
    for i in range(5):
        machine.run(stream, f"k{i}", fixed_ns=10)
        machine.driver.synchronize_stream(stream)
    assert list(machine.times()) == [f"k{i}" for i in range(5)]


def test_a_word_written_by_the_device_is_seen_at_once(machine: Machine) -> None:
    """A stream that waits for another's mark goes on at the mark's modelled time."""
    driver, word = machine.driver, machine.word()
    writer, waiter = machine.stream(), machine.stream()
    gate = machine.hold(writer)
    driver.wait_value(waiter, word.address, 1)
    machine.run(waiter, "after", fixed_ns=10)
    machine.run(writer, "before", fixed_ns=5_000_000)
    driver.bind_mark(writer, word.address)(1)
    spin(lambda: len(driver.machine.timeline.held) == 2)
    gate.value = 1
    machine.finish()
    assert machine.times()["after"][0] == machine.times()["before"][1]


def test_kernels_compute_what_they_compute(machine: Machine) -> None:
    """Upload, kernel and download give the right bytes on the real clock."""
    driver, stream = machine.driver, machine.stream()
    n = 10_000
    source, target = machine.pinned(4 * n), machine.pinned(4 * n)
    np.frombuffer(source.view, np.float32)[:] = np.arange(n)
    address = machine.device_memory(4 * n, stream)

    def double(launch: LaunchFacts, x: Any, n: Any) -> None:
        x[:n] *= 2

    parameters = (Parameter("x", "f4", pointer=True), Parameter("n", "u4"))
    driver.copy_to_device(address, source.address, 4 * n, stream)
    machine.launch(stream, machine.kernel("double", parameters, double), address, n)
    driver.copy_to_host(target.address, address, 4 * n, stream)
    driver.synchronize_stream(stream)
    result = np.frombuffer(target.view, np.float32)
    np.testing.assert_array_equal(result, 2 * np.arange(n, dtype=np.float32))


def test_many_threads_submit_at_once(machine: Machine) -> None:
    """Marks of several threads on their own streams arrive in order."""
    driver = machine.driver
    words = [machine.word() for _ in range(4)]
    kernel = machine.kernel("k", cost=Cost(fixed_ns=100))
    stream = machine.stream()
    machine.launch(stream, kernel)

    def submit(i: int) -> None:
        driver.set_current(machine.primary)
        own = driver.create_stream(None)
        mark = driver.bind_mark(own, words[i].address)
        for ticket in range(1, 201):
            machine.launch(own, kernel)
            mark(ticket)
        driver.synchronize_stream(own)
        assert words[i].value == 200

    def every() -> None:
        threads = [driver.start_thread(lambda i=i: submit(i), f"t{i}") for i in range(4)]  # type: ignore[misc]
        for thread in threads:
            thread.join()

    on_thread(every)
    assert [word.value for word in words] == [200] * 4
    assert len(machine.spans) == 801


def test_a_fault_wakes_waiting_threads(machine: Machine) -> None:
    """A thread that is blocked in the driver gets the fault at once."""
    driver = machine.driver
    driver.script.add(Crash("bad"))
    held, doomed = machine.stream(), machine.stream()
    gate = machine.hold(held, doomed)
    machine.run(doomed, "bad", fixed_ns=10)
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        with pytest.raises(DeviceFault):
            driver.synchronize_stream(doomed)

    thread = driver.start_thread(wait, "waiter")
    waiting.wait()
    gate.value = 1
    thread.join()
    assert not thread.is_alive()
    with pytest.raises(DeviceFault):
        driver.synchronize_stream(held)


def test_the_devices_thread_ends_and_begins_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends without work, and the next work starts another."""
    monkeypatch.setattr(real_clock, "IDLE_S", 1e-6)
    clock = machine.driver.clock
    for i in range(3):
        machine.run(machine.stream(), f"k{i}", fixed_ns=10)
        machine.finish()
        thread = clock._thread  # type: ignore[attr-defined]
        if thread is not None:
            thread.join()
            assert not thread.is_alive()
    assert len(machine.spans) == 3


def test_closing_ends_the_devices_thread(make: Make) -> None:
    """Work that is held never runs, and a wait for it raises."""
    machine = make(clock=None)
    driver, stream = machine.driver, machine.stream()
    machine.hold(stream)
    machine.run(stream, "never", fixed_ns=10)
    machine.run(machine.stream(), "before", fixed_ns=10)
    thread = driver.clock._thread  # type: ignore[attr-defined]
    waiting = threading.Event()
    answers: list[int] = []

    def wait() -> None:
        waiting.set()
        with pytest.raises(CUDAError) as caught:
            driver.synchronize_stream(stream)
        answers.append(caught.value.status)

    waiter = driver.start_thread(wait, "waiter")
    waiting.wait()
    driver.close()
    for each in (thread, waiter):
        each.join()
        assert not each.is_alive()
    assert answers == [4]


def test_the_hosts_side(machine: Machine) -> None:
    """The host's clock is monotonic, with plain queues and daemon threads."""
    driver = machine.driver
    assert driver.spin_budget > 0
    assert driver.subscribe(lambda: None) is None
    before = driver.time()
    box, answer = driver.create_mailbox(), driver.create_mailbox()
    drivers: list[object] = []

    def echo() -> None:
        drivers.append(current_driver())
        answer.put(box.get())

    thread = driver.start_thread(echo, "echo")
    box.put("hello")
    assert answer.get() == "hello"
    thread.join()
    assert thread.daemon
    assert thread.name == "echo"
    assert drivers == [driver]
    assert current_driver() is None
    assert driver.time() >= before


def test_takes_takes_its_time_on_a_workers_thread(machine: Machine) -> None:
    """A callable with a cost takes time on the driver's own threads only."""

    @cost(0.005)
    def work(x: int) -> int:
        return x + 1

    driver = machine.driver
    lasted: list[float] = []

    def timed() -> None:
        before = driver.time()
        assert work(1) == 2
        lasted.append(driver.time() - before)

    driver.start_thread(timed, "timed").join()
    assert lasted[0] >= 0.005
    assert work(2) == 3
    assert work.__name__ == "work"


def test_each_driver_has_a_clock_of_its_own() -> None:
    """Two machines have two timelines, which end separately."""
    one, two = (Machine(clock=None) for _ in range(2))
    assert one.driver.clock is not two.driver.clock
    assert one.driver.machine.timeline is not two.driver.machine.timeline
    one.close()
    two.driver.set_current(two.primary)
    two.run(two.stream(), "k", fixed_ns=10)
    two.finish()
    assert two.times()["k"][1] - two.times()["k"][0] == 10
    assert two.times()["k"][0] >= LAUNCH_NS
    two.close()
    assert simulated.open("h200").clock.virtual is False


def test_kernels_share_as_on_the_virtual_clock(machine: Machine) -> None:
    """What the model says of kernels that come together holds on the real clock, to the ns.

    The first two have half of the space each; the last has none until the short one ends.
    """
    driver, gate, green = machine.driver, machine.word(), machine.green(16)
    for name, blocks, work in (("long", 128, 16_000), ("short", 128, 4_000), ("last", 256, 16_000)):
        stream = machine.stream(green)
        driver.wait_value(stream, gate.address, 1)
        machine.run(stream, name, blocks=blocks, sm_ns=work)
    spin(lambda: len(driver.machine.timeline.held) == 3)
    gate.value = 1
    machine.finish()
    begin = machine.times()["long"][0]
    assert {name: (a - begin, b - begin) for name, (a, b) in machine.times().items()} == {
        "long": (0, 2_000),
        "short": (0, 500),
        "last": (500, 2_250),
    }


def test_a_limit_is_kept_to_the_nanosecond(machine: Machine) -> None:
    """A kernel ends exactly at its limit, and the next on its SMs starts."""
    driver, gate, green = machine.driver, machine.word(), machine.green(16)
    costs = {"latch": {"until": lambda: False, "limit_ns": 1_000_000}, "after": {"fixed_ns": 10}}
    for name, kernel_cost in costs.items():
        stream = machine.stream(green)
        driver.wait_value(stream, gate.address, 1)
        machine.run(stream, name, **kernel_cost)
    spin(lambda: len(driver.machine.timeline.held) == 2)
    gate.value = 1
    machine.finish()
    times = machine.times()
    assert times["latch"][1] - times["latch"][0] == 1_000_000
    assert times["after"][0] == times["latch"][1]


@pytest.mark.fault("I14")
def test_work_that_comes_as_the_device_falls_asleep_is_run(machine: Machine) -> None:
    """Work that is submitted as an idle wait ends is not lost."""
    driver, stream = machine.driver, machine.stream()
    clock = driver.clock
    assert isinstance(clock, real_clock.RealClock)
    wait, submitted = clock._work.wait, list[bool]()

    def timed_out(delay: float | None = None) -> bool:
        if clock._timeline.next_time() is not None or submitted:
            return wait(delay)
        submitted.append(True)
        machine.run(stream, "late", fixed_ns=10)  # on this thread, which holds the lock
        return False

    clock._work.wait = timed_out  # type: ignore[method-assign]
    machine.run(stream, "early", fixed_ns=10)
    spin(lambda: submitted)
    spin(lambda: driver.query_stream(stream))
    assert list(machine.times()) == ["early", "late"]
