"""What a lease costs in a pool that is exported to Prometheus, beside one in a pool that is not.

`python -m benchmarks.micro.metrics` runs on simulated drivers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import partial
from itertools import repeat
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.lib.raw_calls import SMS
from benchmarks.lib.timing import Row, Work, compare, table
from benchmarks.micro.lease import CLASSES, OTHER_SMS
from greensched import Pool
from greensched import driver as drivers
from greensched.integrations.prometheus import export

#: The bar: what the metrics may add to a lease.
MOST = 1.05
#: Leases of each size for each reading of the clock.
BURST = 5


async def measure() -> list[Row]:
    """Return the medians; the exported pool is scraped before each measurement."""
    rows = []
    for service in (None, CLASSES[0].name):
        services = () if service is None else CLASSES
        exported, other = (
            Pool([0], driver=drivers.open("simulated:h200"), services=services) for _ in range(2)
        )
        registry = CollectorRegistry()
        export(exported, registry=registry)
        async with exported, other:
            for sizes in ((SMS,), (SMS, OTHER_SMS)):
                generate_latest(registry)
                what = "lease, exported to Prometheus" if service is None else "...of a class"
                what += ", two sizes in turn" if len(sizes) > 1 else ""
                sides = _leases(exported, service, sizes), _leases(other, service, sizes)
                found = await compare(f"{what} | not exported", *sides)
                rows.append(found.row(0.5, "us", most=MOST))
    return rows


def _leases(pool: Pool, service: str | None, sizes: tuple[int, ...]) -> Work:
    lease = pool.partition if service is None else partial(pool.partition, service=service)

    async def work() -> float:
        start = perf_counter()
        for _ in repeat(None, BURST):
            for sms in sizes:
                async with lease(sms):
                    pass
        return (perf_counter() - start) / BURST / len(sizes)

    return work


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.metrics",
        description="Measure what exporting a pool to Prometheus adds to its leases.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = asyncio.run(measure())
    print(json.dumps([row.as_dict() for row in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
