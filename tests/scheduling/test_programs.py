"""Random programs, a few of them: `make fuzz-scheduler` runs many."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greensched.scheduling.policy import POLICIES, Fifo, RequestView
from greensched.scheduling.services import ServiceClass

from .fuzz import Waits, faults
from .programs import (
    DEVICES,
    Curve,
    Execution,
    Program,
    Traffic,
    draw,
    draw_from,
    partitions,
)

SEEDS = range(20)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_program_locks_or_starves(policy: str) -> None:
    """No request waits for ever, for free cells, or far longer than on fixed partitions."""
    for seed in SEEDS:
        program = draw(seed)
        found = faults(program, policy, partitions(program))
        assert not {"locked", "free", "starved", "overdue"} & {*found}, seed


@pytest.mark.parametrize(
    ("policy", "seed"),
    [("fifo", 302531), ("fifo", 303152), ("fifo", 302219), ("sized", 322353)],
)
def test_no_request_waits_beyond_its_turn(policy: str, seed: int) -> None:
    """A lower lease gives way to it, and a lease that is known to end waits behind no lower one."""
    program = draw(seed)
    assert not {"starved", "overdue"} & {*faults(program, policy, partitions(program))}


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        *(("fifo", 403967), ("fifo", 406209), ("fifo", 401839), ("fair", 405685)),
        *(("fair", 402818), ("sized", 410678)),
    ],
)
def test_a_wait_for_an_aged_request_or_its_own_class_is_no_fault(policy: str, seed: int) -> None:
    """Leases with a known end delay an aged request, and requests the later ones of their class."""
    program = draw(seed)
    assert faults(program, policy, partitions(program)) == []


def test_a_request_that_others_overtake_for_ever_is_overdue() -> None:
    """Without ageing a request for all SMs waits while smaller ones never leave them all free."""

    class Never(Fifo):
        def may_overtake(self, first: RequestView, now: float) -> bool:
            return True

    curve, cells = Curve(0.4, 40), DEVICES[0]
    times = tuple(0.004 * i for i in range(100))
    small = Traffic(ServiceClass("small"), curve, 1, 40, 40, 40, times)
    large = Traffic(ServiceClass("large"), curve, 1, 128, 128, 128, (0.01,))
    for policy, is_overdue in ((Never(), True), (Fifo(), False)):
        waits = Waits()
        Execution(Program(cells, (small, large)), policy, elastic=True, check=waits).run()
        assert (max(waits.in_turn.values()) > waits.bound) is is_overdue


@given(rng=st.randoms(use_true_random=False), policy=st.sampled_from(sorted(POLICIES)))
@settings(max_examples=80)
def test_no_small_program_is_worse_than_on_fixed_partitions(
    rng: random.Random, policy: str
) -> None:
    """Nothing waits for what is free or far longer, and the highest class is in time as often."""
    program = draw_from(rng, most=6)
    assert faults(program, policy, partitions(program)) == []


@pytest.mark.parametrize("seed", [661, 1336, 1470])
def test_a_size_that_a_decision_about_others_changes_is_tried_again(seed: int) -> None:
    """A grant, or a checkpoint of a lease of one size, may change what a request is to have."""
    program = draw(seed)
    assert "free" not in faults(program, "sized", partitions(program))


@pytest.mark.parametrize("seed", [97, 275, 337, 491, 20064, 21380])
def test_a_grant_on_a_kept_device_leaves_no_request_waiting_for_what_is_free(seed: int) -> None:
    """An owner that takes its reserve changes when the first request may begin, or does not."""
    program = draw(seed)
    assert "free" not in faults(program, "fifo", partitions(program))


@pytest.mark.parametrize(("policy", "seed"), [("fifo", 105832), ("deadline", 304966)])
def test_a_device_kept_and_granted_in_one_decision_is_free_for_others(
    policy: str, seed: int
) -> None:
    """A lease that gave way is served by arrival: a request before it in rank is tried again."""
    program = draw(seed)
    assert "free" not in faults(program, policy, partitions(program))


@pytest.mark.parametrize(("policy", "seed"), [("fifo", 3591), ("sized", 406), ("sized", 830)])
def test_no_lease_delays_a_lower_class_in_vain(policy: str, seed: int) -> None:
    """It keeps its SMs where it must end first, and gives way where the remainder then suffices."""
    program = draw(seed)
    assert faults(program, policy, partitions(program)) == []


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        *(("fifo", 193), ("fifo", 21217), ("fair", 134)),
        *(("sized", 590), ("sized", 653), ("sized", 3285), ("sized", 20697), ("sized", 50165)),
    ],
)
def test_the_highest_class_is_no_worse_than_on_fixed_partitions(policy: str, seed: int) -> None:
    """It is given what a checkpoint frees, and let past a device kept for a lower class."""
    program = draw(seed)
    assert faults(program, policy, partitions(program)) == []
