"""What exporters of metrics read of a pool: its state, its statistics, and its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from greensched import Device, LeaseInfo, Pool, PoolStatistics
from greensched.errors import PoolClosed
from greensched.integrations.health import fault_of


@dataclass(slots=True)
class LeasesReading:
    """How many leases are in one state, and for how many seconds the oldest has been."""

    count: int = 0
    oldest: float = 0.0


@dataclass(slots=True)
class DeviceReading:
    """A device at one moment.

    Attributes:
        sms: SMs by state: `free`, `leased`, or `draining` until the work of an ended lease is done.
        leases: by service class, and state: `used` or `draining`.
    """

    device: Device
    is_up: bool
    sms: dict[str, int]
    leases: dict[tuple[str, str], LeasesReading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolReading:
    """A pool at one moment.

    Attributes:
        fault: why the pool did not open, or what ended it.
        statistics: None until it is open; then there are no `devices`, either.
    """

    is_ready: bool
    fault: BaseException | None
    statistics: PoolStatistics | None
    devices: tuple[DeviceReading, ...] = ()

    @property
    def fault_labels(self) -> tuple[str, str]:
        """The name of the fault's class, and that of the driver's status, or ""."""
        return type(self.fault).__name__, getattr(self.fault, "name", "")


def read(pool: Pool) -> PoolReading:
    """Read a pool, and check its devices. Never waits; on any thread."""
    fault = fault_of(pool) or pool.opening_error
    try:
        statistics, leases = pool.statistics(), pool.leases()
    except PoolClosed:  # it is not open yet
        return PoolReading(pool.is_ready, fault, None)
    lost = getattr(fault, "device", None)
    devices = tuple(
        _read_device(
            device,
            [lease for lease in leases if lease.device == device.ordinal],
            is_up=fault is None or lost not in (None, device.ordinal),
        )
        for device in pool.devices
    )
    return PoolReading(pool.is_ready, fault, statistics, devices)


def _read_device(device: Device, leases: Sequence[LeaseInfo], *, is_up: bool) -> DeviceReading:
    now = device.driver.time()
    found = DeviceReading(device, is_up, {})
    held: dict[int, tuple[str, int]] = {}  # shared leases have the same cells
    for lease in leases:
        since = lease.draining_since
        state = "used" if since is None else "draining"
        reading = found.leases.setdefault((lease.service, state), LeasesReading())
        reading.count += 1
        reading.oldest = max(reading.oldest, now - (lease.since if since is None else since))
        if state == "used" or lease.cells not in held:
            held[lease.cells] = ("leased" if state == "used" else state, lease.sms)
    for sms_state in ("leased", "draining"):
        found.sms[sms_state] = sum(sms for state, sms in held.values() if state == sms_state)
    found.sms["free"] = device.sm_count - sum(found.sms.values())
    return found
