"""Leasing, launching and calling on one driver, beside raw calls; on CUDA, beside peers, too.

`python -m benchmarks.micro.hot_path [--driver NAME] [--json]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json

from benchmarks.gpu import peers
from benchmarks.lib.timing import Row, table
from benchmarks.micro import call, launch, lease
from greensched import driver as drivers


async def measure(name: str) -> list[Row]:
    """Return the rows of each part, on a driver of that name."""
    driver = drivers.open(name)
    return [row for part in (lease, launch, call, peers) for row in await part.measure(driver)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.hot_path",
        description="Measure leasing, launching and calling beside raw calls and peers.",
    )
    parser.add_argument("--driver", default="cuda", help="cuda, or a simulated one (default: cuda)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = asyncio.run(measure(options.driver))
    print(json.dumps([row.as_dict() for row in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
