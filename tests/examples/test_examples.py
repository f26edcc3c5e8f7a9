"""The examples, run as a reader runs them.

More of the services is in test_async_service.py, test_fastapi.py, test_inference_server.py and
tests/integrations/fleet/test_ray_serve.py.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from helpers.programs import serving

EXAMPLES = Path(__file__).parents[2] / "examples"

#: What each prints when its result is correct.
PRINTED = {
    "01_hello_partition": ["granted 16 of 132 SMs", "2 x + y = 1.000 ... 3.000: correct"],
    "02_two_at_once": ["16 SMs for short requests", "the product is correct"],
    "03_cancelling": [
        "16 leased,   0 draining",
        "0 leased,  16 draining",
        "no SM was freed early, and none was lost",
    ],
    "04_your_own_kernel": ["below 100,000, 77,031 takes the most steps to 1: 350"],
    "06_prefetching": ["downloaded 4.2 MB", "12 batches of 4.2 MB added: correct"],
    "08_your_own_policy": ["served: many few many few many", "the classes took turns"],
}

#: Run first, these make a result wrong: kernels that do nothing, statistics that lose SMs.
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
    "06_prefetching": ["kernels.saxpy.spec.reference = lambda *_: None"],
    "08_your_own_policy": [
        (
            "old = Pool.__init__; "
            "Pool.__init__ = lambda pool, *a, policy, **options: old(pool, *a, **options)"
        )
    ],
}

#: The interpreter, with warnings as errors.
PYTHON = (sys.executable, "-W", "error")


def environment(driver: str) -> dict[str, str]:
    """Return an environment with this driver and without a visible GPU."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "GREENSCHED_DRIVER": driver}


def python(*arguments: str, driver: str = "simulated:h200") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, *arguments],
        env=environment(driver),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_its_result(name: str) -> None:
    """It exits with 0, prints what it computed, and prints nothing to standard error."""
    done = python(str(EXAMPLES / f"{name}.py"))
    assert (done.returncode, done.stderr) == (0, "")
    for text in PRINTED[name]:
        assert text in done.stdout


@pytest.mark.parametrize(("name", "sabotage"), [(n, s) for n in SABOTAGE for s in SABOTAGE[n]])
def test_an_example_with_a_wrong_result_fails(name: str, sabotage: str) -> None:
    """Its exit code is 1 if the result is wrong."""
    imports = (
        "import numpy, runpy; from dataclasses import replace; from greensched import Pool, kernels"
    )
    run = f"runpy.run_path({str(EXAMPLES / name) + '.py'!r}, run_name='__main__')"
    done = python("-c", f"{imports}; {sabotage}; {run}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_an_example_runs_on_the_driver_that_is_named() -> None:
    """GREENSCHED_DRIVER names it; nothing falls back to a simulation."""
    example = str(EXAMPLES / "01_hello_partition.py")
    other = python(example, driver="simulated:a100")
    assert other.returncode == 0
    assert "of 108 SMs" in other.stdout
    for driver in ("cuda", ""):
        absent = python(example, driver=driver)
        assert absent.returncode == 1
        assert "DriverUnavailable" in absent.stderr


def test_the_service_runs_as_a_program() -> None:
    """It serves on its port, and ends by SIGTERM without a traceback."""
    command = [*PYTHON, str(EXAMPLES / "05_async_service.py"), "0"]
    with serving(command, environment("simulated:h200")) as program:
        even = np.full((8, 8), 0.5, np.float32)
        body = io.BytesIO()
        np.save(body, even)
        answer = httpx.post(f"{program.address}/blur", content=body.getvalue(), timeout=20)
        np.testing.assert_allclose(np.load(io.BytesIO(answer.content)), even, rtol=1e-5)


def test_every_example_is_listed_and_tested() -> None:
    """The README has a line for each, and each numbered one is run by a test."""
    readme = (EXAMPLES / "README.md").read_text()
    found = [*EXAMPLES.glob("*.py"), *(path.parent for path in EXAMPLES.glob("*/app.py"))]
    for path in found:
        assert f"[{path.name}]({path.name})" in readme
    numbered = {path.stem for path in found if path.name[0].isdigit()}
    served = {"05_async_service", "07_fastapi", "09_inference_server", "10_ray_serve"}
    assert numbered == {*PRINTED, *served}
