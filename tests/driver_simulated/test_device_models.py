"""Simulated machines by name, and the facts of their devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from greensched import driver
from greensched.driver import simulated
from greensched.driver.simulated import PRESETS
from greensched.driver.simulated.device_models import even, parse
from greensched.errors import CUDAError, InvalidRequest

from .machine import Machine

#: Vendors' data sheets: SMs, compute capability, threads on an SM at once.
KNOWN = {
    "h200": (132, (9, 0), 2048),
    "h100": (132, (9, 0), 2048),
    "h20": (78, (9, 0), 2048),
    "gh200": (132, (9, 0), 2048),
    "a100": (108, (8, 0), 2048),
    "l40s": (142, (8, 9), 1536),
    "b200": (148, (10, 0), 2048),
    "rtx4090": (128, (8, 9), 1536),
    "rtx5090": (170, (12, 0), 1536),
    "rtxpro6000": (188, (12, 0), 1536),
    "t4": (40, (7, 5), 1024),
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_the_device_it_is_named_after(name: str) -> None:
    """Every preset has its device's SMs and compute capability, in whole TPCs."""
    sms, capability, threads = KNOWN[name]
    model = PRESETS[name]
    facts = model.facts(3)
    assert (facts.sm_count, facts.compute_capability, facts.ordinal) == (sms, capability, 3)
    assert facts.arch == f"sm_{capability[0]}{capability[1]}"
    assert all(gpc % 2 == 0 and gpc > 0 for gpc in model.gpcs)
    assert facts.memory_bytes == model.memory_bytes > 2**30
    assert facts.max_threads_per_sm == threads


def test_presets_say_which_they_are() -> None:
    """UUIDs are unique, and names say that the devices are simulated."""
    facts = [PRESETS["h200"].facts(i) for i in range(2)]
    assert facts[0].uuid != facts[1].uuid
    assert all("Simulated" in each.name for each in facts)


@pytest.mark.parametrize(("sms", "gpcs"), [(142, 12), (108, 7), (128, 11), (40, 5), (2, 1)])
def test_an_even_layout_is_even(sms: int, gpcs: int) -> None:
    """GPCs differ by one TPC at most."""
    layout = even(sms, gpcs)
    assert (sum(layout), len(layout)) == (sms, gpcs)
    assert max(layout) - min(layout) in (0, 2)


@pytest.mark.parametrize(
    ("spec", "names", "version"),
    [
        ("h200", ["H200"], (13, 0)),
        ("H200 ", ["H200"], (13, 0)),
        ("h200x2+l40s", ["H200", "H200", "L40S"], (13, 0)),
        ("rtx4090", ["RTX 4090"], (13, 0)),
        ("rtx4090x3", ["RTX 4090"] * 3, (13, 0)),
        ("h100@13.0", ["H100 SXM"], (13, 0)),
        ("a100 + t4@13.1", ["A100 SXM", "T4"], (13, 1)),
        ("h200x10@13.4", ["H200"] * 10, (13, 4)),
    ],
)
def test_a_machine_by_its_name(spec: str, names: list[str], version: tuple[int, int]) -> None:
    """A name gives the devices, their numbers, and the driver's version."""
    models, found = parse(spec)
    assert ([model.name for model in models], found) == (names, version)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "is not a simulated device"),
        ("h300", "no simulated device 'h300': give one of h200"),
        ("h200x0", "no simulated device"),
        ("h200x", "no simulated device"),
        ("h200x-1", "no simulated device"),
        ("h200+", "no simulated device"),
        ("rtx", "no simulated device"),
        ("@13.0", "is not a simulated device"),
        ("h200@", "is not a simulated device"),
        ("h200@13", "is not a simulated device"),
        ("h200@13.0@13.1", "is not a simulated device"),
        ("h200x" + "9" * 5000, "no simulated device"),
        ("h200@13." + "9" * 5000, "is not a simulated device"),
        ("h200@11.8", r"no simulated CUDA 11\.8: give one of 13\.0"),
    ],
)
def test_a_name_that_is_none_is_refused(spec: str, message: str) -> None:
    """The error lists the names."""
    with pytest.raises(InvalidRequest, match=message):
        parse(spec)


@pytest.mark.fault("I13")
@pytest.mark.parametrize("spec", ["h200x99999", "h200x65", "h200x60+t4x5", "h200x999999999"])
def test_a_machine_has_no_more_devices_than_a_host(spec: str) -> None:
    """Too many devices are refused with the limit before any is made."""
    with pytest.raises(InvalidRequest, match="a simulated machine has at most 64"):
        parse(spec)
    assert len(parse("h200x60+t4x4")[0]) == 64


def test_driver_open_makes_simulated_machines() -> None:
    """`driver.open` takes the same names and makes a new machine each time."""
    opened = driver.open("simulated:h200x2@13.0")
    opened.initialise()
    assert (opened.name, opened.version, opened.device_count()) == ("simulated", (13, 0), 2)
    assert driver.open("simulated:h200") is not driver.open("simulated:h200")
    assert driver.open(opened) is opened
    opened.close()


def test_a_machine_of_ones_own_models() -> None:
    """`open` takes models, even of devices that do not exist."""
    tiny = replace(PRESETS["t4"], name="tiny", gpcs=(4, 2))
    opened = simulated.open([tiny, PRESETS["h200"]])
    opened.initialise()
    assert [opened.device_facts(i).sm_count for i in range(2)] == [6, 132]
    opened.close()


def test_device_facts(make: Callable[..., Machine]) -> None:
    """Facts are returned for existing devices only."""
    machine = make("h200+l40s")
    assert machine.driver.device_facts(1).name == "Simulated L40S"
    for ordinal in (-1, 2):
        with pytest.raises(CUDAError, match="INVALID_DEVICE"):
            machine.driver.device_facts(ordinal)
        with pytest.raises(CUDAError, match="INVALID_DEVICE"):
            machine.driver.retain_primary(ordinal)
        with pytest.raises(CUDAError, match="INVALID_DEVICE"):
            machine.driver.device_resource(ordinal)
