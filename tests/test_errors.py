"""Errors: pickled whole, as multiprocessing and Ray send them; and what their messages say."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from greensched import errors

#: Arguments of the classes that are not made from a message.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "DeviceNotFound": (1, 1),
    "InvalidSize": (0,),
    "TooManySMs": (9, 8),
    "InvalidSplit": ((9, None), 8, "why", (8,)),
    "InvalidCombination": ("why",),
    "InvalidLaunch": ("grid", 9, 8),
    "ArgumentMismatch": ("kernel", "problem"),
    "CompileFailed": ("kernel", "sm_90", "log"),
    "NotSimulable": ("kernel", "cost"),
    "ReferenceFailed": ("kernel", ValueError("why")),
    "WrongDevice": ("buffer", 0, 1),
    "DeviceTaken": (0,),
    "WrongContext": ("stream", "event"),
    "CurrentElsewhere": ("context", "a", "b"),
    "HeldAcrossAwait": ("context", "a.py:1", "task", "a.py:2"),
    "NoLoop": (),
    "WouldDeadlock": (1, 2, 3),
    "QueueFull": (3, 0.5),
    "DeadlineExceeded": (0.5,),
    "FleetTimeout": (0.5,),
    "DeadlineImpossible": (2.0, 1.0),
    "NotSupported": ("what", "needs", "has"),
    "SocketUnavailable": ("pool.sock", "why"),
    "MissingPackage": ("what", "package", "extra"),
    "CUDAError": (1, "INVALID_VALUE", "call", "detail"),
    "OutOfMemory": ("call", 3, 2, 1),
    "DeviceFault": (700, "ILLEGAL_ADDRESS", "call"),
    "DeviceLost": (errors.DeviceFault(700, "ILLEGAL_ADDRESS", "call"),),
    "DeviceHung": ("spin", ("copy",), 0, 8, 1, "decode", "task", "a.py:1", 2.0, 1.0, 0.5),
    "PoolLost": ("pool", "why"),
    "VersionSkew": ("pool", 1, 2),
}
EVERY = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and value.__module__ == errors.__name__
]


def facts(error: BaseException) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(error).items()}


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_an_error_is_pickled_whole(kind: type[errors.GreenschedError]) -> None:
    """It comes back with its class, its message, its attributes and its notes."""
    error = kind(*ARGUMENTS.get(kind.__name__, ("said",)))
    error.add_note("a note")
    got = pickle.loads(pickle.dumps(error))
    assert type(got) is kind
    assert str(got) == str(error)
    assert str(error)
    assert facts(got) == facts(error)


def test_a_lost_device_says_which_and_why() -> None:
    """DeviceLost names the device and the first fault, and has both as attributes."""
    fault = errors.DeviceFault(700, "ILLEGAL_ADDRESS", "cuEventQuery")
    fault.device = 1
    lost = errors.DeviceLost(fault)
    assert str(lost).startswith("device 1 failed")
    assert str(fault) in str(lost)
    assert (lost.device, lost.cause, lost.__cause__) == (1, fault, fault)


def test_a_split_without_alternatives_says_so() -> None:
    """InvalidSplit says what to ask for instead, or that no split is possible."""
    assert "; ask for 8, 16" in str(errors.InvalidSplit((9, None), 24, "why", (8, 16)))
    assert "; no split is possible" in str(errors.InvalidSplit((9, None), 24, "why", ()))


@pytest.mark.parametrize("kind", [errors.PartitionClosed, errors.PoolClosed])
def test_a_closed_object_says_what_to_do(kind: type[errors.Closed]) -> None:
    """Only where it is closed: another state brings its own advice."""
    assert re.search(r"^this is closed: .*another$", str(kind("this")))
    assert str(kind("this", "closing")) == "this is closing"


def test_one_request_is_not_several() -> None:
    """A full queue of one, as in the tutorial, is told in the singular."""
    assert str(errors.QueueFull(1, 0.02)) == "1 request is waiting already; retry in 0.02 s"
    assert str(errors.QueueFull(2, 0.02)).startswith("2 requests are waiting")


def test_an_extra_is_installed_from_where_the_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command names a checkout's folder, or the installed package, and works there."""
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    for root in (checkout / "src", site):
        (root / "greensched").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    monkeypatch.setattr(errors, "__file__", str(checkout / "src/greensched/errors.py"))
    assert errors.install_command("plot") == f"pip install -e '{checkout}[plot]'"
    monkeypatch.setattr(errors, "__file__", str(site / "greensched/errors.py"))
    assert errors.install_command("plot") == "pip install 'greensched[plot]'"
