"""The arithmetic of sets of cells, compared with a search of every set."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given, settings
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
    """Only positive ints, ascending pairs, ALL and REST are sizes; others are refused."""
    with pytest.raises(InvalidSize, match="is not a size"):
        parse_size(size)  # type: ignore[arg-type]


def test_sizes_are_read() -> None:
    """An int is exact, a pair is a range, and ALL depends on the device; any int is a size."""
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
    """An empty joint request, ALL beside another part, and two RESTs are refused."""
    with pytest.raises(InvalidRequest, match=message):
        parse_sizes(sizes)


# -- sets of cells ------------------------------------------------------------------------------


@given(devices())
def test_sets_add_up(cells: DeviceCells) -> None:
    """For every set, the SM count and whether it is possible agree with the reference."""
    assert cells.total == cells.size * cells.count + cells.remainder
    assert cells.cell_mask & cells.remainder_mask == 0
    assert cells.cell_mask | cells.remainder_mask == cells.full_mask
    for mask in subsets(cells.full_mask):
        assert cells.sm_count(mask) == sms(cells, mask)
        assert cells.possible(mask) is possible(cells, mask)


@given(devices(), st.integers(0, 70))
def test_menu_is_possible_and_unique(cells: DeviceCells, limit: int) -> None:
    """`menu` has possible partitions, each once, the whole device first, within its limit."""
    menu = cells.menu(limit)
    assert len(menu) <= limit
    assert len(menu) == len(set(menu))
    assert all(possible(cells, mask) for mask in menu)
    assert menu[:1] == [cells.full_mask][:limit]


@given(devices())
def test_menu_has_what_a_pair_needs(cells: DeviceCells) -> None:
    """For each aligned block, an unlimited menu also has the rest of the device."""
    menu = set(cells.menu(1000))
    for power in range(cells.count.bit_length()):
        for start in range(0, cells.count - (1 << power) + 1, 1 << power):
            block = ((1 << (1 << power)) - 1) << start
            assert block in menu
            rest = rest_of(cells, block)
            assert not rest or rest in menu


@given(devices(), st.integers(0, 40))
def test_largest_is_the_largest(cells: DeviceCells, most: int) -> None:
    """`largest` is reached by a partition, and no partition within the limit is larger."""
    sizes = [sms(cells, mask) for mask in subsets(cells.full_mask) if possible(cells, mask)]
    assert cells.largest(most) == max((size for size in sizes if size <= most), default=0)


@given(devices(), st.integers(1, 40))
@example(DeviceCells(size=1, count=1, remainder=3), 2)
def test_sizes_begin_with_the_smallest_partition(cells: DeviceCells, least: int) -> None:
    """Sizes rise in steps of a cell from the smallest partition with at least so many SMs."""
    possible_sizes = [
        sms(cells, mask) for mask in subsets(cells.full_mask) if possible(cells, mask)
    ]
    sizes = cells.sizes_from(least)
    smallest = min((n for n in possible_sizes if n >= least), default=cells.total)
    assert min((*sizes, cells.total)) == smallest
    assert sorted({*sizes}) == list(sizes)
    assert {n for n in sizes[1:] if n % cells.size} == set()
    assert {*sizes} <= {*possible_sizes}


def test_a_short_menu_has_what_moves_a_border() -> None:
    """With cells of two SMs, an H100's menu has a partition on each side of every border."""
    fine = DeviceCells(size=2, count=66)
    menu = fine.menu(MAX_PREBUILT)
    assert len(menu) == MAX_PREBUILT
    for cells in range(1, 66):
        assert {(1 << cells) - 1, fine.full_mask & ~((1 << cells) - 1)} <= {*menu}, cells


def test_menu_of_an_h100_fits_the_bound() -> None:
    """The menu of an H100 has every number of cells and at most 96 executors."""
    menu = H100.menu(1000)
    assert len(menu) <= 96
    assert {mask.bit_count() for mask in menu} >= set(range(1, H100.count + 1))


@given(devices(), st.data())
def test_complement_is_the_rest(cells: DeviceCells, data: st.DataObject) -> None:
    """A set and its complement are disjoint, and no other cell could join the complement."""
    mask = data.draw(st.integers(0, cells.full_mask))
    rest = cells.complement(mask)
    assert rest == rest_of(cells, mask)
    assert rest & mask == 0


# -- one demand ---------------------------------------------------------------------------------


@given(free_cells(), plain_demands())
def test_fit_finds_cells_exactly_when_there_are_some(
    device: tuple[DeviceCells, int], wanted: SizeRange
) -> None:
    """`fit` returns 0 exactly if no possible set of free cells is enough, and else such a set."""
    cells, free = device
    mask = cells.fit(free, wanted)
    if not fits(cells, free, (wanted,)):
        assert mask == 0
        return
    assert mask & ~free == 0
    assert is_enough(cells, mask, wanted)
    assert is_no_excess(cells, mask, wanted)


@given(free_cells(), plain_demands())
@example((DeviceCells(size=1, count=1, remainder=2), 0b11), SizeRange(2, 3))
def test_fit_gives_an_elastic_demand_all_it_can_use(
    device: tuple[DeviceCells, int], wanted: SizeRange
) -> None:
    """`fit` leaves no free cell that could be added without exceeding `most`."""
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
    """`fit` prefers partitions with executors, and grants the same size as without them."""
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
    """ALL, and REST alone, need every cell, and fit once every cell is free."""
    cells, free = device
    whole = cells.full_mask if free == cells.full_mask else 0
    assert cells.fit(free, SizeRange(0, 0, ALL)) == whole
    assert cells.fit_all(free, (SizeRange(0, 0, REST),)) == ((whole,) if whole else ())


def test_an_h100_by_hand() -> None:
    """An H100 has 15 cells of 8 SMs and a remainder of 12, which joins no other cell."""
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
    """A remainder that joins replaces cells that are not free, or adds to them."""
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
    """`fit_all` is empty exactly if no disjoint sets are enough, and else returns such sets."""
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
    """(12, 8, 8) fits on two cells of 8 and a remainder of 12, which serves the part of 12."""
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
    """No elastic part takes cells that another part needs; then the parts grow in order."""
    cells = DeviceCells(size=8, count=8)
    masks = cells.fit_all(cells.full_mask, parse_sizes(((8, 64), (16, 32), 16)))
    assert [mask.bit_count() for mask in masks] == [4, 2, 2]
    masks = cells.fit_all(cells.full_mask, parse_sizes(((8, 32), 8)))
    assert [mask.bit_count() for mask in masks] == [4, 1], "and to no more than their most"


def test_rest_is_every_other_cell() -> None:
    """`(16, REST)` covers the device, except a remainder that cannot join."""
    first, rest = H100.fit_all(H100.full_mask, parse_sizes((16, REST)))
    assert (first, rest) == (0b11, H100.cell_mask & ~0b11)
    rest, first = H100.fit_all(H100.full_mask, parse_sizes((REST, 120)))
    assert (rest, first) == (H100.remainder_mask, H100.cell_mask)
    assert H100.fit_all(H100.full_mask & ~(1 << 14), parse_sizes((16, REST))) == ()
    assert H100.fit_all(H100.full_mask, parse_sizes((121, REST))) == ()


def test_no_cells_form_no_partition() -> None:
    """Without cells no SM can be granted."""
    assert DeviceCells(size=8, count=4, remainder=4).largest_within(0) == 0


def test_each_shared_grant_has_a_mask_of_its_own() -> None:
    """A shared grant's mask has every cell and differs from every other mask."""
    cells = DeviceCells(size=8, count=4, remainder=4)
    masks = {cells.shared_mask(number) for number in range(4)}
    assert len(masks - {cells.full_mask}) == 4
    assert {mask & cells.full_mask for mask in masks} == {cells.full_mask}


def test_the_nearest_request_that_fits_has_fewer_parts_rather_than_empty_ones() -> None:
    """`nearest` leaves out a part that cannot have one cell."""
    cells = DeviceCells(size=8, count=2)
    assert cells.nearest(cells.full_mask, parse_sizes((8, 8, 8))) == (8, 8)
    assert cells.nearest(cells.full_mask, parse_sizes((16, 8))) == (8, 8)


def test_only_the_whole_device_has_cells_and_a_remainder_that_does_not_join() -> None:
    """Below the whole device, the largest partition has cells and no remainder."""
    assert H100.largest(132) == 132
    assert H100.largest(131) == 120
    assert H100.largest(12) == 12


def test_a_remainder_that_does_not_join_is_granted_alone() -> None:
    """A request that only the remainder fits gets the remainder and no cell."""
    free = H100.remainder_mask | 0b1
    assert H100.fit(free, SizeRange(12, 12)) == H100.remainder_mask
    assert H100.fit_all(0, (SizeRange(8, 8),)) == ()
