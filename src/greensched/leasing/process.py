"""Rules for whole processes: one pool per device on this machine, and none in a forked child.

CUDA does not survive a fork, and a thread that does not exist in the child may hold a lock. So each
pool is notified in the child before anything else runs there.

Two processes' pools on one GPU would each lease all of its SMs, and the GPU would switch between
them. So a pool locks a file that is named by the GPU's UUID. The kernel releases the lock when the
process ends, in whatever way; a forked child does not inherit it. The lock has no effect on other
users and other containers.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from greensched.driver import mps
from greensched.driver.interface import Driver
from greensched.driver.types import Mailbox
from greensched.errors import DeviceTaken

logger = logging.getLogger("greensched")


class Forkable(Protocol):
    """An object that is notified of a fork: a pool's lifecycle."""

    def forked(self) -> None: ...


_pools: weakref.WeakSet[Forkable] = weakref.WeakSet()
_claimed: dict[tuple[int, int], Driver] = {}
#: Claimed devices of collected pools that are being closed. A claim waits for their end.
_ending: set[tuple[int, int]] = set()
_waiting: list[tuple[tuple[int, int], Mailbox[None]]] = []
_lock = threading.Lock()
#: The locked files of claimed GPUs.
_files: dict[tuple[int, int], int] = {}


def claim_device(driver: Driver, ordinal: int, uuid: str) -> None:
    """Record that a pool uses a device. Blocks while a collected pool on it is closed.

    Raises:
        DeviceTaken: Another pool uses it, in this or another process.
    """
    key = id(driver), ordinal
    while True:
        with _lock:
            if key not in _claimed:
                if driver.needs_binary and not mps.is_running():
                    _lock_gpu(key, uuid)
                _claimed[key] = driver
                return
            if key not in _ending:
                raise DeviceTaken(ordinal)
            released: Mailbox[None] = driver.create_mailbox()
            _waiting.append((key, released))
        released.get()


def _lock_gpu(key: tuple[int, int], uuid: str) -> None:
    """Lock a GPU for this process. Raises `DeviceTaken` if another process has it.

    If no file can be locked, log a warning and continue.
    """
    try:
        path = _lock_path(uuid)
        own_folder(path.parent)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        logger.warning("other processes' pools on GPU %s are not looked for: %s", uuid, error)
        return
    try:
        # Locked per process: forked children, which may outlive this one, would share a `flock`.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(file, 20)
        os.close(file)
        raise DeviceTaken(key[1], int(owner or b"0")) from None
    os.truncate(file, 0)
    os.write(file, str(os.getpid()).encode())
    _files[key] = file


def _lock_path(uuid: str) -> Path:
    return Path(tempfile.gettempdir(), f"greensched-{os.geteuid()}", f"{uuid}.lock")


def other_holder(uuid: str) -> int | None:
    """Return the other process of this user whose pool has a GPU; 0 if its ID is unknown.

    None means that no such process has it, or that MPS runs. Only for a process without a pool: the
    kernel releases every lock of a process on a file as soon as the process closes that file.
    """
    if mps.is_running():
        return None
    try:
        file = os.open(_lock_path(uuid), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        os.lockf(file, os.F_TEST, 0)
    except OSError:
        return int(os.read(file, 20) or b"0")
    finally:
        os.close(file)
    return None


def own_folder(folder: Path) -> Path:
    """Return a folder; create it with mode 0700 if it is missing.

    Raises:
        OSError: It cannot be created, belongs to another user, or is not a folder.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise OSError(f"{folder} is not a folder that this user owns")
    return folder


def end_claims(driver: Driver, ordinals: Sequence[int]) -> None:
    """Record that devices will be released soon. Takes no lock, so destructors may call it."""
    _ending.update((id(driver), ordinal) for ordinal in ordinals)


def release_devices(driver: Driver, ordinals: Sequence[int]) -> None:
    """Record that no pool uses these devices any more."""
    with _lock:
        for ordinal in ordinals:
            key = id(driver), ordinal
            _claimed.pop(key, None)
            _ending.discard(key)
            if key in _files:
                os.close(_files.pop(key))
            for entry in [claim for claim in _waiting if claim[0] == key]:
                _waiting.remove(entry)
                entry[1].put(None)


def on_fork(pool: Forkable) -> None:
    """Call a pool's `forked` in each forked child."""
    _pools.add(pool)


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    for pool in tuple(_pools):
        pool.forked()


os.register_at_fork(after_in_child=_forked)
