"""What a long benchmark found so far: kept as JSON at each step, and told if it must be cut short.

A GPU is lent for minutes. So what was measured is on disk at once, and a program that hangs, in a
driver's call too, which nothing in Python can interrupt, ends by itself all the same.
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

#: A program that was cut short ends with this.
CUT_SHORT = 3


class Report:
    """Findings by name, written to a file whenever one is added.

    Args:
        path: the file; None: none is written.
        seconds: all there is. `left` counts down from it.
        grace: so much later the process is ended, whatever it does.
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
        """Seconds that are left; negative: it should have ended."""
        return self._end - time.monotonic()

    def put(self, name: str, value: Any) -> None:
        """Adds a finding, or replaces one."""
        with self._lock:
            self.found[name] = value
            self._write()

    def fail(self, what: str) -> None:
        """Adds the exception that is being handled, and says it."""
        told = f"{what}: {traceback.format_exc()}"
        print(told, file=sys.stderr, flush=True)
        with self._lock:
            self.found["errors"].append(told)
            self._write()

    def close(self) -> None:
        """The process is not ended any more. A program that may hang as it ends leaves this out."""
        self._guard.cancel()

    def _write(self) -> None:
        if self._path is not None:
            text = json.dumps(self.found, indent=1)
            beside = self._path.with_suffix(".part")
            beside.write_text(text)
            beside.replace(self._path)

    def _give_up(self) -> None:
        threads = sys._current_frames().items()
        told = [
            f"thread {number}:\n{''.join(traceback.format_stack(at))}" for number, at in threads
        ]
        print("out of time; where each thread is:\n" + "\n".join(told), file=sys.stderr, flush=True)
        self.found["errors"].append("out of time")
        self._write()
        os._exit(CUT_SHORT)


def clocks() -> str:
    """SM clock, memory clock, power, temperature, by nvidia-smi; empty: there is none."""
    return smi("clocks.sm,clocks.mem,power.draw,temperature.gpu")


def smi(fields: str) -> str:
    """What nvidia-smi says of the first GPU; empty: there is none."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip()
