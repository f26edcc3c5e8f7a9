"""The inference server, as a program over a socket, and compared under load by its own command."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from helpers.programs import serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "09_inference_server"
#: As compare.py has it: numpy's threads are more than the processors of a test machine.
THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT = os.environ | THREADS | {"GREENSCHED_DRIVER": "simulated:h200"}
#: The interpreter, with warnings as errors.
PYTHON = (sys.executable, "-W", "error")

SEED = random.Random(1)
#: More clients than a prefill or a step has at a time.
PROMPTS = [[SEED.randrange(500) for _ in range(SEED.randint(1, 60))] for _ in range(8)]


@pytest.fixture(scope="module")
def small() -> Iterator[ModuleType]:
    """Return the example's model for simulated GPUs; its modules have plain names."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield importlib.import_module("small")
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in ("small", "batch"):
            del sys.modules[name]


def read(small: ModuleType, prompt: list[int], tokens: int) -> list[int]:
    """Return the answer without a cache: everything is read again for each token."""
    model, found = small.Small(), list[int]()
    for _ in range(tokens):
        piece = small.Piece(0, prompt + found, 0, is_last=True)
        found += model.compute(small.Batch(pieces=[piece]))
    return found


async def ask(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> list[int]:
    """Return what is streamed to a client that stays; each event ends with an empty line."""
    asked = {"prompt": prompt, "tokens": tokens}
    async with client.stream("POST", "/generate", json=asked) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        body = (await response.aread()).decode()
    assert body.endswith("\n\ndata: [DONE]\n\n")
    return [json.loads(data)["token"] for data in re.findall(r"data: (\{.*\})\n\n", body)]


async def leave(client: httpx.AsyncClient, prompt: list[int]) -> None:
    """Disconnect at the first token."""
    asked = {"prompt": prompt, "tokens": 100}
    async with client.stream("POST", "/generate", json=asked) as response:
        async for line in response.aiter_lines():
            assert line.startswith("data")
            return


@pytest.mark.parametrize(
    "options",
    [("--partitions",), ("--streams",), ("--chunked", "64")],
    ids=lambda given: given[0][2:],
)
def test_tokens_are_streamed(small: ModuleType, options: tuple[str, ...]) -> None:
    """Each client gets its own tokens, whichever others leave; invalid requests get none."""

    async def main(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=20) as client:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(ask(client, prompt, 6)) for prompt in PROMPTS]
                for prompt in PROMPTS[:3]:
                    tasks.create_task(leave(client, prompt))
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                assert answer.result() == read(small, prompt, 6)
            # No slot is lost: as many as there are can be had at once.
            slots = range(small.SHAPE.slots)
            answers_of_all = await asyncio.gather(*(ask(client, [slot], 2) for slot in slots))
            assert [len(tokens) for tokens in answers_of_all] == [2 for _ in slots]
            for nonsense in NONSENSE:
                answer = await client.post("/generate", content=nonsense)
                assert answer.status_code == 400

    with serving([*PYTHON, str(EXAMPLE / "app.py"), "0", *options], ENVIRONMENT) as program:
        asyncio.run(main(program.address))


def test_too_many_prompts_are_refused() -> None:
    """More than fit into slots and queue get 429 and a time to come back; the others are served."""

    async def main(address: str) -> None:
        asked = {"prompt": PROMPTS[0], "tokens": 40}
        async with httpx.AsyncClient(base_url=address, timeout=30) as client:
            answers = await asyncio.gather(
                *(client.post("/generate", json=asked) for _ in range(95))
            )
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        served = [answer for answer in answers if answer.status_code == 200]
        assert len(served) + len(refused) == len(answers)
        assert len(served) >= 64
        assert len({answer.text for answer in served}) == 1

    with serving([*PYTHON, str(EXAMPLE / "app.py"), "0"], ENVIRONMENT) as program:
        asyncio.run(main(program.address))


NONSENSE = [
    "",
    "[1, 2]",
    '{"prompt": [1]}',
    '{"prompt": [], "tokens": 3}',
    '{"prompt": [-1], "tokens": 3}',
    '{"prompt": [100000], "tokens": 3}',
    '{"prompt": ["x"], "tokens": 3}',
    '{"prompt": [1], "tokens": 0}',
    '{"prompt": [1], "tokens": 100000}',
]


def compare(folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, str(folder / "compare.py"), *(f"--{key}={options[key]}" for key in options)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_is_compared() -> None:
    """One command serves all three ways under load, and says what clients waited for, each way."""
    done = compare(EXAMPLE, seconds=1)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("plain streams", "chunked", "partitions"):
        (found,) = re.findall(rf"^{name} +([\d. ]+)$", done.stdout, re.MULTILINE)
        ttft, slow_ttft, between, slow_between, rate, answered, refused = map(float, found.split())
        assert 0 < ttft <= slow_ttft
        assert 0 <= between <= slow_between > 0
        assert rate > 0 < answered
        assert refused == 0


def test_a_server_whose_graphs_fail_does_not_start(tmp_path: Path) -> None:
    """It ends with the cause, and never says that it is ready."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    small = tmp_path / "small.py"
    right = "def decode_graphs(self) -> Small:\n        return self"
    assert right in small.read_text()
    wrong = right.replace("return self", 'raise RuntimeError("no graphs")')
    small.write_text(small.read_text().replace(right, wrong))
    done = subprocess.run(
        [*PYTHON, str(tmp_path / "app.py"), "0"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "RuntimeError: no graphs" in done.stderr
    assert "running on" not in done.stderr


def test_a_wrong_server_is_found(tmp_path: Path) -> None:
    """It exits with 1 where clients get fewer tokens than they asked for."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    app = tmp_path / "engine.py"
    right = "if not self.left:\n                self.news"
    assert right in app.read_text()
    app.write_text(app.read_text().replace(right, "if self.left <= 1:\n                self.news"))
    done = compare(tmp_path, seconds=0.1)
    assert done.returncode == 1
    assert "received a wrong answer" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("option", "given"), [("--chunked", "0"), ("--chunked", "many"), ("--decode-sms", "-8")]
)
def test_a_size_below_one_is_refused(option: str, given: str) -> None:
    """A chunk or a number of SMs that is no positive number ends the program with one line."""
    command = [sys.executable, EXAMPLE / "app.py", f"{option}={given}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"argument {option}: invalid positive value: '{given}'" in done.stderr


@pytest.mark.parametrize("sms", [132, 200, 18, 128])
def test_sms_that_no_split_allows_are_refused(sms: int) -> None:
    """The program ends with one line that says which numbers of SMs are possible."""
    command = [*PYTHON, str(EXAMPLE / "app.py"), "0", "--decode-sms", str(sms)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    expected = "this GPU has 132 SMs: give a multiple of 8 from 8 to 120"
    assert done.stderr == f"--decode-sms {sms}: {expected}\n"
