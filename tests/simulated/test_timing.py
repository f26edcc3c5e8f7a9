"""Modelled time, against figures worked out by hand. All in nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.driver.simulated.sharing import fair, sm_shares, speeds
from greensched.typing import Cost

from .machine import COPY_NS, DRAM_PER_NS, LAUNCH_NS, LINK_PER_NS, SMS, Machine

Make = Callable[..., Machine]


def lengths(machine: Machine) -> dict[str, int]:
    """How long each kernel or copy took, once it had begun."""
    machine.finish()
    return {name: end - start for name, (start, end) in machine.times().items()}


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
    """The same work takes as much longer as its partition is smaller."""
    for sms in (8, 16, 64):
        machine.run(machine.stream(machine.green(sms)), f"{sms}", sm_ns=64_000)
        machine.finish()
    machine.run(machine.stream(), "132", sm_ns=132_000)
    assert lengths(machine) == {"8": 8_000, "16": 4_000, "64": 1_000, "132": 1_000}
    assert {span.name: span.sms.bit_count() for span in machine.spans} == {
        str(sms): sms for sms in (8, 16, 64, 132)
    }


def test_launches_behind_each_other_hide_their_latency(machine: Machine) -> None:
    """A launch submitted while the one before it runs begins right behind it."""
    stream = machine.stream()
    machine.run(stream, "first", fixed_ns=10_000)
    machine.run(stream, "second", fixed_ns=10)
    machine.finish()
    assert machine.times()["second"] == (LAUNCH_NS + 10_000, LAUNCH_NS + 10_010)


# -- kernels that share SMs ---------------------------------------------------------------------


def test_two_on_the_same_sms_take_twice_as_long(machine: Machine) -> None:
    """Two equal kernels on two streams of one green context share its SMs."""
    green = machine.green(16)
    for name in "ab":
        machine.run(machine.stream(green), name, sm_ns=16_000)
    assert lengths(machine) == {"a": 2_000, "b": 2_000}


def test_three_on_the_same_sms_take_three_times_as_long(machine: Machine) -> None:
    """As two, three ways."""
    green = machine.green(16)
    for name in "abc":
        machine.run(machine.stream(green), name, sm_ns=16_000)
    assert lengths(machine) == {"a": 3_000, "b": 3_000, "c": 3_000}


def test_on_disjoint_sms_each_is_as_if_alone(machine: Machine) -> None:
    """Fifteen kernels on fifteen partitions take what one takes."""
    for i, green in enumerate(machine.greens(15, 8)):
        machine.run(machine.stream(green), f"k{i}", sm_ns=8_000)
    assert set(lengths(machine).values()) == {1_000}


def test_a_short_kernel_beside_a_long_one(machine: Machine) -> None:
    """Both run at half speed until the short one ends; the rest of the long one runs alone.

    Short: 4000 of work at 8 SMs = 500. Long: 4000 done by then, 12000 left at 16 SMs = 750 more.
    """
    green = machine.green(16)
    machine.run(machine.stream(green), "long", sm_ns=16_000)
    machine.run(machine.stream(green), "short", sm_ns=4_000)
    assert lengths(machine) == {"long": 1_250, "short": 500}


def test_a_kernel_that_comes_later_slows_what_is_left(machine: Machine) -> None:
    """First: 600 alone (9600 done), then 6400 left at 8 SMs = 800: 1400 in all.

    Second, from 600 on: 800 at 8 SMs (6400), then 9600 left at 16 = 600: 1400 too.
    """
    green = machine.green(16)
    machine.run(machine.stream(green), "first", sm_ns=16_000)
    machine.run(machine.stream(green), "second", sm_ns=16_000, fixed_ns=600)
    assert lengths(machine) == {"first": 1_400, "second": 600 + 1_400}


def test_partly_overlapping_partitions(machine: Machine) -> None:
    """16 SMs inside 64: the small one has half of its 16, the large one 48 + 8 = 56.

    Small: 16000 / 8 = 2000. Large: 56 x 2000 = 112000 of 128000 by then, 16000 / 64 = 250 more.
    """
    machine.run(machine.stream(machine.green(16)), "small", sm_ns=16_000)
    machine.run(machine.stream(machine.green(64)), "large", sm_ns=128_000)
    assert lengths(machine) == {"small": 2_000, "large": 2_250}


def test_primary_kernels_slow_every_partition(machine: Machine) -> None:
    """Work on the primary context runs on every SM, the partitions' included.

    Partition: 8 of its 16 while the primary runs. Primary: 116 + 8 = 124 SMs, 124000 / 124 = 1000.
    Partition by then: 8000 of 16000, the rest alone at 16 = 500: 1500 in all.
    """
    machine.run(machine.stream(machine.green(16)), "partition", sm_ns=16_000)
    machine.run(machine.stream(), "primary", sm_ns=124_000)
    assert lengths(machine) == {"partition": 1_500, "primary": 1_000}


def test_devices_share_nothing(make: Make) -> None:
    """The same work on two devices takes what it takes on one."""
    machine = make("h200x2")
    machine.run(machine.stream(), "here", sm_ns=132_000)
    there = machine.stream(machine.green(64, device=1))
    machine.run(there, "there", sm_ns=64_000, dram_bytes=1_000 * DRAM_PER_NS)
    machine.driver.synchronize_stream(there)
    assert lengths(machine) == {"here": 1_000, "there": 1_000}


# -- kernels that share memory bandwidth --------------------------------------------------------


def test_bandwidth_is_shared_whatever_the_sms(machine: Machine) -> None:
    """Two kernels on disjoint SMs that each want all of it take twice as long."""
    for name, green in zip("ab", machine.greens(2), strict=True):
        machine.run(machine.stream(green), name, dram_bytes=1_000 * DRAM_PER_NS)
    assert lengths(machine) == {"a": 2_000, "b": 2_000}


def test_who_asks_little_bandwidth_gets_it_all(machine: Machine) -> None:
    """Max-min: the small wish (480 a ns) is met, the large one has the other 4320.

    Large: 4320000 of 4800000 in 1000, then 480000 at 4800 = 100 more.
    """
    small, large = machine.greens(2)
    machine.run(machine.stream(small), "small", sm_ns=16_000, dram_bytes=480_000)
    machine.run(machine.stream(large), "large", dram_bytes=4_800_000)
    assert lengths(machine) == {"small": 1_000, "large": 1_100}


def test_three_wishes_for_bandwidth(machine: Machine) -> None:
    """Wishes of 1200, 4800 and 4800 a ns: the first is met, the others have 1800 each.

    Light: 1000. Heavy ones: 1800000 of 3600000 by then, 1800000 left at 2400 = 750 more.
    """
    light, *heavy = machine.greens(3)
    machine.run(machine.stream(light), "light", sm_ns=16_000, dram_bytes=1_200_000)
    for name, green in zip("ab", heavy, strict=True):
        machine.run(machine.stream(green), name, dram_bytes=3_600_000)
    assert lengths(machine) == {"light": 1_000, "a": 1_750, "b": 1_750}


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
    """SMs are all that a partition isolates: copies of two of them wait for each other."""
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
    assert lengths(machine) == {"kernel": 1_000, "to device": 1_000}


# -- traces -------------------------------------------------------------------------------------


def test_spans_tell_what_happened(machine: Machine) -> None:
    """Who, where, how much, and when: enqueued <= start <= end <= seen."""
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


def test_a_kernel_that_runs_until_a_word_changes(machine: Machine) -> None:
    """It ends when its condition holds, or at its limit, whichever comes first."""
    word = machine.word()

    def body() -> None:
        until = lambda: word.value != 0  # noqa: E731
        machine.run(machine.stream(), "limited", until=until, limit_ns=2_000)
        stream = machine.stream()
        machine.run(stream, "latched", until=until)
        machine.driver.clock.sleep(50_000)
        assert machine.times() == {"limited": (LAUNCH_NS, LAUNCH_NS + 2_000)}
        word.value = 1
        machine.driver.synchronize_stream(stream)
        assert machine.times()["latched"] == (LAUNCH_NS, 50_000)

    machine.inside(body)


def test_a_kernel_of_infinite_cost_never_ends(machine: Machine) -> None:
    """It occupies its SMs and holds up its stream, and the rest goes on."""
    green = machine.green(16)
    stuck = machine.stream(green)
    machine.run(stuck, "stuck", sm_ns=math.inf)

    def body() -> None:
        beside = machine.stream(green)
        machine.run(beside, "beside", sm_ns=16_000)
        machine.driver.synchronize_stream(beside)
        assert not machine.driver.query_stream(stuck)

    machine.inside(body)
    assert {name: end - start for name, (start, end) in machine.times().items()} == {
        "beside": 2_000
    }


# -- the arithmetic -----------------------------------------------------------------------------


@dataclass
class Running:
    """What sharing needs to know of a kernel."""

    sms: int
    cap: int
    cost: Cost


@st.composite
def running(draw: st.DrawFn) -> list[Running]:
    kernels = []
    for _ in range(draw(st.integers(1, 5))):
        sms = draw(st.integers(1, 255))
        dram, work = draw(st.floats(0, 1e6)), draw(st.floats(1.0, 1e6))
        cap = draw(st.integers(1, sms.bit_count()))
        kernels.append(Running(sms, cap, Cost(sm_ns=work, dram_bytes=dram)))
    return kernels


@given(running())
def test_no_sm_is_given_out_twice(kernels: list[Running]) -> None:
    """The kernels' shares of each set of SMs never add up to more than there are."""
    shares = sm_shares(kernels)
    assert all(
        0 < share <= min(k.cap, k.sms.bit_count()) + 1e-9
        for share, k in zip(shares, kernels, strict=True)
    )
    union = 0
    for kernel in kernels:
        union |= kernel.sms
    assert sum(shares) <= union.bit_count() + 1e-9


@given(running(), st.floats(1.0, 1e6))
def test_no_byte_is_moved_twice(kernels: list[Running], per_ns: float) -> None:
    """Together they move no more than the bandwidth, and none is faster than its SMs allow."""
    found = speeds(kernels, per_ns * 1e9)
    moved = sum(k.cost.dram_bytes * speed for k, speed in zip(kernels, found, strict=True))
    assert moved <= per_ns * (1 + 1e-9)
    for kernel, share, speed in zip(kernels, sm_shares(kernels), found, strict=True):
        assert 0 < speed <= share / kernel.cost.sm_ns * (1 + 1e-9)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(0, 1e6))
def test_fair_is_max_min(wanted: list[float], capacity: float) -> None:
    """Nobody has more than he wants; who has less has as much as anybody, and all is given out."""
    granted = fair(wanted, capacity)
    assert all(0 <= g <= w for g, w in zip(granted, wanted, strict=True))
    assert sum(granted) <= capacity * (1 + 1e-9)
    short = [g for g, w in zip(granted, wanted, strict=True) if g < w * (1 - 1e-9)]
    if short:
        assert sum(granted) == pytest.approx(capacity)
        assert min(short) >= max(granted) * (1 - 1e-9)
