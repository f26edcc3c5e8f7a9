"""The orders of passes of the inference server's engine, on a test's own place."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "09_inference_server"
SEED = random.Random(1)
#: More clients than the model has slots, and the most tokens that one asks for.
PROMPTS = [[SEED.randrange(500) for _ in range(SEED.randint(1, 60))] for _ in range(24)]
MOST = 6


@pytest.fixture(scope="module")
def engine() -> Iterator[ModuleType]:
    """Import the example's module with its small model; its modules have plain names."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        found = importlib.import_module("engine")
        found.small = importlib.import_module("small")  # type: ignore[attr-defined]
        yield found
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in ("engine", "small", "batch"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def expected(engine: ModuleType) -> list[list[int]]:
    """Return the answers without a cache: everything is read again for each token."""
    answers = []
    for prompt in PROMPTS:
        model, found = engine.small.Small(), list[int]()
        for _ in range(MOST):
            piece = engine.small.Piece(0, prompt + found, 0, is_last=True)
            found += model.compute(engine.small.Batch(pieces=[piece]))
        answers.append(found)
    return answers


class Device:
    """A place whose passes each take one turn of the loop, one after another."""

    def __init__(self, module: ModuleType, model: Any, *, ahead: int) -> None:
        self._module, self._model, self._ahead = module, model, ahead
        self._last: asyncio.Future[Any] | None = None
        self._submitted = self.most = 0

    def _run(self, batch: Any) -> Awaitable[Any]:
        self._submitted += 1
        self.most = max(self.most, self._submitted)
        before = self._last

        async def passed() -> Any:
            if before is not None:
                await before
            await asyncio.sleep(0)
            self._submitted -= 1
            return answer

        answer = self._model.launch(batch)
        self._last = asyncio.ensure_future(passed())
        return self._last

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Any]:
        yield self._module.Turn(self._run, ahead=self._ahead)


def separate(module: ModuleType, engine: Any, places: Callable[[], Any]) -> Any:
    return module.separate(engine, places(), places())


def interleaved(module: ModuleType, engine: Any, places: Callable[[], Any]) -> Any:
    return module.interleaved(engine, places(), 3)


def fused(module: ModuleType, engine: Any, places: Callable[[], Any]) -> Any:
    return module.fused(engine, places(), 24)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("order", [separate, interleaved, fused])
def test_each_order_gives_each_client_its_tokens(
    engine: ModuleType, expected: list[list[int]], order: Callable[..., Any], ahead: int
) -> None:
    """Passes are submitted ahead, clients leave at any time, and no slot is lost."""
    model = engine.small.Small()
    served = engine.Engine(model.shape, len(PROMPTS) + 1)
    devices: list[Device] = []

    def place() -> Any:
        devices.append(Device(engine, model, ahead=ahead))
        return devices[-1].take

    async def client(sequence: Any, leaves_after: int | None) -> list[int]:
        found: list[int] = []
        while (token := await sequence.news.get()) is not None:
            found.append(token)
            if len(found) == leaves_after:
                sequence.cancel()
                break
        return found

    async def main() -> None:
        serving = asyncio.ensure_future(order(engine, served, place))
        asked = [1 + number % MOST for number in range(len(PROMPTS))]
        leaves = [1 + number % 3 if number % 4 == 0 else None for number in range(len(PROMPTS))]
        sequences = [
            engine.Sequence(prompt, tokens) for prompt, tokens in zip(PROMPTS, asked, strict=True)
        ]
        for sequence in (*sequences, gone := engine.Sequence([1, 2, 3], 5)):
            served.submit(sequence)
        gone.cancel()  # before any pass
        answers = await asyncio.gather(*map(client, sequences, leaves))
        await served.wait(lambda: served.is_idle)
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()
        ends = [leave or tokens for leave, tokens in zip(leaves, asked, strict=True)]
        assert answers == [
            whole[: min(end, tokens)]
            for whole, end, tokens in zip(expected, ends, asked, strict=True)
        ]
        assert gone.news.empty()
        assert sorted(served._free) == list(range(model.shape.slots))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert max(device.most for device in devices) == ahead
