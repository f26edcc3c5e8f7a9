"""The structured split and work queues through the real bindings."""

from __future__ import annotations

from typing import Any

import pytest

from greensched import errors
from greensched.driver.interface import Driver
from greensched.driver.types import SMGroup, WorkqueueFacts
from greensched.typing import Feature
from helpers.backend import needs


def sms(driver: Driver, *groups: SMGroup) -> tuple[list[int], int]:
    made, rest = driver.split(driver.device_resource(0), groups)
    facts = [driver.resource_facts(one) for one in made]
    return [f.sm_count for f in facts], driver.resource_facts(rest).sm_count if rest else 0


def test_a_structured_split(driver: Driver) -> None:
    """The driver gets several sizes, and returns the groups as requested."""
    needs(driver, Feature.STRUCTURED_SPLIT)
    assert sms(driver, SMGroup(16), SMGroup(64), SMGroup(8)) == ([16, 64, 8], 44)
    assert sms(driver, SMGroup(16), SMGroup(0, 2)) == ([16, 116], 0)
    assert sms(driver, SMGroup(12, backfill=True)) == ([12], 120)
    with pytest.raises(errors.CUDAError, match="INVALID_RESOURCE_CONFIGURATION"):
        sms(driver, SMGroup(12))


def test_a_group_says_its_alignment_and_flags(driver: Driver) -> None:
    """A group has the facts with which the driver made it."""
    needs(driver, Feature.STRUCTURED_SPLIT)
    whole = driver.device_resource(0)
    (fine, filled), _ = driver.split(whole, [SMGroup(4, 2), SMGroup(12, backfill=True)])
    assert driver.resource_facts(fine).coscheduled_alignment == 2
    assert driver.resource_facts(filled).flags == 1


def test_a_workqueue_is_configured_in_a_copy(driver: Driver, primary: Any) -> None:
    """The driver takes the configured copy, and the context reports it."""
    needs(driver, Feature.WORKQUEUES)
    default = driver.device_workqueue(0)
    before = driver.workqueue_facts(default)
    mine = driver.configure_workqueue(default, "green_ctx_balanced", 2)
    assert driver.workqueue_facts(default) == before
    (group,), _ = driver.split_by_count(driver.device_resource(0), 1, 16)
    for resources, count in (([group, mine], 16), ([mine], 132)):
        green = driver.create_green(driver.describe(resources), 0)
        view = driver.green_context(green)
        found = driver.workqueue_facts(driver.context_workqueue(view))
        assert found == WorkqueueFacts("green_ctx_balanced", 2)
        assert driver.resource_facts(driver.context_resource(view)).sm_count == count
        driver.destroy_green(green)
    assert driver.workqueue_facts(driver.context_workqueue(primary)) == before


def test_what_is_missing_is_said(driver: Driver) -> None:
    """Below 13.1 the errors say which version is needed."""
    if not driver.supports(Feature.WORKQUEUES):
        with pytest.raises(errors.NotSupported, match=r"CUDA 13\.1; this is CUDA 13\."):
            driver.device_workqueue(0)
    if not driver.supports(Feature.STRUCTURED_SPLIT):
        with pytest.raises(errors.NotSupported, match="cuDevSmResourceSplit needs"):
            sms(driver, SMGroup(16))
