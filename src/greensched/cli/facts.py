"""What `info` and `doctor` report about a driver and its devices. Creates no context."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greensched.driver.interface import Driver

Facts = dict[str, Any]


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def software() -> Facts:
    """Return the versions of greensched and the software under it."""
    return {
        "greensched": installed("greensched"),
        "python": platform.python_version(),
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "platform": platform.platform(),
        "cuda-bindings": installed("cuda-bindings"),
        "numpy": installed("numpy"),
    }


def of_driver(driver: Driver) -> Facts:
    """Return the version and features of an initialised driver."""
    from greensched.typing import Feature

    return {
        "name": driver.name,
        "cuda": ".".join(map(str, driver.version)),
        "features": {feature.name.lower(): driver.supports(feature) for feature in Feature},
    }


def of_device(driver: Driver, ordinal: int) -> Facts:
    """Return what a device is, and how it can be split. Allocates nothing on the device."""
    from greensched.typing import Feature

    facts = driver.device_facts(ordinal)
    workqueues = None
    if driver.supports(Feature.WORKQUEUES):
        queue = driver.workqueue_facts(driver.device_workqueue(ordinal))
        workqueues = {"scope": queue.sharing_scope, "concurrency": queue.concurrency_limit}
    return {
        "device": ordinal,
        "name": facts.name,
        "uuid": facts.uuid,
        "sms": facts.sm_count,
        "memory_bytes": facts.memory_bytes,
        "l2_bytes": facts.l2_bytes,
        "arch": facts.arch,
        "copy_engines": facts.copy_engines,
        "coscheduled": _cells(driver, ordinal, fine=False),
        "fine": _cells(driver, ordinal, fine=True),
        "workqueues": workqueues,
    }


def _cells(driver: Driver, ordinal: int, *, fine: bool) -> Facts:
    whole = driver.device_resource(ordinal)
    least = 1 if fine else max(1, driver.resource_facts(whole).min_partition_size)
    groups, rest = driver.split_by_count(whole, None, least, ignore_coscheduling=fine)
    return {
        "cells": len(groups),
        "sms_each": driver.resource_facts(groups[0]).sm_count,
        "sms_over": 0 if rest is None else driver.resource_facts(rest).sm_count,
    }
