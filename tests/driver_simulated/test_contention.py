"""Kernels that meet on SMs, against figures worked out by hand. All in nanoseconds.

An SM of an H200 holds 2048 threads, so 16 of the blocks of 128 that these kernels are made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.driver.simulated.contention import CROWDING, clock, fair, settle, speeds
from greensched.driver.simulated.device_models import PRESETS
from greensched.driver.simulated.kernel_timing import KernelOp
from greensched.driver.simulated.timeline import DeviceState, Span, StreamQueue, Timeline
from greensched.typing import Cost

from .machine import LAUNCH_NS, SMS, Machine

#: Blocks that fill 16 SMs, and the whole device.
FILL = 16 * 16
FILL_ALL = 16 * SMS


def times(machine: Machine) -> dict[str, tuple[int, int]]:
    """Return (start, end) of each kernel, from when the first could start."""
    machine.finish()
    return {name: (a - LAUNCH_NS, b - LAUNCH_NS) for name, (a, b) in machine.times().items()}


# -- room is given out first come, first served -------------------------------------------------


def test_a_later_kernel_waits_for_full_sms(machine: Machine) -> None:
    """Where an earlier kernel's blocks leave no room, a later one starts when it ends."""
    green = machine.green(16)
    machine.run(machine.stream(green), "large", blocks=FILL, sm_ns=16_000)
    machine.run(machine.stream(green), "small", blocks=1, sm_ns=100)
    assert times(machine) == {"large": (0, 1_000), "small": (1_000, 1_100)}


def test_kernels_start_in_the_order_they_came(machine: Machine) -> None:
    """Whatever their streams and sizes: a small one overtakes no kernel that waits for its SMs.

    One leaves half of the space: the second takes it, so the third waits for both.
    """
    green = machine.green(16)
    machine.run(machine.stream(green), "half", blocks=FILL // 2, fixed_ns=1_000)
    machine.run(machine.stream(green), "full", blocks=2 * FILL, fixed_ns=2_000)
    machine.run(machine.stream(green), "small", blocks=1, fixed_ns=10)
    assert times(machine) == {"half": (0, 1_000), "full": (0, 2_000), "small": (2_000, 2_010)}


def test_a_small_kernel_leaves_room(machine: Machine) -> None:
    """Beside a block on each SM there is room for 15 more: a later kernel starts at once.

    They share by threads. Small: 1/16 of 16 SMs, 1000. Large: 15 SMs for 1000, then 16000 alone.
    """
    green = machine.green(16)
    machine.run(machine.stream(green), "small", blocks=16, sm_ns=1_000)
    machine.run(machine.stream(green), "large", blocks=FILL, sm_ns=31_000)
    assert times(machine) == {"small": (0, 1_000), "large": (0, 2_000)}


def test_a_kernel_grows_into_what_becomes_free(machine: Machine) -> None:
    """It starts with the blocks that have room; the others follow when an earlier kernel ends.

    64 blocks find room for 16, so 1/16 of the SMs: 1000 of 5000 by 1000, the rest on all 16.
    """
    green = machine.green(16)
    machine.run(machine.stream(green), "large", blocks=15 * 16, sm_ns=15_000)
    machine.run(machine.stream(green), "late", blocks=64, sm_ns=5_000)
    assert times(machine) == {"large": (0, 1_000), "late": (0, 1_250)}


def test_a_block_too_large_for_the_room_waits(machine: Machine) -> None:
    """512 threads are left: a block of 1024 waits, one of 512 does not."""
    one, two = machine.greens(2)
    for green, threads in ((one, 1024), (two, 512)):
        machine.run(machine.stream(green), f"before {threads}", blocks=FILL - 4, fixed_ns=1_000)
        machine.run(machine.stream(green), f"{threads}", blocks=1, threads=threads, fixed_ns=10)
    found = times(machine)
    assert (found["1024"], found["512"]) == ((1_000, 1_010), (0, 10))


def test_a_kernel_takes_no_more_sms_than_it_can_use(machine: Machine) -> None:
    """A kernel that can use two SMs leaves the others free."""
    green = machine.green(16)
    machine.run(machine.stream(green), "two", blocks=10**6, sm_ns=4_000, sms=2)
    machine.run(machine.stream(green), "rest", blocks=14, sm_ns=14_000)
    assert times(machine) == {"two": (0, 2_000), "rest": (0, 1_000)}


def test_two_kernels_with_room_for_both_share(machine: Machine) -> None:
    """Two that each fill half of the SMs start together and are half as fast.

    Short: 4000 at 8 SMs = 500. Long: 4000 done by then, 12000 left at 16 SMs = 750 more.
    """
    green = machine.green(16)
    machine.run(machine.stream(green), "long", blocks=FILL // 2, sm_ns=16_000)
    machine.run(machine.stream(green), "short", blocks=FILL // 2, sm_ns=4_000)
    assert times(machine) == {"long": (0, 1_250), "short": (0, 500)}


def test_a_kernel_that_comes_later_slows_what_is_left(machine: Machine) -> None:
    """First: 600 alone (9600 done), then 6400 left at 8 SMs = 800: 1400 in all.

    Second, from 600 on: 800 at 8 SMs (6400), then 9600 left at 16 = 600: 1400 too.
    """
    green = machine.green(16)
    machine.run(machine.stream(green), "first", blocks=FILL // 2, sm_ns=16_000)
    machine.run(machine.stream(green), "second", blocks=FILL // 2, sm_ns=16_000, fixed_ns=600)
    assert times(machine) == {"first": (0, 1_400), "second": (0, 600 + 1_400)}


# -- partitions ---------------------------------------------------------------------------------


def test_on_disjoint_sms_each_is_as_if_alone(machine: Machine) -> None:
    """Fifteen kernels on disjoint partitions each take the time of one alone."""
    for i, green in enumerate(machine.greens(15, 8)):
        machine.run(machine.stream(green), f"k{i}", sm_ns=8_000)
    assert set(times(machine).values()) == {(0, 1_000)}


def test_a_crowd_elsewhere_changes_nothing(machine: Machine) -> None:
    """A kernel beside a partition with a queue is as fast as alone."""
    crowded, own = machine.greens(2)
    for i in range(5):
        machine.run(machine.stream(crowded), f"k{i}", sm_ns=16_000)
    machine.run(machine.stream(own), "own", blocks=3, sm_ns=3_000)
    found = times(machine)
    assert found["own"] == (0, 1_000)
    assert found["k4"] == (4_000, 5_000)


def test_partly_overlapping_partitions(machine: Machine) -> None:
    """16 SMs inside 64: the later, larger one starts on the 48 others.

    Large: 48000 of 112000 by the end of the small one, then 64000 on 64 SMs.
    """
    small, large = (machine.stream(machine.green(sms)) for sms in (16, 64))
    machine.run(small, "small", sm_ns=16_000)
    machine.run(large, "large", sm_ns=112_000)
    assert times(machine) == {"small": (0, 1_000), "large": (0, 2_000)}


@pytest.mark.fault("B12")
def test_primary_kernels_are_in_every_partitions_way(machine: Machine) -> None:
    """All partitions wait for a kernel of the primary context."""
    partitions = [machine.stream(green) for green in machine.greens(8)]
    machine.run(machine.stream(), "primary", blocks=FILL_ALL, sm_ns=SMS * 1_000)
    for i, stream in enumerate(partitions):
        machine.run(stream, f"k{i}", sm_ns=16_000)
    found = times(machine)
    assert found.pop("primary") == (0, 1_000)
    assert set(found.values()) == {(1_000, 2_000)}


def test_partitions_are_in_the_primarys_way(machine: Machine) -> None:
    """It starts on the SMs that are free, takes the others as they become so, and keeps them.

    Primary: 116000 of 248000 while the partition's first kernel runs, then 132000 on all SMs.
    """
    stream = machine.stream(machine.green(16))
    machine.run(stream, "first", sm_ns=16_000)
    machine.run(machine.stream(), "primary", blocks=FILL_ALL, sm_ns=248_000)
    machine.run(stream, "second", sm_ns=16_000)
    assert times(machine) == {
        "first": (0, 1_000),
        "primary": (0, 2_000),
        "second": (2_000, 3_000),
    }


def test_a_half_full_device_leaves_half_of_each_partition(machine: Machine) -> None:
    """The primary's blocks are spread evenly, so a partition is half as fast."""
    partition = machine.stream(machine.green(16))
    machine.run(machine.stream(), "primary", blocks=FILL_ALL // 2, sm_ns=math.inf)
    machine.run(partition, "partition", sm_ns=16_000)

    def body() -> None:
        machine.driver.clock.sleep(10**6)

    machine.inside(body)
    assert machine.times() == {"partition": (LAUNCH_NS, LAUNCH_NS + 2_000)}


# -- kernels of a fixed time, and without an end ------------------------------------------------


def test_a_fixed_time_takes_room(machine: Machine) -> None:
    """Kernels of a fixed time wait for room, and their time counts from their start."""
    green = machine.green(16)
    for name in "ab":
        machine.run(machine.stream(green), name, blocks=FILL, fixed_ns=500)
    assert times(machine) == {"a": (0, 500), "b": (500, 1_000)}


def test_a_fixed_time_takes_no_arithmetic(machine: Machine) -> None:
    """Beside a waiting kernel, another with a block on each SM is as fast as alone."""
    green = machine.green(16)
    machine.run(machine.stream(green), "waits", blocks=FILL - 16, fixed_ns=5_000)
    machine.run(machine.stream(green), "works", blocks=FILL, sm_ns=16_000)
    assert times(machine) == {"waits": (0, 5_000), "works": (0, 1_000)}


def test_a_kernel_without_work_waits_its_turn(machine: Machine) -> None:
    """It starts when it has room, and ends at the same time."""
    green = machine.green(16)
    machine.run(machine.stream(green), "large", blocks=FILL, fixed_ns=500)
    machine.run(machine.stream(green), "nothing")
    machine.run(machine.stream(green), "after", fixed_ns=10)
    assert times(machine) == {"large": (0, 500), "nothing": (500, 500), "after": (500, 510)}


def test_a_kernel_that_runs_until_a_word_changes(machine: Machine) -> None:
    """It ends when its condition holds or at its limit."""
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


def test_a_limit_counts_from_the_start(machine: Machine) -> None:
    """A kernel that waits for SMs has not begun to wait for its word."""
    green, never = machine.green(16), lambda: False
    machine.run(machine.stream(green), "before", fixed_ns=1_000)
    machine.run(machine.stream(green), "latch", until=never, limit_ns=2_000)
    machine.run(machine.stream(green), "after", fixed_ns=10)
    assert times(machine) == {
        "before": (0, 1_000),
        "latch": (1_000, 3_000),
        "after": (3_000, 3_010),
    }


def test_what_holds_before_the_start_ends_a_kernel_at_its_start(machine: Machine) -> None:
    """It still waits for its SMs, and has its effect."""
    green, always = machine.green(16), lambda: True
    machine.run(machine.stream(green), "before", fixed_ns=1_000)
    machine.run(machine.stream(green), "latch", until=always, limit_ns=2_000)
    assert times(machine) == {"before": (0, 1_000), "latch": (1_000, 1_000)}


def test_a_host_that_looks_late_moves_no_limit() -> None:
    """A kernel ends at its limit although its condition is checked later."""

    class Late:
        time = 0

        def now(self) -> int:
            return self.time

        def poke(self) -> None:
            pass

    clock, spans, all_sms = Late(), list[Span](), (1 << SMS) - 1
    timeline, device = Timeline(clock), DeviceState(0, PRESETS["h200"])
    timeline.on_span = spans.append
    cost = Cost(until=lambda: clock.time >= 5_000, limit_ns=1_000)
    kernel = KernelOp("latch", cost, 1, 0.5, all_sms, lambda: None)
    with timeline.lock:
        timeline.submit(StreamQueue(1, device, 0, all_sms), kernel)
        timeline.run(0)
        clock.time = 6_000
        timeline.run(6_000)
    assert [(span.start, span.end, span.seen) for span in spans] == [(0, 1_000, 6_000)]
    assert not timeline.held


def test_a_kernel_of_infinite_cost_never_ends(machine: Machine) -> None:
    """It keeps its room and blocks its stream; other work uses the rest."""
    one, two = machine.greens(2)
    stuck = machine.stream(one)
    machine.run(stuck, "stuck", blocks=FILL // 2, sm_ns=math.inf)
    machine.run(machine.stream(two), "full", sm_ns=math.inf)

    def body() -> None:
        beside = machine.stream(one)
        machine.run(beside, "beside", sm_ns=16_000)
        machine.run(machine.stream(two), "never", sm_ns=16_000)
        machine.driver.synchronize_stream(beside)
        machine.driver.clock.sleep(10**12)
        assert not machine.driver.query_stream(stuck)

    machine.inside(body)
    assert machine.times() == {"beside": (LAUNCH_NS, LAUNCH_NS + 2_000)}


# -- the arithmetic -----------------------------------------------------------------------------


@dataclass
class Running:
    """What the sharing needs to know of a kernel."""

    sms: int
    cap: int
    part: float
    occupancy: float
    cost: Cost
    working: bool = False
    started: bool = False
    priority: int = 0
    yields: bool = False


@st.composite
def running(draw: st.DrawFn) -> list[Running]:
    """Draw kernels in their order, of which some that have room run."""
    kernels = []
    for _ in range(draw(st.integers(1, 6))):
        sms = draw(st.integers(1, 255))
        blocks, part = draw(st.integers(1, 300)), draw(st.integers(1, 1024)) / 2048
        cap = draw(st.integers(1, min(blocks, sms.bit_count())))
        dram, work = draw(st.just(0.0) | st.floats(1.0, 1e6)), draw(st.floats(1.0, 1e6))
        cost = Cost(sm_ns=work, dram_bytes=dram)
        kernels.append(Running(sms, cap, part, min(blocks * part, cap), cost))
    return [
        replace(kernel, working=run and draw(st.booleans()))
        for kernel, run in zip(kernels, settle(kernels)[0], strict=True)
    ]


@given(running())
def test_no_sm_is_given_out_twice(kernels: list[Running]) -> None:
    """Shares add up to the SMs at most, and none exceeds what its kernel can use."""
    _, shares, _ = settle(kernels)
    for kernel, share in zip(kernels, shares, strict=True):
        assert (share > 0) == kernel.working
        assert share <= kernel.cap * (1 + 1e-9)
    union = 0
    for kernel in kernels:
        union |= kernel.sms
    assert sum(shares) <= union.bit_count() * (1 + 1e-9)


@given(running())
def test_no_room_is_given_out_twice(kernels: list[Running]) -> None:
    """A kernel has room while earlier ones leave a block's; the first always has."""
    runs, _, _ = settle(kernels)
    assert runs[0]
    for i, kernel in enumerate(kernels):
        before = sum(k.occupancy for k in kernels[:i] if k.sms & kernel.sms)
        if before <= kernel.sms.bit_count() - kernel.part:
            assert runs[i]
    same = [replace(kernel, sms=255) for kernel in kernels]
    for i, run in enumerate(settle(same)[0]):
        left = 8 - sum(k.occupancy for k in same[:i])
        if abs(left - same[i].part) > 1e-6:
            assert run == (left > same[i].part)


@given(running(), st.data())
def test_a_running_kernel_never_loses_space(kernels: list[Running], data: st.DataObject) -> None:
    """When a kernel ends, the others keep their space."""
    runs, _, _ = settle(kernels)
    gone = data.draw(st.integers(0, len(kernels) - 1))
    later, _, _ = settle(kernels[:gone] + kernels[gone + 1 :])
    for before, after in zip(runs[:gone] + runs[gone + 1 :], later, strict=True):
        assert after or not before


@given(running())
def test_kernels_on_other_sms_do_not_matter(kernels: list[Running]) -> None:
    """A kernel on SMs of its own is as fast as alone on the device."""
    alone = Running(0xFF00, 8, 0.5, 8.0, Cost(sm_ns=1.0), working=True)
    runs, shares, spaces = settle(kernels)
    assert settle([*kernels, alone]) == ([*runs, True], [*shares, 8.0], [*spaces, 8.0])
    assert settle([alone, *kernels]) == ([True, *runs], [8.0, *shares], [8.0, *spaces])


@given(running(), st.floats(1.0, 1e6))
def test_no_byte_is_moved_twice(kernels: list[Running], per_ns: float) -> None:
    """Together kernels stay within the bandwidth, and each within what its SMs allow."""
    _, shares, _ = settle(kernels)
    working = [(k, share) for k, share in zip(kernels, shares, strict=True) if k.working]
    found = speeds([k for k, _ in working], [share for _, share in working], per_ns * 1e9)
    moved = sum(k.cost.dram_bytes * speed for (k, _), speed in zip(working, found, strict=True))
    assert moved <= per_ns * (1 + 1e-9)
    for (kernel, share), speed in zip(working, found, strict=True):
        assert 0 < speed <= share / kernel.cost.sm_ns * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-6, 1.0)), min_size=1, max_size=6),
    st.floats(1.0, 1e6),
)
def test_fair_is_max_min(asked: list[tuple[float, float]], capacity: float) -> None:
    """No kernel gets more than it wants; one with less gets its weighted share."""
    wanted, weights = [amount for amount, _ in asked], [weight for _, weight in asked]
    granted = fair(wanted, capacity, weights)
    assert all(0 <= g <= w for g, w in zip(granted, wanted, strict=True))
    assert sum(granted) <= capacity * (1 + 1e-9)
    levels = [g / weight for g, weight in zip(granted, weights, strict=True)]
    short = [i for i, g in enumerate(granted) if g < wanted[i] * (1 - 1e-9)]
    if short:
        assert sum(granted) == pytest.approx(capacity)
        assert min(levels[i] for i in short) >= max(levels) * (1 - 1e-6)


def test_bandwidth_is_shared_by_bytes_in_flight() -> None:
    """Two kernels that want all bandwidth get it by what their SMs have in flight.

    16 SMs beside 104 that copy: what an H100 gave is 525 and 2367 GB/s. Alone 8 SMs draw what 8 do.
    """
    wide = Cost(dram_bytes=1.0)
    few = Running(1, 16, 1.0, 16.0, wide, working=True)
    many = Running(2, 104, 1.0, 104.0, wide, working=True)
    first, second = speeds([few, many], [16.0, 104.0], 2.85e12, 95e9)
    assert first + second == pytest.approx(2_850)
    assert second / first == pytest.approx((104 / 16) ** CROWDING)
    assert speeds([few], [8.0], 2.85e12, 95e9) == [pytest.approx(8 * 95, rel=0.02)]
    assert speeds([many], [104.0], 2.85e12, 95e9) == [pytest.approx(2_760, rel=0.02)]


def test_a_board_at_its_limit_lowers_the_clock_of_all_sms() -> None:
    """Arithmetic slows by the cube root of its excess power, memory does not."""
    assert clock(580, idle=120, limit=700) == 1.0
    assert clock(8 * 580, idle=120, limit=700) == pytest.approx(0.5)
    model = replace(PRESETS["h200"], idle_watts=100.0, power_limit=100.0 + 16 * 10 / 8)
    machine = Machine([model])
    machine.run(machine.stream(machine.green(16)), "hot", sm_ns=16_000, sm_watts=10.0)
    machine.run(machine.stream(machine.green(16)), "cool", dram_bytes=1_000)
    assert times(machine)["hot"] == (0, 2_000)


# -- waves --------------------------------------------------------------------------------------


def test_an_urgent_kernel_waits_for_a_wave_and_not_for_the_grid() -> None:
    """It starts when the present wave ends, and the grid goes on after it."""
    machine = Machine()
    low, high = (machine.stream(None, priority=priority) for priority in (0, -5))
    machine.run(low, "grid", blocks=4 * FILL_ALL, fixed_ns=4_000)
    machine.run(high, "urgent", blocks=FILL_ALL, fixed_ns=500)
    assert times(machine) == {"grid": (0, 4_500), "urgent": (1_000, 1_500)}


def test_an_urgent_kernel_that_needs_little_displaces_little() -> None:
    """The grid goes on with the SMs that the urgent kernel leaves."""
    machine = Machine()
    low, high = (machine.stream(None, priority=priority) for priority in (0, -5))
    machine.run(low, "grid", blocks=4 * FILL_ALL, sm_ns=4_000 * SMS)
    machine.run(high, "urgent", blocks=FILL_ALL // 2, fixed_ns=1_000)
    found = times(machine)
    assert found["urgent"] == (1_000, 2_000)
    assert 4_000 <= found["grid"][1] <= 4_500


def test_the_last_wave_of_a_grid_leaves_what_it_does_not_need() -> None:
    """A later kernel of equal priority starts in a partly empty last wave."""
    machine = Machine()
    one, two = machine.stream(), machine.stream()
    machine.run(one, "grid", blocks=FILL_ALL * 3 // 2, fixed_ns=2_000)
    machine.run(two, "small", blocks=16, fixed_ns=100)
    assert times(machine) == {"grid": (0, 2_000), "small": (1_000, 1_100)}


def test_measured_interference_slows_kernels_beside_it() -> None:
    """What a model says kernels do to each other holds while both work, on disjoint SMs too."""

    def slowed(at_work: Sequence[tuple[str, float]]) -> list[float]:
        return [2.0 if name == "victim" else 1.0 for name, _ in at_work]

    machine = Machine([replace(PRESETS["h200"], interference=slowed)])
    for (name, took), green in zip(
        {"victim": 1_000, "other": 500}.items(), machine.greens(2), strict=True
    ):
        machine.run(machine.stream(green), name, sm_ns=16 * took)
    assert times(machine) == {"victim": (0, 1_250), "other": (0, 500)}
    machine.close()
