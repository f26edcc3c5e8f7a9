"""Arithmetic of SM sets, against every set there is."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greensched.errors import InvalidRequest, InvalidSize
from greensched.leasing.device_pool import MAX_PREBUILT
from greensched.scheduling.cells import DeviceCells, SizeRange, parse_size, parse_sizes
from greensched.typing import ALL, REST

from .reference_cells import fits, is_enough, is_no_excess, possible, rest_of, sms, subsets
from .strategies import devices, joint_demands, plain_demands

H100 = DeviceCells(size=8, count=15, remainder=12)


@st.composite
def free_cells(draw: st.DrawFn) -> tuple[DeviceCells, int]:
    cells = draw(devices())
    return cells, draw(st.integers(0, cells.full_mask))


# -- sizes --------------------------------------------------------------------------------------


NO_NUMBERS = [0, -1, True, False, 1.5, float("nan"), 1e9, "16", None, b"8"]
NO_PAIRS = [(8,), (8, 16, 32), (16, 8), (0, 8), (-1, 8), (8, 16.0), (True, 8), [8, 64], ("8", "9")]
NO_NAMED = [(ALL, 8), (0, ALL), (8, REST), (ALL, ALL)]


@pytest.mark.parametrize("size", [*NO_NUMBERS, *NO_PAIRS, *NO_NAMED], ids=repr)
def test_what_is_no_size_is_refused(size: object) -> None:
    """Only a positive int, an ordered pair of them or with ALL, ALL and REST are sizes."""
    with pytest.raises(InvalidSize, match="is not a size"):
        parse_size(size)  # type: ignore[arg-type]


def test_sizes_are_read() -> None:
    """An int is exact, a pair a range, a name depends on the device; a huge int is a size."""
    assert parse_size(16) == SizeRange(16, 16)
    assert parse_size((8, 64)) == SizeRange(8, 64)
    assert parse_size(10**9) == SizeRange(10**9, 10**9)
    assert parse_size(ALL) == SizeRange(0, 0, ALL)
    assert parse_size((8, ALL)) == SizeRange(8, sys.maxsize)
    assert parse_sizes((16, REST)) == (SizeRange(16, 16), SizeRange(0, 0, REST))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((), "at least one"),
        ((ALL, 8), "use REST"),
        ((8, ALL), "use REST"),
        ((ALL, ALL), "use REST"),
        ((REST, REST), "only once"),
        ((8, REST, REST), "only once"),
    ],
)
def test_sizes_that_cannot_stand_together_are_refused(sizes: tuple[int, ...], message: str) -> None:
    """An empty joint request, ALL beside anything, and two RESTs can never be right."""
    with pytest.raises(InvalidRequest, match=message):
        parse_sizes(sizes)


# -- sets of cells ------------------------------------------------------------------------------


@given(devices())
def test_sets_add_up(cells: DeviceCells) -> None:
    """Counting SMs and asking what is possible agree with the naive answers for every set."""
    assert cells.total == cells.size * cells.count + cells.remainder
    assert cells.cell_mask & cells.remainder_mask == 0
    assert cells.cell_mask | cells.remainder_mask == cells.full_mask
    for mask in subsets(cells.full_mask):
        assert cells.sm_count(mask) == sms(cells, mask)
        assert cells.possible(mask) is possible(cells, mask)


@given(devices(), st.integers(0, 70))
def test_menu_is_possible_and_unique(cells: DeviceCells, limit: int) -> None:
    """`menu` names partitions that can exist, each once, everything first, no more than wanted."""
    menu = cells.menu(limit)
    assert len(menu) <= limit
    assert len(menu) == len(set(menu))
    assert all(possible(cells, mask) for mask in menu)
    assert menu[:1] == [cells.full_mask][:limit]


@given(devices())
def test_menu_has_what_a_pair_needs(cells: DeviceCells) -> None:
    """Beside each aligned block in a menu without bounds stands what REST is beside it."""
    menu = set(cells.menu(1000))
    for power in range(cells.count.bit_length()):
        for start in range(0, cells.count - (1 << power) + 1, 1 << power):
            block = ((1 << (1 << power)) - 1) << start
            assert block in menu
            rest = rest_of(cells, block)
            assert not rest or rest in menu


@given(devices(), st.integers(0, 40))
def test_largest_is_the_largest(cells: DeviceCells, most: int) -> None:
    """No partition of at most so many SMs is larger, and one is as large."""
    sizes = [sms(cells, mask) for mask in subsets(cells.full_mask) if possible(cells, mask)]
    assert cells.largest(most) == max((size for size in sizes if size <= most), default=0)


@given(devices(), st.integers(1, 40))
def test_sizes_begin_with_the_smallest_partition(cells: DeviceCells, least: int) -> None:
    """Sizes rise from the smallest with at least so many SMs, in steps of a cell."""
    possible_sizes = [
        sms(cells, mask) for mask in subsets(cells.full_mask) if possible(cells, mask)
    ]
    sizes = cells.sizes_from(least)
    smallest = min((n for n in possible_sizes if n >= least), default=cells.total)
    assert min((*sizes, cells.total)) == smallest
    assert sorted({*sizes}) == list(sizes)
    assert {n for n in sizes[1:] if n % cells.size} == set()


def test_a_short_menu_has_what_moves_a_border() -> None:
    """Cut by twos, an H100 has partitions for two that share it, wherever their border is."""
    fine = DeviceCells(size=2, count=66)
    menu = fine.menu(MAX_PREBUILT)
    assert len(menu) == MAX_PREBUILT
    for cells in range(1, 66):
        assert {(1 << cells) - 1, fine.full_mask & ~((1 << cells) - 1)} <= {*menu}, cells


def test_menu_of_an_h100_fits_the_bound() -> None:
    """The menu of a real device has every number of cells, and needs no more than 96 executors."""
    menu = H100.menu(1000)
    assert len(menu) <= 96
    assert {mask.bit_count() for mask in menu} >= set(range(1, H100.count + 1))


@given(devices(), st.data())
def test_complement_is_the_rest(cells: DeviceCells, data: st.DataObject) -> None:
    """A set and its complement are disjoint, and nothing more could join the complement."""
    mask = data.draw(st.integers(0, cells.full_mask))
    rest = cells.complement(mask)
    assert rest == rest_of(cells, mask)
    assert rest & mask == 0


# -- one demand ---------------------------------------------------------------------------------


@given(free_cells(), plain_demands())
def test_fit_finds_cells_exactly_when_there_are_some(
    device: tuple[DeviceCells, int], wanted: SizeRange
) -> None:
    """`fit` is 0 exactly when no possible set of free cells is enough; else one that is."""
    cells, free = device
    mask = cells.fit(free, wanted)
    if not fits(cells, free, (wanted,)):
        assert mask == 0
        return
    assert mask & ~free == 0
    assert is_enough(cells, mask, wanted)
    assert is_no_excess(cells, mask, wanted)


@given(free_cells(), plain_demands())
def test_fit_gives_an_elastic_demand_all_it_can_use(
    device: tuple[DeviceCells, int], wanted: SizeRange
) -> None:
    """No free cell stays behind that could be added without exceeding `most`."""
    cells, free = device
    mask = cells.fit(free, wanted)
    for bit in range(cells.count + 1):
        more = mask | (1 << bit)
        if mask and free >> bit & 1 and more != mask and possible(cells, more):
            assert sms(cells, more) > wanted.most


@given(free_cells(), plain_demands(), st.data())
def test_warm_partitions_are_preferred_and_change_nothing_else(
    device: tuple[DeviceCells, int], wanted: SizeRange, data: st.DataObject
) -> None:
    """A warm partition of the right number of free cells is taken; the size granted is the same."""
    cells, free = device
    masks = data.draw(st.lists(st.integers(1, cells.full_mask), max_size=6, unique=True))
    warm: dict[int, list[int]] = {}
    for mask in filter(cells.possible, masks):
        warm.setdefault(mask.bit_count(), []).append(mask)
    cold, chosen = cells.fit(free, wanted), cells.fit(free, wanted, warm)
    assert cells.sm_count(chosen) == cells.sm_count(cold)
    assert chosen & ~free == 0
    usable = [m for m in warm.get(cold.bit_count(), ()) if m & ~free == 0 and m <= cells.cell_mask]
    if usable and not cold & cells.remainder_mask:
        assert chosen == usable[0]


@given(free_cells())
def test_all_is_the_whole_device(device: tuple[DeviceCells, int]) -> None:
    """ALL, and REST alone, are every cell, once every cell is free."""
    cells, free = device
    whole = cells.full_mask if free == cells.full_mask else 0
    assert cells.fit(free, SizeRange(0, 0, ALL)) == whole
    assert cells.fit_all(free, (SizeRange(0, 0, REST),)) == ((whole,) if whole else ())


def test_an_h100_by_hand() -> None:
    """The cells of the published split: 15 x 8 and 12 over that join nothing."""
    every, equal, leftover = H100.full_mask, H100.cell_mask, H100.remainder_mask
    assert H100.total == 132
    assert H100.fit(every, parse_size(16)) == 0b11
    assert H100.fit(every & ~0b1, parse_size(16)) == 0b1100, "aligned, so that large blocks stay"
    assert H100.fit(leftover, parse_size(8)) == leftover, "12 SMs for 8 where nothing else is free"
    assert H100.fit(leftover | 1, parse_size(16)) == 0
    assert H100.fit(every, parse_size((8, 64))).bit_count() == 8
    assert H100.fit(equal, parse_size((8, 132))) == equal
    assert H100.fit(every, parse_size((8, 132))) == every
    assert H100.fit(every, parse_size(120)) == equal
    assert H100.fit(every, parse_size(121)) == every
    assert H100.fit(every & ~1, parse_size(121)) == 0
    assert H100.fit(every, parse_size(133)) == 0


def test_a_remainder_that_joins_by_hand() -> None:
    """Where the remainder may join, it makes up for cells that are not free, or adds to them."""
    cells = DeviceCells(size=8, count=15, remainder=12, joins=True)
    assert cells.fit(cells.remainder_mask | 0b1, parse_size(16)) == cells.remainder_mask | 0b1
    assert cells.fit(cells.remainder_mask | 0b1, parse_size((8, 20))) == cells.remainder_mask | 0b1
    assert cells.fit(cells.remainder_mask | 0b1, parse_size((8, 19))) == 0b1
    assert (
        cells.fit(cells.remainder_mask | 0b11, parse_size((12, 64))) == cells.remainder_mask | 0b11
    )


# -- several at once ----------------------------------------------------------------------------


@settings(max_examples=300)
@given(free_cells(), joint_demands())
def test_a_joint_request_fits_exactly_when_disjoint_sets_exist(
    device: tuple[DeviceCells, int], parts: tuple[SizeRange, ...]
) -> None:
    """`fit_all` is empty exactly when no disjoint sets are enough; else it gives such sets."""
    cells, free = device
    masks = cells.fit_all(free, parts)
    assert bool(masks) is fits(cells, free, parts)
    if not masks:
        return
    assert len(masks) == len(parts)
    union = 0
    for mask, part in zip(masks, parts, strict=True):
        assert mask & union == 0
        assert mask & ~free == 0
        union |= mask
        if part.named is not REST:
            assert is_enough(cells, mask, part)
            assert is_no_excess(cells, mask, part)
    for mask, part in zip(masks, parts, strict=True):
        if part.named is REST:
            assert mask == rest_of(cells, union & ~mask)


def test_the_remainder_goes_where_it_helps() -> None:
    """(12, 8, 8) fits on 2 x 8 and 12 over: the remainder is the part that would need two cells."""
    cells = DeviceCells(size=8, count=2, remainder=12)
    assert cells.fit_all(cells.full_mask, parse_sizes((12, 8, 8))) == (
        cells.remainder_mask,
        0b01,
        0b10,
    )
    assert cells.fit_all(cells.full_mask, parse_sizes((8, 12, 8))) == (
        0b01,
        cells.remainder_mask,
        0b10,
    )
    assert cells.fit_all(cells.full_mask, parse_sizes((8, 8, 8))) != ()
    assert cells.fit_all(cells.full_mask, parse_sizes((12, 12, 8))) == ()
    assert cells.fit_all(cells.remainder_mask | 0b10, parse_sizes((12, 8))) == (
        cells.remainder_mask,
        0b10,
    )
    assert cells.fit_all(cells.cell_mask, parse_sizes((12, 8))) == (), "the remainder is not free"
    joins = DeviceCells(size=8, count=5, remainder=12, joins=True)
    assert joins.fit_all(joins.full_mask, parse_sizes((12, 40))) == (
        joins.remainder_mask,
        joins.cell_mask,
    )
    more = DeviceCells(size=8, count=3, remainder=12)
    (stretched, *_) = more.fit_all(more.full_mask, parse_sizes(((12, 64), 8, 8)))
    assert stretched == more.remainder_mask, "no cell joins it"


def test_elastic_parts_share_what_is_left() -> None:
    """No elastic part takes what another part needs; then they stretch in their order."""
    cells = DeviceCells(size=8, count=8)
    masks = cells.fit_all(cells.full_mask, parse_sizes(((8, 64), (16, 32), 16)))
    assert [mask.bit_count() for mask in masks] == [4, 2, 2]
    masks = cells.fit_all(cells.full_mask, parse_sizes(((8, 32), 8)))
    assert [mask.bit_count() for mask in masks] == [4, 1], "and to no more than their most"


def test_rest_is_every_other_cell() -> None:
    """`(16, REST)` covers the device, less a remainder that cannot join."""
    first, rest = H100.fit_all(H100.full_mask, parse_sizes((16, REST)))
    assert (first, rest) == (0b11, H100.cell_mask & ~0b11)
    rest, first = H100.fit_all(H100.full_mask, parse_sizes((REST, 120)))
    assert (rest, first) == (H100.remainder_mask, H100.cell_mask)
    assert H100.fit_all(H100.full_mask & ~(1 << 14), parse_sizes((16, REST))) == ()
    assert H100.fit_all(H100.full_mask, parse_sizes((121, REST))) == ()


def test_no_cells_form_no_partition() -> None:
    """Where no cell is left, not one SM can be granted."""
    assert DeviceCells(size=8, count=4, remainder=4).largest_within(0) == 0


def test_each_shared_grant_has_a_mask_of_its_own() -> None:
    """It has every cell, and differs from those of others and from the device's own."""
    cells = DeviceCells(size=8, count=4, remainder=4)
    masks = {cells.shared_mask(number) for number in range(4)}
    assert len(masks - {cells.full_mask}) == 4
    assert {mask & cells.full_mask for mask in masks} == {cells.full_mask}


def test_the_nearest_request_that_fits_has_fewer_parts_rather_than_empty_ones() -> None:
    """A part that cannot have one cell is left out."""
    cells = DeviceCells(size=8, count=2)
    assert cells.nearest(cells.full_mask, parse_sizes((8, 8, 8))) == (8, 8)
    assert cells.nearest(cells.full_mask, parse_sizes((16, 8))) == (8, 8)


def test_only_the_whole_device_has_cells_and_a_remainder_that_does_not_join() -> None:
    """With one SM less than all, the largest partition is made of cells."""
    assert H100.largest(132) == 132
    assert H100.largest(131) == 120
    assert H100.largest(12) == 12


def test_a_remainder_that_does_not_join_is_granted_alone() -> None:
    """A size that only the remainder has left gets no cell with it."""
    free = H100.remainder_mask | 0b1
    assert H100.fit(free, SizeRange(12, 12)) == H100.remainder_mask
    assert H100.fit_all(0, (SizeRange(8, 8),)) == ()
