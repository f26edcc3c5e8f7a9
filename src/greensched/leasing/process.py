"""What holds for a whole process: one pool to a device, and none in a forked child.

CUDA does not survive a fork, and a lock may be held by a thread that a child does not have: so in
a child each pool is told at once, before anything else runs there.
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
    """A pool."""

    def forked(self) -> None: ...


_pools: weakref.WeakSet[Forkable] = weakref.WeakSet()
_taken: dict[tuple[int, int], Driver] = {}
_lock = threading.Lock()


def take_device(driver: Driver, ordinal: int) -> None:
    """Notes that a pool has a device.

    Raises:
        DeviceTaken: another one has it.
    """
    with _lock:
        if (id(driver), ordinal) in _taken:
            raise DeviceTaken(ordinal)
        _taken[id(driver), ordinal] = driver


def release_devices(driver: Driver, ordinals: Sequence[int]) -> None:
    """Notes that nobody has them any more."""
    with _lock:
        for ordinal in ordinals:
            _taken.pop((id(driver), ordinal), None)


def on_fork(pool: Forkable) -> None:
    """Has a pool told, by `forked`, in each forked child."""
    _pools.add(pool)


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    for pool in tuple(_pools):
        pool.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
