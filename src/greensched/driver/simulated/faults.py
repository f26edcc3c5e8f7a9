"""Fault scripts: what shall go wrong, and when. Each counts from 1, over the driver's life."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from greensched.driver.blocking import DRIVER_CALLS, Blocking
from greensched.driver.status import STATUS_NAMES, STICKY
from greensched.errors import InvalidRequest

#: What `bind_launch` and `bind_mark` return: each call of those counts and can fail too.
BOUND = ("launch", "mark")


def _status(status: int | str) -> int:
    """A status by number, or by name (`"OUT_OF_MEMORY"`)."""
    if isinstance(status, int):
        return status
    for number, name in STATUS_NAMES.items():
        if name == status:
            return number
    raise InvalidRequest(f"no status {status!r}: there is {', '.join(STATUS_NAMES.values())}")


def _one_of(verb: str, verbs: Iterable[str], what: str) -> None:
    if verb not in verbs:
        raise InvalidRequest(f"no {what} {verb!r}: there is {', '.join(verbs)}")


@dataclass(frozen=True, slots=True)
class Fail:
    """The `nth` call of a verb does nothing and answers a status (`last`: up to which call).

    Beside the verbs of the port there is `launch` and `mark`: a call of what `bind_launch` and
    `bind_mark` return.
    """

    verb: str
    nth: int = 1
    status: int | str = "INVALID_VALUE"
    last: int | None = None

    def __post_init__(self) -> None:
        _one_of(self.verb, (*DRIVER_CALLS, *BOUND), "driver verb")
        _status(self.status)


@dataclass(frozen=True, slots=True)
class Slow:
    """Every call of a verb that may block takes so many seconds more."""

    verb: str
    seconds: float

    def __post_init__(self) -> None:
        slow = [verb for verb, mark in DRIVER_CALLS.items() if mark.blocking is not Blocking.NEVER]
        _one_of(self.verb, slow, "driver verb that may block")


@dataclass(frozen=True, slots=True)
class Hang:
    """The `nth` start of a kernel never ends."""

    kernel: str
    nth: int = 1


@dataclass(frozen=True, slots=True)
class Crash:
    """The `nth` start of a kernel ends in a device fault (a sticky one: nothing works after it)."""

    kernel: str
    nth: int = 1
    status: int | str = "ILLEGAL_ADDRESS"

    def __post_init__(self) -> None:
        if _status(self.status) not in STICKY:
            raise InvalidRequest(f"a kernel cannot end in {self.status!r}: it is not sticky")


Fault = Fail | Slow | Hang | Crash


class Script:
    """The faults of one driver, and the counts they go by."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.calls: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self._fails: dict[str, list[Fail]] = {}
        self._slow: dict[str, float] = {}
        self._kernels: dict[tuple[str, int], Hang | Crash] = {}
        self._lock = threading.Lock()
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Adds one more fault; its count includes what has happened already."""
        match fault:
            case Fail(verb=verb):
                self._fails.setdefault(verb, []).append(fault)
            case Slow(verb=verb, seconds=seconds):
                self._slow[verb] = seconds
            case Hang(kernel=kernel, nth=nth) | Crash(kernel=kernel, nth=nth):
                self._kernels[kernel, nth] = fault

    def call(self, verb: str) -> tuple[int | None, float]:
        """Counts a call; (the status it must answer or None, the seconds it must take)."""
        with self._lock:
            self.calls[verb] += 1
            nth = self.calls[verb]
        for fail in self._fails.get(verb, ()):
            if fail.nth <= nth <= (fail.last or fail.nth):
                return _status(fail.status), self._slow.get(verb, 0.0)
        return None, self._slow.get(verb, 0.0)

    def start(self, kernel: str) -> Hang | int | None:
        """Counts a kernel's start: a hang, the status it crashes with, or None."""
        with self._lock:
            self.starts[kernel] += 1
            fault = self._kernels.get((kernel, self.starts[kernel]))
        return _status(fault.status) if isinstance(fault, Crash) else fault
