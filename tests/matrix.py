"""Install the wheel of a release on each Python, with the oldest and the newest dependencies.

    python tests/matrix.py FOLDER

Each environment is empty but for the wheel and pytest. It runs the demo and quick tests, in a copy
of the tests without the sources beside them. Ends with 1 if one fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: The oldest that pyproject.toml allows, and that this Python allows: numpy 1.26 has no wheels for
#: 3.13 and later, and 3.14 warns of the source of anyio before 4.10, which fails the tests.
OLDEST = ["cuda-bindings==13.0.*", "click==8.1.*", "rich==13.0.*"]
OLDEST_BY_PYTHON = {
    "3.11": ["numpy==1.26.*", "anyio==4.5.*"],
    "3.12": ["numpy==1.26.*", "anyio==4.5.*"],
    "3.13": ["numpy==2.1.*", "anyio==4.5.*"],
    "3.14": ["numpy==2.3.*", "anyio==4.10.*"],
}
TOOLS = ["pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "trio", "hypothesis"]
TOOLS += ["perfetto", "pytest-randomly", "uvloop"]
QUICK = [
    *("tests/cli", "tests/leasing/test_cancellation.py", "tests/conformance/test_leases.py"),
    *("tests/conformance/test_jobs.py", "tests/scheduling/test_scheduler.py"),
]


def pythons() -> dict[str, str]:
    """Return each Python that runs here, by version, from the path or else pyenv's."""
    found = {}
    for version in OLDEST_BY_PYTHON:
        of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        for path in filter(None, [shutil.which(f"python{version}"), *map(str, of_pyenv)]):
            if subprocess.run([path, "-V"], capture_output=True, check=False).returncode == 0:
                found[version] = path
                break
    return found


def tried(wheel: Path, python: str, pins: list[str], tree: Path) -> str:
    """Install and run; return the last lines of what failed, "" if nothing did."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        here = f"{folder}/bin/python"
        commands = [
            [python, "-m", "venv", folder],
            [here, "-m", "pip", "install", "--quiet", str(wheel), *TOOLS, *pins],
            [f"{folder}/bin/greensched", "doctor", "--driver", "simulated:h200"],
            [f"{folder}/bin/greensched", "demo", "--seconds", "0.3", "--driver", "simulated:h200"],
            [here, "-m", "pytest", "-q", "-n", "2", *QUICK],
        ]
        for command in commands:
            done = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                return f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}"
        print(f"    {done.stdout.splitlines()[-1]}")
    return ""


def main() -> int:
    (wheel,) = Path(sys.argv[1]).absolute().glob("*-py3-none-any.whl")
    failed = False
    with tempfile.TemporaryDirectory() as tree:
        for name in ("tests", "docs", "examples", "benchmarks"):
            shutil.copytree(ROOT / name, Path(tree, name))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"):
            shutil.copy(ROOT / name, tree)
        here = pythons()
        for version in OLDEST_BY_PYTHON.keys() - here.keys():
            print(f"Python {version}: not on this machine, not tried")
        for version, python in here.items():
            oldest = [*OLDEST, *OLDEST_BY_PYTHON[version]]
            for name, pins in (("newest", []), ("oldest", oldest)):
                print(f"Python {version}, {name} dependencies", flush=True)
                problem = tried(wheel, python, pins, Path(tree))
                failed |= bool(problem)
                print(problem, end="\n" if problem else "", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
