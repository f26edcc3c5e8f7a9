"""LitServe with a pool in its worker, over HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from helpers.hosts import RECIPES, hosted, slowed

pytest.importorskip("litserve", reason="LitServe is not installed: make test-embedding")

READY = "Application startup complete"


def test_it_answers(port: int) -> None:
    """The service returns sums from the GPU to one client and to several at once."""
    command = [sys.executable, str(RECIPES / "litserve_api.py"), str(port)]

    async def main() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            given = [[1.0, 2.0, n] for n in range(8)]
            posts = [client.post("/predict", json={"numbers": numbers}) for numbers in given]
            answers = await asyncio.gather(*posts)
            assert [one.json() for one in answers] == [{"sum": sum(numbers)} for numbers in given]

    with hosted(command, READY, RECIPES):
        asyncio.run(main())


def test_too_many(port: int, tmp_path: Path) -> None:
    """Of 14 concurrent requests 8 run and at most 2 wait; the others are refused with 429."""
    command = [sys.executable, str(slowed(RECIPES / "litserve_api.py", tmp_path)), str(port)]

    async def main() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            posts = [client.post("/predict", json={"numbers": [1.0]}) for _ in range(14)]
            answers = await asyncio.gather(*posts)
            statuses = Counter(one.status_code for one in answers)
            assert 8 <= statuses[200] <= 10
            assert statuses[200] + statuses[429] == 14
            refused = next(one for one in answers if one.status_code == 429)
            assert "2 requests are waiting" in refused.json()["detail"]

    with hosted(command, READY, tmp_path):
        asyncio.run(main())
