"""Compare the ways of the inference server under load, in one table.

python examples/09_inference_server/compare.py [--seconds 20]

The server and its clients are separate processes that communicate by HTTP. The figures depend on
the GPU; the exit code is 1 if a client did not receive all its tokens.

Without a GPU: set GREENSCHED_DRIVER=simulated:h200.
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
ARRANGEMENTS = {"plain streams": ["--streams"], "chunked": ["--chunked", "256"], "partitions": []}

#: numpy's threads would take the processors from the server and its clients.
ENVIRONMENT = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

#: Requests per second, the longest prompt, and tokens per request, for a simulated GPU and for a
#: GPU: prompts keep it busy for about half of the time.
SIMULATED = {"rate": 12, "longest": 192, "tokens": 12}
ON_GPU = {"rate": 10, "longest": 1280, "tokens": 60}


@contextmanager
def serving(options: Sequence[str]) -> Iterator[str]:
    """Run the server and yield its address; exit with its output if it cannot start."""
    command = [sys.executable, str(HERE / "app.py"), "0", *options]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        output = ""
        while (found := re.search(r"running on (http://127.0.0.1:\d+)", output)) is None:
            line = server.stderr.readline()
            if not line:
                raise SystemExit(f"the server ended:\n{output}")
            output += line
        try:
            yield found[1]
        finally:
            server.send_signal(signal.SIGTERM)
            output = server.stderr.read()
    if "Traceback" in output:
        raise SystemExit(output)


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


def quantile(times: list[float], fraction: float) -> float:
    """Return the time below which this fraction of all lies."""
    return sorted(times)[min(len(times) - 1, int(fraction * len(times)))]


HEADER = f"""{"":15}{"TTFT, ms":>20}{"between tokens":>20}{"tokens":>10}{"requests":>20}
{"":15}""" + "".join(
    f"{cell:>10}" for cell in ("p50", "p99", "p50", "p99", "a second", "answered", "refused")
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20, help="seconds of load for each")
    seconds = parser.parse_args().seconds
    wrong = 0
    print(HEADER)
    for name, options in ARRANGEMENTS.items():
        found = measure(options, seconds)
        wrong += found["wrong"]
        print(row(name, found), flush=True)
    if wrong:
        print(f"{wrong} requests received a wrong answer")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
