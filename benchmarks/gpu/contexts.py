"""Count the green contexts a device can have; time their creation, and measure their memory.

`python -m benchmarks.gpu.contexts [--most N] [--seconds S]` runs on the GPU of this machine. It
creates contexts over one group of SMs, each with a stream, until the driver refuses or a limit is
reached. It runs in its own process: the driver may keep part of the memory until the process ends.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

from greensched import Device
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.errors import CUDAError

#: Contexts at the beginning and at the end whose median is printed.
SOME = 64


def measure(driver: Driver, most: int, seconds: float) -> dict[str, Any]:
    """Return times in microseconds, and memory in MiB for each context."""
    with Device(0, driver=driver) as device:
        groups, _ = driver.split_by_count(driver.device_resource(0), None, device.sm_count // 8)
        made: list[tuple[Any, Any]] = []
        making: list[float] = []
        refused = ""
        free = driver.memory_info()[0]
        began = perf_counter()
        while len(made) < most and perf_counter() - began < seconds:
            start = perf_counter()
            try:
                green = driver.create_green(driver.describe([groups[0]]), 0)
                made.append((green, driver.create_stream(green)))
            except CUDAError as error:
                refused = str(error)
                break
            making.append(perf_counter() - start)
        taken = free - driver.memory_info()[0]
        ending = []
        for green, stream in reversed(made):
            start = perf_counter()
            driver.destroy_stream(stream)
            driver.destroy_green(green)
            ending.append(perf_counter() - start)
        left = free - driver.memory_info()[0]
    return {
        "contexts": len(made),
        "refused": refused or "no: the limit of this run was reached",
        "made_us": {"first": 1e6 * median(making[:SOME]), "last": 1e6 * median(making[-SOME:])},
        "ended_us": {"last made": 1e6 * median(ending[:SOME]), "all": 1e6 * median(ending)},
        "memory_mib_each": taken / len(made) / 2**20,
        "memory_mib_each_not_given_back": left / len(made) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.contexts",
        description="Create green contexts until there are no more.",
    )
    parser.add_argument("--driver", default="cuda", help="cuda, or a simulated one")
    parser.add_argument("--most", type=int, default=100_000, help="contexts at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="for making them, at most")
    options = parser.parse_args()
    found = measure(drivers.open(options.driver), options.most, options.seconds)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
