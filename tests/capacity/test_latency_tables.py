"""Tables of time against SMs, and what kinds of work do to each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from greensched.capacity import host_costs
from greensched.capacity.interference import PUBLISHED, factor, slowdowns
from greensched.capacity.latency_tables import CURVES, SpeedupCurve, load
from greensched.capacity.workload import services
from greensched.errors import InvalidRequest
from greensched.leasing.latency import LatencyCurve

MEASURED = Path(__file__).parents[2] / "docs/measurements/h100-580/tables.json"


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_a_piece_alone_takes_what_the_table_says(curve: SpeedupCurve) -> None:
    """By its cost, on SMs of its own, at each size of the table."""
    for sms, ms in zip(curve.sms, curve.ms, strict=True):
        cost = curve.cost(0.010, sms)
        able = sms if curve.fills else min(sms, curve.width)
        assert cost.fixed_ns + cost.sm_ns / able == pytest.approx(1e7 * ms / curve.ms[-1])
        assert cost.sm_ns >= 0


def test_between_sizes_time_is_linear_in_one_over_sms() -> None:
    """Work that divides evenly is exact everywhere, also below the smallest size."""
    curve = SpeedupCurve("even", (8, 128), (16.0, 1.0))
    assert [curve.at(s) for s in (4, 8, 32, 64, 128, 200)] == pytest.approx([32, 16, 4, 2, 1, 1])


def test_steps_are_kept() -> None:
    """MLA decoding is flat from 64 to 120 SMs: more do not help, and the table knows."""
    mla = CURVES["mla-decode"]
    sizes = tuple(range(8, 133, 4))
    assert mla.least(1.81, sizes) <= 72
    assert mla.least(1.5, sizes) > 120


def test_the_flat_part_is_the_published_fit() -> None:
    """State-space decoding at batch 8 is 0.96 constant, a GEMM next to nothing."""
    assert CURVES["ssm-b8"].flat == pytest.approx(0.96, abs=0.02)
    assert CURVES["attention-b8"].flat == pytest.approx(0.70, abs=0.03)
    assert CURVES["gemm"].flat < 0.05


def test_a_measured_table_is_read(tmp_path: Path) -> None:
    """From JSON, by name; what is no curve is refused."""
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"mine": {"sms": [8, 16], "ms": [2, 1], "fills": False}}))
    assert load(path)["mine"].slowdown(8) == 2
    for wrong in ({"sms": [16, 8], "ms": [1, 2]}, {"sms": [8], "ms": [-1]}, {"sms": [8]}):
        path.write_text(json.dumps({"mine": wrong}))
        with pytest.raises(InvalidRequest):
            load(path)


def test_what_a_pool_measured_is_read(tmp_path: Path) -> None:
    """A saved latency curve, under the name of its file."""
    LatencyCurve({8: [0.004], 64: [0.001]}).save(tmp_path / "mine.json")
    assert load(tmp_path / "mine.json")["mine"].slowdown(8) == 4


def test_the_guard_blames_one_side() -> None:
    """A GEMM beside a mixture of experts is slower as published; that is hardly touched."""
    slowed = slowdowns(PUBLISHED, {"prefill": "gemm", "decode": "moe", "other": "unknown"})
    gemm, moe = slowed([("prefill", 64), ("decode", 64)])
    assert gemm == pytest.approx(1.21)
    assert 1.0 <= moe <= 1.05
    assert slowed([("prefill", 64), ("other", 64)]) == [1.0, 1.0]
    assert factor(PUBLISHED["gemm", "moe"], 28) == pytest.approx((1.46 + 1.32) / 2)


def test_what_measure_wrote_is_a_table_with_sizes_bytes_and_host_costs() -> None:
    """The file of an H100: a class of its table's name has its times by size, and its bytes."""
    tables = load(MEASURED)
    found = services("llm", tables)
    decode, prefill = found["decode"], found["prefill"]
    assert decode.seconds(32) == pytest.approx(0.003739)
    assert decode.seconds(8) == pytest.approx(0.0015, rel=0.01)
    assert prefill.seconds(1024) == pytest.approx(0.003159)
    assert prefill.seconds(128) == pytest.approx(0.00102 / 2)
    assert decode.curve.slowdown(8) == pytest.approx(41.303 / 3.739)
    assert decode.curve.slowdown(8, 0.000833) == pytest.approx(3.633 / 0.833)
    assert 3.633 / 0.833 < decode.curve.slowdown(8, 0.001) < 11.874 / 1.5
    assert decode.curve.slowdown(8, 1.0) == pytest.approx(41.303 / 3.739)
    assert prefill.curve.slowdown(8, 0.00102) == prefill.curve.slowdown(8)
    cost = decode.curve.cost(0.003739, 132)
    assert cost.dram_bytes == pytest.approx(8_724_152_320, rel=1e-3)
    assert cost.sm_ns / 132 == pytest.approx(3_739_000)
    host = host_costs.load(MEASURED)
    assert (host.lease.p50_us, host.checkpoint.p50_us) == (4.41, 143.82)
    assert (host.awaited.p50_us, host.awaited.p99_us) == pytest.approx((23.98, 44.95))


def test_a_table_without_host_costs_has_none(tmp_path: Path) -> None:
    """Then the host takes no time; what is no cost is refused."""
    path = tmp_path / "tables.json"
    path.write_text('{"mine": {"sms": [8], "ms": [1.0]}}')
    assert host_costs.load(path) == host_costs.HostCosts()
    path.write_text('{"host": {"lease": 3}}')
    with pytest.raises(InvalidRequest, match="greensched measure --host"):
        host_costs.load(path)


def test_sizes_and_their_times_are_checked() -> None:
    """Each size has a time, and they rise."""
    for sizes, seconds in (((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1,), (0.0,))):
        with pytest.raises(InvalidRequest, match="give rising sizes"):
            SpeedupCurve("x", (1,), (1.0,), sizes=sizes, seconds=seconds)


@pytest.mark.parametrize(
    ("read", "content", "said"),
    [
        *((read, content, said) for read in (load, lambda path: services(str(path)))
          for content, said in (("{", "Expecting"), (None, "No such file"))),
        (load, '{"mine": {}}', "no 'ms'"),
        (lambda path: services(str(path)), "{}", "no 'classes'"),
    ],
)  # fmt: skip
def test_an_unreadable_file_is_explained_in_words(
    tmp_path: Path, read: Callable[[Path], object], content: str | None, said: str
) -> None:
    """The error says what is wrong with the file, without the name of an exception."""
    path = tmp_path / "given.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidRequest, match=said) as caught:
        read(path)
    assert "Error" not in str(caught.value)


def test_an_unknown_attribute_of_a_class_names_the_known_ones(tmp_path: Path) -> None:
    """They are listed as words, not as a list of Python."""
    path = tmp_path / "classes.json"
    path.write_text('{"classes": {"search": {"sms": 8}}}')
    with pytest.raises(InvalidRequest, match="give some of batch, blocks, cap, "):
        services(str(path))
