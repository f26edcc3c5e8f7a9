"""The simulated structured split and work queues, by version."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.driver import simulated
from greensched.driver.simulated import PRESETS
from greensched.driver.types import ResourceHandle, SMGroup, WorkqueueFacts
from greensched.errors import CUDAError, DriverMisuse, NotSupported
from greensched.typing import Feature

from .machine import Machine

Make = Callable[..., Machine]
NEW = ("13.1", "13.3", "13.4")
OLD = ("13.0",)


def mask(resource: ResourceHandle) -> int:
    return resource.mask  # type: ignore[attr-defined, no-any-return]


def counts(machine: Machine, *groups: SMGroup) -> tuple[list[int], int]:
    """Return the SMs of each group of a structured split of device 0, and of the remainder."""
    driver = machine.driver
    made, rest = driver.split(driver.device_resource(0), groups)
    return [mask(one).bit_count() for one in made], mask(rest).bit_count() if rest else 0


@pytest.mark.parametrize("version", NEW)
def test_groups_of_different_sizes_come_from_one_call(make: Make, version: str) -> None:
    """Groups have exactly the requested sizes, in order."""
    machine = make(f"h200@{version}")
    assert counts(machine, SMGroup(16), SMGroup(64), SMGroup(8)) == ([16, 64, 8], 44)
    assert counts(machine, SMGroup(10, 2), SMGroup(122, 2)) == ([10, 122], 0)


@pytest.mark.parametrize(
    ("version", "plain", "fine"), [("13.1", 120, 132), ("13.3", 120, 132), ("13.4", 132, 132)]
)
def test_discovery_by_version(make: Make, version: str, plain: int, fine: int) -> None:
    """A count of 0 finds the largest group: whole sets, and from 13.4 on every SM."""
    machine = make(f"h200@{version}")
    assert counts(machine, SMGroup()) == ([plain], 132 - plain)
    assert counts(machine, SMGroup(0, 2)) == ([fine], 0)
    assert counts(machine, SMGroup(0, 8)) == ([120], 12)
    assert counts(machine, SMGroup(0, 8, backfill=True)) == ([132], 0)
    assert counts(machine, SMGroup(16), SMGroup(0, 8)) == ([16, 104], 12)


#: What no driver of 13.1 or newer cuts an H200 into: odd, too many, no whole sets, too large sets.
IMPOSSIBLE = [
    (SMGroup(9),),
    (SMGroup(9, backfill=True),),
    (SMGroup(134),),
    (SMGroup(12),),
    (SMGroup(8), SMGroup(128)),
    (SMGroup(128),),  # a multiple of 8, but there are 15 sets of 8 within GPCs
    (SMGroup(4, 8, backfill=True),),
    (SMGroup(64, 64),),
    (SMGroup(16, 8, 12),),
    (SMGroup(16, 3),),
    (SMGroup(0, 2), SMGroup(0, 2)),
]


@pytest.mark.parametrize("version", NEW)
@pytest.mark.parametrize("groups", IMPOSSIBLE)
def test_what_cannot_be_cut_is_refused(
    make: Make, version: str, groups: tuple[SMGroup, ...]
) -> None:
    """Every rule of the structured split answers INVALID_RESOURCE_CONFIGURATION."""
    with pytest.raises(CUDAError, match="INVALID_RESOURCE_CONFIGURATION"):
        counts(make(f"h200@{version}"), *groups)


def test_backfill_makes_the_constraints_optional(make: Make) -> None:
    """Backfill allows any even count with one whole set, across GPCs."""
    machine = make("h200@13.1")
    assert counts(machine, SMGroup(12, backfill=True)) == ([12], 120)
    assert counts(machine, SMGroup(128, backfill=True)) == ([128], 4)
    (group,), _ = machine.driver.split(
        machine.driver.device_resource(0), [SMGroup(12, backfill=True)]
    )
    assert machine.driver.resource_facts(group).flags == 1


def test_coscheduled_sets_lie_in_one_gpc(make: Make) -> None:
    """Each set is within one GPC, and preferred sets are taken first."""
    machine = make("h200@13.1")
    gpcs = [sum(1 << sm for sm in gpc) for gpc in PRESETS["h200"].sms_of_gpcs()]
    (group, wide), _ = machine.driver.split(
        machine.driver.device_resource(0), [SMGroup(32, 8), SMGroup(32, 8, 16)]
    )
    shares = [(mask(group) & gpc).bit_count() for gpc in gpcs]
    assert all(share % 8 == 0 for share in shares)
    assert sorted((mask(wide) & gpc).bit_count() for gpc in gpcs if mask(wide) & gpc) == [16, 16]


@given(
    spec=st.sampled_from(sorted(PRESETS)),
    version=st.sampled_from(NEW),
    groups=st.lists(
        st.builds(
            SMGroup,
            st.integers(0, 40).map(lambda n: 2 * n),
            st.sampled_from([0, 2, 8, 16]),
            st.just(0),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_every_structured_split_is_disjoint_exact_and_complete(
    spec: str, version: str, groups: list[SMGroup]
) -> None:
    """Groups and remainder cover every SM once, with the requested sizes."""
    driver = simulated.open(f"{spec}@{version}")
    driver.initialise()
    try:
        made, rest = driver.split(driver.device_resource(0), groups)
    except CUDAError as error:
        assert error.name == "INVALID_RESOURCE_CONFIGURATION"  # noqa: PT017  either may be right
        return
    finally:
        driver.close()
    masks = [mask(one) for one in made]
    for one, group in zip(masks, groups, strict=True):
        assert one.bit_count() == (group.sm_count or one.bit_count()) > 0
    every = masks + ([mask(rest)] if rest is not None else [])
    assert not any(one & other for one, other in combinations(every, 2))
    assert sum(one.bit_count() for one in every) == PRESETS[spec].sm_count


@pytest.mark.parametrize("version", NEW)
def test_an_output_of_a_structured_split_cannot_be_split(make: Make, version: str) -> None:
    """Neither split call takes a group or a remainder."""
    driver = make(f"h200@{version}").driver
    (group,), rest = driver.split(driver.device_resource(0), [SMGroup(64)])
    assert rest is not None
    for output in (group, rest):
        with pytest.raises(CUDAError, match="cannot be split again"):
            driver.split(output, [SMGroup(8)])
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        driver.split(driver.device_resource(0), [])


@pytest.mark.parametrize("version", OLD)
def test_before_13_1_there_is_no_structured_split(make: Make, version: str) -> None:
    """An older driver says which version is needed."""
    machine = make(f"h200@{version}")
    driver = machine.driver
    here = rf"CUDA 13\.1; this is a simulated CUDA {version}"
    asks = (
        lambda: driver.split(driver.device_resource(0), [SMGroup(16)]),
        lambda: driver.device_workqueue(0),
        lambda: driver.context_workqueue(machine.primary),
    )
    for ask in asks:
        with pytest.raises(NotSupported, match=here):
            ask()


# -- descriptors --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", NEW)
def test_groups_of_one_alignment_combine(make: Make, version: str) -> None:
    """Groups of different sizes combine if their alignments are equal; on 13.4 also their flags."""
    driver = make(f"h200@{version}").driver
    (a, b, fine, filled), _ = driver.split(
        driver.device_resource(0),
        [SMGroup(16), SMGroup(8), SMGroup(4, 2), SMGroup(12, backfill=True)],
    )
    driver.describe([a, b])
    with pytest.raises(CUDAError, match="different alignment"):
        driver.describe([a, fine])
    if version == "13.4":
        with pytest.raises(CUDAError, match="different flags"):
            driver.describe([a, filled])
    else:
        driver.describe([a, filled])


@pytest.mark.parametrize("version", NEW)
def test_a_workqueue_may_stand_beside_sms(make: Make, version: str) -> None:
    """A descriptor takes one configuration; alone it means every SM."""
    machine = make(f"h200x2@{version}")
    driver = machine.driver
    default = driver.device_workqueue(0)
    assert driver.workqueue_facts(default) == WorkqueueFacts("device_ctx", 8)
    mine = driver.configure_workqueue(default, "green_ctx_balanced", 2)
    assert driver.workqueue_facts(default) == WorkqueueFacts("device_ctx", 8)
    cell = machine.cells()[0]
    for resources, sms in (([cell, mine], 16), ([mine], 132)):
        green = driver.create_green(driver.describe(resources), 0)
        view = driver.green_context(green)
        assert driver.workqueue_facts(driver.context_workqueue(view)) == WorkqueueFacts(
            "green_ctx_balanced", 2
        )
        assert mask(driver.context_resource(view)).bit_count() == sms
    with pytest.raises(CUDAError, match="more than one work-queue"):
        driver.describe([cell, mine, default])
    with pytest.raises(CUDAError, match="several devices"):
        driver.describe([cell, driver.device_workqueue(1)])
    shared = driver.context_workqueue(machine.primary)
    assert driver.workqueue_facts(shared) == WorkqueueFacts("device_ctx", 8)


def test_a_workqueue_is_no_sm_resource(make: Make) -> None:
    """Each kind of resource is refused in the other's place."""
    machine = make("h200@13.1")
    driver = machine.driver
    queue, cell = driver.device_workqueue(0), machine.cells()[0]
    with pytest.raises(DriverMisuse, match="expected a Resource"):
        driver.split(queue, [SMGroup(8)])
    with pytest.raises(DriverMisuse, match="expected a Workqueue"):
        driver.workqueue_facts(cell)


def test_workqueues_can_be_taken_away(make: Make) -> None:
    """A machine without the features refuses like an older one."""
    driver = make("h200@13.1", without={Feature.WORKQUEUES, Feature.STRUCTURED_SPLIT}).driver
    with pytest.raises(NotSupported, match="without it"):
        driver.device_workqueue(0)
    with pytest.raises(NotSupported, match="without it"):
        driver.split(driver.device_resource(0), [SMGroup(8)])
