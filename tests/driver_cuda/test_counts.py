"""What the hot paths ask of the driver and of the loop, counted: counts do not drift as times do.

A count here is a promise. Where a change makes one smaller, write the smaller one down.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from driver_cuda.conftest import Standin
from greensched import Buffer, LaunchConfig, Partition, Pool
from greensched.kernels import fill
from helpers.waiting import until

pytestmark = pytest.mark.standin

CONFIG = LaunchConfig(grid=1, block=64)
ITEMS = 64
#: Each thing is done so often: a count is per time, and what comes once in a while shows.
TIMES = 64
#: Looks, one in each turn of the loop, at which nothing new was asked.
QUIET = 10

#: What the safety look asks, once in milliseconds.
SWEEP = {"cuStreamIsCapturing", "cuEventQuery", "cuThreadExchangeStreamCaptureMode"}
LAUNCH = {"cuLaunchKernel": 1}
MARK = {"cuStreamWriteValue32": 1}


class Loop(asyncio.SelectorEventLoop):
    """A loop that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def call_soon(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        self.asked["turn"] += 1
        return super().call_soon(*args, **kwargs)

    def call_at(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        self.asked["timer"] += 1
        return super().call_at(*args, **kwargs)

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        self.asked["hop"] += 1
        return super().call_soon_threadsafe(*args, **kwargs)

    def create_task(self, *args: Any, **kwargs: Any) -> Any:
        self.asked["task"] += 1
        return super().create_task(*args, **kwargs)

    def create_future(self) -> asyncio.Future[Any]:
        self.asked["future"] += 1
        return super().create_future()


class Counts:
    """The calls of some work, each time it was done."""

    def __init__(self, standin: Standin, folder: Path, loop: Loop) -> None:
        self._standin, self._folder, self._loop = standin, folder, loop
        self.driver: dict[str, float] = {}
        self.loop: dict[str, float] = {}

    async def quiet(self) -> None:
        """Wait until our threads have notified the loop."""
        seen: list[Counter[str]] = []

        def is_quiet() -> bool:
            seen.append(self._calls())
            return len(seen) > QUIET and all(calls == seen[-1] for calls in seen[-QUIET:])

        await until(is_quiet)

    def _calls(self) -> Counter[str]:
        found = json.loads(self._standin.report(self._folder / "calls").read_text())["calls"]
        return Counter({name.removesuffix("_v2"): number for name, number in found.items()})

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the calls in the block, which is done `TIMES` times."""
        before, asked = self._calls(), self._loop.asked.copy()
        yield
        after = self._loop.asked - asked
        calls = self._calls()
        self.driver = {k: n / TIMES for k, n in sorted((calls - before).items())}
        self.loop = {k: n / TIMES for k, n in sorted(after.items())}


Work = Callable[[Pool, Partition, Buffer], Callable[[], Awaitable[object]]]


def launched(_: Pool, p: Partition, x: Buffer) -> Callable[[], Awaitable[object]]:
    async def work() -> None:
        await p.launch(CONFIG, fill, x, 1.0, ITEMS)

    return work


def bound(_: Pool, p: Partition, x: Buffer) -> Callable[[], Awaitable[object]]:
    bound = p.bind(CONFIG, fill, x, 1.0, ITEMS)

    async def work() -> None:
        await bound.submit()

    return work


def packed(_: Pool, p: Partition, x: Buffer) -> Callable[[], Awaitable[object]]:
    async def work() -> None:
        p.bind(CONFIG, fill, x, 1.0, ITEMS)

    return work


def leased(pool: Pool, _: Partition, __: Buffer) -> Callable[[], Awaitable[object]]:
    async def work() -> None:
        async with pool.partition(16):
            pass

    return work


def leased_and_launched(pool: Pool, _: Partition, x: Buffer) -> Callable[[], Awaitable[object]]:
    async def work() -> None:
        async with pool.partition(16) as q:
            await q.launch(CONFIG, fill, x, 1.0, ITEMS)

    return work


def asked(_: Pool, p: Partition, x: Buffer) -> Callable[[], Awaitable[object]]:
    job = p.launch(CONFIG, fill, x, 1.0, ITEMS)

    async def work() -> None:
        assert job.done()
        await job

    return work


def called(_: Pool, p: Partition, __: Buffer) -> Callable[[], Awaitable[object]]:
    async def work() -> None:
        await p.run(int)

    return work


def count(standin: Standin, folder: Path, what: Work) -> Counts:
    """Count the calls of some work with kernels that take no time."""
    standin.set("inline", 1)

    async def main() -> Counts:
        async with Pool(driver="cuda", prepare=[fill]) as pool, pool.partition(8) as p:
            with await p.empty(ITEMS) as x:
                work = what(pool, p, x)
                await work()
                loop = asyncio.get_running_loop()
                assert isinstance(loop, Loop)
                counts = Counts(standin, folder, loop)
                await counts.quiet()
                with counts.counted():
                    for _ in range(TIMES):
                        await work()
        return counts

    try:
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(main())
    finally:
        standin.set("inline", 0)


@pytest.mark.parametrize(
    ("what", "driver"),
    [
        (launched, LAUNCH | MARK),
        (bound, LAUNCH | MARK),
        (packed, {}),
        (leased, {}),
        (leased_and_launched, LAUNCH | MARK),
        (asked, {}),
    ],
)
def test_a_short_job_costs_its_launch_and_a_mark(
    standin: Standin, tmp_path: Path, what: Work, driver: dict[str, float]
) -> None:
    """No other driver call, and of the loop no turn, task, hop or future; a timer for all of it."""
    counts = count(standin, tmp_path, what)
    assert counts.driver == driver
    assert counts.loop in ({}, {"timer": 1 / TIMES})  # the safety look's


def test_a_call_wakes_the_loop_once(standin: Standin, tmp_path: Path) -> None:
    """One hop back, no turn behind it; the driver is asked what is current, and for its work.

    The event of the green context captures what the call has left on any stream.
    """
    counts = count(standin, tmp_path, called)
    each_time = {name: n for name, n in counts.driver.items() if name not in SWEEP}
    assert each_time == {
        "cuCtxGetCurrent": 2,  # before; whether more was pushed
        "cuCtxSetCurrent": 2,
        "cuGreenCtxRecordEvent": 1,
        "cuStreamQuery": 1,
    }
    assert 0 < counts.loop["hop"] <= 1  # fewer where a look of the loop's own came first
    assert not {"future", "task"} & set(counts.loop)
    timers = counts.loop.get("timer", 0)
    assert timers <= 1  # for a thread that would not wake the loop
    assert counts.loop.get("turn", 0) <= timers
