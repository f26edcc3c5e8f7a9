"""The examples, run as a reader runs them.

More of the services is in test_async_service.py, test_fastapi.py, test_inference_server.py and
neighbours/test_ray_serve.py.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from helpers.programs import serving

EXAMPLES = Path(__file__).parents[2] / "examples"

#: What each prints when all is well.
SAID = {
    "01_hello_partition": ["16 of 132 SMs are ours", "2 x + y = 1.000 ... 3.000: right"],
    "02_two_at_once": ["16 SMs for short requests", "the product is right"],
    "03_cancelling": [
        "16 leased,   0 draining",
        "0 leased,  16 draining",
        "nothing came back too early, and nothing was lost",
    ],
    "04_your_own_kernel": ["below 100,000 is that of 77,031: 350 steps"],
    "06_feeding": ["all of 4.2 MB are back", "12 batches of 4.2 MB added up: right"],
    "08_your_own_policy": ["served: many few many few many", "they took turns"],
}

#: Run first, these make a result wrong: kernels that do nothing, an account that loses SMs.
SABOTAGE = {
    "01_hello_partition": ["kernels.saxpy.spec.reference = lambda *_: None"],
    "02_two_at_once": [
        "kernels.matmul.spec.reference = lambda *_: None",
        "kernels.gaussian_blur.spec.reference = lambda *_: None",
    ],
    "03_cancelling": [
        (
            "from dataclasses import replace; old = Pool.statistics; "
            "Pool.statistics = lambda pool: replace(old(pool), sms_draining=0)"
        )
    ],
    "04_your_own_kernel": ["numpy.flatnonzero = lambda _: numpy.empty(0, int)"],
    "06_feeding": ["kernels.saxpy.spec.reference = lambda *_: None"],
    "08_your_own_policy": [
        (
            "old = Pool.__init__; "
            "Pool.__init__ = lambda pool, *a, policy, **options: old(pool, *a, **options)"
        )
    ],
}

#: The interpreter, with warnings as errors.
PYTHON = (sys.executable, "-W", "error")


def without_gpu(**variables: str) -> dict[str, str]:
    """The environment, with no GPU to be seen and no driver chosen."""
    others = {name: value for name, value in os.environ.items() if name != "GREENSCHED_DRIVER"}
    return others | {"CUDA_VISIBLE_DEVICES": ""} | variables


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, *arguments],
        env=without_gpu(PYTHONPATH=str(EXAMPLES), **variables),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("name", SAID)
def test_an_example_says_on_what_it_runs_and_what_it_found(name: str) -> None:
    """It exits with 0, says that its GPU is simulated and what it found, and nothing else."""
    done = python(str(EXAMPLES / f"{name}.py"))
    assert done.returncode == 0, done.stderr
    told = re.fullmatch(r"No GPU here: .*\.\nThis runs on a simulated one .*\.\n", done.stderr)
    assert told, done.stderr
    for text in SAID[name]:
        assert text in done.stdout


@pytest.mark.parametrize(("name", "sabotage"), [(n, s) for n in SABOTAGE for s in SABOTAGE[n]])
def test_an_example_with_a_wrong_result_fails(name: str, sabotage: str) -> None:
    """Its exit code is 1 where the result is wrong: it does check."""
    imports = (
        "import numpy, runpy; from dataclasses import replace; from greensched import Pool, kernels"
    )
    run = f"runpy.run_path({str(EXAMPLES / name) + '.py'!r}, run_name='__main__')"
    done = python("-c", f"{imports}; {sabotage}; {run}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_an_example_runs_on_what_was_chosen() -> None:
    """GREENSCHED_DRIVER decides where it is set, also for a driver that is not there."""
    example = str(EXAMPLES / "01_hello_partition.py")
    chosen = python(example, GREENSCHED_DRIVER="simulated:a100")
    assert chosen.returncode == 0
    assert "of 108 SMs are ours" in chosen.stdout
    assert "No GPU" not in chosen.stderr
    absent = python(example, GREENSCHED_DRIVER="cuda")
    assert absent.returncode == 1
    assert "DriverUnavailable" in absent.stderr


def test_the_service_runs_as_a_program() -> None:
    """It says on what it runs, serves on its port, and ends by SIGTERM without a traceback."""
    command = [*PYTHON, str(EXAMPLES / "05_async_service.py"), "0"]
    with serving(command, without_gpu()) as program:
        even = np.full((8, 8), 0.5, np.float32)
        body = io.BytesIO()
        np.save(body, even)
        answer = httpx.post(f"{program.address}/blur", content=body.getvalue(), timeout=20)
        np.testing.assert_allclose(np.load(io.BytesIO(answer.content)), even, rtol=1e-5)
    assert "runs on a simulated one" in program.said


def test_every_example_is_listed_and_tested() -> None:
    """The README has a line for each, and each numbered one is run by a test."""
    readme = (EXAMPLES / "README.md").read_text()
    found = [*EXAMPLES.glob("*.py"), *(path.parent for path in EXAMPLES.glob("*/app.py"))]
    for path in found:
        assert f"[{path.name}]({path.name})" in readme
    numbered = {path.stem for path in found if path.name[0].isdigit()}
    served = {"05_async_service", "07_fastapi", "09_inference_server", "10_ray_serve"}
    assert numbered == {*SAID, *served}
