"""`python -m benchmarks [--standin DIR] [--json] [--plot FILE]`: all of them.

Exit code 1 if a bar fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import hot_path as cuda
from benchmarks.lib import plot
from benchmarks.lib.timing import Bystanders, Row, table
from benchmarks.micro import call as calling
from benchmarks.micro import import_time as importing
from benchmarks.micro import launch as launching
from benchmarks.micro import lease as leasing
from benchmarks.micro import pytest_plugin as plugin
from benchmarks.micro import scheduler as deciding
from benchmarks.system import client_disconnect as leaving
from benchmarks.system import heartbeat
from greensched import driver as drivers


def main() -> int:
    options = _parser().parse_args()
    bystanders = Bystanders()
    parts: dict[str, Callable[[], list[Row]]] = {
        "import": importing.measure,
        "pytest": plugin.measure,
        "clients that hang up": leaving.measure,
        "decisions": deciding.measure,
        "event loop": heartbeat.measure,
        "simulated H200, real clock": _simulated,
    }
    if options.standin:
        parts["cuda.bindings on the stand-in driver"] = lambda: cuda.measure(options.standin)
    found: dict[str, list[Row]] = {}
    for name, measure in parts.items():
        print(f"measuring: {name}", file=sys.stderr)
        found[name] = measure()
    machine = str(bystanders)
    _print(found, machine, as_json=options.json)
    if options.plot is not None:
        plot.save(found, machine, options.plot)
    return int(any(row.passed is False for rows in found.values() for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--standin", type=_folder, help="the folder of a stand-in libcuda.so.1, to run on it too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=plot.picture, metavar="FILE", help="draw it there, too")
    return parser


def _folder(name: str) -> str:
    folder = Path(name).resolve()
    if not (folder / "libcuda.so.1").is_file():
        raise argparse.ArgumentTypeError(f"there is no libcuda.so.1 in {folder}")
    return str(folder)


def _simulated() -> list[Row]:
    async def all_of_them() -> list[Row]:
        parts = leasing, launching, calling
        return [row for part in parts for row in await part.measure(drivers.open("simulated:h200"))]

    return asyncio.run(all_of_them())


def _print(found: dict[str, list[Row]], machine: str, *, as_json: bool) -> None:
    if as_json:
        rows = {name: [row.as_dict() for row in part] for name, part in found.items()}
        print(json.dumps({"machine": machine, **rows}, indent=1))
        return
    print(machine)
    for name, part in found.items():
        print(f"\n{name}\n{table(part)}")


if __name__ == "__main__":
    raise SystemExit(main())
