"""Which calls wait on an H200 while others work, and which memory does not return."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from greensched.driver.simulated import Crash
from greensched.driver.types import CodeImage, KernelHandle
from greensched.errors import DeviceFault
from greensched.typing import CaptureMode, Limit

from .h200 import FIRST_USE_HOLDS, PROBE, STUCK_AND_LOST
from .machine import Machine

MIB = 2**20


def recorded(words: str) -> dict[str, Any]:
    """Return the answers to the question with these words."""
    asked = STUCK_AND_LOST | FIRST_USE_HOLDS
    (answers,) = (answers for key, answers in asked.items() if words in key)
    assert isinstance(answers, dict)
    return answers


# -- beside a stream that is stuck --------------------------------------------------------------

#: By the default: code is loaded lazily.
BESIDE = recorded("with 4, 30 and 55 executors")["lazy loading, 8 connections"]


class Beside:
    """The calls that were made beside a stuck stream, on the same device and none of them on it.

    Each method gets ready what its call needs, and returns the call.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.driver = machine, machine.driver
        self.green = machine.greens(2)[1]
        self.stream = machine.stream(self.green)
        self.pool = machine.pool

    def create_event(self) -> Call:
        return self.driver.create_event

    def destroy_event(self) -> Call:
        event = self.machine.event()
        return lambda: self.driver.destroy_event(event)

    def create_green(self) -> Call:
        descriptor = self.driver.describe(self.machine.cells()[:1])
        return lambda: self.driver.create_green(descriptor, 0)

    def destroy_green(self) -> Call:
        green = self.machine.green()
        return lambda: self.driver.destroy_green(green)

    def create_stream(self) -> Call:
        return lambda: self.driver.create_stream(self.green)

    def destroy_stream(self) -> Call:
        stream = self.machine.stream(self.green)
        return lambda: self.driver.destroy_stream(stream)

    def allocate_host(self) -> Call:
        return lambda: self.driver.allocate_host(MIB)

    def free_host(self) -> Call:
        memory = self.machine.pinned(MIB)
        return lambda: self.driver.free_host(memory)

    def create_pool(self) -> Call:
        return lambda: self.driver.create_memory_pool(0)

    def destroy_pool(self) -> Call:
        pool = self.driver.create_memory_pool(0)
        return lambda: self.driver.destroy_memory_pool(pool)

    def allocate(self, nbytes: int) -> Call:
        return lambda: self.driver.allocate(self.pool, nbytes, self.stream)

    def free(self, nbytes: int) -> Call:
        address = self.driver.allocate(self.pool, nbytes, self.stream)
        return lambda: self.driver.free(address, self.stream)

    def synchronize_stream(self) -> Call:
        return lambda: self.driver.synchronize_stream(self.stream)

    def load_code(self) -> Call:
        return lambda: self.driver.load_code(CodeImage("image", {}))

    def fresh(self) -> Any:
        return self.machine.kernel("fresh", loaded=False)

    def get_kernel(self) -> Call:
        library = self.fresh().library
        return lambda: self.driver.get_kernel(library, "fresh")

    def kernel_layout(self) -> Call:
        kernel = self.fresh()
        return lambda: self.driver.kernel_layout(kernel)

    def load_kernel(self) -> Call:
        kernel = self.fresh()
        self.driver.kernel_layout(kernel)  # was asked before it
        return lambda: self.driver.load_kernel(kernel)

    def unload_code(self) -> Call:
        kernel = self.fresh()
        self.driver.load_kernel(kernel)
        return lambda: self.driver.unload_code(kernel.library)

    def memory_info(self) -> Call:
        return self.driver.memory_info

    def record_green(self) -> Call:
        event = self.machine.event(self.green)
        return lambda: self.driver.record_green(self.green, event)

    def synchronize_green(self) -> Call:
        context = self.driver.green_context(self.green)
        return lambda: self.driver.synchronize_context(context)

    def launch_first(self) -> Call:
        kernel = self.fresh()
        return lambda: self.machine.launch(self.stream, kernel)

    def launch(self) -> Call:
        kernel = self.machine.kernel()
        return lambda: self.machine.launch(self.stream, kernel)

    def launch_graph(self) -> Call:
        self.driver.begin_capture(self.stream, CaptureMode.RELAXED)
        self.launch()()
        graph = self.driver.end_capture(self.stream)
        executable = self.driver.instantiate_graph(graph, self.stream)
        return lambda: self.driver.launch_graph(executable, self.stream)

    def record_event(self) -> Call:
        event = self.machine.event(self.green)
        return lambda: self.driver.record_event(event, self.stream)

    def wait_event(self) -> Call:
        event = self.machine.event(self.green)
        self.driver.record_event(event, self.stream)
        return lambda: self.driver.wait_event(self.stream, event)

    def copy(self) -> Call:
        there, here = self.machine.device_memory(64, self.stream), self.machine.pinned()
        return lambda: self.driver.copy_to_device(there, here.address, 64, self.stream)

    def set_bytes(self) -> Call:
        there = self.machine.device_memory(64, self.stream)
        return lambda: self.driver.set_bytes(there, 0, 64, self.stream)

    def mark(self) -> Call:
        mark = self.driver.bind_mark(self.stream, self.machine.word().address)
        return lambda: mark(1)

    def query_event(self) -> Call:
        event = self.machine.event(self.green)
        return lambda: self.driver.query_event(event)

    def allocate_and_free(self) -> Call:
        return lambda: self.driver.free(self.allocate(MIB)(), self.stream)

    def create_and_destroy_stream(self) -> Call:
        return lambda: self.driver.destroy_stream(self.create_stream()())


Call = Callable[[], Any]
CALLS: dict[str, Callable[[Beside], Call]] = {
    "create event": Beside.create_event,
    "destroy event": Beside.destroy_event,
    "create green": Beside.create_green,
    "create stream in it": Beside.create_stream,
    "destroy that stream": Beside.destroy_stream,
    "destroy that green": Beside.destroy_green,
    "host register 1 MiB": Beside.allocate_host,
    "host unregister": Beside.free_host,
    "memory pool create": Beside.create_pool,
    "allocate 1 MiB in another context": lambda beside: beside.allocate(MIB),
    "free it there": lambda beside: beside.free(MIB),
    "allocate 1 GiB in another context": lambda beside: beside.allocate(1024 * MIB),
    "free it": lambda beside: beside.free(1024 * MIB),
    "synchronize that stream": Beside.synchronize_stream,
    "memory pool destroy": Beside.destroy_pool,
    "cuLibraryLoadData": Beside.load_code,
    "cuLibraryGetKernel": Beside.get_kernel,
    "cuKernelGetParamInfo": Beside.kernel_layout,
    "cuKernelGetFunction + cuFuncLoad": Beside.load_kernel,
    "cuLibraryUnload": Beside.unload_code,
    "primary memory info": Beside.memory_info,
    "record whole other green": Beside.record_green,
    "synchronize other green context": Beside.synchronize_green,
    "destroy idle stream": Beside.destroy_stream,
    "destroy idle event": Beside.destroy_event,
    "destroy idle green": Beside.destroy_green,
}


@pytest.mark.parametrize("by", ["a kernel", "a wait on a word"])
@pytest.mark.parametrize("name", BESIDE)
def test_which_calls_wait_beside_stuck_work(h200: Machine, name: str, by: str) -> None:
    """The calls that waited on the GPU wait here, and the others return."""
    driver, word = h200.driver, h200.word()
    stuck = h200.stream(h200.green())
    call = CALLS[name](Beside(h200))

    def body() -> float:
        if by == "a kernel":
            h200.run(stuck, "latch", fixed_ns=1e9)
        else:
            driver.wait_value(stuck, word.address, 1)
            driver.start_thread(release, "release")
        began = driver.time()
        call()
        return driver.time() - began

    def release() -> None:
        driver.clock.sleep(10**9)
        word.value = 1

    took = h200.inside(body)
    asked, waited = BESIDE[name]["asked"], BESIDE[name]["waited"]
    assert waited in (0, asked)
    assert took == pytest.approx(1 if waited else 0, abs=1e-3)


#: While another thread waits in one call.
HOLDS = recorded("while a thread waits in another call")
HOLDERS: dict[str, Callable[[Beside], Call]] = {
    "cuKernelGetParamInfo, its library's first": Beside.kernel_layout,
    "cuKernelGetFunction + cuFuncLoad, its library's first": lambda beside: (
        lambda kernel: lambda: beside.driver.load_kernel(kernel)
    )(beside.fresh()),
    "cuLaunchKernel, its library's first": Beside.launch_first,
    "cuLibraryUnload": Beside.unload_code,
    "cuGreenCtxCreate": Beside.create_green,
}
MEANWHILE: dict[str, Callable[[Beside], Call]] = {
    "record event": Beside.record_event,
    "create event": Beside.create_event,
    "launch": Beside.launch,
    "launch graph": Beside.launch_graph,
    "copy pinned memory": Beside.copy,
    "set bytes": Beside.set_bytes,
    "get limit": lambda beside: lambda: beside.driver.limit(Limit.STACK),
    "set limit": lambda beside: lambda: beside.driver.set_limit(Limit.STACK, 2048),
    "record a green context": Beside.record_green,
    "allocate host": Beside.allocate_host,
    "create and destroy stream": Beside.create_and_destroy_stream,
    "query event": Beside.query_event,
    "query stream": lambda beside: lambda: beside.driver.query_stream(beside.stream),
    "wait for an event": Beside.wait_event,
    "write a word": Beside.mark,
    "allocate and free": Beside.allocate_and_free,
    "is capturing": lambda beside: lambda: beside.driver.is_capturing(beside.stream),
    "synchronize another context": Beside.synchronize_green,
}


@pytest.mark.parametrize("holder", HOLDS)
@pytest.mark.parametrize("name", MEANWHILE)
def test_which_calls_wait_with_one_that_waits(h200: Machine, name: str, holder: str) -> None:
    """Loading code blocks the calls that it blocked on the GPU, and no others."""
    driver, word = h200.driver, h200.word()
    hold, call = HOLDERS[holder](Beside(h200)), MEANWHILE[name](Beside(h200))
    context = driver.current()

    threads = []

    def waiting() -> None:
        driver.set_current(context)
        hold()

    def release() -> None:
        driver.clock.sleep(10**9)
        word.value = 1

    def body() -> float:
        driver.wait_value(h200.stream(), word.address, 1)
        threads.append(driver.start_thread(waiting, "holder"))
        driver.clock.sleep(10**6)
        threads.append(driver.start_thread(release, "release"))
        began = driver.time()
        call()
        return driver.time() - began

    took = h200.inside(body)
    for thread in threads:
        thread.join()
    assert took == pytest.approx(1 if HOLDS[holder][name] == "waits" else 0, abs=2e-3)


def test_another_device_is_not_held_up() -> None:
    """Loading code on one device does not block the other."""
    assert max(row["launch on another device"] for row in HOLDS.values()) < 1
    machine = Machine("h200x2")
    driver, hold = machine.driver, Beside(machine).kernel_layout()
    primary, word = driver.retain_primary(1), machine.hold(machine.stream())
    threads = []

    def holding() -> None:
        driver.set_current(machine.primary)
        hold()

    def body() -> None:
        driver.set_current(primary)
        stream, event, kernel = machine.stream(), driver.create_event(), machine.kernel()
        began = driver.time()
        threads.append(driver.start_thread(holding, "holder"))
        driver.clock.sleep(10**6)
        machine.launch(stream, kernel)
        driver.record_event(event, stream)
        assert driver.time() - began == pytest.approx(1e-3, abs=1e-4)
        word.value = 1

    machine.inside(body)
    threads[0].join()
    machine.close()


def test_a_second_kernel_of_a_library_does_not_wait(h200: Machine) -> None:
    """Its code was loaded with the first kernel's."""
    assert max(recorded("second kernel of a library").values()) < 1
    driver, word = h200.driver, h200.hold(h200.stream())
    image = CodeImage("two", {name: h200.kernel(name).spec for name in ("one", "other")})
    library = driver.load_code(image)
    one, other = (driver.get_kernel(library, name) for name in ("one", "other"))
    word.value = 1
    h200.inside(lambda: driver.kernel_layout(one))
    word = h200.hold(h200.stream())
    h200.inside(lambda: driver.kernel_layout(other))
    word.value = 1


def test_a_fault_ends_the_waiting(h200: Machine) -> None:
    """A wait for a failing device ends with its fault."""
    driver = h200.driver
    calls = [CALLS[name](Beside(h200)) for name in ("create green", "host unregister")]
    unload = CALLS["cuLibraryUnload"](Beside(h200))
    driver.script.add(Crash("wild"))
    bad, endless = h200.stream(), h200.stream()
    before = driver.live()

    def body() -> None:
        h200.run(endless, "endless", sm_ns=math.inf)
        h200.run(bad, "wild", fixed_ns=1e6)
        for call in calls:
            with pytest.raises(DeviceFault):
                call()
        unload()

    h200.inside(body)
    assert driver.live() == before - Counter({"pinned memory": 1})


# -- the first use of a kernel ------------------------------------------------------------------


def test_a_first_launch_beside_a_running_kernel(h200: Machine) -> None:
    """It waits as long as it was seen to wait; that of a kernel used before, no longer than that.

    The times are compared to a millisecond: those seen have the host's calls in them.
    """
    driver, seen = h200.driver, PROBE["first_launch_beside_a_latch"]
    held, free = (h200.stream(green) for green in h200.greens(2, 8))
    warm, fresh = h200.kernel("warm"), h200.kernel("fresh", loaded=False)

    def timed(call: Callable[[], object]) -> int:
        began = driver.time()
        call()
        return round((driver.time() - began) * 1e3)

    def launch_and_wait(kernel: KernelHandle) -> None:
        h200.launch(free, kernel)
        driver.synchronize_stream(free)

    def body() -> dict[str, int]:
        h200.run(held, "latch", fixed_ns=2e9)
        return {
            "warm kernel ms": timed(lambda: launch_and_wait(warm)),
            "first launch ms": timed(lambda: h200.launch(free, fresh)),
            "alloc and free ms": timed(lambda: driver.free(h200.device_memory(64, free), free)),
        }

    assert h200.inside(body) == {name: round(ms) for name, ms in seen.items()}


def test_a_kernel_is_loaded_for_every_green_context(h200: Machine) -> None:
    """Beside a loaded context a kernel used in a third one begins at once: code is shared.

    In `many_contexts` the first launches on contexts just made stand in the maximum.
    """
    row = PROBE["many_contexts"]
    assert row["2 contexts, loaded"]["max"] < 2 * row["2 contexts, alone"]["p50"]
    driver = h200.driver
    one, two, three = h200.greens(3)
    kernel = h200.kernel("shared", loaded=False)
    h200.launch(h200.stream(one), kernel)
    h200.run(h200.stream(two), "load", fixed_ns=1e9)
    h200.launch(h200.stream(three), kernel)
    driver.set_current(driver.green_context(three))
    driver.load_kernel(kernel)
    h200.finish()
    first, second = (span for span in h200.spans if span.name == "shared")
    assert second.enqueued == first.enqueued


# -- device memory ------------------------------------------------------------------------------


def free_mib(machine: Machine) -> float:
    return machine.driver.memory_info()[0] / MIB


def test_what_contexts_and_streams_take(h200: Machine) -> None:
    """They take the recorded memory, to a tenth of a MiB."""
    seen, driver = STUCK_AND_LOST["MiB"], h200.driver
    number, before = 30, free_mib(h200)
    descriptor = driver.describe(h200.cells()[:1])
    greens = [driver.create_green(descriptor, 0) for _ in range(number)]
    made = free_mib(h200)
    for green in greens:
        h200.stream(green)
    took = {
        "MiB per green context kept": (before - made) / number,
        "MiB per first stream": (made - free_mib(h200)) / number,
    }
    assert took == pytest.approx({name: seen[name] for name in took}, abs=0.1)
    assert sum(took.values()) * MIB == pytest.approx(PROBE["costs"]["bytes_each"], rel=0.02)


@pytest.mark.parametrize("case", recorded("not back after making and ending"))
def test_what_does_not_come_back(h200: Machine, case: str) -> None:
    """4 MiB of a green context return only with the primary."""
    driver, seen = h200.driver, recorded("not back after making and ending")[case]
    kept = h200.green()
    before = driver.memory_info()[0]
    green = h200.green() if case.startswith("green") else None
    if case == "stream in a kept green context":
        driver.destroy_stream(h200.stream(kept))
    elif case == "plain stream":
        driver.destroy_stream(h200.stream())
    elif case == "green destroyed before its stream":
        h200.stream(green)
    else:
        streams = [h200.stream(green) for _ in range(int(re.sub(r"\D", "", case) or 0))]
        for stream in streams:
            h200.launch(stream, h200.kernel())
            driver.synchronize_stream(stream)
            driver.destroy_stream(stream)
    if green is not None:
        driver.destroy_green(green)
    lost = (before - driver.memory_info()[0]) / MIB
    assert lost == pytest.approx(seen, abs=0.1)


def test_all_comes_back_with_the_primary(h200: Machine) -> None:
    """Lost memory returns when the primary context ends."""
    seen = recorded("after opening and closing a pool")
    driver, before = h200.driver, free_mib(h200)
    for _ in range(55):
        green = h200.green()
        driver.destroy_stream(h200.stream(green))
        driver.destroy_green(green)
    assert before - free_mib(h200) == seen["primary context kept by another library"]
    driver.set_current(None)
    driver.release_primary(0)
    driver.set_current(driver.retain_primary(0))
    assert before - free_mib(h200) == seen["primary context goes with it"]


def test_churn(h200: Machine) -> None:
    """A thousand green contexts lose exactly the recorded bytes."""
    driver, before = h200.driver, h200.driver.memory_info()[0]
    descriptor = driver.describe(h200.cells()[:2])
    for _ in range(1000):
        green = driver.create_green(descriptor, 0)
        driver.destroy_stream(h200.stream(green))
        driver.destroy_green(green)
    assert before - driver.memory_info()[0] == PROBE["churn"]["device_bytes_lost"]


def test_how_many_there_can_be(h200: Machine) -> None:
    """As many green contexts exist at once as the probe made."""
    seen = PROBE["how_many"]
    assert seen["stopped_by"] == "the probe's own limit"
    driver, cells = h200.driver, h200.cells(8)
    for i in range(seen["contexts_with_a_stream"]):
        h200.stream(driver.create_green(driver.describe([cells[i % len(cells)]]), 0))
