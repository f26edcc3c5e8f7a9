"""The inference server under load, on plain streams and with partitions: one table.

python examples/09_inference_server/compare.py [--seconds 20]

The server and its clients are processes of their own, and speak HTTP. What the table shows is up to
the GPU; that every client got all its tokens is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
ARRANGEMENTS = {"plain streams": ["--streams"], "partitions": []}

#: numpy's threads would take the processors from whoever else is compared here.
ENVIRONMENT = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

#: Requests a second, the longest prompt, and tokens for each, where the GPU is simulated and where
#: it is not: prompts keep it busy for about half of the time.
SIMULATED = {"rate": 20, "longest": 192, "tokens": 12}
ON_GPU = {"rate": 6, "longest": 4096, "tokens": 32}


@contextmanager
def serving(options: Sequence[str]) -> Iterator[str]:
    """The server's address, while it runs; its last words, if it cannot."""
    command = [sys.executable, str(HERE / "app.py"), "0", *options]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = ""
        while (found := re.search(r"running on (http://127.0.0.1:\d+)", said)) is None:
            line = server.stderr.readline()
            if not line:
                raise SystemExit(f"the server ended:\n{said}")
            said += line
        try:
            yield found[1]
        finally:
            server.send_signal(signal.SIGTERM)
            said = server.stderr.read()
    if "Traceback" in said:
        raise SystemExit(said)


def measure(options: Sequence[str], seconds: float) -> dict[str, Any]:
    with serving(options) as address:
        device = httpx.get(f"{address}/about", timeout=60).json()["device"]
        load = SIMULATED if device.startswith("Simulated") else ON_GPU
        arguments = [f"--{name}={value}" for name, value in {**load, "seconds": seconds}.items()]
        command = [sys.executable, str(HERE / "load.py"), address, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(name: str, found: dict[str, Any]) -> str:
    ttft, between = found["ttft"], found["between"]
    times = [1e3 * quantile(times, part) for times in (ttft, between) for part in (0.5, 0.99)]
    rate = (len(ttft) + len(between)) / found["seconds"]
    cells = [f"{time:.1f}" for time in times] + [f"{rate:.0f}", f"{found['answered']}"]
    return f"{name:15}" + "".join(f"{cell:>10}" for cell in [*cells, f"{found['refused']}"])


def quantile(times: list[float], part: float) -> float:
    """The smallest time that so large a part does not exceed."""
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


HEAD = f"""{"":15}{"TTFT, ms":>20}{"between tokens":>20}{"tokens":>10}{"requests":>20}
{"":15}""" + "".join(
    f"{cell:>10}" for cell in ("p50", "p99", "p50", "p99", "a second", "answered", "refused")
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20, help="of load, for each arrangement")
    seconds = parser.parse_args().seconds
    wrong = 0
    print(HEAD)
    for name, options in ARRANGEMENTS.items():
        found = measure(options, seconds)
        wrong += found["wrong"]
        print(row(name, found), flush=True)
    if wrong:
        print(f"{wrong} requests were not answered as they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
