"""What a service class can be."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import greensched
from greensched.errors import InvalidRequest
from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.policy import Fair
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import WEIGHTS, ServiceClass, validate_services
from greensched.typing import ALL, REST

WRONG: list[tuple[str, Any]] = [
    ("name", 5), ("name", ""), ("reserve", -1), ("reserve", 8.0), ("reserve", True), ("cap", 0),
    ("cap", "8"), ("cap", REST), ("priority", "high"), ("priority", math.nan), ("weight", 0),
    ("weight", -1), ("weight", math.inf), ("weight", 1e-320), ("weight", 1e300),
    ("latency", 0), ("latency", "1"),
    ("checkpoint_interval", -1),
    ("preemptible", 1), ("max_wait_for_reserve", -0.1), ("max_wait_for_reserve", math.nan),
    ("max_waiting", -1),
    ("max_waiting", 1.5), ("quota", 0), ("quota", "8"), ("memory_bytes", -1),
    ("memory_bytes", 1e9), ("on_late", "drop"), ("on_late", None),
]  # fmt: skip


@pytest.mark.fault("B6")
@pytest.mark.parametrize(("field", "value"), WRONG, ids=repr)
def test_what_no_class_can_be_is_refused(field: str, value: object) -> None:
    """Each field is checked, and the message names the class, the field and what it was given."""
    service = dataclasses.replace(ServiceClass("decode"), **{field: value})
    with pytest.raises(InvalidRequest, match=rf"{field}="):
        validate_services([service])


def test_a_latency_in_milliseconds_is_refused() -> None:
    """50 is surely not seconds: the message gives the right number."""
    with pytest.raises(InvalidRequest, match=r"latency=50: .*in seconds \(0.05 for 50 ms\)"):
        validate_services([ServiceClass("decode", latency=50)])
    assert validate_services([ServiceClass("decode", latency=10)])


def test_a_cap_below_the_reserve_is_refused() -> None:
    """What is kept for a class is at most what it may have."""
    with pytest.raises(InvalidRequest, match="as its reserve"):
        validate_services([ServiceClass("decode", reserve=32, cap=16)])


@pytest.mark.fault("I13")
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_charges_of_any_weight_are_counted(weight: float) -> None:
    """With the smallest and the largest weight a class has finite tags; 1e-320 had none."""
    services = [ServiceClass("extreme", weight=weight), ServiceClass("plain")]
    scheduler = Scheduler([DeviceCells(size=8, count=1)], Fair(), 100, services=services)
    for start in range(0, 20, 2):
        for after, name in enumerate(("extreme", "plain")):
            (lease,) = scheduler.request(start + after, parse_sizes((8,)), service=name).grants
            scheduler.drained(start + after + 1, lease)
    stats = scheduler.services(0.0)
    assert [stats[name].sm_seconds for name in ("extreme", "plain")] == [80, 80]
    tags = {lease.class_state.start, lease.class_state.finish}
    assert all(map(math.isfinite, tags))
    assert lease.class_state.finish > lease.class_state.start


@pytest.mark.parametrize(
    "services", ["decode", 5, [5], np.array(5), [ServiceClass("a"), ServiceClass("a")]], ids=repr
)
def test_what_are_no_classes_are_refused(services: object) -> None:
    """Classes come as ServiceClass objects, each name once."""
    with pytest.raises(InvalidRequest, match="services="):
        validate_services(services)


def test_a_class_is_what_the_issue_says() -> None:
    """Name first, everything else by name, frozen, and ALL for no cap; it is a public name."""
    service = greensched.ServiceClass(
        "decode", reserve=32, cap=ALL, priority=10, weight=1, latency=0.050, preemptible=False
    )
    assert validate_services([service]) == (service,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        service.reserve = 8  # type: ignore[misc]
