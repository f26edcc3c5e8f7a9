"""Which partitions fit on a device, found by trying every set of cells."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.typing import ALL, REST


def possible(cells: DeviceCells, mask: int) -> bool:
    """Say whether a partition may have these cells; only some remainders join other cells."""
    leftover = 1 << cells.count if cells.remainder else 0
    every = (1 << cells.count) - 1 | leftover
    if mask == 0 or mask & ~every:
        return False
    return not mask & leftover or mask in (leftover, every) or cells.joins


def sms(cells: DeviceCells, mask: int) -> int:
    equal = sum(cells.size for i in range(cells.count) if mask >> i & 1)
    return equal + (cells.remainder if mask >> cells.count & 1 else 0)


def subsets(mask: int) -> Iterator[int]:
    """Yield every subset, including the empty one."""
    subset = mask
    while True:
        yield subset
        if subset == 0:
            return
        subset = (subset - 1) & mask


def is_enough(cells: DeviceCells, mask: int, part: SizeRange) -> bool:
    """Say whether one partition of these cells has at least the SMs that a part asks for."""
    if part.named is ALL:
        return mask == cells.full_mask
    return possible(cells, mask) and sms(cells, mask) >= part.least


def is_no_excess(cells: DeviceCells, mask: int, part: SizeRange) -> bool:
    """Say whether it has no more SMs than the part asks for, rounded up to whole cells."""
    if sms(cells, mask) <= part.most:
        return True
    fewer = [mask & ~(1 << bit) for bit in range(mask.bit_length()) if mask >> bit & 1]
    return not any(is_enough(cells, smaller, part) for smaller in fewer)


def rest_of(cells: DeviceCells, others: int) -> int:
    """Return the SMs that REST means beside the other parts of its request."""
    left = cells.full_mask & ~others
    return left if possible(cells, left) else left & cells.cell_mask


@lru_cache(maxsize=200_000)
def fits(cells: DeviceCells, free: int, parts: tuple[SizeRange, ...]) -> bool:
    """Say whether disjoint sets of free cells give every part enough."""
    if any(part.named is REST for part in parts):
        others = tuple(part for part in parts if part.named is not REST)
        return free == cells.full_mask and any(
            rest_of(cells, taken) for taken in _takings(cells, free, others)
        )
    return any(True for _ in _takings(cells, free, parts))


def _takings(cells: DeviceCells, free: int, parts: tuple[SizeRange, ...]) -> Iterator[int]:
    """Yield every union of disjoint sets that give the parts enough."""
    if not parts:
        yield 0
        return
    for mask in subsets(free):
        if is_enough(cells, mask, parts[0]):
            for others in _takings(cells, free & ~mask, parts[1:]):
                yield mask | others
