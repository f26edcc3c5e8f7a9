"""SM resources: how a device can be split, and what can be combined."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.driver import simulated
from greensched.driver.simulated import PRESETS
from greensched.driver.simulated.sm_split import Resource
from greensched.driver.types import ResourceFacts, ResourceHandle
from greensched.errors import CUDAError, DriverMisuse, NotSupported
from greensched.typing import Feature

from .machine import Machine

Make = Callable[..., Machine]


def mask(resource: ResourceHandle | None) -> int:
    assert isinstance(resource, Resource)
    return resource.mask


def counts(machine: Machine, *arguments: object, **options: bool) -> tuple[list[int], int]:
    """Return the SMs of each group of a split of device 0, and of the remainder."""
    groups, rest = machine.driver.split_by_count(
        machine.driver.device_resource(0), *arguments, **options
    )
    return [mask(group).bit_count() for group in groups], mask(rest).bit_count() if rest else 0


#: Splits that were published. Source: CUDA programming guide 4.6, and probes of an H100 SXM.
PUBLISHED = [
    ("gh200", 2, 72, False, [72], 60),
    ("gh200", 6, 11, False, [16] * 6, 36),
    ("gh200", 6, 11, True, [12] * 6, 60),
    ("gh200", 2, 1, False, [8] * 2, 116),
    ("gh200@13.0", 1, 16, False, [16], 116),
    ("h100", 16, 8, False, [8] * 15, 12),
]


@pytest.mark.parametrize(("spec", "groups", "minimum", "fine", "made", "rest"), PUBLISHED)
def test_published_splits(
    make: Make, spec: str, groups: int, minimum: int, fine: bool, made: list[int], rest: int
) -> None:
    """Every published split of a preset device comes out as published."""
    machine = make(spec)
    assert counts(machine, groups, minimum, ignore_coscheduling=fine) == (made, rest)


def test_as_many_groups_as_there_can_be(make: Make) -> None:
    """Without a number there are as many groups as fit."""
    assert counts(make(), None, 8) == ([8] * 15, 12)
    assert counts(make(), None, 2, ignore_coscheduling=True) == ([2] * 66, 0)
    assert counts(make("a100"), None, 1) == ([4] * 27, 0)
    assert counts(make("t4"), None, 3) == ([4] * 10, 0)


@pytest.mark.parametrize(
    ("spec", "least", "alignment"),
    [("t4", 2, 2), ("a100", 4, 2), ("l40s", 4, 2), ("h200", 8, 8), ("rtx5090", 8, 8)],
)
def test_granularity(make: Make, spec: str, least: int, alignment: int) -> None:
    """Minimum and alignment are those of the compute capability."""
    machine = make(f"{spec}@13.0")
    facts = machine.driver.resource_facts(machine.driver.device_resource(0))
    assert facts == ResourceFacts(PRESETS[spec].sm_count, least, alignment)


@given(
    spec=st.sampled_from(sorted(PRESETS)),
    groups=st.none() | st.integers(1, 100),
    minimum=st.integers(0, 200),
    fine=st.booleans(),
)
def test_every_split_is_disjoint_equal_and_complete(
    spec: str, groups: int | None, minimum: int, fine: bool
) -> None:
    """Groups are equal, at least the minimum, and with the remainder cover every SM once."""
    driver = simulated.open(spec)
    driver.initialise()
    device = driver.device_resource(0)
    model = PRESETS[spec]
    try:
        cut, rest = driver.split_by_count(device, groups, minimum, ignore_coscheduling=fine)
    except CUDAError as error:
        assert error.name == "INVALID_RESOURCE_CONFIGURATION"  # noqa: PT017  either may be right
        return
    finally:
        driver.close()
    masks = [mask(group) for group in cut]
    (size,) = {group.bit_count() for group in masks}
    assert minimum <= size
    assert len(masks) <= (groups or model.sm_count)
    every = masks + ([mask(rest)] if rest is not None else [])
    assert not any(one & other for one, other in combinations(every, 2))
    assert sum(each.bit_count() for each in every) == model.sm_count
    assert {0} != set(every)


@pytest.mark.parametrize(("groups", "minimum"), [(1, 133), (None, 133), (0, 8), (-1, 8), (1, 129)])
def test_what_cannot_be_cut_is_refused(machine: Machine, groups: int | None, minimum: int) -> None:
    """More SMs than the device has are refused."""
    with pytest.raises(CUDAError, match="INVALID_RESOURCE_CONFIGURATION"):
        counts(machine, groups, minimum)


def test_every_sm_can_be_one_group(machine: Machine) -> None:
    """All SMs can be one group, even if not a multiple of the alignment."""
    assert counts(machine, 1, 132) == ([132], 0)


def test_independent_splits_overlap(machine: Machine) -> None:
    """Two splits start from the same SMs, so their outputs overlap."""
    small, large = (machine.cells(size)[0] for size in (16, 64))
    assert mask(small) & mask(large) == mask(small)


def test_an_output_cannot_be_split_again(machine: Machine) -> None:
    """An output is not split, but a context's resource over it is."""
    driver = machine.driver
    (group, *_), rest = driver.split_by_count(driver.device_resource(0), 2, 64)
    assert rest is None or mask(rest)
    for output in (group, rest):
        assert output is not None
        with pytest.raises(CUDAError, match="cannot be split again"):
            driver.split_by_count(output, None, 8)
    green = driver.create_green(driver.describe([group]), 0)
    again = driver.context_resource(driver.green_context(green))
    halves, _ = driver.split_by_count(again, 2, 32)
    assert [mask(half).bit_count() for half in halves] == [32, 32]
    assert all(mask(half) & ~mask(group) == 0 for half in halves)


def test_the_resource_of_a_primary_is_the_device(machine: Machine) -> None:
    """The primary has every SM, and can be split like the device."""
    resource = machine.driver.context_resource(machine.primary)
    assert mask(resource).bit_count() == 132
    assert len(machine.driver.split_by_count(resource, None, 8)[0]) == 15


# -- descriptors --------------------------------------------------------------------------------


def test_one_resource_makes_a_descriptor_in_every_version(make: Make) -> None:
    """A group, a remainder and the unsplit device each make a green context by themselves."""
    for version in ("13.0", "13.1"):
        machine = make(f"h200@{version}")
        driver = machine.driver
        groups, rest = driver.split_by_count(driver.device_resource(0), None, 8)
        assert rest is not None
        for resource, sms in ((groups[3], 8), (rest, 12), (driver.device_resource(0), 132)):
            green = driver.create_green(driver.describe([resource]), 0)
            own = driver.context_resource(driver.green_context(green))
            assert mask(own).bit_count() == sms


@pytest.mark.parametrize(("version", "with_remainder"), [("13.0", True), ("13.1", False)])
def test_combining_by_version(make: Make, version: str, with_remainder: bool) -> None:
    """13.0 joins a remainder to groups; 13.1 needs equal alignment."""
    machine = make(f"h200@{version}")
    driver = machine.driver
    groups, rest = driver.split_by_count(driver.device_resource(0), None, 8)
    assert rest is not None
    driver.describe(groups[:3])
    if with_remainder:
        driver.describe([groups[0], rest])
    else:
        with pytest.raises(CUDAError, match="INVALID_RESOURCE_CONFIGURATION"):
            driver.describe([groups[0], rest])


def test_a_remainder_of_whole_sets_joins(make: Make) -> None:
    """A remainder with the groups' alignment joins them on any version."""
    machine = make("a100@13.1")
    driver = machine.driver
    groups, rest = driver.split_by_count(driver.device_resource(0), 3, 8)
    assert rest is not None
    driver.describe([*groups, rest])


def test_combined_resources_are_their_union(machine: Machine) -> None:
    """A green context over several cells has exactly their SMs."""
    driver = machine.driver
    cells = machine.cells(8)
    green = driver.create_green(driver.describe([cells[1], cells[4], cells[9]]), 0)
    union = mask(cells[1]) | mask(cells[4]) | mask(cells[9])
    assert mask(driver.context_resource(driver.green_context(green))) == union


@pytest.mark.parametrize("version", ["13.0", "13.1", "13.4"])
def test_outputs_of_two_splits(make: Make, version: str) -> None:
    """A descriptor takes outputs of one split; the H200 of 13.0 took any."""
    machine = make(f"h200@{version}")
    driver = machine.driver
    one, two, every = machine.cells(8), machine.cells(8), driver.device_resource(0)
    for resources, counted in (([one[0], two[1]], 16), ([one[0], every], 132), ([every] * 2, 132)):
        if version == "13.0":
            green = driver.create_green(driver.describe(resources), 0)
            of_green = driver.context_resource(driver.green_context(green))
            assert driver.resource_facts(of_green).sm_count == counted
            driver.destroy_green(green)
        else:
            with pytest.raises(CUDAError, match="only outputs of one split call"):
                driver.describe(resources)


def test_how_outputs_are_aligned_is_said_of_contexts(make: Make) -> None:
    """Driver 580 says nothing of a split's outputs; a context of them has the least alignment."""
    machine = make("h200@13.0")
    driver = machine.driver
    whole = driver.device_resource(0)
    (one, two), rest = driver.split_by_count(whole, 2, 8)
    assert rest is not None
    for output in (one, rest):
        facts = driver.resource_facts(output)
        assert (facts.min_partition_size, facts.coscheduled_alignment) == (0, 0)
    for parts, alignment in (([one, two], 8), ([one, rest], 2), ([whole], 8)):
        green = driver.create_green(driver.describe(parts), 0)
        facts = driver.resource_facts(driver.context_resource(driver.green_context(green)))
        assert facts.coscheduled_alignment == alignment
        driver.destroy_green(green)


def test_resources_of_two_devices_do_not_combine(make: Make) -> None:
    """A descriptor and its green context are of one device."""
    machine = make("h200x2")
    here, there = machine.cells(8, 0)[0], machine.cells(8, 1)[0]
    with pytest.raises(CUDAError, match=r"INVALID_RESOURCE_CONFIGURATION.*several devices"):
        machine.driver.describe([here, there])
    with pytest.raises(CUDAError, match="INVALID_DEVICE"):
        machine.driver.create_green(machine.driver.describe([there]), 0)


def test_a_descriptor_needs_a_resource(machine: Machine) -> None:
    """An empty descriptor is an invalid value."""
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        machine.driver.describe([])


def test_features_can_be_taken_away(make: Make) -> None:
    """A machine without a feature behaves like a version without it."""
    lacking = {Feature.WORKQUEUES, Feature.WRITE_VALUE}
    machine = make("h200@13.4", without=lacking)
    driver = machine.driver
    assert not any(driver.supports(feature) for feature in lacking)
    with pytest.raises(NotSupported, match="without it"):
        driver.device_workqueue(0)
    with pytest.raises(NotSupported, match="without it"):
        driver.bind_mark(machine.stream(), 0)


@pytest.mark.parametrize("version", ["13.0", "13.1", "13.4"])
def test_features_by_version(make: Make, version: str) -> None:
    """Each feature exists from its version on."""
    driver = make(f"h200@{version}").driver
    has = tuple(map(int, version.split(".")))
    for feature in Feature:
        since = feature.value.partition("(CUDA ")[2].rstrip(")")
        needed = tuple(map(int, since.split("."))) if since else (0, 0)
        assert driver.supports(feature) is (has >= needed)


def test_what_is_no_resource_is_refused(machine: Machine) -> None:
    """Handles of a wrong kind are refused as the caller's error."""
    for call in (machine.driver.describe, lambda x: machine.driver.resource_facts(x[0])):
        with pytest.raises(DriverMisuse, match="expected a Resource"):
            call([machine.primary])
    with pytest.raises(DriverMisuse, match="expected a Descriptor"):
        machine.driver.create_green(machine.cells()[0], 0)  # type: ignore[arg-type]
