"""Splitting and combining SMs by the driver's version: the same answer, or what is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched import (
    Closed,
    ContextOptions,
    Device,
    InvalidCombination,
    InvalidRequest,
    InvalidSplit,
    LaunchConfig,
    NotSupported,
    SMResource,
    SMResourceOptions,
    WrongDevice,
    launch,
)
from greensched.driver import simulated
from greensched.driver.simulated import Fail, Span
from greensched.errors import CUDAError
from greensched.kernels import spin

VERSIONS = ("13.0", "13.1", "13.4")
OLD, NEW = VERSIONS[:1], VERSIONS[1:]
Open = Callable[..., Device]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open devices of simulated machines, and check that nothing is left."""
    devices: list[Device] = []

    def new(spec: str, ordinal: int = 0, **options: object) -> Device:
        machine = simulated.open(spec, **options)  # type: ignore[arg-type]
        devices.append(Device(ordinal, driver=machine))
        return devices[-1]

    yield new
    for device in devices:
        device.close()
        assert not device.driver.live()  # type: ignore[attr-defined]
        device.driver.close()  # type: ignore[attr-defined]


def mask(resource: SMResource) -> int:
    return resource.handle.mask  # type: ignore[attr-defined, no-any-return]


def sizes(device: Device, **options: object) -> tuple[list[int], int]:
    groups, rest = device.resources.sm.split(SMResourceOptions(**options))  # type: ignore[arg-type]
    return [group.sm_count for group in groups], rest.sm_count if rest is not None else 0


@pytest.mark.parametrize("version", VERSIONS)
def test_equal_groups_on_every_version(opened: Open, version: str) -> None:
    """Equal groups are the same by either split call."""
    device = opened(f"h200@{version}")
    assert sizes(device, count=16) == ([16], 116)
    assert sizes(device, count=(16, 16, 16)) == ([16] * 3, 84)
    assert sizes(device, count=(8,) * 15) == ([8] * 15, 12)
    assert sizes(device, count=(10, 10), coscheduled_sm_count=2) == ([10, 10], 112)


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize(
    "options",
    [
        {"count": (16, 32)},
        {"count": (16, None)},
        {"count": 12, "backfill": True},
        {"count": 16, "preferred_coscheduled_sm_count": 16},
        {"count": 16, "coscheduled_sm_count": 16},
        {"count": (16, 16), "coscheduled_sm_count": (8, 2)},
    ],
)
def test_what_needs_a_structured_split_says_so(
    opened: Open, version: str, options: dict[str, object]
) -> None:
    """Below 13.1 other splits say which version is needed."""
    with pytest.raises(NotSupported, match=rf"CUDA 13\.1; this is CUDA {version}"):
        sizes(opened(f"h200@{version}"), **options)


@pytest.mark.parametrize(("version", "largest"), [("13.0", 132), ("13.1", 120), ("13.4", 132)])
def test_the_largest_group_by_version(opened: Open, version: str, largest: int) -> None:
    """None gives the largest group of that version's driver."""
    assert sizes(opened(f"h200@{version}")) == ([largest], 132 - largest)


@pytest.mark.parametrize("version", NEW)
def test_groups_of_several_sizes(opened: Open, version: str) -> None:
    """From 13.1 on one call gives several sizes, and scalars apply to each."""
    device = opened(f"h200@{version}")
    assert sizes(device, count=(16, 64, None), coscheduled_sm_count=8) == ([16, 64, 40], 12)
    assert sizes(device, count=(16, 116), coscheduled_sm_count=(8, 2)) == ([16, 116], 0)
    assert sizes(device, count=(16, 116), backfill=(False, True)) == ([16, 116], 0)


@pytest.mark.parametrize("version", NEW)
def test_preferred_sets_are_larger_where_there_is_room(opened: Open, version: str) -> None:
    """A group that prefers sets of 16 has whole sets where they fit."""
    device = opened(f"h200@{version}")
    options = SMResourceOptions(
        count=(24, 32), coscheduled_sm_count=8, preferred_coscheduled_sm_count=(None, 16)
    )
    (plain, wide), _ = device.resources.sm.split(options)
    assert (plain.sm_count, wide.sm_count) == (24, 32)
    gpcs = [sum(1 << sm for sm in gpc) for gpc in simulated.PRESETS["h200"].sms_of_gpcs()]
    assert {(mask(plain) & gpc).bit_count() % 8 for gpc in gpcs} == {0}
    assert {(mask(wide) & gpc).bit_count() % 16 for gpc in gpcs} == {0}


@pytest.mark.parametrize(
    ("version", "options", "why", "nearest"),
    [
        ("13.1", {"count": 12}, "not a multiple of the 8", (16,)),
        ("13.1", {"count": 9}, "odd", (8,)),
        ("13.1", {"count": 200}, "more than there are", (120,)),
        ("13.1", {"count": 128}, "enough co-scheduled SMs.*backfill=True", (120,)),
        ("13.1", {"count": (64, 72)}, "together they are 136", (64, 56)),
        ("13.4", {"count": (None, None)}, "leaves no SM", (120,)),
        ("13.1", {"count": (8,) * 16}, "enough co-scheduled SMs", (8,) * 15),
        ("13.1", {"count": (64, 70), "coscheduled_sm_count": 2}, "together", (64, 68)),
        ("13.1", {"count": 12, "coscheduled_sm_count": 3}, "sets of 3: sets are even", ()),
        ("13.1", {"count": 64, "coscheduled_sm_count": 64}, "have 32 SMs at most", ()),
        ("13.1", {"count": 32, "preferred_coscheduled_sm_count": 64}, "sets of 64: ", ()),
        (
            "13.1",
            {"count": 24, "preferred_coscheduled_sm_count": 12},
            "12 are preferred.* of 8",
            (),
        ),
        ("13.0", {"count": 12}, "not a multiple of the 8", (16,)),
        ("13.0", {"count": (8,) * 16}, "enough co-scheduled SMs", (8,) * 15),
        ("13.0", {"count": (72, 72)}, "together", (64, 64)),
        ("13.0", {"count": (4,) * 40, "coscheduled_sm_count": 2}, "together", (2,) * 40),
        ("13.0", {"count": 3, "coscheduled_sm_count": 2}, "odd", (4,)),
        ("13.0", {"count": (None, None)}, "leaves no SM", (64, 64)),
    ],
)
def test_a_refusal_says_why_and_what_is_nearest(
    opened: Open, version: str, options: dict[str, object], why: str, nearest: tuple[int, ...]
) -> None:
    """A size for which the chip has no room is refused with an alternative."""
    with pytest.raises(InvalidSplit, match=why) as refused:
        sizes(opened(f"h200@{version}"), **options)
    assert refused.value.nearest == nearest
    assert isinstance(refused.value.__cause__, CUDAError)


def test_below_8_the_oldest_split_has_a_smallest_group(opened: Open) -> None:
    """An A100 splits by count into groups of 4; 13.1 into groups of 2."""
    with pytest.raises(InvalidSplit, match="fewer than the 4") as refused:
        sizes(opened("a100@13.0"), count=2)
    assert refused.value.nearest == (4,)
    assert sizes(opened("a100@13.1"), count=2) == ([2], 106)
    assert sizes(opened("a100@13.0"), count=2, coscheduled_sm_count=2) == ([2], 106)
    with pytest.raises(InvalidSplit, match=r"sets of 8: .*have 2 SMs at most"):
        sizes(opened("a100@13.1"), count=16, coscheduled_sm_count=8)


def test_a_drivers_other_failures_are_not_refusals(opened: Open) -> None:
    """Other errors are raised as they are, and nothing else is tried."""
    device = opened("h200@13.1", faults=[Fail("split", 1, 999)])
    with pytest.raises(CUDAError, match="UNKNOWN"):
        sizes(device, count=16)
    assert sizes(device, count=16) == ([16], 116)


@given(
    version=st.sampled_from(VERSIONS),
    spec=st.sampled_from(["h200", "a100", "t4", "rtx5090"]),
    counts=st.lists(st.none() | st.integers(1, 140), min_size=1, max_size=4),
    fine=st.booleans(),
    alike=st.booleans(),
)
def test_a_dry_run_is_the_real_split(
    version: str, spec: str, counts: list[int | None], fine: bool, alike: bool
) -> None:
    """Whatever is asked of whatever driver, both answer or refuse in the same words.

    What is cut has just the sizes asked for and is disjoint; what is nearest can be cut.
    """
    driver = simulated.open(f"{spec}@{version}")
    device = Device(0, driver=driver)
    counts = [counts[0]] * len(counts) if alike else counts
    options = SMResourceOptions(count=counts, coscheduled_sm_count=2 if fine else None)

    def outcome(*, dry_run: bool) -> tuple[object, str, tuple[int, ...]]:
        try:
            groups, rest = device.resources.sm.split(options, dry_run=dry_run)
        except (NotSupported, InvalidSplit) as error:
            return type(error), str(error), getattr(error, "nearest", ())
        every = [*groups, *([rest] if rest is not None else [])]
        assert not any(mask(a) & mask(b) for a, b in combinations(every, 2))
        for asked, group in zip(counts, groups, strict=True):
            assert group.sm_count == (asked or group.sm_count)
        return (), "", tuple(one.sm_count for one in groups)

    first = outcome(dry_run=True)
    assert first == outcome(dry_run=False)
    kind, _, possible = first
    if kind is InvalidSplit and possible:
        again = SMResourceOptions(count=possible, coscheduled_sm_count=options.coscheduled_sm_count)
        nearest, _ = device.resources.sm.split(again)
        assert tuple(one.sm_count for one in nearest) == possible
    device.close()
    driver.close()


# -- combining --------------------------------------------------------------------------------


def combine(device: Device, *resources: SMResource | None) -> int:
    """Return the SMs of a context over several resources."""
    assert None not in resources
    context = device.create_context(ContextOptions(resources=resources))  # type: ignore[arg-type]
    count = context.resources.sm.sm_count
    context.close()
    return count


@pytest.mark.parametrize("version", VERSIONS)
def test_one_resource_makes_a_context_on_every_version(opened: Open, version: str) -> None:
    """A group, a remainder, and the unsplit device each make a context."""
    device = opened(f"h200@{version}")
    (group,), rest = device.resources.sm.split(SMResourceOptions(count=16))
    for resource, sms in ((group, 16), (rest, 116), (device.resources.sm, 132)):
        assert combine(device, resource) == sms


@pytest.mark.parametrize("version", VERSIONS)
def test_outputs_of_one_split_combine(opened: Open, version: str) -> None:
    """A context over several groups has all their SMs."""
    device = opened(f"h200@{version}")
    groups, _ = device.resources.sm.split(SMResourceOptions(count=(8, 8, 8)))
    assert combine(device, *groups) == 24


@pytest.mark.parametrize("version", VERSIONS)
def test_a_remainder_of_unequal_alignment_stays_alone_from_13_1_on(
    opened: Open, version: str
) -> None:
    """Before, it joins groups; later the error has both alignments."""
    device = opened(f"h200@{version}")
    groups, rest = device.resources.sm.split(SMResourceOptions(count=(8,) * 15))
    if version in NEW:
        with pytest.raises(InvalidCombination, match=r"unequal alignment .*\(8, 2\)"):
            combine(device, groups[0], rest)
    else:
        assert combine(device, groups[0], rest) == 20


@pytest.mark.parametrize("version", VERSIONS)
def test_outputs_of_several_splits_do_not_combine(opened: Open, version: str) -> None:
    """They overlap and are refused, even if a driver would accept them."""
    device = opened(f"h200@{version}")
    outputs = [device.resources.sm.split(SMResourceOptions(count=8))[0][0] for _ in range(2)]
    with pytest.raises(InvalidCombination, match="several splits"):
        combine(device, *outputs)
    with pytest.raises(InvalidCombination, match="twice"):
        combine(device, outputs[0], outputs[0])


def test_backfilled_groups_stay_apart_from_13_4_on(opened: Open) -> None:
    """From 13.4 on flags must be equal."""
    for version in NEW:
        device = opened(f"h200@{version}")
        groups, _ = device.resources.sm.split(
            SMResourceOptions(count=(8, 8), backfill=(False, True))
        )
        assert [group.flags for group in groups] == [0, 1]
        if version == "13.4":
            with pytest.raises(InvalidCombination, match="unequal flags"):
                combine(device, *groups)
        else:
            assert combine(device, *groups) == 16


def test_a_resource_of_another_device_is_refused(opened: Open) -> None:
    """The error names the resource's device."""
    machine = simulated.open("h200x2@13.1")
    here, there = Device(0, driver=machine), Device(1, driver=machine)
    (group,), _ = there.resources.sm.split(SMResourceOptions(count=8))
    for resource in (group, there.resources.workqueue):
        with pytest.raises(WrongDevice, match="belongs to device 1, but is used on device 0"):
            here.create_context(ContextOptions(resources=[resource]))
    here.close()
    there.close()
    machine.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_streams_of_green_contexts_say_their_sms(opened: Open, version: str) -> None:
    """A stream has its context's SMs."""
    device = opened(f"h200@{version}")
    (group,), _ = device.resources.sm.split(SMResourceOptions(count=16))
    context = device.create_context(ContextOptions(resources=[group]))
    stream = context.create_stream()
    assert stream.resources.sm.sm_count == 16
    stream.close()
    context.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_two_contexts_run_on_sms_of_their_own(opened: Open, version: str) -> None:
    """Kernels of two contexts of one split overlap in time and share no SM."""
    device = opened(f"h200@{version}", clock=simulated.VirtualClock())
    spans: list[Span] = []
    device.driver.on_span(spans.append)  # type: ignore[attr-defined]
    groups, _ = device.resources.sm.split(SMResourceOptions(count=(16, 16)))
    contexts = [device.create_context(ContextOptions(resources=[group])) for group in groups]
    streams = [context.create_stream() for context in contexts]
    for stream in streams:
        launch(stream, LaunchConfig(grid=64, block=64), spin, 2_000_000)
    for stream in streams:
        stream.sync()
    one, two = (span for span in spans if span.name == "spin")
    assert one.sms.bit_count() == two.sms.bit_count() == 16
    assert not one.sms & two.sms
    assert max(one.start, two.start) < min(one.end, two.end)
    for child in (*streams, *contexts):
        child.close()


def test_many_threads_split_the_same_sms(opened: Open) -> None:
    """Concurrent splits of one SMResource are all complete."""
    device = opened("h200@13.1")
    sm = device.resources.sm
    options = SMResourceOptions(count=(16, 32, 64))
    results: list[list[SMResource]] = []

    def work() -> None:
        for _ in range(50):
            groups, rest = sm.split(options)
            assert rest is not None
            results.append([*groups, rest])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 400
    for outputs in results:
        assert [one.sm_count for one in outputs] == [16, 32, 64, 20]
        assert not any(mask(a) & mask(b) for a, b in combinations(outputs, 2))
        assert len({one.cut for one in outputs}) == 1
    assert len({outputs[0].cut for outputs in results}) == 400


@pytest.mark.parametrize("version", VERSIONS)
def test_a_current_context_is_not_closed(opened: Open, version: str) -> None:
    """It is refused while current; later its streams and events end first."""
    device = opened(f"h200@{version}")
    (group,), _ = device.resources.sm.split(SMResourceOptions(count=16))
    context = device.create_context(ContextOptions(resources=[group]))
    event = context.create_event()
    with context:
        with pytest.raises(InvalidRequest, match="current on this thread"):
            context.close()
        assert context.resources.sm.sm_count == 16
    context.close()
    with pytest.raises(Closed, match="context is gone"):
        event.sync()
    with pytest.raises(Closed):
        context.create_stream()
