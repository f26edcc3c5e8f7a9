"""The runbook: a service breaks in eight ways, and the alerts alone tell which.

The service runs in virtual time, on a simulated GPU. Its metrics are scraped every 15 s, and the
rules of examples/observability/alerts.yml are evaluated on these samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from greensched import ALL, GreenschedError, LaunchConfig, Pool, ServiceClass
from greensched.driver.simulated import Crash, Fail, Hang
from greensched.integrations.prometheus import export
from greensched.integrations.testing import SimGPU
from greensched.kernels import spin
from helpers.promql import Series

ROOT = Path(__file__).parents[2]
RULES = yaml.safe_load((ROOT / "examples/observability/alerts.yml").read_text())["groups"][0][
    "rules"
]
#: Seconds between scrapes.
INTERVAL = 20
SECONDS = {"s": 1, "m": 60}
MS = 1_000_000
CONFIG = LaunchConfig(grid=1, block=1)
CLASSES = (
    ServiceClass("chat", priority=1, max_waiting=4),
    ServiceClass("batch", preemptible=True, checkpoint_interval=0.1),
)
Service = Callable[[Pool], Awaitable[None]]


class Alerts:
    """Which rules fire, after each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series = Series(registry)
        self._since: dict[tuple[str, Any], float] = {}
        self.firing: set[str] = set()

    def scrape(self, now: float) -> None:
        self._series.scrape(now)
        for rule in RULES:
            name, found = rule["alert"], self._series.query(rule["expr"])
            for key in [key for key in self._since if key[0] == name and key[1] not in found]:
                del self._since[key]
            for labels in found:
                since = self._since.setdefault((name, labels), now)
                if now - since >= seconds(rule.get("for", "0s")):
                    self.firing.add(name)


def seconds(text: str) -> int:
    return int(text[:-1]) * SECONDS[text[-1]]


def found(service: Service, *, minutes: float = 4, **options: Any) -> set[str]:
    """The alerts that fire while a service runs on a pool."""
    gpu, registry = SimGPU(), CollectorRegistry()
    alerts = Alerts(registry)

    async def main() -> None:
        pool = gpu.pool(services=CLASSES, max_waiting=64, **options)
        export(pool, registry=registry)
        running = asyncio.ensure_future(service(pool))
        for _ in range(int(minutes * 60 / INTERVAL)):
            alerts.scrape(gpu.time)
            await asyncio.sleep(INTERVAL)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    gpu.run(main)
    gpu.close()
    return alerts.firing


async def opened(pool: Pool, *loads: Service) -> None:
    """Opens the pool, and tries again if that fails; has loads run until it ends."""
    while True:
        with suppress(GreenschedError):
            async with pool:
                await asyncio.gather(*(load(pool) for load in loads))
        await asyncio.sleep(20)


async def chat(pool: Pool, *, milliseconds: int = 10) -> None:
    """A request each second, which gives up after ten."""
    while True:
        with suppress(GreenschedError, TimeoutError):
            async with asyncio.timeout(10), pool.partition(32, service="chat") as p:
                await p.launch(CONFIG, spin, milliseconds * MS)
        await asyncio.sleep(1)


async def batch(pool: Pool) -> None:
    """A preemptible job of a minute, again and again."""
    while True:
        with suppress(GreenschedError):
            async with pool.partition(64, service="batch") as p:
                for _ in range(60):
                    await p.launch(CONFIG, spin, 1000 * MS)
                    await p.checkpoint()
        await asyncio.sleep(1)


async def healthy(pool: Pool) -> None:
    await opened(pool, chat, batch)


def test_a_healthy_service_raises_no_alarm() -> None:
    """Two classes within their means: no alert."""
    assert found(healthy) == set()


@pytest.mark.parametrize("hang_after", [None, 30])
def test_a_hung_kernel(hang_after: float | None) -> None:
    """Work does not end whose request gave up, or whose request waits, with `hang_after`."""

    async def service(pool: Pool) -> None:
        await opened(pool, chat if hang_after is None else batch)

    faults = [Hang("spin", nth=5)]
    assert found(service, faults=faults, hang_after=hang_after) == {"GreenschedWorkHung"}


def test_a_lost_device() -> None:
    """A kernel of the service crashes the device."""
    assert found(healthy, faults=[Crash("spin", nth=5)]) == {
        "GreenschedDeviceLost",
        "GreenschedNotReady",
    }


def test_a_full_queue() -> None:
    """More requests than the class may queue."""

    async def crowd(pool: Pool) -> None:
        await opened(pool, batch, *[partial(chat, milliseconds=4000)] * 12)

    assert found(crowd, minutes=3) == {"GreenschedQueueFull"}


def test_a_starving_class() -> None:
    """A request of the other class has all SMs, and works on and on."""

    async def greedy(pool: Pool) -> None:
        async with pool.partition(ALL, service="chat") as p:
            while True:
                await p.launch(CONFIG, spin, 5000 * MS)

    async def service(pool: Pool) -> None:
        await opened(pool, greedy, batch)

    assert found(service, minutes=5) == {"GreenschedServiceStarved"}


def test_a_leak_of_a_lease() -> None:
    """A task keeps its lease for ever, without work on it."""

    async def leak(pool: Pool) -> None:
        async with pool.partition(8, service="chat"):
            await asyncio.Event().wait()

    async def service(pool: Pool) -> None:
        await opened(pool, chat, leak)

    assert found(service, minutes=12) == {"GreenschedLeaseLeaked"}


def test_a_slow_loop() -> None:
    """A callback computes on the loop's thread for 200 ms, again and again."""

    async def slow(pool: Pool) -> None:
        clock = pool.devices[0].driver.clock  # type: ignore[attr-defined]  # the simulated driver's
        while True:
            clock.sleep(200 * MS)
            await asyncio.sleep(0)

    async def contend(pool: Pool) -> None:
        while True:
            async with pool.partition(ALL, service="chat"):
                await asyncio.sleep(0)

    async def service(pool: Pool) -> None:
        await opened(pool, slow, *[contend] * 3)

    assert found(service, minutes=3) == {"GreenschedLoopSlow"}


@pytest.mark.parametrize(
    ("status", "alert"),
    [
        ("NO_DEVICE", "GreenschedDeviceMissing"),
        ("SYSTEM_DRIVER_MISMATCH", "GreenschedDriverUnusable"),
    ],
)
def test_a_pool_that_cannot_open(status: str, alert: str) -> None:
    """The GPU is missing, or the driver is the wrong one; the service tries again and again."""
    faults = [Fail("initialise", status=status, last=1_000_000)]
    assert found(healthy, faults=faults) == {alert, "GreenschedNotReady"}
