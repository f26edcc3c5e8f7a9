"""Facts of a whole process: one pool to a device, and no pool in a forked child.

CUDA does not survive a fork, and a thread that the child does not have may hold a lock, so each
pool is told in the child before anything else runs there.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from greensched.driver.interface import Driver
from greensched.errors import DeviceTaken


class Forkable(Protocol):
    """What is told about a fork: a pool's lifecycle."""

    def forked(self) -> None: ...


_pools: weakref.WeakSet[Forkable] = weakref.WeakSet()
_claimed: dict[tuple[int, int], Driver] = {}
_lock = threading.Lock()


def claim_device(driver: Driver, ordinal: int) -> None:
    """Record that a pool uses a device.

    Raises:
        DeviceTaken: another pool uses it.
    """
    with _lock:
        if (id(driver), ordinal) in _claimed:
            raise DeviceTaken(ordinal)
        _claimed[id(driver), ordinal] = driver


def release_devices(driver: Driver, ordinals: Sequence[int]) -> None:
    """Record that no pool uses these devices any more."""
    with _lock:
        for ordinal in ordinals:
            _claimed.pop((id(driver), ordinal), None)


def on_fork(pool: Forkable) -> None:
    """Call `forked` of a pool in each forked child."""
    _pools.add(pool)


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    for pool in tuple(_pools):
        pool.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
