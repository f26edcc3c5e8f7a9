"""Arithmetic of sets of SMs: how many and which cells a number of SMs takes.

A *cell* is the smallest group of SMs into which a device is split. All cells of a device come from
one split, so they are disjoint. A set of cells is a bit mask. Bit `i < count` is a cell of `size`
SMs; bit `count`, if `remainder` is not 0, is the remainder of the split.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from greensched._validation import as_int
from greensched.errors import InvalidRequest, InvalidSize
from greensched.typing import ALL, REST, NamedSize

#: Sets of cells that have an executor, by their number of cells, preferred ones first.
ReadyMasks = Mapping[int, Iterable[int]]
NO_MASKS: ReadyMasks = {}


class SizeRange(NamedTuple):
    """The size of one part of a request: least and most SMs, or a named size."""

    least: int
    most: int
    named: NamedSize | None = None

    def __str__(self) -> str:
        """Return the size as a caller would write it."""
        if self.named is not None:
            return repr(self.named)
        if self.least == self.most:
            return str(self.least)
        return f"({self.least}, {'ALL' if self.most == sys.maxsize else self.most})"


def parse_size(size: object) -> SizeRange:
    """Parse one size.

    Raises:
        InvalidSize: Not a positive int, an ordered pair of them, (least, ALL), ALL or REST.
    """
    if isinstance(size, NamedSize):
        return SizeRange(0, 0, size)
    least, most = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
    size_range = SizeRange(as_int(least), sys.maxsize if most is ALL else as_int(most))
    if not 0 < size_range.least <= size_range.most:
        raise InvalidSize(size)
    return size_range


def parse_sizes(sizes: tuple[object, ...]) -> tuple[SizeRange, ...]:
    """Parse the sizes of a request for several parts.

    Raises:
        InvalidSize: As for `parse_size`.
        InvalidRequest: The sizes cannot be combined in one request.
    """
    parts = tuple(parse_size(size) for size in sizes)
    if not parts:
        raise InvalidRequest("no size: give at least one, such as pool.partitions(16, 16)")
    named = [part.named for part in parts if part.named is not None]
    if len(parts) > 1 and ALL in named:
        raise InvalidRequest("ALL leaves no SM for the other sizes of the request: use REST")
    if named.count(REST) > 1:
        raise InvalidRequest("REST stands for all remaining SMs: give it only once")
    return parts


@dataclass(frozen=True, slots=True)
class DeviceCells:
    """The cells of one device.

    Attributes:
        size: SMs of each cell.
        count: The number of cells.
        remainder: SMs left over by the split, or 0.
        joins: Whether the remainder can be combined with cells in one partition.
    """

    size: int
    count: int
    remainder: int = 0
    joins: bool = False
    #: All cells, without the remainder.
    cell_mask: int = field(init=False, compare=False, repr=False)
    #: The bit of the remainder, or 0.
    remainder_mask: int = field(init=False, compare=False, repr=False)
    #: All cells and the remainder, which as a partition is the whole device, unsplit.
    full_mask: int = field(init=False, compare=False, repr=False)
    #: The number of all SMs.
    total: int = field(init=False, compare=False, repr=False)
    #: By number of cells: where aligned blocks of that many cells begin.
    _starts: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        cells = (1 << self.count) - 1
        remainder = 1 << self.count if self.remainder else 0
        object.__setattr__(self, "cell_mask", cells)
        object.__setattr__(self, "remainder_mask", remainder)
        object.__setattr__(self, "full_mask", cells | remainder)
        object.__setattr__(self, "total", self.size * self.count + self.remainder)
        starts = (range(0, self.count, alignment(cells)) for cells in range(self.count + 1))
        object.__setattr__(
            self, "_starts", tuple(sum(1 << at for at in offsets) for offsets in starts)
        )

    def sm_count(self, mask: int) -> int:
        """Return the number of SMs in a set of cells."""
        if mask & self.remainder_mask:
            return self.size * (mask & self.cell_mask).bit_count() + self.remainder
        return self.size * mask.bit_count()

    def cell_count(self, mask: int) -> int:
        """Return the number of cells in a set, without the remainder."""
        return (mask & self.cell_mask).bit_count()

    def cells_for(self, sms: int) -> int:
        """Return how many cells are needed for this many SMs."""
        return -(-sms // self.size)

    def shared_mask(self, number: int) -> int:
        """Return a shared grant's mask: every cell, and a higher bit that identifies the grant."""
        return self.full_mask | 1 << self.count + 1 + number

    def possible(self, mask: int) -> bool:
        """Say whether one green context can have exactly these cells."""
        if not mask & self.remainder_mask or mask in (self.remainder_mask, self.full_mask):
            return mask != 0
        return self.joins

    def largest(self, most: int) -> int:
        """Return the SMs of the largest partition with at most this many, or 0."""
        if most >= self.total:
            return self.total
        more = (most - self.remainder) // self.size if self.joins else 0
        with_remainder = self.remainder + more * self.size if self.remainder <= most else 0
        return max(min(most // self.size, self.count) * self.size, with_remainder)

    def sizes_from(self, least: int) -> tuple[int, ...]:
        """Return the SMs of the smallest partition with at least this many, and of more cells."""
        fewest, of_cells = self.cells_for(least) * self.size, self.count * self.size
        sizes = tuple(range(fewest, min(self.total, of_cells + 1), self.size))
        if (beside := self._beside_remainder(least)) is None:
            return sizes
        smaller = self.remainder + beside * self.size
        return (smaller, *sizes) if smaller < min((*sizes, self.total)) else sizes

    def largest_within(self, mask: int) -> int:
        """Return the SMs of the largest partition that a set of cells can form."""
        if self.possible(mask):
            return self.sm_count(mask)
        remainder = self.remainder if mask & self.remainder_mask else 0
        return max(self.size * self.cell_count(mask), remainder)

    def menu(self, limit: int) -> list[int]:
        """Return the sets for which executors are worth making in advance.

        These are single cells, aligned blocks, and their complements, which `pool.partitions(n,
        REST)` needs. A block is aligned to the power of two at or above its number of cells, as in
        a buddy allocator, so that free cells stay in large blocks. Powers of two come first, then
        the other numbers of cells. If these are too many, blocks that begin at the first cell come
        next, because two leases that share a device move the border between them. Last are the
        large aligned blocks: with these most leases get at least what they need.
        """
        powers = [1 << power for power in range(self.count.bit_length())]
        pairs = [
            (mask, self.complement(mask))
            for cells in dict.fromkeys((*powers, *range(1, self.count + 1)))
            for start in range(0, self.count - cells + 1, alignment(cells))
            for mask in [((1 << cells) - 1) << start]
        ]
        ordered = self._possible((self.full_mask, *chain(*pairs)))
        firsts = chain(*(pair for pair in pairs if pair[0] & 1))
        aligned = [mask for mask, _ in pairs if mask.bit_count() in powers]
        aligned.sort(key=lambda mask: -mask.bit_count())
        if len(ordered) <= limit:
            return ordered
        return self._possible((self.full_mask, *firsts, *aligned, *ordered))[:limit]

    def _possible(self, masks: Iterable[int]) -> list[int]:
        return [mask for mask in dict.fromkeys(masks) if self.possible(mask)]

    def complement(self, mask: int) -> int:
        """Return all other cells that can be in one partition."""
        rest = self.full_mask & ~mask
        return rest if self.possible(rest) else rest & ~self.remainder_mask

    # -- choosing --------------------------------------------------------------------------------

    def fit(self, free: int, wanted: SizeRange, ready: ReadyMasks = NO_MASKS) -> int:
        """Return the free cells to grant for a single part, or 0 if it does not fit."""
        if wanted.named is not None or wanted.least <= self.total <= wanted.most:
            if free == self.full_mask:
                return free
            if wanted.named is not None:
                return 0
        free_cells = free & self.cell_mask
        free_count = free_cells.bit_count()
        least = -(-wanted.least // self.size)
        if free_count >= least:
            most = wanted.most // self.size
            cells = least if most <= least else min(free_count, most)
            chosen = self.choose(free_cells, cells, ready)
            if 0 < self.remainder <= wanted.most - cells * self.size:
                with_remainder = chosen | (free & self.remainder_mask)
                return with_remainder if self.possible(with_remainder) else chosen
            return chosen
        if not free & self.remainder_mask:
            return 0
        beside = self._beside_remainder(wanted.least)
        if beside is not None and free_count >= beside:
            more = max(beside, (wanted.most - self.remainder) // self.size) if self.joins else 0
            return self.remainder_mask | self.choose(free_cells, min(free_count, more), NO_MASKS)
        return free if free == self.full_mask and self.total >= wanted.least else 0

    def fit_all(
        self, free: int, parts: tuple[SizeRange, ...], ready: ReadyMasks = NO_MASKS
    ) -> tuple[int, ...]:
        """Return disjoint cells for each part of a request; empty if they do not fit together."""
        if len(parts) == 1:
            mask = self.fit(free, parts[0], ready) if free else 0
            return (mask,) if mask else ()
        rest = next((i for i, part in enumerate(parts) if part.named is REST), None)
        if rest is not None and free != self.full_mask:
            return ()
        # Place each part's minimum first, so that no elastic part takes what a later part needs.
        needs = {i: -(-part.least // self.size) for i, part in enumerate(parts) if i != rest}
        masks = [0] * len(parts)
        left = free
        if sum(needs.values()) > self.cell_count(free):
            helped = self._give_remainder(free, parts, needs)
            if helped is None:
                return ()
            masks[helped] = self.remainder_mask
            left &= ~self.remainder_mask
        for i in sorted(needs, key=lambda i: -needs[i]):
            if needs[i]:
                chosen = self.choose(left & self.cell_mask, needs[i], ready)
                masks[i] |= chosen
                left &= ~chosen
        if rest is None:
            return tuple(self._stretched(masks, parts, left))
        masks[rest] = left if self.possible(left) else left & self.cell_mask
        return tuple(masks) if masks[rest] else ()

    def nearest(self, free: int, parts: tuple[SizeRange, ...]) -> tuple[int, ...]:
        """Return the SMs of each part of the nearest request that fits, or an empty tuple.

        Removes cells from the largest part, then removes parts from the end, until the rest fits.
        """
        most = self.total
        trial = [
            SizeRange(min(part.least, most), min(part.least, most), part.named) for part in parts
        ]
        while trial:
            masks = self.fit_all(free, tuple(trial))
            if masks:
                return tuple(self.sm_count(mask) for mask in masks)
            largest = max(range(len(trial)), key=lambda i: trial[i].least)
            least = trial[largest].least - self.size
            if least > 0:
                trial[largest] = SizeRange(least, least)
            else:
                trial.pop()
        return ()

    def _give_remainder(
        self, free: int, parts: tuple[SizeRange, ...], needs: dict[int, int]
    ) -> int | None:
        """Give the remainder to the part for which it saves the most cells.

        Returns that part, with its need lowered; None if the parts do not fit together even so.
        """
        best, saved = None, 0
        for i, need in needs.items():
            beside = self._beside_remainder(parts[i].least)
            if beside is not None and need - beside > saved:
                best, saved = i, need - beside
        short = sum(needs.values()) - self.cell_count(free)
        if best is None or saved < short or not free & self.remainder_mask:
            return None
        needs[best] -= saved
        return best

    def is_helped(self, free: int, least: int) -> bool:
        """Say whether the remainder, if free, may replace cells that are not free."""
        if not free & self.remainder_mask:
            return False
        return self.joins or self.remainder >= least or free == self.full_mask

    def _beside_remainder(self, least: int) -> int | None:
        """Return how many cells are needed besides the remainder; None if it cannot be used."""
        if self.remainder >= least:
            return 0
        return self.cells_for(least - self.remainder) if self.joins else None

    def _stretched(
        self, masks: list[int], parts: tuple[SizeRange, ...], left: int
    ) -> Iterator[int]:
        """Give the remaining cells to the elastic parts, in order."""
        for i, part in enumerate(parts):
            more = part.most // self.size - masks[i].bit_count()
            while more > 0 and left & self.cell_mask and not masks[i] & self.remainder_mask:
                cell = left & self.cell_mask & -(left & self.cell_mask)
                masks[i] |= cell
                left &= ~cell
                more -= 1
            yield masks[i]

    def choose(self, free: int, cells: int, ready: ReadyMasks) -> int:
        """Choose this many free cells: a set with an executor, a block, or the lowest ones."""
        for mask in ready.get(cells, ()):
            if mask & ~free == 0:
                return mask
        # Find the first free set of `blocks` by shifting.
        runs, length = free, 1  # where runs of this many free cells begin
        while length < cells:
            step = cells - length if cells < 2 * length else length
            runs &= runs >> step
            length += step
        if runs:
            starts = runs & self._starts[cells] or runs
            return (starts & -starts) * ((1 << cells) - 1)
        return lowest(free, cells)


def alignment(cells: int) -> int:
    """Return the alignment of a block of this many cells."""
    return 1 << (cells - 1).bit_length() if cells > 1 else 1


def lowest(mask: int, count: int) -> int:
    """Return this many of the lowest cells of a set, or the whole set if it is smaller."""
    chosen = 0
    while count > 0 and mask:
        cell = mask & -mask
        chosen |= cell
        mask ^= cell
        count -= 1
    return chosen
