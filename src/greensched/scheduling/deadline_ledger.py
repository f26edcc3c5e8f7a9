"""Queued work by its due time, and whether more work fits without making the rest late.

At each moment, the work due by then must fit on the devices (`Packing`). This is necessary but not
sufficient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from greensched.scheduling.cells import DeviceCells

#: Seconds of a bucket of deadlines, and the number of buckets. A deadline counts as the beginning
#: of its bucket, which is up to a millisecond early. All deadlines at least a second away share the
#: last bucket.
BUCKET = 0.001
BUCKETS = 1024


#: The measures besides the fraction of cells: how many requests of more than a half, a third, a
#: quarter ... of a device fit. Below a sixth the fraction of cells is precise enough.
MEASURES = (1, 2, 3, 4, 5)


class Packing:
    """How much work the devices can do at once, by several measures.

    A measure gives each request a fraction of a device, such that requests that fit on a device
    together add up to at most 1. So work that exceeds the devices by any measure cannot be done.
    For example, only two requests of 48 SMs fit on 132, so each counts as a half (dual feasible
    functions; Fekete and Schepers, Mathematical Programming 2001).

    Args:
        devices: The cells of each device. Requests are measured on the largest device.
    """

    def __init__(self, devices: Sequence[DeviceCells]) -> None:
        self._cells = largest = max(devices, key=lambda cells: cells.total)
        self._units = largest.count + largest.cells_for(largest.remainder)
        #: The number of devices that do the work.
        self.devices = len(devices)

    def shares(self, sms: int) -> list[float]:
        """Return the fraction of a device that this many SMs take, by each measure."""
        cells, units = min(self._cells.cells_for(sms), self._units), self._units
        shares = [cells / units]
        for k in MEASURES:
            parts = (k + 1) * cells
            shares.append(parts // units / k if parts % units else cells / units)
        return shares

    def work(self, pieces: Iterable[tuple[int, float]]) -> list[float]:
        """Return the device-seconds that pieces take together, by each measure.

        Args:
            pieces: The SMs and seconds of each piece.
        """
        totals = [0.0] * (1 + len(MEASURES))
        for sms, seconds in pieces:
            pairs = zip(totals, self.shares(sms), strict=True)
            totals = [sum_ + share * seconds for sum_, share in pairs]
        return totals


class PackedWork:
    """Queued work by its due time and by each measure of `Packing`.

    Args:
        packing: The measures.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._ledgers = [DeadlineLedger(packing.devices) for _ in (0, *MEASURES)]

    def add(self, due: float, sms: int, seconds: float) -> int:
        """Add work; return its bucket, for `remove`."""
        pairs = zip(self._ledgers, self._packing.shares(sms), strict=True)
        buckets = [ledger.add(due, share * seconds) for ledger, share in pairs]
        return buckets[0]  # all ledgers use the same bucket

    def remove(self, bucket: int, sms: int, seconds: float) -> None:
        """Remove work that was added."""
        for ledger, share in zip(self._ledgers, self._packing.shares(sms), strict=True):
            ledger.remove(bucket, share * seconds)

    def advance(self, now: float) -> None:
        """Set the time. Work that was due before it is late."""
        for ledger in self._ledgers:
            ledger.advance(now)

    def due_by(self, due: float) -> list[float]:
        """Return the work due by a time, in seconds of a device, by each measure."""
        return [ledger.due_by(due) for ledger in self._ledgers]

    def has_room(self, now: float, due: float, work: Sequence[float]) -> bool:
        """Say whether all later work stays in time if this much more work is due by `due`."""
        pairs = zip(self._ledgers, work, strict=True)
        return all(ledger.has_room(now, due, added) for ledger, added in pairs)


class DeadlineLedger:
    """Queued work by its due time: how much is due by a time, and the least slack after it.

    It is a segment tree over a ring of buckets, so each query and change takes O(log `BUCKETS`).

    Args:
        devices: The number of devices that do the work.
    """

    __slots__ = ("_late", "_leaves", "_now", "_sum", "_tight", "devices")

    def __init__(self, devices: int) -> None:
        self.devices = devices
        #: The first bucket that is not past, and the work of past buckets.
        self._now, self._late = 0, 0.0
        self._leaves = [0] * BUCKETS
        #: For each node: its work, and the most by which the work up to one of its buckets
        #: exceeds what can be done from 0 to then (minus infinity without work).
        self._sum = [0.0] * (2 * BUCKETS)
        self._tight = [-math.inf] * (2 * BUCKETS)

    def add(self, due: float, work: float) -> int:
        """Add work; return its bucket, for `remove`."""
        bucket = self._bucket(due)
        if bucket < self._now:
            self._late += work
        else:
            self._change(bucket, work, 1)
        return bucket

    def remove(self, bucket: int, work: float) -> None:
        """Remove work that was added."""
        if bucket < self._now:
            self._late = max(0.0, self._late - work)
        else:
            self._change(bucket, -work, -1)

    def advance(self, now: float) -> None:
        """Set the time. Work that was due before it is late."""
        current = int(now / BUCKET)
        for bucket in range(self._now, min(current, self._now + BUCKETS)):
            leaf = bucket % BUCKETS
            if self._leaves[leaf]:
                self._late += self._sum[BUCKETS + leaf]
                self._set(leaf, 0.0, -math.inf)
                self._leaves[leaf] = 0
        self._now = max(self._now, current)

    def due_by(self, due: float) -> float:
        """Return the work due by a time, in seconds of a device."""
        return self._late + self._fold(self._now, self._bucket(due) + 1)[0]

    def has_room(self, now: float, due: float, work: float) -> bool:
        """Say whether all later work stays in time if this much more work is due by `due`."""
        first = max(self._now, self._bucket(due))
        tight = self._fold(first, self._now + BUCKETS)[1]
        before = self._late + self._fold(self._now, first)[0]
        return tight + before + work + self.devices * now <= 0

    # -- the tree --------------------------------------------------------------------------------

    def _bucket(self, due: float) -> int:
        last = self._now + BUCKETS - 1
        return last if due >= last * BUCKET else int(due / BUCKET)  # due / BUCKET may overflow

    def _change(self, bucket: int, work: float, change: int) -> None:
        leaf = bucket % BUCKETS
        self._leaves[leaf] += change
        if self._leaves[leaf]:
            total = self._sum[BUCKETS + leaf] + work
            self._set(leaf, total, total - self.devices * bucket * BUCKET)
        else:  # exactly 0, without rounding errors
            self._set(leaf, 0.0, -math.inf)

    def _set(self, leaf: int, total: float, tight: float) -> None:
        sums, tights = self._sum, self._tight
        node = BUCKETS + leaf
        sums[node], tights[node] = total, tight
        while node > 1:
            node //= 2
            left, right = 2 * node, 2 * node + 1
            sums[node] = sums[left] + sums[right]
            tights[node] = max(tights[left], sums[left] + tights[right])

    def _fold(self, first: int, end: int) -> tuple[float, float]:
        """Return the work and the tightness of a range of buckets."""
        low, high = first % BUCKETS, end % BUCKETS
        if first >= end:
            return 0.0, -math.inf
        if low < high:
            return self._fold_leaves(low, high)
        low_part, high_part = self._fold_leaves(low, BUCKETS), self._fold_leaves(0, high)
        return low_part[0] + high_part[0], max(low_part[1], low_part[0] + high_part[1])

    def _fold_leaves(self, low: int, high: int) -> tuple[float, float]:
        left_sum, left_tight, right_sum, right_tight = 0.0, -math.inf, 0.0, -math.inf
        low, high = low + BUCKETS, high + BUCKETS
        while low < high:
            if low & 1:
                left_tight = max(left_tight, left_sum + self._tight[low])
                left_sum += self._sum[low]
                low += 1
            if high & 1:
                high -= 1
                right_tight = max(self._tight[high], self._sum[high] + right_tight)
                right_sum += self._sum[high]
            low //= 2
            high //= 2
        return left_sum + right_sum, max(left_tight, left_sum + right_tight)
