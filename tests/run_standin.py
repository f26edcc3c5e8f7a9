"""Runs what is judged by the stand-in driver, then reads its account of the whole run.

    python tests/run_standin.py FOLDER [pytest arguments]

FOLDER holds its libcuda.so.1. The suites run once for each driver version in turn; afterwards
nothing may be alive, nothing misused, no thread may have been left with a context it did not
start with, and no call may have blocked the main thread for long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VERSIONS = (13000, 13010)
TESTS = ("tests/standin", "tests/conformance")
#: A driver call on an event loop's thread may take so long (the issue's bar).
MOST_NS = 5_000_000


def main(folder: str, *arguments: str) -> int:
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as work:
            report = Path(work, "report.json")
            environment = os.environ | {
                "GREENSCHED_STANDIN_LIB": str(Path(folder).resolve()),
                "STUBCUDA_DRIVER_VERSION": str(version),
                "STUBCUDA_REPORT": str(report),
                "LD_LIBRARY_PATH": str(Path(folder).resolve()),
            }
            command = [sys.executable, "-m", "pytest", "--driver", "cuda", *TESTS, *arguments]
            code = subprocess.run(command, env=environment, check=False).returncode
            if code:
                return code
            if not judge(version, json.loads(report.read_text())):
                return 1
    return 0


def judge(version: int, report: dict[str, Any]) -> bool:
    """Prints the account of one run; true if it is clean."""
    blocking = max(
        (row["max_ns"] for row in report["blocking"].values() if row["main_thread_n"]), default=0
    )
    checks = {
        "alive at the end": {k: n for k, n in report["live"].items() if n},
        "misuse": report["misuse_by_kind"],
        "threads that ended with a context": report["threads"]["left"],
        "threads with a context now": [t for t in report["threads"]["current"] if t["context"]],
        "blocking calls on the main thread over 5 ms": blocking if blocking > MOST_NS else 0,
    }
    print(f"\nstand-in driver {version}: its account of the run")
    for what, found in checks.items():
        print(f"  {what}: {found or 'none'}")
    return not any(checks.values())


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
