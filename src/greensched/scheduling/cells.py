"""Arithmetic of SM sets: which cells for how many SMs.

A *cell* is the smallest group of SMs a device is cut into; all cells of a device come from one
split, so they are disjoint by construction, and a set of cells is a bit mask. Bit `i < count` is
an equal cell of `size` SMs; bit `count`, where `remainder` is not 0, is what the split left over.
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

#: The partitions that are made already, by their number of cells, the ones to prefer first.
Warm = Mapping[int, Iterable[int]]
NOTHING_WARM: Warm = {}


class SizeRange(NamedTuple):
    """A size, read once: at least so many SMs, at most so many; or a named size."""

    least: int
    most: int
    named: NamedSize | None = None


def demand(size: object) -> SizeRange:
    """Reads a size.

    Raises:
        InvalidSize: not a positive int, a pair of them in order, (least, ALL), ALL or REST.
    """
    if isinstance(size, NamedSize):
        return SizeRange(0, 0, size)
    least, most = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
    demand = SizeRange(as_int(least), sys.maxsize if most is ALL else as_int(most))
    if not 0 < demand.least <= demand.most:
        raise InvalidSize(size)
    return demand


def parse_sizes(sizes: tuple[object, ...]) -> tuple[SizeRange, ...]:
    """Reads the sizes of one joint request."""
    parts = tuple(demand(size) for size in sizes)
    if not parts:
        raise InvalidRequest("a joint request needs at least one size")
    named = [part.named for part in parts if part.named is not None]
    if len(parts) > 1 and ALL in named:
        raise InvalidRequest("ALL leaves no SM for the other sizes of the same request: use REST")
    if named.count(REST) > 1:
        raise InvalidRequest("REST can stand only once in a request")
    return parts


@dataclass(frozen=True, slots=True)
class DeviceCells:
    """The cells of one device.

    Attributes:
        size: SMs of each equal cell.
        count: how many equal cells.
        remainder: SMs left over by the split; 0: none.
        joins: whether the remainder may be in one partition with equal cells.
    """

    size: int
    count: int
    remainder: int = 0
    joins: bool = False
    #: Every equal cell.
    equal: int = field(init=False, compare=False, repr=False)
    #: The remainder's bit, or 0.
    leftover: int = field(init=False, compare=False, repr=False)
    #: Every cell: as a partition, the whole device shared.
    every: int = field(init=False, compare=False, repr=False)
    #: SMs in all.
    total: int = field(init=False, compare=False, repr=False)
    _blocks: dict[int, tuple[int, ...]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    #: Where aligned blocks of so many equal cells start.
    _starts: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        equal = (1 << self.count) - 1
        leftover = 1 << self.count if self.remainder else 0
        object.__setattr__(self, "equal", equal)
        object.__setattr__(self, "leftover", leftover)
        object.__setattr__(self, "every", equal | leftover)
        object.__setattr__(self, "total", self.size * self.count + self.remainder)
        starts = (range(0, self.count, aligned(cells)) for cells in range(self.count + 1))
        object.__setattr__(self, "_starts", tuple(sum(1 << at for at in one) for one in starts))

    def sms(self, mask: int) -> int:
        """SMs of a set of cells."""
        if mask & self.leftover:
            return self.size * (mask & self.equal).bit_count() + self.remainder
        return self.size * mask.bit_count()

    def seat(self, number: int) -> int:
        """Every cell, as one of those who have them all at once: told apart by a bit above."""
        return self.every | 1 << self.count + 1 + number

    def possible(self, mask: int) -> bool:
        """Whether one green context can have just these cells."""
        if not mask & self.leftover or mask in (self.leftover, self.every):
            return mask != 0
        return self.joins

    def largest(self, most: int) -> int:
        """SMs of the largest partition that has at most so many; 0: each has more."""
        if most >= self.total:
            return self.total
        more = (most - self.remainder) // self.size if self.joins else 0
        with_leftover = self.remainder + more * self.size if self.remainder <= most else 0
        return max(min(most // self.size, self.count) * self.size, with_leftover)

    def blocks(self, cells: int) -> tuple[int, ...]:
        """Contiguous sets of so many equal cells, the aligned ones first.

        Aligned to the power of two at or above the number, as buddies are: then what stays free
        stays in large blocks.
        """
        found = self._blocks.get(cells)
        if found is None:
            step = aligned(cells)
            starts = range(self.count - cells + 1)
            ordered = sorted(starts, key=lambda start: (start % step != 0, start))
            found = self._blocks[cells] = tuple(((1 << cells) - 1) << start for start in ordered)
        return found

    def menu(self, limit: int) -> list[int]:
        """The partitions worth making beforehand: everything, aligned blocks, and complements.

        The complement of a block is what `pool.partitions(n, REST)` needs beside it. Powers of two
        come first, then the other numbers of cells. Where that is too many, blocks that begin at
        the first cell go before others: two that share a device move the border between them.
        """
        powers = [1 << power for power in range(self.count.bit_length())]
        pairs = [
            (mask, self.complement(mask))
            for cells in dict.fromkeys((*powers, *range(1, self.count + 1)))
            for mask in self.blocks(cells)
            if (mask.bit_length() - cells) % aligned(cells) == 0
        ]
        ordered = self._possible((self.every, *chain(*pairs)))
        firsts = chain(*(pair for pair in pairs if pair[0] & 1))
        chosen = set(self._possible((self.every, *firsts, *ordered))[:limit])
        return [mask for mask in ordered if mask in chosen]

    def _possible(self, masks: Iterable[int]) -> list[int]:
        """Those of some that can be, each once."""
        return [mask for mask in dict.fromkeys(masks) if self.possible(mask)]

    def complement(self, mask: int) -> int:
        """Every other cell that can be in one partition."""
        rest = self.every & ~mask
        return rest if self.possible(rest) else rest & ~self.leftover

    # -- choosing --------------------------------------------------------------------------------

    def fit(self, free: int, wanted: SizeRange, warm: Warm = NOTHING_WARM) -> int:
        """The cells to grant out of the free ones for a demand alone; 0: none fit."""
        if wanted.named is not None:
            return self.every if free == self.every else 0
        equal = free & self.equal
        have = equal.bit_count()
        least = -(-wanted.least // self.size)
        if have >= least:
            most = wanted.most // self.size
            cells = least if most <= least else min(have, most)
            chosen = self.choose(equal, cells, warm)
            if 0 < self.remainder <= wanted.most - cells * self.size:
                with_leftover = chosen | (free & self.leftover)
                return with_leftover if self.possible(with_leftover) else chosen
            return chosen
        if not free & self.leftover:
            return 0
        beside = self._beside_leftover(wanted.least)
        if beside is not None and have >= beside:
            more = max(beside, (wanted.most - self.remainder) // self.size) if self.joins else 0
            return self.leftover | self.choose(equal, min(have, more), NOTHING_WARM)
        return free if free == self.every and self.total >= wanted.least else 0

    def fit_all(
        self, free: int, parts: tuple[SizeRange, ...], warm: Warm = NOTHING_WARM
    ) -> tuple[int, ...]:
        """The cells of each part of a joint request, disjoint; empty: they do not fit together."""
        if len(parts) == 1:
            mask = self.fit(free, parts[0], warm) if free else 0
            return (mask,) if mask else ()
        rest = next((i for i, part in enumerate(parts) if part.named is REST), None)
        if rest is not None and free != self.every:
            return ()
        # Least first for everybody, so that an elastic part never takes what a later one needs.
        needs = {i: -(-part.least // self.size) for i, part in enumerate(parts) if i != rest}
        masks = [0] * len(parts)
        left = free
        if sum(needs.values()) > (free & self.equal).bit_count():
            helped = self._give_leftover(free, parts, needs)
            if helped is None:
                return ()
            masks[helped] = self.leftover
            left &= ~self.leftover
        for i in sorted(needs, key=lambda i: -needs[i]):
            if needs[i]:
                chosen = self.choose(left & self.equal, needs[i], warm)
                masks[i] |= chosen
                left &= ~chosen
        if rest is None:
            return tuple(self._stretched(masks, parts, left))
        masks[rest] = left if self.possible(left) else left & self.equal
        return tuple(masks) if masks[rest] else ()

    def _give_leftover(
        self, free: int, parts: tuple[SizeRange, ...], needs: dict[int, int]
    ) -> int | None:
        """Gives the remainder to the part whose need of equal cells it lowers the most.

        Returns that part, its need lowered; None: not even so do all of them fit.
        """
        best, saved = None, 0
        for i, need in needs.items():
            beside = self._beside_leftover(parts[i].least)
            if beside is not None and need - beside > saved:
                best, saved = i, need - beside
        short = sum(needs.values()) - (free & self.equal).bit_count()
        if best is None or saved < short or not free & self.leftover:
            return None
        needs[best] -= saved
        return best

    def is_helped(self, free: int, least: int) -> bool:
        """Whether the remainder, which is free, may make up for equal cells that are not."""
        if not free & self.leftover:
            return False
        return self.joins or self.remainder >= least or free == self.every

    def _beside_leftover(self, least: int) -> int | None:
        """How many equal cells are needed beside the remainder; None: it helps nobody."""
        if self.remainder >= least:
            return 0
        return -(-(least - self.remainder) // self.size) if self.joins else None

    def _stretched(
        self, masks: list[int], parts: tuple[SizeRange, ...], left: int
    ) -> Iterator[int]:
        """Gives elastic parts what is left, in their order."""
        for i, part in enumerate(parts):
            more = part.most // self.size - masks[i].bit_count()
            while more > 0 and left & self.equal and not masks[i] & self.leftover:
                cell = left & self.equal & -(left & self.equal)
                masks[i] |= cell
                left &= ~cell
                more -= 1
            yield masks[i]

    def choose(self, free: int, cells: int, warm: Warm) -> int:
        """So many of the free equal cells, of which there are: a warm lane, a block, the lowest."""
        for mask in warm.get(cells, ()):
            if mask & ~free == 0:
                return mask
        # The first of `blocks` that is free, found by shifting.
        runs, length = free, 1  # where runs of so many free cells start
        while length < cells:
            step = cells - length if cells < 2 * length else length
            runs &= runs >> step
            length += step
        if runs and cells:
            starts = runs & self._starts[cells] or runs
            return (starts & -starts) * ((1 << cells) - 1)
        chosen = 0
        for _ in range(cells):
            chosen |= free & ~chosen & -(free & ~chosen)
        return chosen


def aligned(cells: int) -> int:
    """What a block of so many cells is aligned to."""
    return 1 << (cells - 1).bit_length() if cells > 1 else 1
