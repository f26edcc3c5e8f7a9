"""Latency curves: measured, smoothed, queried, saved, and updated."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import greensched
from greensched import LatencyCurve, LaunchConfig, Partition, Pool
from greensched.driver import simulated
from greensched.errors import InvalidRequest
from greensched.kernels import matmul

#: Decode attention beside nothing on a Hopper GPU: flat, then a second wave is saved. Seconds.
STEPPED = {8: 1.040, 16: 0.523, 32: 0.262, 64: 0.135, 96: 0.135, 120: 0.137, 132: 0.075}


def curve(times: dict[int, float]) -> LatencyCurve:
    return LatencyCurve({sms: [seconds * 1e-3] for sms, seconds in times.items()})


def test_the_fewest_sms_within_a_slowdown() -> None:
    """`within` gives the smallest size whose tail is close enough to the whole device's."""
    assert curve(STEPPED).within(slowdown=1.05) == 132
    assert curve(STEPPED).within(slowdown=1.9) == 64
    assert curve({8: 4.0, 16: 2.0, 32: 1.03, 64: 1.0}).within(slowdown=1.05) == 32
    with pytest.raises(greensched.InvalidRequest, match="slowdown"):
        curve(STEPPED).within(slowdown=0.9)


def test_the_fewest_sms_that_meet_a_time() -> None:
    """`meeting` gives the smallest size in time, or says how fast the largest is."""
    assert curve(STEPPED).meeting(0.0003) == 32
    with pytest.raises(
        greensched.InvalidRequest, match=r"give at least 7\.5e-05, which the largest size"
    ):
        curve(STEPPED).meeting(0.00005)


def test_steps_are_marked() -> None:
    """A size below which the latency jumps is a step; a size on a flat part is not."""
    assert curve(STEPPED).steps == (16, 32, 64, 132)


@pytest.mark.parametrize(
    "samples",
    [{8: [0.1, math.nan, 0.2]}, {8: [math.inf]}, {0: [0.1]}, {8.5: [0.1]}, {8: 0.1}, {8: ["1"]}, 8],
)
def test_wrong_numbers_are_in_no_curve(samples: Any, tmp_path: Path) -> None:
    """Sizes are whole and durations finite, in a table, in a file and when observed."""
    with pytest.raises(InvalidRequest, match="give"):
        LatencyCurve(samples)
    path, known = tmp_path / "curve.json", LatencyCurve({np.int64(8): np.array([0.1])})  # type: ignore[dict-item]
    known.save(path)
    assert LatencyCurve.load(path).sizes == (8,)
    path.write_text(path.read_text().replace('"p95": 0.1', '"p95": NaN'))
    with pytest.raises(InvalidRequest, match="not a latency curve"):
        LatencyCurve.load(path)
    with pytest.raises(InvalidRequest, match="give"):
        known.observe(8, math.nan)
    for wrong in (known.times, known.meeting, lambda x: known.within(slowdown=x)):
        with pytest.raises(InvalidRequest, match="give"):
            wrong("1")  # type: ignore[arg-type]


def test_more_sms_never_take_longer() -> None:
    """Durations that rise with the SMs are averaged, and the others stay."""
    smooth = curve({8: 4.0, 16: 1.0, 24: 1.2, 32: 0.5})
    assert [smooth.at(sms) for sms in (8, 16, 24, 32)] == pytest.approx(
        [0.004, 0.0011, 0.0011, 0.0005]
    )
    assert smooth.at(31) == smooth.at(24), "between two sizes the smaller one's time counts"
    assert smooth.at(4) == pytest.approx(0.008)


def test_the_tail_is_kept_apart() -> None:
    """Of twenty durations, the median is the tenth and the 95th percentile the nineteenth."""
    one = LatencyCurve({8: [0.001 * i for i in range(1, 21)]})
    assert (one.at(8), one.p95(8)) == pytest.approx((0.010, 0.019))


def test_a_curve_is_kept_as_json(tmp_path: Path) -> None:
    """A loaded curve equals the saved one; other files are refused."""
    saved = LatencyCurve({8: [0.004, 0.005], 16: [0.002, 0.004]})
    saved.save(tmp_path / "curve.json")
    loaded = LatencyCurve.load(tmp_path / "curve.json")
    assert loaded.sizes == saved.sizes
    assert [loaded.at(8), loaded.p95(16)] == [saved.at(8), saved.p95(16)]
    for text in ("", "{}", '{"latency": [{"sms": 8}]}', '{"latency": []}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(greensched.InvalidRequest):
            LatencyCurve.load(tmp_path / "wrong.json")


@pytest.mark.parametrize("samples", [{}, {8: []}, {8: [-1.0]}, {8: [float("inf")]}], ids=repr)
def test_what_is_no_curve_is_refused(samples: dict[int, list[float]]) -> None:
    """A curve needs at least one size with finite durations."""
    with pytest.raises(greensched.InvalidRequest):
        LatencyCurve(samples)


def test_it_follows_what_it_sees() -> None:
    """Durations that are observed while serving move median and tail to their values."""
    rng = random.Random(1)
    learning = LatencyCurve({8: [0.010], 16: [0.001]})
    for _ in range(2000):
        learning.observe(8, rng.uniform(0.020, 0.030))
    assert learning.at(8) == pytest.approx(0.025, rel=0.1)
    assert learning.p95(8) == pytest.approx(0.0295, rel=0.05)
    assert learning.at(16) == pytest.approx(0.001), "the others stay"


async def multiply(p: Partition, n: int) -> None:
    config = LaunchConfig(grid=(n // 16, n // 16), block=(16, 16))
    with await p.empty((n, n)) as a, await p.empty((n, n)) as b, await p.empty((n, n)) as c:
        await p.launch(config, matmul, a, b, c, n, n, n, 1)


def test_what_it_learns_is_smooth_at_once() -> None:
    """After each observation it equals a curve made of the same data."""
    curve = LatencyCurve({8: [4.0], 16: [2.0], 32: [1.0]})
    assert curve.at(16) == 2.0
    for sms, seconds in ((16, 2.5), (32, 6.0), (8, 1.0), (24, 9.0)) * 30:
        curve.observe(sms, seconds)
        times = [curve.at(size) for size in curve.sizes]
        assert times == sorted(times, reverse=True)
        tails = [curve.p95(size) for size in curve.sizes]
        assert tails == sorted(tails, reverse=True)
        again = LatencyCurve({size: [curve._median[size]] for size in curve.sizes})
        assert times == [again.at(size) for size in curve.sizes]


def test_so_many_times_the_work_teaches_the_same_curve() -> None:
    """A batch takes its multiple of one piece, and its duration updates the curve."""
    curve = LatencyCurve({8: [1.0], 16: [0.5]})
    batch = curve.times(4)
    assert (batch.at(8), batch.at(16)) == (4.0, 2.0)
    for _ in range(300):
        batch.observe(16, 3.0)
    assert curve.at(16) == pytest.approx(0.75, rel=0.01)
    with pytest.raises(InvalidRequest):
        curve.times(0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_pool_measures_a_piece_of_work(backend: str) -> None:
    """On a simulated GPU each size is measured, and more SMs are faster."""
    clock = simulated.VirtualClock(seed=1)
    driver = simulated.open("h200", clock=clock)

    async def main() -> None:
        async with Pool(driver=driver, prepare=[matmul]) as pool:
            found = await pool.measure(multiply, 256)
            assert found.sizes == (*range(8, 8 * len(found.sizes), 8), 132)
            assert found.at(8) > 4 * found.at(64)
            sms = found.within(slowdown=1.5)
            assert 8 < sms < 132
            async with pool.partition(sms=sms, duration=found, deadline=1.0) as p:
                await multiply(p, 256)
            with pytest.raises(greensched.DeadlineImpossible):
                async with pool.partition(8, duration=found, deadline=found.at(8) / 2):
                    raise AssertionError("granted")
            few = await pool.measure(len, "a blocking function", sms=[16])
            assert few.sizes == (16,)
            with pytest.raises(greensched.InvalidRequest, match="measure"):
                await pool.measure(5)  # type: ignore[arg-type]
            with pytest.raises(greensched.InvalidRequest, match=r"sms=\[\]\): give the sizes"):
                await pool.measure(len, "", sms=[])
            with pytest.raises(greensched.InvalidRequest, match=r"sms=16\): give the sizes"):
                await pool.measure(len, "16 alone", sms=16)  # type: ignore[arg-type]
            assert pool.statistics().sms_free == 132

    clock.run(main, backend=backend)  # type: ignore[arg-type]


def test_a_pool_keeps_its_curves_true() -> None:
    """Durations of a curve's leases are observed, and its predictions follow."""
    clock = simulated.VirtualClock(seed=1)
    driver = simulated.open("h200", clock=clock)

    async def main() -> None:
        async with Pool(driver=driver, prepare=[matmul]) as pool:
            wrong = LatencyCurve({16: [10.0]})
            for _ in range(200):
                async with pool.partition(16, duration=wrong) as p:
                    await multiply(p, 64)
            assert wrong.at(16) < 0.1

    clock.run(main, backend="asyncio")
