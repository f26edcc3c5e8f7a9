"""The engine's benchmark: its requests, what is in time, the search, and a run of each arm."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import engine

from greensched import Pool, current_call
from greensched.errors import QueueFull


def test_random_requests_have_their_rate_and_lengths() -> None:
    """The mean rate and lengths are what the text says, and a seed gives the same requests."""
    found = engine.poisson(50, 100, seed=3)
    assert found == engine.poisson(50, 100, seed=3)
    assert found != engine.poisson(50, 100, seed=4)
    assert len(found) == pytest.approx(5000, rel=0.05)
    assert sum(one.prompt for one in found) / len(found) == pytest.approx(700, rel=0.05)
    assert sum(one.tokens for one in found) / len(found) == pytest.approx(60, rel=0.05)
    assert max(one.prompt + one.tokens for one in found) <= 1536


def test_a_trace_is_replayed_at_a_rate(tmp_path: Path) -> None:
    """Its bursts stay, in a time in which the mean rate is what is asked for."""
    trace = tmp_path / "trace.csv"
    rows = [
        f"2023-11-16 18:15:{second:02}.6805900,{second},5" for second in (1, 1, 1, 41, 41, 41, 41)
    ]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    found = engine.replayed(trace, rate=2, seconds=3, seed=0)
    assert [one.at for one in found] in ([0, 0, 0, 3, 3, 3], [0, 0, 3, 3, 3, 3])
    assert {one.prompt for one in found} == {16, 41}


def timed(first: float, gaps: list[float], wanted: int) -> engine.Timed:
    """Return a sequence that arrived at 0 and received its tokens at these times."""
    found = engine.Timed([1], wanted)
    found.came, at = 0.0, first
    found.times = [at, *(at := at + gap for gap in gaps)]
    return found


def test_in_time_means_first_token_and_most_gaps() -> None:
    """A late first token, a tenth of the gaps, or a missing token makes a request late."""
    gaps = [0.01] * 20
    assert timed(0.4, gaps, 21).is_in_time(0.02)
    assert not timed(0.6, gaps, 21).is_in_time(0.02)
    assert not timed(0.4, gaps, 22).is_in_time(0.02)
    assert timed(0.4, [*gaps[:19], 0.03], 21).is_in_time(0.02)
    assert not timed(0.4, [*gaps[:17], 0.03, 0.03, 0.03], 21).is_in_time(0.02)
    assert not timed(math.inf, [], 1).is_in_time(0.02)


@pytest.mark.parametrize(
    ("start", "kept", "knee", "most"),
    [(4, 6, 6, 3), (12, 6, 6, 4), (4, 0, 0, 5), (4, 99, 40, 17), (0.5, 1, 1, 3), (7, 7, 7, 2)],
)
def test_the_search_finds_the_knee(start: float, kept: float, knee: float, most: int) -> None:
    """From below and from above, without a rate that is not needed."""
    tried = []

    async def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= kept

    assert asyncio.run(engine.search(start, keeps, engine.RATES)) == knee
    assert len(tried) == len(set(tried)) <= most


def test_what_is_searched_is_read_from_text() -> None:
    """An arm with its parameter, a target, and the rate at which the search starts."""
    assert engine.Search.parse("split:24@20=18") == engine.Search("split:24", 20, 18)
    assert engine.Search.parse("plain@12") == engine.Search("plain", 12, 12)
    for text in engine.DEFAULT.split():
        assert hasattr(engine.Bench, engine.Search.parse(text).arm.partition(":")[0])


ARMS = ("split:24", "leased:24", "sized:24")


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_serves_all_requests(arm: str) -> None:
    """Each request gets its tokens, and the arm can be entered again."""

    async def main() -> None:
        bench = engine.Bench(small_model(), "simulated:h100", 132)
        arrivals = [engine.Arrival(0.01 * number, 10, 3) for number in range(15)]
        for _ in range(2):
            async with bench.arm(arm) as serve:
                found = await engine.run(bench.model, [serve], arrivals)
            assert found["requests"] == found["complete"] == 15

    asyncio.run(main())


def test_two_devices_share_the_requests() -> None:
    """With a model on each device every request goes to the engine with the fewest sequences."""

    async def main() -> None:
        models = Watched(), Watched()
        benches = [engine.Bench(m, engine.SIMULATED, 132, n) for n, m in enumerate(models)]
        arrivals = [engine.Arrival(0.0, 10, 20) for _ in range(8)]
        async with benches[0].arm("split:24") as one, benches[1].arm("split:24") as other:
            found = await engine.run(models[0], [one, other], arrivals)
        assert found["complete"] == 8
        assert [len([kind for kind, _ in model.ran if kind == "prompt"]) for model in models] == [
            4,
            4,
        ]

    asyncio.run(main())


class Watched:
    """The small model, which records the SMs of each pass."""

    def __init__(self) -> None:
        self._small = small_model()
        self.shape = self._small.shape
        self.ran: list[tuple[str, int]] = []

    def decode_graphs(self) -> Any:
        return self

    def prefill_graphs(self) -> Any:
        return self

    def launch(self, batch: Any) -> Any:
        call = current_call()
        assert call is not None
        self.ran += [("prompt", call.sm_count)] * len(batch.pieces) or [("step", call.sm_count)]
        return self._small.launch(batch)


def test_sizes_follow_the_load() -> None:
    """All SMs for a prompt that is alone; a part for each where steps and prompts are due."""

    async def main() -> Watched:
        model = Watched()
        bench = engine.Bench(model, "simulated:h100", 132)
        arrivals = [engine.Arrival(0.0, 10, 40), *(engine.Arrival(0.2, 200, 2) for _ in range(3))]
        async with bench.arm("sized:24") as serve:
            found = await engine.run(model, [serve], arrivals)
        assert found["complete"] == 4
        return model

    ran = asyncio.run(main()).ran
    assert ran[:2] == [("prompt", 132), ("step", 24)]
    assert set(ran) == {("prompt", 132), ("prompt", 108), ("step", 24)}


@pytest.mark.parametrize(("growing", "quiet", "sms"), [(16, 1, 24), (17, 1, 132), (17, 0, 24)])
def test_a_step_of_many_sequences_has_all_sms(growing: int, quiet: float, sms: int) -> None:
    """If no prompt has come for a while: few sequences would gain nothing from more SMs."""

    async def main() -> Watched:
        model = Watched()
        async with Pool(driver="simulated:h100", services=engine.sized_classes(24, 132)) as pool:
            serving = engine.Engine(model.shape, max_waiting=1)
            serving.growing = [engine.Sequence([1], 2) for _ in range(growing)]
            serving._prompts_seen_at = time.monotonic() - quiet
            decode, _ = engine.sized(pool, model, serving, 24, 132)
            async with decode() as turn:
                await turn.run(engine.Batch())
        return model

    assert asyncio.run(main()).ran == [("step", sms)]


def small_model() -> Any:
    """Return the example's small model, which the benchmark's module has put on the path."""
    import small

    return small.Small()


@pytest.mark.parametrize(
    "order",
    [
        lambda place: lambda serving: engine.fused(serving, place, 16),
        lambda place: lambda serving: engine.interleaved(serving, place, 2),
    ],
    ids=["chunked", "interval"],
)
def test_an_order_on_one_stream_serves_all_requests(
    order: Callable[[Any], Callable[[Any], Awaitable[None]]],
) -> None:
    """Chunks of several prompts in one pass, and prompts between steps, give each its tokens."""
    model = small_model()

    async def launch(batch: Any) -> Any:
        return model.launch(batch)

    arrivals = [engine.Arrival(0.0, 10 + number, 4) for number in range(15)]
    found = asyncio.run(engine.run(model, [order(engine.held(launch))], arrivals))
    assert found["requests"] == found["complete"] == 15


def test_a_budget_that_sequences_exceed_reads_no_prompt() -> None:
    """Where the step of all sequences exceeds the budget, prompts wait until some have ended."""
    model = small_model()
    rows: list[tuple[int, int]] = []

    async def launch(batch: Any) -> Any:
        rows.append((len(batch.slots), batch.rows - len(batch.slots)))
        await asyncio.sleep(0)  # further requests come meanwhile
        return model.launch(batch)

    arrivals = [engine.Arrival(0.0, 6, 30) for _ in range(15)]
    place = engine.held(launch)
    found = asyncio.run(
        engine.run(model, [lambda serving: engine.fused(serving, place, 8)], arrivals)
    )
    assert found["complete"] == 15
    assert max(growing for growing, _ in rows) > 4  # the step is that of 12 sequences
    assert all(read <= 8 - (4 if growing else 0) for growing, read in rows)
    assert all(not read for growing, read in rows if growing > 4)


def test_a_loop_that_fails_is_reported() -> None:
    """A run whose engine ended raises the cause instead of counting late requests."""

    async def launch(_: Any) -> Any:
        raise ZeroDivisionError

    async def main() -> None:
        place = engine.held(launch)
        arrivals = [engine.Arrival(0.0, 10, 3)]
        with pytest.raises(RuntimeError, match="ended") as error:
            await engine.run(
                small_model(), [lambda serving: engine.fused(serving, place, 16)], arrivals
            )
        assert isinstance(error.value.__cause__, ZeroDivisionError)

    asyncio.run(main())


def test_the_program_reports_runs_and_knees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes each run and knee as JSON, and stops when its time is over."""
    found = tmp_path / "found.json"
    monkeypatch.setattr(
        "sys.argv",
        [
            "engine", "--small", "--run", "0.3", "--seconds", "20", "--json", str(found),
            "--search", "split:24@20=4",
        ],
    )  # fmt: skip
    monkeypatch.setattr(engine, "RATES", (4, 6))
    assert engine.main() == 0
    written = json.loads(found.read_text())
    assert written["runs"][0]["rate"] == 4
    assert written["knees"][0]["arm"] == "split:24"
    assert "knee" in capsys.readouterr().out


def test_the_queue_is_bounded_and_forgets_cancelled_prompts() -> None:
    """A prompt too many is refused; one whose client left makes way; a failure reaches all."""
    model = small_model()
    serving = engine.Engine(model.shape, max_waiting=2)
    first, second, third = (engine.Sequence([1], 2) for _ in range(3))
    serving.submit(first)
    serving.submit(second)
    with pytest.raises(QueueFull, match="2 requests"):
        serving.submit(third)
    first.cancel()
    serving.submit(third)
    error = ZeroDivisionError()
    serving.fail(error)
    assert [second.news.get_nowait(), third.news.get_nowait()] == [error, error]
    with pytest.raises(ZeroDivisionError):
        serving.submit(engine.Sequence([1], 2))


@pytest.mark.parametrize(
    ("kept", "requests", "low", "high"),
    [(99, 100, 0.946, 0.998), (0, 10, 0.0, 0.278), (5, 5, 0.566, 1)],
)
def test_a_share_has_an_interval(kept: int, requests: int, low: float, high: float) -> None:
    """As tables of Wilson's interval have it, also where all or none are in time."""
    assert engine.interval(kept, requests) == pytest.approx((low, high), abs=1e-3)
