"""The benchmark of two models on one GPU: what each arm runs, and what is in time."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import engine, two_models
from benchmarks.gpu.engine import SIMULATED, Arrival

SMS = 132


class Watched:
    """A small model that records its passes: the model, rows of a step, and tokens read."""

    def __init__(self, name: str, ran: list[tuple[str, int, int]]) -> None:
        import small

        self._small, self._name, self._ran = small.Small(), name, ran
        self.shape = self._small.shape

    def fused_graphs(self, _: int) -> Any:
        return self

    def prefill_graphs(self) -> Any:
        return self

    def launch(self, batch: Any) -> Any:
        self._ran.append((self._name, len(batch.slots), batch.rows - len(batch.slots)))
        return self._small.launch(batch)


@pytest.mark.parametrize(
    "arm",
    ["plain:24", "plain:24:128", "priority:24:128", "turns:24:128", "split:40:24", "sized:40:24"],
)
def test_an_arm_serves_both_models(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request gets its tokens, and no pass reads more tokens of texts than the arm allows."""
    monkeypatch.setattr(two_models, "use_stream", lambda device, priority: None)
    ran: list[tuple[str, int, int]] = []
    pair = two_models.Pair(Watched("chat", ran), Watched("texts", ran), SIMULATED, SMS)
    chats = [Arrival(0.01 * number, 10, 12) for number in range(6)]
    texts = [Arrival(0.01 * number, 150, 7) for number in range(6)]

    async def main() -> Any:
        async with pair.arm(arm) as serve:
            return await pair.run(serve, chats, texts, target=20)

    found = asyncio.run(main())
    assert (found["chat"]["complete"], found["texts"]["complete"]) == (6, 6)
    assert sum(read for name, _, read in ran if name == "texts") == 6 * 150
    most = 128 if arm.endswith(":128") else 256
    assert {rows for name, rows, _ in ran if name == "texts"} == {0}
    assert max(read for name, _, read in ran if name == "texts") <= most
    assert max(rows + read for name, rows, read in ran if name == "chat") <= 24


def test_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While both have work, a pass of one follows a pass of the other."""
    monkeypatch.setattr(two_models, "use_stream", lambda device, priority: None)
    ran: list[tuple[str, int, int]] = []
    pair = two_models.Pair(Watched("chat", ran), Watched("texts", ran), SIMULATED, SMS)

    async def main() -> None:
        async with pair.arm("turns:24:128") as serve:
            await pair.run(serve, [Arrival(0, 10, 40)], [Arrival(0, 128, 1)] * 8, target=20)

    asyncio.run(main())
    order = [name for name, _, _ in ran]
    first = order.index("texts")
    assert order[first : first + 16] == ["texts", "chat"] * 8


def test_the_program_reports_runs_and_knees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes each run and knee as JSON."""
    written = tmp_path / "found.json"
    monkeypatch.setattr(
        "sys.argv",
        [
            "two_models", "--small", "--run", "0.3", "--seconds", "60", "--json", str(written),
            "--search", "split:40:24@20=4",
        ],
    )  # fmt: skip
    monkeypatch.setattr(two_models, "RATES", (4, 6))
    assert two_models.main() == 0
    found = json.loads(written.read_text())
    assert found["runs"][0]["rate"] == 4
    assert found["knees"][0]["arm"] == "split:40:24"
    assert "texts/s" in capsys.readouterr().out


@pytest.mark.parametrize("program", [engine, two_models])
@pytest.mark.parametrize("arguments", [[], ["--small"]])
def test_without_torch_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, program: Any, arguments: list[str]
) -> None:
    """A program whose arms need torch ends before it loads a model."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("sys.argv", ["program", *arguments])
    with pytest.raises(SystemExit, match=r"^this needs torch: pip install torch;.*$"):
        program.main()


def test_the_default_names_arms() -> None:
    """Each search of the default is of an arm."""
    for text in two_models.DEFAULT.split():
        kind, *parameters = two_models.Search.parse(text).arm.split(":")
        assert hasattr(two_models.Pair, kind)
        assert all(parameter.isdigit() for parameter in parameters)
