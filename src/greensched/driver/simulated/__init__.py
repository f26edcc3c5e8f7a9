"""The simulated driver: the driver interface in memory, with timing, faults and CUDA's rules.

It is used only on request, never as a fallback: `Pool(driver="simulated:h200")`, or `open` here for
options that a string cannot express (a clock, faults).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

from greensched.driver.simulated.device_models import (
    MEASURED,
    PRESETS,
    VERSIONS,
    DeviceModel,
    parse,
)
from greensched.driver.simulated.driver import SimulatedDriver, current_driver
from greensched.driver.simulated.faults import Crash, Fail, Fault, Hang, Slow
from greensched.driver.simulated.timeline import Span
from greensched.driver.simulated.virtual_clock import VirtualClock
from greensched.typing import Cost, Feature, T

P = ParamSpec("P")

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


def open(  # noqa: A001  the module is used by its name: simulated.open("h200")
    spec: str | Sequence[DeviceModel] = "h200",
    *,
    clock: VirtualClock | None = None,
    faults: Iterable[Fault] = (),
    without: Iterable[Feature] = (),
    strict_events: bool | None = None,
) -> SimulatedDriver:
    """Make a simulated machine.

    Args:
        spec: The devices and the CUDA version, such as `"h200"`, `"h200x2+l40s"` or `"h100@13.1"`;
            or device models, under CUDA 13.0.
        clock: A virtual clock. None: real time.
        faults: The faults to inject: `Fail`, `Slow`, `Hang`, `Crash`.
        without: Features that the machine lacks.
        strict_events: Whether an event can be recorded only on streams of its own context. None:
            depends on the version. 13.0 accepts any stream of the device, as measured on an H200;
            for other versions only the documented rule is known.

    Raises:
        InvalidRequest: A device or version is unknown; the message names the known ones.
    """
    devices, version = parse(spec) if isinstance(spec, str) else (list(spec), MEASURED)
    return SimulatedDriver(
        devices,
        version=version,
        clock=clock,
        faults=faults,
        without=without,
        strict_events=strict_events,
    )


def cost(how: float | Cost | Callable[P, Cost]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a callable for `partition.run` with its duration in a simulation.

    On a simulated driver's worker thread the time passes after the call. Elsewhere the decorator
    has no effect.

    Args:
        how: Seconds of the driver's clock; or a `Cost` for work on the partition's SMs, after the
            work submitted to them before, and beside other work there; or a function of the
            callable's arguments that returns a `Cost`.

    Raises:
        InvalidRequest: Raised by the call if `how` gives no valid cost.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            result = function(*args, **kwargs)
            driver = current_driver()
            if driver is not None:
                if isinstance(how, (int, float)):
                    driver.clock.sleep(int(how * 1e9))
                else:
                    name = getattr(function, "__name__", "call")
                    driver.occupy(name, how if isinstance(how, Cost) else how(*args, **kwargs))
            return result

        return timed

    return decorate
