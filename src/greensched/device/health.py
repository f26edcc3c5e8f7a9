"""Whether a device can be used: one object, which its streams and allocators share."""

from __future__ import annotations

from collections.abc import Callable

from greensched.errors import DeviceFault, DeviceLost, GreenschedError


class DeviceHealth:
    """What has ended the use of a device, if anything.

    Attributes:
        device: the device's ordinal, which faults are marked with.
        is_over: the device has failed, or its pool ended over unfinished work: no ticket is
            reached any more, and no memory comes back. One attribute for the hot paths.
        failure: the first device fault.
        closed_by: makes the error of a pool that was closed, or forked, over the device.
        on_failure: called with the first fault before it is recorded here. A pool records it for
            each of its devices, together with its own state.
    """

    __slots__ = ("closed_by", "device", "failure", "is_over", "on_failure")

    def __init__(self, device: int | None = None) -> None:
        self.device = device
        self.is_over = False
        self.failure: BaseException | None = None
        self.closed_by: Callable[[], GreenschedError] | None = None
        self.on_failure: Callable[[BaseException], object] | None = None

    def fail(self, error: BaseException) -> None:
        """Report a device fault. From any thread; only the first one counts."""
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
        """End the device's use without a fault: its pool was closed, or forked."""
        self.closed_by = closed_by
        self.is_over = True

    def error(self) -> GreenschedError:
        """Return what work is told that will never be done; a new one, for its traceback."""
        if self.failure is not None:
            return DeviceLost(self.failure)
        assert self.closed_by is not None, "nothing has ended this device"
        return self.closed_by()

    def check(self) -> None:
        """Raise `DeviceLost`, `PoolClosed` or `ForkedPool` where the device's use is over."""
        if self.is_over:
            raise self.error()
