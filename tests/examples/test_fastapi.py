"""The FastAPI example, as a program over a socket, and its own tests as a reader runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx

from helpers.programs import serving

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "07_fastapi"
#: With warnings as errors, and no plugin but that of greensched.
PYTEST = ("-W", "error", "-p", "no:cacheprovider")
PYTEST += ("-p", "greensched.integrations.pytest_plugin")

#: Where the example is made wrong, its tests must say so: what is replaced, and by what.
WRONG = {
    "no errors answered": ("app.add_middleware", "0 and app.add_middleware"),
    "no probes": ("app.router.routes.extend", "0 and app.router.routes.extend"),
    "another size": ("pool.partition(16", "pool.partition(32"),
    "another deadline": ("deadline=DEADLINE", "deadline=5"),
    "a wrong sum": ("values.size)\n", "values.size - 1)\n"),
}

#: Runs the tests of one folder after another in one process, which imports what they need once.
EACH = """
import sys, pytest
*options, folders = sys.argv[1:]
for folder in folders.split(":"):
    print("exit", int(pytest.main([*options, folder])), flush=True)
    for name in "app", "test_app":
        sys.modules.pop(name, None)
"""


def run_tests(*folders: Path) -> tuple[list[int], str]:
    """Run tests; return the exit code and the output."""
    done = subprocess.run(
        [sys.executable, "-c", EACH, *PYTEST, ":".join(map(str, folders))],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    codes = re.findall(r"^exit (\d)$", done.stdout, re.MULTILINE)
    return [int(code) for code in codes], done.stdout


def test_its_tests_pass() -> None:
    """They pass from the root of the repository, with no plugin but that of greensched."""
    codes, printed = run_tests(EXAMPLE)
    assert codes == [0], printed
    assert "4 passed" in printed


def test_its_tests_find_what_is_wrong(tmp_path: Path) -> None:
    """They fail on each wrong application, and pass on a copy of the right one."""
    source = (EXAMPLE / "app.py").read_text()
    folders = []
    for number, (right, wrong) in enumerate([*WRONG.values(), ("", "")]):
        assert right in source
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "app.py").write_text(source.replace(right, wrong) if right else source)
        for name in ("test_app.py", "pytest.ini"):
            shutil.copy(EXAMPLE / name, folder)
        folders.append(folder)
    codes, printed = run_tests(*folders)
    assert codes == [1] * len(WRONG) + [0], printed


def test_it_runs_as_a_program() -> None:
    """It serves on its port on the GPU that was chosen, and ends by SIGTERM without a traceback."""
    command = [sys.executable, "-W", "error", str(EXAMPLE / "app.py"), "0"]
    environment = os.environ | {"GREENSCHED_DRIVER": "simulated:h200"}
    with serving(command, environment) as program:
        sums = f"{program.address}/sum"
        assert httpx.post(sums, json=[1, 2, 3.5], timeout=20).json() == {"sum": 6.5}
        assert httpx.post(sums, json=["x"], timeout=20).status_code == 422
        ready = httpx.get(f"{program.address}/readyz", timeout=20)
        assert "132 SMs" in ready.json()["detail"]
