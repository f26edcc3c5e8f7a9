"""Fault scripts: which calls and kernels fail. Counts begin at 1 and never restart."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from greensched.driver.blocking import DRIVER_CALLS, Blocking
from greensched.driver.status import STATUS_NAMES, STICKY
from greensched.errors import InvalidRequest

#: The names of functions that `bind_launch` and `bind_mark` return, whose calls can fail, too.
BOUND = ("launch", "mark")


def _status(status: int | str) -> int:
    """Return a status that is given by number or by name (`"OUT_OF_MEMORY"`)."""
    if isinstance(status, int):
        return status
    for number, name in STATUS_NAMES.items():
        if name == status:
            return number
    known = ", ".join(STATUS_NAMES.values())
    raise InvalidRequest(f"status {status!r} does not exist: give a number, or one of {known}")


def _check_name(call: str, calls: Iterable[str], what: str) -> None:
    if call not in calls:
        raise InvalidRequest(f"{call!r} is not a {what}: give one of {', '.join(calls)}")


@dataclass(frozen=True, slots=True)
class Fail:
    """The `nth` to the `last` call of a driver call does nothing and returns a status.

    `call` is the name of a method of `Driver`, or `launch` or `mark` for the function that
    `bind_launch` or `bind_mark` returned.
    """

    call: str
    nth: int = 1
    status: int | str = "INVALID_VALUE"
    last: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.call, (*DRIVER_CALLS, *BOUND), "driver call")
        _status(self.status)


@dataclass(frozen=True, slots=True)
class Slow:
    """Every call of a driver call that may block takes this many seconds longer."""

    call: str
    seconds: float

    def __post_init__(self) -> None:
        slow = [c for c, traits in DRIVER_CALLS.items() if traits.blocking is not Blocking.NEVER]
        _check_name(self.call, slow, "driver call that may block")


@dataclass(frozen=True, slots=True)
class Hang:
    """The `nth` start of a kernel never ends."""

    kernel: str
    nth: int = 1


@dataclass(frozen=True, slots=True)
class Crash:
    """The `nth` start of a kernel ends in a sticky device fault: the device is lost."""

    kernel: str
    nth: int = 1
    status: int | str = "ILLEGAL_ADDRESS"

    def __post_init__(self) -> None:
        if _status(self.status) not in STICKY:
            raise InvalidRequest(
                f"a kernel cannot crash with {self.status!r}: give a sticky status, such as "
                "ILLEGAL_ADDRESS"
            )


Fault = Fail | Slow | Hang | Crash


class FaultScript:
    """The faults of one driver, and its counts of calls and kernel starts."""

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
        """Add a fault. Its count includes earlier calls and starts."""
        match fault:
            case Fail(call=call):
                self._fails.setdefault(call, []).append(fault)
            case Slow(call=call, seconds=seconds):
                self._slow[call] = seconds
            case Hang(kernel=kernel, nth=nth) | Crash(kernel=kernel, nth=nth):
                self._kernels[kernel, nth] = fault

    def call(self, name: str) -> tuple[int | None, float]:
        """Count a call; return (the status it must return or None, the seconds it must take)."""
        with self._lock:
            nth = self.calls[name] = self.calls[name] + 1
        if not self._fails and not self._slow:  # the usual case, made fast
            return None, 0.0
        for fail in self._fails.get(name, ()):
            if fail.nth <= nth <= (fail.last or fail.nth):
                return _status(fail.status), self._slow.get(name, 0.0)
        return None, self._slow.get(name, 0.0)

    def start(self, kernel: str) -> Hang | int | None:
        """Count a kernel's start; return a hang, the status it crashes with, or None."""
        with self._lock:
            self.starts[kernel] += 1
            fault = self._kernels.get((kernel, self.starts[kernel]))
        return _status(fault.status) if isinstance(fault, Crash) else fault
