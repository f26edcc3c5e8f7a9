"""What users ask of a pool, read and checked before anything is queued."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from greensched._validation import as_float
from greensched.device.buffers import Buffer
from greensched.errors import InvalidRequest
from greensched.kernels import Kernel
from greensched.leasing.wish import LeaseRequest
from greensched.scheduling.cells import parse_sizes
from greensched.scheduling.requests import Duration
from greensched.scheduling.services import ServiceClass
from greensched.typing import Size

#: Latencies told at once, at most: counts of them are still whole numbers as floats.
MOST_AT_ONCE = 10**9
#: Wishes that are kept: one for each size of each class, of which few are asked for.
SHARED = 1024


class RequestParser:
    """What a pool is asked for.

    Args:
        services: its classes.
    """

    def __init__(self, services: Sequence[ServiceClass]) -> None:
        self.services = services
        #: What was asked for by a size, and a class or none, as most is: one wish for each.
        self._shared: dict[tuple[int, str | None], LeaseRequest] = {}

    def one(
        self,
        sms: Size,
        service: str | None,
        device: int | None,
        deadline: float | None,
        duration: Duration | None,
        near: Buffer | None,
    ) -> LeaseRequest:
        """Reads what `Pool.partition` is given; a number of SMs and a class alone, only once.

        Raises:
            InvalidSize, InvalidRequest: what can never be right.
        """
        if not (
            type(sms) is int  # True is no size
            and (service is None or type(service) is str)
            and device is None
            and deadline is None
            and duration is None
            and near is None
        ):
            return self.several((sms,), service, device, deadline, duration, near)
        found = self._shared.get((sms, service))
        if found is None:
            found = self.several((sms,), service)
            if len(self._shared) < SHARED:
                found.is_shared = True
                self._shared[sms, service] = found
        return found

    def several(
        self,
        sizes: tuple[Size, ...],
        service: str | None = None,
        device: int | None = None,
        deadline: float | None = None,
        duration: Duration | None = None,
        near: Buffer | None = None,
    ) -> LeaseRequest:
        """Reads what `Pool.partitions` is given. Raises as `one`."""
        if device is not None and (type(device) is not int or device < 0):
            raise InvalidRequest(f"device={device!r} is no ordinal of a device")
        if service is not None:
            self._check_known(service)
        until = checked_deadline(deadline)
        if near is not None and not isinstance(near, Buffer):
            raise InvalidRequest(
                f"near={near!r}: give a Buffer, to be on its device where it can be"
            )
        where = None if near is None else near.device
        return LeaseRequest(
            parse_sizes(sizes),
            sizes,
            device,
            service or "",
            until,
            checked_duration(duration),
            where,
        )

    def check_observed(self, service: object, latency: object, count: object) -> None:
        """Checks what `Pool.observe` is told.

        Raises:
            InvalidRequest: no such class, or what is no latency or count.
        """
        self._check_known(service)
        if not 0 <= as_float(latency) < math.inf:
            raise InvalidRequest(f"latency={latency!r}: give seconds, at least 0")
        if type(count) is not int or not 1 <= count <= MOST_AT_ONCE:
            raise InvalidRequest(
                f"count={count!r}: give how many had it, at least 1 and at most {MOST_AT_ONCE}"
            )

    def _check_known(self, service: object) -> None:
        names = [one.name for one in self.services]
        if not (isinstance(service, str) and service in names):  # no array: that is no truth value
            known = ", ".join(names) or "none"
            raise InvalidRequest(
                f"no service {service!r}: this pool has {known} (name it in Pool(services=[...]))"
            )


def checked_duration(duration: object) -> Duration | None:
    """Seconds that the work takes, or a curve of them."""
    if duration is None:
        return None
    methods = (getattr(duration, method, None) for method in ("at", "observe"))
    if not isinstance(duration, type) and all(map(callable, methods)):
        return duration  # type: ignore[return-value]  # what has both is a curve
    number = as_float(duration)
    if not 0 < number < math.inf:
        raise InvalidRequest(
            f"duration={duration!r}: give seconds, more than 0, or a curve, with `at` and `observe`"
        )
    return number


def checked_deadline(deadline: object) -> float | None:
    """Seconds from now."""
    if deadline is None:
        return None
    until = as_float(deadline)
    if not until > 0:
        raise InvalidRequest(f"deadline={deadline!r}: give the seconds from now, more than 0")
    return until


def one_of(name: str, value: object, known: tuple[object, ...]) -> object:
    """An option that is one of a few."""
    if not any(value is one or (isinstance(value, str) and value == one) for one in known):
        raise InvalidRequest(f"{name}={value!r}: give {' or '.join(map(repr, known))}")
    return value


def kernels(prepare: object) -> tuple[Kernel, ...]:
    """Kernels, each once."""
    given = tuple(prepare) if isinstance(prepare, Iterable) else (prepare,)
    if not all(isinstance(kernel, Kernel) for kernel in given):
        raise InvalidRequest(f"prepare={prepare!r}: give kernels, such as [kernels.saxpy]")
    return tuple(dict.fromkeys(given))


def ordinals(devices: object) -> tuple[int, ...]:
    """Ordinals of devices, each once; another library's device says its own."""
    given = tuple(devices) if isinstance(devices, Iterable) else ()
    chosen = tuple(getattr(device, "device_id", device) for device in given)
    whole = all(type(ordinal) is int and ordinal >= 0 for ordinal in chosen)
    if not chosen or not whole or len(set(chosen)) != len(chosen):
        raise InvalidRequest(
            f"devices={devices!r}: give the ordinals, each once and at least one, such as [0, 1]"
        )
    return chosen
