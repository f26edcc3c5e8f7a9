"""The simulated driver: the port in memory, with time, faults, and the answers of a real driver.

It is asked for, never fallen back to: `Pool(driver="simulated:h200")`, or `open` here for what a
string cannot say (a clock, faults).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from greensched.driver.simulated.base import checked, current_driver
from greensched.driver.simulated.device_models import (
    MEASURED,
    PRESETS,
    VERSIONS,
    DeviceModel,
    parse,
)
from greensched.driver.simulated.faults import Crash, Fail, Fault, Hang, Slow
from greensched.driver.simulated.modules import Code
from greensched.driver.simulated.real_clock import RealClock
from greensched.driver.simulated.timeline import Span
from greensched.driver.simulated.virtual_clock import VirtualClock
from greensched.typing import Cost, Feature

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "PRESETS",
    "VERSIONS",
    "Crash",
    "DeviceModel",
    "Fail",
    "Fault",
    "Hang",
    "SimulatedDriver",
    "Slow",
    "Span",
    "VirtualClock",
    "cost",
    "open",
]


@checked
class SimulatedDriver(Code):
    """Every verb of the port, in memory."""


def open(  # noqa: A001  the module is used by its name: simulated.open("h200")
    spec: str | Sequence[DeviceModel] = "h200",
    *,
    clock: VirtualClock | None = None,
    faults: Iterable[Fault] = (),
    without: Iterable[Feature] = (),
    strict_events: bool | None = None,
) -> SimulatedDriver:
    """A new simulated machine.

    Args:
        spec: `"h200"`, `"h200x2+l40s"`, `"h100@13.0"` (a driver version), or device models.
        clock: a virtual clock; None is real time.
        faults: what shall go wrong: `Fail`, `Slow`, `Hang`, `Crash`.
        without: features it shall lack.
        strict_events: an event can be recorded only on streams of the context it was made in. None:
            by the version. 13.0 takes any stream of the device, as an H200 was seen to do; of the
            others only that rule is known.

    Raises:
        InvalidRequest: an unknown device or version; the message names those there are.
    """
    devices, version = parse(spec) if isinstance(spec, str) else (list(spec), MEASURED)
    return SimulatedDriver(
        devices,
        version=version,
        clock=clock or RealClock(),
        faults=faults,
        without=without,
        strict_events=version != MEASURED if strict_events is None else strict_events,
    )


def cost(how: float | Cost | Callable[P, Cost]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a callable for `partition.run` with the time it takes when simulated.

    On a simulated driver's worker thread, what it says comes behind the call; anywhere else the
    callable is called as it is.

    Args:
        how: seconds of the driver's clock, or a `Cost`: work that takes as long as that says on the
            partition's SMs, behind what was submitted to them before, and beside what else runs
            there. Or a function of the callable's arguments that gives one.

    Raises:
        InvalidRequest: in the call: a cost that is none.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            result = function(*args, **kwargs)
            driver = current_driver()
            if isinstance(driver, Code):
                if isinstance(how, (int, float)):
                    driver.clock.sleep(int(how * 1e9))
                else:
                    name = getattr(function, "__name__", "call")
                    driver.occupy(name, how if isinstance(how, Cost) else how(*args, **kwargs))
            return result

        return timed

    return decorate
