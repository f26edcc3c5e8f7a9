"""Whether a device can be used: one object that its streams and allocators share."""

from __future__ import annotations

from collections.abc import Callable

from greensched.errors import DeviceFault, DeviceLost, GreenschedError


class DeviceHealth:
    """What has ended the use of a device, if anything has.

    Attributes:
        device: The device's ordinal, for marking faults.
        is_over: Whether the device has failed, or its pool ended over unfinished work. Then no
            ticket is reached any more, and no memory is reused. One attribute for the hot paths.
        failure: The first device fault.
        closed_by: Makes the error after the pool over the device was closed or forked.
        on_failure: Called with the first fault before it is recorded here. A pool records the fault
            for all its devices, together with its own state.
    """

    __slots__ = ("closed_by", "device", "failure", "is_over", "on_failure")

    def __init__(self, device: int | None = None) -> None:
        self.device = device
        self.is_over = False
        self.failure: BaseException | None = None
        self.closed_by: Callable[[], GreenschedError] | None = None
        self.on_failure: Callable[[BaseException], object] | None = None

    def fail(self, error: BaseException) -> None:
        """Report a device fault. From any thread. Only the first fault counts."""
        if self.is_over:
            return
        if isinstance(error, DeviceFault) and error.device is None:
            error.device = self.device
        if self.on_failure is not None:
            self.on_failure(error)
        if not self.is_over:
            self.record(error)

    def record(self, error: BaseException) -> None:
        """Record a device fault, without calling `on_failure`."""
        self.failure = error
        self.is_over = True

    def close(self, closed_by: Callable[[], GreenschedError]) -> None:
        """End the device's use without a fault, because its pool was closed or forked."""
        self.closed_by = closed_by
        self.is_over = True

    def error(self) -> GreenschedError:
        """Return the error for work that will never be done, a new one for its own traceback."""
        if self.failure is not None:
            return DeviceLost(self.failure)
        assert self.closed_by is not None, "nothing has ended this device"
        return self.closed_by()

    def check(self) -> None:
        """Raise `DeviceLost`, `PoolClosed` or `ForkedPool` if the device is no longer used."""
        if self.is_over:
            raise self.error()
