"""Modelled time, against figures worked out by hand. All in nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from .machine import COPY_NS, DRAM_PER_NS, LAUNCH_NS, LINK_PER_NS, SMS, Machine

# -- one kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "blocks", "took"),
    [
        ({"fixed_ns": 500}, 1024, 500),
        ({"fixed_ns": 0.2}, 1024, 1),
        ({"sm_ns": 16_000}, 1024, 1_000),
        ({"sm_ns": 16_001}, 1024, 1_001),
        ({"sm_ns": 16_000, "fixed_ns": 250}, 1024, 1_250),
        ({"sm_ns": 16_000}, 4, 4_000),
        ({"sm_ns": 16_000, "sms": 2}, 1024, 8_000),
        ({"sm_ns": 16_000, "sms": 99}, 1024, 1_000),
        ({"sm_ns": 16_000, "sms": 99}, 4, 4_000),
        ({"dram_bytes": 1_000 * DRAM_PER_NS}, 1024, 1_000),
        ({"sm_ns": 16_000, "dram_bytes": 3_000 * DRAM_PER_NS}, 1024, 3_000),
        ({"sm_ns": 16_000, "dram_bytes": 500 * DRAM_PER_NS, "fixed_ns": 10}, 1024, 1_010),
        ({}, 1024, 0),
    ],
)
def test_a_kernel_alone(machine: Machine, cost: dict, blocks: int, took: int) -> None:
    """On 16 SMs: fixed + max(work / SMs it can use, bytes / bandwidth), behind the latency."""
    machine.run(machine.stream(machine.green(16)), "k", blocks, **cost)
    machine.finish()
    assert machine.times()["k"] == (LAUNCH_NS, LAUNCH_NS + took)


def test_a_kernel_uses_the_sms_its_stream_has(machine: Machine) -> None:
    """The same work takes longer by the ratio of the SMs."""
    for sms in (8, 16, 64):
        machine.run(machine.stream(machine.green(sms)), f"{sms}", sm_ns=64_000)
        machine.finish()
    machine.run(machine.stream(), "132", sm_ns=132_000)
    assert machine.lengths() == {"8": 8_000, "16": 4_000, "64": 1_000, "132": 1_000}
    assert {span.name: span.sms.bit_count() for span in machine.spans} == {
        str(sms): sms for sms in (8, 16, 64, 132)
    }


def test_devices_share_nothing(make: Callable[..., Machine]) -> None:
    """The same work on two devices takes the time of one."""
    machine = make("h200x2")
    machine.run(machine.stream(), "here", sm_ns=132_000)
    there = machine.stream(machine.green(64, device=1))
    machine.run(there, "there", sm_ns=64_000, dram_bytes=1_000 * DRAM_PER_NS)
    machine.driver.synchronize_stream(there)
    assert machine.lengths() == {"here": 1_000, "there": 1_000}


def test_launches_behind_each_other_hide_their_latency(machine: Machine) -> None:
    """A launch that is submitted during another begins right after it."""
    stream = machine.stream()
    machine.run(stream, "first", fixed_ns=10_000)
    machine.run(stream, "second", fixed_ns=10)
    machine.finish()
    assert machine.times()["second"] == (LAUNCH_NS + 10_000, LAUNCH_NS + 10_010)


# -- kernels that share memory bandwidth --------------------------------------------------------


def test_bandwidth_is_shared_whatever_the_sms(machine: Machine) -> None:
    """Two kernels that each want all bandwidth take twice as long."""
    for name, green in zip("ab", machine.greens(2), strict=True):
        machine.run(machine.stream(green), name, dram_bytes=1_000 * DRAM_PER_NS)
    assert machine.lengths() == {"a": 2_000, "b": 2_000}


def test_a_small_demand_for_bandwidth_is_met(machine: Machine) -> None:
    """Max-min: the small demand (480 a ns) is met, the large one has the other 4320.

    Large: 4320000 of 4800000 in 1000, then 480000 at 4800 = 100 more.
    """
    small, large = machine.greens(2)
    machine.run(machine.stream(small), "small", sm_ns=16_000, dram_bytes=480_000)
    machine.run(machine.stream(large), "large", dram_bytes=4_800_000)
    assert machine.lengths() == {"small": 1_000, "large": 1_100}


def test_three_demands_for_bandwidth(machine: Machine) -> None:
    """Demands of 1200, 4800 and 4800 a ns: the first is met, the others have 1800 each.

    Light: 1000. Heavy ones: 1800000 of 3600000 by then, 1800000 left at 2400 = 750 more.
    """
    light, *heavy = machine.greens(3)
    machine.run(machine.stream(light), "light", sm_ns=16_000, dram_bytes=1_200_000)
    for name, green in zip("ab", heavy, strict=True):
        machine.run(machine.stream(green), name, dram_bytes=3_600_000)
    assert machine.lengths() == {"light": 1_000, "a": 1_750, "b": 1_750}


# -- copies -------------------------------------------------------------------------------------


def test_a_copy_takes_its_latency_and_its_bytes(machine: Machine) -> None:
    """55 bytes a ns over the link; inside the device each byte is read and written."""
    driver, stream = machine.driver, machine.stream()
    host, address = machine.pinned(48_000), machine.device_memory(48_000, stream)
    driver.copy_to_device(address, host.address, 48_000, stream)
    driver.copy(address, address, 48_000, stream)
    driver.set_bytes(address, 0, 48_000, stream)
    machine.finish()
    up = COPY_NS + math.ceil(48_000 / LINK_PER_NS)
    assert machine.times() == {
        "to device": (COPY_NS, up),
        "on device": (up, up + 20),
        "set": (up + 20, up + 30),
    }


def test_copies_of_one_direction_take_turns(machine: Machine) -> None:
    """One engine for each direction: two uploads one after the other, a download beside them."""
    driver = machine.driver
    streams = [machine.stream() for _ in range(3)]
    nbytes = 1_000 * LINK_PER_NS
    host, address = machine.pinned(nbytes), machine.device_memory(nbytes, streams[0])
    driver.copy_to_device(address, host.address, nbytes, streams[0])
    driver.copy_to_device(address, host.address, nbytes, streams[1])
    driver.copy_to_host(host.address, address, nbytes, streams[2])
    machine.finish()
    spans = sorted((span.name, span.start - COPY_NS, span.end - COPY_NS) for span in machine.spans)
    assert spans == [("to device", 0, 1_000), ("to device", 1_000, 2_000), ("to host", 0, 1_000)]


def test_copies_ignore_partitions(machine: Machine) -> None:
    """Copies of two partitions wait for each other."""
    driver = machine.driver
    nbytes = 1_000 * LINK_PER_NS
    for green in machine.greens(2):
        stream = machine.stream(green)
        host, address = machine.pinned(nbytes), machine.device_memory(nbytes, stream)
        driver.copy_to_device(address, host.address, nbytes, stream)
    machine.finish()
    assert [span.end - COPY_NS for span in machine.spans] == [1_000, 2_000]


def test_copies_and_kernels_overlap(machine: Machine) -> None:
    """A copy on one stream costs a kernel on another nothing."""
    driver = machine.driver
    nbytes = 1_000 * LINK_PER_NS
    one, two = machine.stream(), machine.stream()
    host, address = machine.pinned(nbytes), machine.device_memory(nbytes, two)
    machine.run(one, "kernel", sm_ns=SMS * 1_000)
    driver.copy_to_device(address, host.address, nbytes, two)
    assert machine.lengths() == {"kernel": 1_000, "to device": 1_000}


# -- traces -------------------------------------------------------------------------------------


def test_spans_tell_what_happened(machine: Machine) -> None:
    """Which, where, how much, and when: enqueued <= start <= end <= seen."""
    driver = machine.driver
    green = machine.green(16)
    stream = machine.stream(green)
    host, address = machine.pinned(64), machine.device_memory(64, stream)
    driver.copy_to_device(address, host.address, 64, stream)
    machine.run(stream, "work", fixed_ns=10)
    driver.bind_mark(stream, host.address)(1)
    machine.finish()
    copy, kernel = machine.spans
    assert (copy.kind, copy.name, copy.nbytes, copy.sms) == ("copy", "to device", 64, 0)
    assert (kernel.kind, kernel.name, kernel.sms.bit_count()) == ("kernel", "work", 16)
    assert copy.green == kernel.green != 0
    assert copy.stream == kernel.stream
    for span in machine.spans:
        assert span.enqueued <= span.start <= span.end <= span.seen
    machine.run(machine.stream(), "primary", fixed_ns=10)
    machine.finish()
    assert machine.spans[-1].green == 0
    driver.on_span(None)
    machine.run(stream, "unseen", fixed_ns=10)
    machine.finish()
    assert len(machine.spans) == 3
