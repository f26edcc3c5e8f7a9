"""The model reproduces published figures, and says which ones it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from benchmarks.model.colocation import (
    PUBLISHED_SPLITS,
    STEPS,
    check_colocation,
    nothing_saturates,
)
from benchmarks.model.isolation import inversion, start_latency
from benchmarks.model.scenarios import Check


@pytest.mark.parametrize(
    "situation",
    [start_latency, inversion, nothing_saturates],
    ids=["start latency", "inversion", "nothing saturates"],
)
def test_a_known_situation_is_reproduced(situation: Callable[[int], Iterator[Check]]) -> None:
    """Every figure of it is within a quarter of what was published, for another seed than 1 too."""
    for check in situation(7):
        assert check.is_reproduced, str(check)


def test_plain_streams_win_where_nothing_saturates() -> None:
    """Small kernels lose by every published split, and nothing on two streams."""
    found = {check.what: check.found for check in nothing_saturates(1)}
    streams = found["small kernels on two streams: decode, ms"]
    assert found["the same, shared classes of the pool, ms"] <= 1.02 * streams
    for prefill, decode in PUBLISHED_SPLITS:
        assert found[f"split {prefill}/{decode}: decode, ms"] > streams


def test_tallys_order_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS is worst, then throttling, then time slices; yielding in microseconds hardly hurts."""
    monkeypatch.setattr("benchmarks.model.colocation.REQUESTS", 12)
    name = "ResNet-50, batch 32"
    monkeypatch.setattr("benchmarks.model.colocation.STEPS", {name: STEPS[name]})
    mps, _, tgs, slices, tally = (check.found for check in check_colocation(1))
    assert mps > tgs > slices > tally
    assert tally < 1.1


def test_what_is_not_reproduced_is_said() -> None:
    """A figure that is off by more than a quarter is marked."""
    assert "NOT reproduced" in str(Check("a", 1.0, 1.3, "nothing"))
    assert "NOT" not in str(Check("a", 1.0, 0.8, "nothing"))
