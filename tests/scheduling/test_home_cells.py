"""Classes with sizes: their leases use few sets of cells, and the same sets again."""

from __future__ import annotations

import random

import pytest

from greensched import ALL
from greensched.errors import InvalidRequest
from greensched.leasing.requests import RequestParser
from greensched.scheduling.cells import DeviceCells, SizeRange, parse_sizes
from greensched.scheduling.home_cells import home_masks
from greensched.scheduling.policy import Fifo
from greensched.scheduling.requests import GRANTED, Grant
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import NO_CAP, ServiceClass, validate_services

#: An H100 with driver 580.
H100 = DeviceCells(size=8, count=16, remainder=4, joins=True)
DECODE = ServiceClass("decode", sizes=(24, 48, 64), cap=64, reserve=24, priority=1)
PREFILL = ServiceClass("prefill", sizes=(68, 84, 108), cap=108)


def scheduler_of(*services: ServiceClass, cells: DeviceCells = H100) -> Scheduler:
    """Return the scheduler of a pool of one device with these classes."""
    return Scheduler([cells], Fifo(), 100, services=services)


def grant(scheduler: Scheduler, service: str, *sizes: object) -> Grant:
    """Return the grant of a request that fits at once."""
    request = scheduler.request(0.0, parse_sizes(sizes), service=service)
    assert request.state is GRANTED
    (granted,) = request.grants
    return granted


def test_homes_contain_each_other_from_one_end() -> None:
    """Each size's home contains the smaller ones, and several leases fit beside each other."""
    down = home_masks(H100, (24, 48, 64), 64, 16, downward=True)
    assert down == {24: (0b111 << 13, 0b111 << 10), 48: (0b111111 << 10,), 64: (0xFF << 8,)}
    up = home_masks(H100, (24, 48), NO_CAP, 0, downward=False)
    assert up[24] == tuple(0b111 << at for at in (0, 3, 6, 9, 12))
    assert up[48] == (0b111111, 0b111111 << 6)


def test_the_remainder_is_used_where_it_saves_sms() -> None:
    """68 SMs are 8 cells and the remainder of 4, if these can be combined."""
    with_it = home_masks(H100, (68, 132), NO_CAP, 0, downward=False)
    assert with_it[68] == (0xFF | H100.remainder_mask,)
    assert with_it[132] == (H100.full_mask,)
    apart = DeviceCells(size=8, count=16, remainder=4)
    assert home_masks(apart, (68,), NO_CAP, 0, downward=False)[68] == (0x1FF,)


def test_two_classes_fill_a_device_from_its_ends() -> None:
    """Each size of one class fits beside the matching size of the other, wherever the border is."""
    for small, large in ((24, 108), (48, 84), (64, 68)):
        for names in (("decode", "prefill"), ("prefill", "decode")):
            scheduler = scheduler_of(DECODE, PREFILL)
            sizes = {"decode": small, "prefill": large}
            grants = {name: grant(scheduler, name, sizes[name]) for name in names}
            found = {name: one.sms for name, one in grants.items()}
            assert found == sizes
            for name, one in grants.items():
                assert one.mask in scheduler.home_masks(0, name)


def test_a_lease_grows_and_shrinks_among_its_sizes() -> None:
    """A checkpoint takes the largest of the class's sizes that is free."""
    scheduler = scheduler_of(DECODE, PREFILL)
    prefill = grant(scheduler, "prefill", 84)
    decode = grant(scheduler, "decode", (24, 64))
    assert decode.sms == 48
    scheduler.drained(1.0, prefill)
    scheduler.checkpoint(1.0, decode)
    assert decode.sms == 64
    waiting = scheduler.request(2.0, parse_sizes((108,)), service="prefill")
    assert scheduler.checkpoint(2.0, decode) == [waiting]
    assert decode.sms == 24
    assert {decode.mask, waiting.grants[0].mask} <= {*scheduler.home_masks(0)}


def test_a_reserve_is_the_classes_home() -> None:
    """Leases of other classes leave the home of a reserve free, at both ends."""
    other = ServiceClass("other", sizes=(16, 32), reserve=16)
    scheduler = scheduler_of(DECODE, other, ServiceClass("third", reserve=8))
    rest = grant(scheduler, "", (8, ALL))
    assert rest.sms == 132 - 24 - 16 - 8
    assert grant(scheduler, "decode", 24).mask == scheduler.home_masks(0, "decode")[0]
    assert grant(scheduler, "other", 16).mask == scheduler.home_masks(0, "other")[0]
    assert grant(scheduler, "third", 8).sms == 8


@pytest.mark.parametrize("seed", range(20))
def test_a_home_that_is_free_is_granted(seed: int) -> None:
    """A request gets one of its sizes, at home if that is free, and otherwise elsewhere."""
    draw = random.Random(seed)
    cells = draw.choice([H100, DeviceCells(size=8, count=9, remainder=6), DeviceCells(2, 66)])
    scheduler = scheduler_of(
        DECODE, ServiceClass("batch", sizes=(16, 40), preemptible=True), cells=cells
    )
    held: list[Grant] = []
    for step in range(200):
        now, name = float(step), draw.choice(["decode", "batch", ""])
        free = scheduler.allocator.free_masks[0]
        sizes = scheduler.allocator.classes[name].sizes or (8, 16, 24)
        least, most = sorted(draw.choices(sizes, k=2))
        request = scheduler.request(now, (SizeRange(least, most),), service=name)
        if request.state is GRANTED:
            (one,) = request.grants
            held.append(one)
            if name:
                exact = {cells.sm_count(cells.fit(cells.full_mask, SizeRange(s, s))) for s in sizes}
                homes = scheduler.allocator.homes(one.class_state, 0)
                assert one.sms in exact | {
                    cells.sm_count(mask) for masks in homes.values() for mask in masks
                }
                size = max(s for s in sizes if s <= one.sms)
                at_home = [mask for mask in homes[size] if not mask & ~free]
                assert not at_home or one.mask in homes[size]
        else:
            scheduler.cancel(now, request)
        if held and (draw.random() < 0.5 or request.state is not GRANTED):
            scheduler.drained(now, held.pop(draw.randrange(len(held))))


@pytest.mark.parametrize("sizes", [24, (48, 24), (24, 24), (0, 24), (24.0,), (24, 200), [24]])
def test_what_sizes_cannot_be(sizes: object) -> None:
    """Sizes must ascend within the cap, and a class with sizes cannot be shared."""
    service = ServiceClass("decode", sizes=sizes, cap=64)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="sizes="):
        validate_services([service])
    with pytest.raises(InvalidRequest, match="sizes="):
        validate_services([ServiceClass("decode", sizes=(24,), shared=True)])


def test_a_request_names_sizes_of_its_class() -> None:
    """ALL means the largest size; other sizes are refused, with a list of the valid ones."""
    parser = RequestParser([DECODE, PREFILL])
    assert parser.parse((24, ALL), {"service": "decode"}).parts == (SizeRange(24, 64),)
    for wrong in (30, (24, 60), ALL):
        with pytest.raises(InvalidRequest, match=r"sizes \(24, 48, 64\)"):
            parser.parse(wrong, {"service": "decode"})


def test_a_checkpoint_takes_up_home_cells_that_have_an_executor() -> None:
    """An elastic lease grows to the largest home that has an executor."""
    made: set[int] = set()
    scheduler = Scheduler([H100], Fifo(), 100, lambda _, mask: mask in made, services=(DECODE,))
    smallest, _, middle, largest = scheduler.home_masks(0, "decode")
    made.add(smallest)
    decode = grant(scheduler, "decode", (24, 64))
    found = []
    for mask in (smallest, middle, largest):
        made.add(mask)
        scheduler.checkpoint(1.0, decode)
        found.append(decode.mask)
    assert found == [smallest, middle, largest]


def test_a_class_with_sizes_needs_no_other_limit() -> None:
    """Without caps and reserves, a lease still has one of its class's sizes."""
    scheduler = scheduler_of(ServiceClass("sized", sizes=(24, 48)))
    assert grant(scheduler, "sized", (8, 132)).sms == 48
