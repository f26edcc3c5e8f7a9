"""The map of a pool's latest leases, for a test that failed and for asyncio's debug mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from greensched.observability import sm_map
from greensched.observability.lease_history import LeaseHistory, TracedDevice
from greensched.observability.snapshot import DeviceSnapshot, Snapshot
from greensched.records import Granted, Record

#: Spans of leases that are kept.
MOST_SPANS: Final = 200


class PoolMap:
    """The latest leases of one pool. Pass `add` to `Pool.watch`.

    Args:
        snapshot: Returns a snapshot of the pool, which names its devices.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._devices: list[TracedDevice] = []
        self._history = LeaseHistory(MOST_SPANS)

    def add(self, record: Record) -> None:
        """Process the next record."""
        if not self._devices and isinstance(record, Granted):
            self._devices = [_traced(device) for device in self._snapshot().devices]
        self._history.add(record)

    def lines(self, now: float) -> list[str]:
        """Return the map as lines of text; empty if there was no lease.

        Args:
            now: The time of the pool's clock, in seconds, up to which open leases are shown.
        """
        spans = self._history.all_spans(now)
        if not spans:
            return []
        start, end = min(span.start for span in spans), max(span.end for span in spans)
        return sm_map.text(sm_map.by_holder(spans), self._devices, start, end)


def _traced(device: DeviceSnapshot) -> TracedDevice:
    sizes = [cell.sms for cell in device.cells]
    count = sizes.count(sizes[0])
    return TracedDevice(device.device, device.name, device.uuid, device.sms, count, sizes[0])
