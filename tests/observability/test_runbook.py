"""The runbook: a service breaks in eight ways; the alerts alone tell which, and so does `top`.

The service runs in virtual time, on a simulated GPU. Its metrics are scraped every 20 s, and the
rules of examples/observability/alerts.yml are evaluated on these samples. At the end the screen of
`greensched top` is drawn, 80 columns wide.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from rich.console import Console

from greensched import ALL, GreenschedError, LaunchConfig, Pool, ServiceClass
from greensched.cli.top import Screen
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
    """The firing rules after each scrape."""

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


def screen_of(pool: Pool) -> str:
    """Return what `greensched top` shows of a pool, as one line."""
    file = io.StringIO()
    Console(file=file, width=80, markup=False).print(Screen([pool.snapshot().as_dict()]))
    return " ".join(file.getvalue().split())


def found(service: Service, *, minutes: float = 4, **options: Any) -> tuple[set[str], str]:
    """Return the alerts that fire while a service runs, and its last screen."""
    gpu, registry, screens = SimGPU(), CollectorRegistry(), []
    alerts = Alerts(registry)

    async def main() -> None:
        pool = gpu.pool(services=CLASSES, max_waiting=64, **options)
        export(pool, registry=registry)
        running = asyncio.create_task(service(pool), name="service")
        for _ in range(int(minutes * 60 / INTERVAL)):
            alerts.scrape(gpu.time)
            await asyncio.sleep(INTERVAL)
        screens.append(screen_of(pool))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    gpu.run(main)
    gpu.close()
    return alerts.firing, screens[0]


async def opened(pool: Pool, *loads: Service) -> None:
    """Open the pool, retrying if that fails, and run loads until it ends."""
    while True:
        with suppress(GreenschedError):
            async with pool:
                await asyncio.gather(*(load(pool) for load in loads))
        await asyncio.sleep(20)


async def chat(pool: Pool, *, milliseconds: int = 10) -> None:
    """Request SMs each second, and give up after ten."""
    while True:
        with suppress(GreenschedError, TimeoutError):
            async with asyncio.timeout(10), pool.partition(32, service="chat") as p:
                await p.launch(CONFIG, spin, milliseconds * MS)
        await asyncio.sleep(1)


async def batch(pool: Pool) -> None:
    """Run a preemptible job of a minute again and again."""
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
    """Two classes within their limits raise no alert."""
    alerts, screen = found(healthy)
    assert alerts == set()
    assert ": open" in screen
    assert "0 expired, 0 refused" in screen
    for said in ("has not ended", "poisoned", "waiting:", "could not open", "min "):
        assert said not in screen


@pytest.mark.parametrize(
    ("hang_after", "said"),
    [(None, "32 SMs, cells 0-3 draining 4min"), (30, "spin on device 0 has not ended")],
)
def test_a_hung_kernel(hang_after: float | None, said: str) -> None:
    """Work does not end, with `hang_after`."""

    async def service(pool: Pool) -> None:
        await opened(pool, chat if hang_after is None else batch)

    alerts, screen = found(service, faults=[Hang("spin", nth=5)], hang_after=hang_after)
    assert alerts == {"GreenschedWorkHung"}
    assert said in screen


def test_a_lost_device() -> None:
    """A kernel of the service crashes the device."""
    alerts, screen = found(healthy, faults=[Crash("spin", nth=5)])
    assert alerts == {"GreenschedDeviceLost", "GreenschedNotReady"}
    assert "poisoned" in screen
    assert "ILLEGAL_ADDRESS" in screen


def test_a_full_queue() -> None:
    """More requests arrive than the class may queue."""

    async def crowd(pool: Pool) -> None:
        await opened(pool, batch, *[partial(chat, milliseconds=4000)] * 12)

    alerts, screen = found(crowd, minutes=3)
    assert alerts == {"GreenschedQueueFull"}
    assert "refused sms=32: 4 requests are waiting already; retry in 4 s (64 times)" in screen


def test_a_starving_class() -> None:
    """A lease of the other class holds all SMs and never ends."""

    async def greedy(pool: Pool) -> None:
        async with pool.partition(ALL, service="chat") as p:
            while True:
                await p.launch(CONFIG, spin, 5000 * MS)

    async def service(pool: Pool) -> None:
        await opened(pool, greedy, batch)

    alerts, screen = found(service, minutes=5)
    assert alerts == {"GreenschedServiceStarved"}
    assert "5min needs 64 SMs; 0 of 132 are free on device 0" in screen
    assert "the oldest, of class 'chat', has had 132 for 300 s" in screen


def test_a_leak_of_a_lease() -> None:
    """A task keeps its lease for ever, without work."""

    async def leak(pool: Pool) -> None:
        async with pool.partition(8, service="chat"):
            await asyncio.Event().wait()

    async def service(pool: Pool) -> None:
        await opened(pool, chat, leak)

    alerts, screen = found(service, minutes=12)
    assert alerts == {"GreenschedLeaseLeaked"}
    assert "12min 8 SMs, cell 4" in screen


def test_a_slow_loop() -> None:
    """A callback blocks the loop for 200 ms again and again."""

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

    alerts, screen = found(service, minutes=3)
    assert alerts == {"GreenschedLoopSlow"}
    assert "wake p99 250ms" in screen


@pytest.mark.parametrize(
    ("status", "alert", "said"),
    [
        ("NO_DEVICE", "GreenschedDeviceMissing", "the driver sees no GPU"),
        ("SYSTEM_DRIVER_MISMATCH", "GreenschedDriverUnusable", "SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_a_pool_that_cannot_open(status: str, alert: str, said: str) -> None:
    """The GPU is missing or the driver is wrong, and the service retries."""
    faults = [Fail("initialise", status=status, last=1_000_000)]
    alerts, screen = found(healthy, faults=faults)
    assert alerts == {alert, "GreenschedNotReady"}
    assert "it could not open: " in screen
    assert said in screen


def test_a_gpu_of_several_is_missing() -> None:
    """The machine has fewer GPUs than the service needs."""
    alerts, screen = found(healthy, devices=[0, 1])
    assert alerts == {"GreenschedDeviceMissing", "GreenschedNotReady"}
    assert "device 1 does not exist: this machine has 1 device (0)." in screen
