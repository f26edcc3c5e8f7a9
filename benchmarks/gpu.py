"""`python -m benchmarks.gpu [--json FILE]`: all that is asked of a real GPU but whole workloads.

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

from benchmarks.cuda import judge
from benchmarks.measure import Row, table

#: Seconds that a part may take: several times what one took on an H200.
LIMIT_S = 240
#: Of medians on a GPU: ours at most so many times theirs.
BARS = {
    "bound launch | raw launch, packed once": 1.05,
    "bound.submit | raw launch + mark": 1.1,
    "lease, launch, await | semaphore, launch, polled event": 2.0,
}
PARTS = {
    "hot path and peers": "benchmarks.cuda",
    "eight lanes": "benchmarks.lanes",
    "beside a batch": "benchmarks.beside",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    whole: dict[str, Any] = {}
    is_good = True
    for name, module in PARTS.items():
        found = _run(module, "--json")
        is_good &= found is not None
        if found is not None:
            rows = [judge(Row.from_dict(row), BARS) for row in found]
            is_good &= all(row.passed is not False for row in rows)
            print(f"\n{name}\n{table(rows)}", flush=True)
            whole[name] = [row.as_dict() for row in rows]
    whole["green contexts"] = _run("benchmarks.contexts")
    print(f"\ngreen contexts\n{json.dumps(whole['green contexts'], indent=1)}")
    is_good &= whole["green contexts"] is not None
    if options.json is not None:
        options.json.write_text(json.dumps(whole, indent=1))
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
