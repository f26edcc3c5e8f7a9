"""Run the suites on the stand-in driver, then read its account of the whole run.

    python tests/run_standin.py FOLDER [pytest arguments]

FOLDER holds its libcuda.so.1. The driver versions run side by side, and each suite once on each, in
a process of its own. What a process printed is shown when all have ended, a failed one's last: of a
long log often only the end is kept. Afterwards nothing may be alive, nothing misused, and no thread
may have been left with a context it did not start with. In the conformance suite, whose main thread
runs the loops, no driver call may have blocked that thread for long; the other one tests the driver
itself, also where it blocks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

VERSIONS = (13000, 13010)
CONFORMANCE = "tests/conformance"
SUITES = ("tests/driver_cuda", CONFORMANCE)
#: A driver call on an event loop's thread may take so long (the issue's bar).
MOST_NS = 5_000_000


def main(folder: str, *arguments: str) -> int:
    with ThreadPoolExecutor() as versions:
        runs = list(versions.map(partial(run, folder, arguments), VERSIONS))
    for _, printed in sorted(runs, key=lambda run: run[0], reverse=True):
        print(printed)
    return 0 if all(passed for passed, _ in runs) else 1


def run(folder: str, arguments: tuple[str, ...], version: int) -> tuple[bool, str]:
    """Run the suites on one version, up to the first that fails; return what they printed, too."""
    texts = []
    for suite in SUITES:
        passed, printed = run_suite(folder, arguments, version, suite)
        texts.append(printed)
        if not passed:
            return False, "\n".join(texts)
    return True, "\n".join(texts)


def run_suite(
    folder: str, arguments: tuple[str, ...], version: int, suite: str
) -> tuple[bool, str]:
    """Return whether one suite passes and leaves a clean account, and what it printed."""
    with tempfile.TemporaryDirectory() as work:
        report = Path(work, "report.json")
        environment = os.environ | {
            "GREENSCHED_STANDIN_LIB": str(Path(folder).resolve()),
            "STUBCUDA_DRIVER_VERSION": str(version),
            "STUBCUDA_REPORT": str(report),
            "LD_LIBRARY_PATH": str(Path(folder).resolve()),
        }
        command = [sys.executable, "-m", "pytest", "--driver", "cuda", suite, *arguments]
        done = subprocess.run(
            command, env=environment, check=False, text=True, stdout=PIPE, stderr=STDOUT
        )
        if done.returncode:
            return False, done.stdout
        said, is_clean = judge(version, suite, json.loads(report.read_text()))
        return is_clean, f"{done.stdout}\n{said}"


def judge(version: int, suite: str, report: dict[str, Any]) -> tuple[str, bool]:
    """Return the account of one run, in words, and whether it is clean."""
    checks = {
        "alive at the end": {k: n for k, n in report["live"].items() if n},
        "misuse": report["misuse_by_kind"],
        "threads that ended with a context": report["threads"]["left"],
        "threads with a context now": [t for t in report["threads"]["current"] if t["context"]],
    }
    if suite == CONFORMANCE:  # the sum over the whole suite: then no single call was longer
        waits = {name: row["main_thread_ns"] for name, row in report["blocking"].items()}
        checks["calls that held the main thread over 5 ms"] = {
            name: ns for name, ns in waits.items() if ns > MOST_NS
        }
    said = [f"{suite} on the stand-in driver {version}: its account"]
    said += [f"  {what}: {found or 'none'}" for what, found in checks.items()]
    return "\n".join(said), not any(checks.values())


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
