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
from greensched.driver.types import Mailbox
from greensched.errors import DeviceTaken


class Forkable(Protocol):
    """What is told about a fork: a pool's lifecycle."""

    def forked(self) -> None: ...


_pools: weakref.WeakSet[Forkable] = weakref.WeakSet()
_claimed: dict[tuple[int, int], Driver] = {}
#: Claimed devices whose pool was collected and is being closed, and what waits for the end of that.
_ending: set[tuple[int, int]] = set()
_waiting: list[tuple[tuple[int, int], Mailbox[None]]] = []
_lock = threading.Lock()


def claim_device(driver: Driver, ordinal: int) -> None:
    """Record that a pool uses a device. Blocks while a pool that was collected is closed.

    Raises:
        DeviceTaken: another pool uses it.
    """
    key = id(driver), ordinal
    while True:
        with _lock:
            if key not in _claimed:
                _claimed[key] = driver
                return
            if key not in _ending:
                raise DeviceTaken(ordinal)
            released: Mailbox[None] = driver.create_mailbox()
            _waiting.append((key, released))
        released.get()


def end_claims(driver: Driver, ordinals: Sequence[int]) -> None:
    """Record that devices will be released soon. Takes no lock, for destructors."""
    _ending.update((id(driver), ordinal) for ordinal in ordinals)


def release_devices(driver: Driver, ordinals: Sequence[int]) -> None:
    """Record that no pool uses these devices any more."""
    with _lock:
        for ordinal in ordinals:
            key = id(driver), ordinal
            _claimed.pop(key, None)
            _ending.discard(key)
            for entry in [one for one in _waiting if one[0] == key]:
                _waiting.remove(entry)
                entry[1].put(None)


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
