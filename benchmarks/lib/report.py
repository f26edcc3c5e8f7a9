"""The results of a long benchmark: written as JSON at each step, and kept if it has to be ended.

A GPU is lent for minutes. So results are on disk at once, and a program that hangs, even in a call
of the driver that Python cannot interrupt, is ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

#: The exit code of a program that was ended.
CUT_SHORT = 3


class Report:
    """Results by name, written to a file whenever one is added.

    Args:
        path: the file; None: none is written.
        seconds: the time for everything; `left` counts down from it.
        grace: the process is ended so many seconds later, whatever it does.
    """

    def __init__(self, path: Path | None, seconds: float, grace: float = 20.0) -> None:
        self._path = path
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.found: dict[str, Any] = {"errors": []}
        self._guard = threading.Timer(seconds + grace, self._give_up)
        self._guard.daemon = True
        self._guard.start()

    @property
    def left(self) -> float:
        """Return the seconds that are left; negative: the program is late."""
        return self._end - time.monotonic()

    def put(self, name: str, value: Any) -> None:
        """Add a result, or replace it."""
        with self._lock:
            self.found[name] = value
            self._write()

    def fail(self, what: str) -> None:
        """Add the exception that is being handled, and print it."""
        text = f"{what}: {traceback.format_exc()}"
        print(text, file=sys.stderr, flush=True)
        with self._lock:
            self.found["errors"].append(text)
            self._write()

    def close(self) -> None:
        """Do not end the process. A program that may hang as it ends does not call this."""
        self._guard.cancel()

    def _write(self) -> None:
        if self._path is not None:
            text = json.dumps(self.found, indent=1)
            partial = self._path.with_suffix(".part")
            partial.write_text(text)
            partial.replace(self._path)

    def _give_up(self) -> None:
        threads = sys._current_frames().items()
        stacks = [
            f"thread {number}:\n{''.join(traceback.format_stack(at))}" for number, at in threads
        ]
        print(
            "out of time; where each thread is:\n" + "\n".join(stacks),
            file=sys.stderr,
            flush=True,
        )
        self.found["errors"].append("out of time")
        self._write()
        os._exit(CUT_SHORT)


def clocks() -> str:
    """Return SM clock, memory clock, power and temperature by nvidia-smi; empty without it."""
    return smi("clocks.sm,clocks.mem,power.draw,temperature.gpu")


def smi(fields: str) -> str:
    """Return fields of this process's first GPU by nvidia-smi; empty without it."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={first}"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip()
