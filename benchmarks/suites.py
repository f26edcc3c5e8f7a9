"""`python -m benchmarks.suites [--json FILE] [--plot FILE]`: all of a real GPU but whole workloads.

Each part in a process of its own, so that one which fails, or spoils the device for its process,
leaves the others their figures. Exit code 1 if a part or a bar fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.hot_path import judge
from benchmarks.lib import plot
from benchmarks.lib.report import smi
from benchmarks.lib.timing import Bystanders, Row, table

#: Seconds that a part may take: several times what one took on an H200.
LIMIT_S = 240
#: Of medians on a GPU: ours at most so many times theirs.
BARS = {
    "bound launch | raw launch, packed once": 1.05,
    "bound.submit | raw launch + mark": 1.1,
    "lease, launch, await | semaphore, launch, polled event": 2.0,
}
PARTS = {
    "hot path and peers": "benchmarks.hot_path",
    "eight lanes": "benchmarks.micro.executors",
    "beside a batch": "benchmarks.gpu.isolation",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--plot", type=plot.picture, metavar="FILE", help="draw them there, too")
    options = parser.parse_args()
    bystanders = Bystanders()
    found: dict[str, list[Row]] = {}
    is_good = True
    for name, module in PARTS.items():
        measured = _run(module, "--json")
        is_good &= measured is not None
        if measured is not None:
            rows = found[name] = [judge(Row.from_dict(row), BARS) for row in measured]
            is_good &= all(row.passed is not False for row in rows)
            print(f"\n{name}\n{table(rows)}", flush=True)
    contexts = _run("benchmarks.gpu.contexts")
    print(f"\ngreen contexts\n{json.dumps(contexts, indent=1)}")
    is_good &= contexts is not None
    machine = f"{smi('name,driver_version')}; {bystanders}"
    if options.json is not None:
        parts = {name: [row.as_dict() for row in rows] for name, rows in found.items()}
        whole = {"machine": machine, **parts, "green contexts": contexts}
        options.json.write_text(json.dumps(whole, indent=1))
    if options.plot is not None:
        plot.save(found, machine, options.plot)
    return int(not is_good)


def _run(module: str, *options: str) -> Any:
    """What a part printed, as JSON; None where it failed, which it has said on standard error."""
    command = [sys.executable, "-m", module, *options]
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S)
        return json.loads(ran.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"{module}: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    raise SystemExit(main())
