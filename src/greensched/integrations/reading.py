"""What metric exporters read from pools: state, statistics and devices."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import greensched
from greensched import Device, LeaseInfo, Pool, PoolState, PoolStatistics
from greensched.errors import InvalidRequest, PoolClosed
from greensched.integrations.health import fault_of

#: States in which a pool is left out, because it does not change any more.
ENDED = (PoolState.CLOSED, PoolState.FORKED)
#: How a request ends.
OUTCOMES = ("granted", "cancelled", "expired", "refused")


class ExportedPools:
    """The pools of one exporter, by name. Keeps no pool alive."""

    def __init__(self) -> None:
        self._pools: dict[str, weakref.ref[Pool]] = {}
        self._lock = threading.Lock()  # not held while a pool is read

    def add(self, pool: Pool, name: str) -> bool:
        """Add a pool until it is closed; return whether it is new.

        Raises:
            InvalidRequest: Another pool has the name, or this pool has another name.
        """
        with self._lock:
            for known, other in self._live():
                if (other is pool) != (known == name):
                    what = "this pool" if other is pool else "another pool"
                    raise InvalidRequest(
                        f"name={name!r}: {what} is already exported as {known!r}: give each pool "
                        "one name of its own"
                    )
            is_new = name not in self._pools
            self._pools[name] = weakref.ref(pool)
            return is_new

    def live(self) -> list[tuple[str, Pool]]:
        """Return the open pools, and forget the closed ones."""
        with self._lock:
            return self._live()

    def _live(self) -> list[tuple[str, Pool]]:
        references = [(name, reference()) for name, reference in self._pools.items()]
        live = [(name, pool) for name, pool in references if pool and pool.state not in ENDED]
        self._pools = {name: weakref.ref(pool) for name, pool in live}
        return live


@dataclass(slots=True)
class LeasesReading:
    """The number of leases in one state, and the seconds that the oldest has been in it."""

    count: int = 0
    oldest: float = 0.0


@dataclass(slots=True)
class DeviceReading:
    """A device at one moment.

    Attributes:
        sms: SMs by state: `free`, `leased`, or `draining` until the work of an ended lease is done.
        leases: Leases by service class and state (`used` or `draining`).
        hung: SMs under hanging work, by the class of the lease; see `Pool.hung`.
    """

    device: Device
    is_up: bool
    sms: dict[str, int]
    leases: dict[tuple[str, str], LeasesReading] = field(default_factory=dict)
    hung: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class PoolReading:
    """A pool at one moment.

    Attributes:
        fault: Why the pool did not open, or what ended it.
        statistics: None until the pool is open; then `devices` is empty, too.
    """

    is_ready: bool
    fault: BaseException | None
    statistics: PoolStatistics | None
    devices: tuple[DeviceReading, ...] = ()

    @property
    def status(self) -> str:
        """The driver's status, if the fault is one of its errors; otherwise ""."""
        return getattr(self.fault, "name", "")


def read(pool: Pool) -> PoolReading:
    """Read a pool and check its devices. Never waits. From any thread."""
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
    for hung in pool.hung:
        for reading in devices:
            if reading.device.ordinal == hung.device:
                reading.hung[hung.service] += hung.sms
    return PoolReading(pool.is_ready, fault, statistics, devices)


def info(reading: PoolReading, statistics: PoolStatistics) -> dict[str, str]:
    """Return what an open pool runs."""
    return {
        "version": greensched.__version__,
        "driver": reading.devices[0].device.driver.name,  # tells a service on a simulated GPU
        "policy": statistics.policy,
        "granularity": statistics.granularity,
        "completion": statistics.completion,
    }


def _read_device(device: Device, leases: Sequence[LeaseInfo], *, is_up: bool) -> DeviceReading:
    now = device.driver.time()
    device_reading = DeviceReading(device, is_up, {})
    held: dict[int, tuple[str, int]] = {}  # by cells, which shared leases have in common
    for lease in leases:
        since = lease.draining_since
        state = "used" if since is None else "draining"
        reading = device_reading.leases.setdefault((lease.service, state), LeasesReading())
        reading.count += 1
        reading.oldest = max(reading.oldest, now - (lease.since if since is None else since))
        if state == "used" or lease.cells not in held:
            held[lease.cells] = ("leased" if state == "used" else state, lease.sms)
    for sms_state in ("leased", "draining"):
        device_reading.sms[sms_state] = sum(
            sms for state, sms in held.values() if state == sms_state
        )
    device_reading.sms["free"] = device.sm_count - sum(device_reading.sms.values())
    return device_reading
