"""Cancellation at every await of every public coroutine, on asyncio and trio.

Each scenario is run once to find its waits, then once for each wait, cancelled there. After each
run everything must be as before: nothing leaked, nothing granted twice, the same statistics. The
awaits in the source, those reached and those cancelled are counted and printed; an await that no
scenario reaches fails the test.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, LaunchConfig, Pool
from greensched.driver import simulated
from greensched.kernels import spin
from greensched.leasing.latency import measure
from helpers.gate import Gate
from helpers.small_executors import one_cell_executors
from helpers.stepping import Place, Steps, awaits_in
from helpers.waiting import turns, until

SOURCE = Path(greensched.__file__).parent
#: The modules that await; `sync` delegates to them, and is interrupted by its own tests.
MODULES = [
    SOURCE / "pool.py",
    *sorted(path for path in (SOURCE / "leasing").rglob("*.py") if path.stem != "sync"),
    *sorted((SOURCE / "execution").rglob("*.py")),
]
#: System tasks of trio, which only the end of the run cancels; and `Pool.measure`, which delegates
#: to `measure`, of which a scenario asks for fewer repetitions.
EXCLUDED = {"notify_on_exit", "_TaskTimer._run", "Pool.measure"}

Backend = Literal["asyncio", "trio"]


class Stage:
    """A pool on a machine of its own, with what a scenario delays."""

    def __init__(self, driver: simulated.SimulatedDriver) -> None:
        self.driver = driver
        self.pool = Pool(driver=driver)
        self.gates: list[Gate] = []
        self.abandoned: tuple[Any, ...] = ()

    async def hold(self, sms: Any, *, forever: bool = False) -> None:
        """Lease SMs, submit work that does not end, and leave: the lease then drains."""
        with pytest.raises(LookupError):
            async with self.pool.partition(sms) as p:
                self.gates.append(await Gate.closed(p))
                raise LookupError

    def open_gates(self) -> None:
        for gate in self.gates:
            gate.open()


Scenario = Callable[[Stage], Awaitable[None]]
SCENARIOS: dict[str, tuple[Scenario | None, Scenario]] = {}


def scenario(name: str, before: Scenario | None = None) -> Callable[[Scenario], Scenario]:
    """Register a coroutine to cancel, and its preparation."""

    def register(main: Scenario) -> Scenario:
        SCENARIOS[name] = (before, main)
        return main

    return register


async def opened(stage: Stage) -> None:
    await stage.pool.open()


async def opened_and_held(stage: Stage) -> None:
    await stage.pool.open()
    await stage.hold(ALL)


@scenario("open")
async def _open(stage: Stage) -> None:
    await stage.pool.open()


@scenario("open what is open", opened)
async def _open_again(stage: Stage) -> None:
    await stage.pool.open()


@scenario("enter and leave a pool")
async def _pool(stage: Stage) -> None:
    async with stage.pool:
        pass


@scenario("lease a prepared partition", opened)
async def _warm(stage: Stage) -> None:
    async with stage.pool.partition(16):
        pass


@scenario("lease a partition to be made", opened)
async def _cold(stage: Stage) -> None:
    async with stage.pool.partition(24):  # see `few_executors`
        pass


@scenario("wait in the queue", opened_and_held)
async def _queued(stage: Stage) -> None:
    async with stage.pool.partition(16):
        pass


@scenario("wait for several at once", opened_and_held)
async def _several(stage: Stage) -> None:
    async with stage.pool.partitions(16, greensched.REST) as (a, b):
        a.launch(LaunchConfig(grid=1, block=1), spin, 1000)
        b.launch(LaunchConfig(grid=1, block=1), spin, 1000)


@scenario("leave with work in flight", opened)
async def _leaving(stage: Stage) -> None:
    async with stage.pool.partition(16) as p:
        stage.gates.append(await Gate.closed(p))
        p.launch(LaunchConfig(grid=1, block=1), spin, 1000)
        p.run(lambda: None)


@scenario("await jobs of every kind", opened)
async def _jobs(stage: Stage) -> None:
    async with stage.pool.partition(16) as p:
        with await p.upload(np.ones(10)) as small, await p.upload(np.ones(100_000)) as large:
            await p.launch(LaunchConfig(grid=1, block=1), spin, 1000)
            await p.copy(large, np.zeros(100_000))
            await p.download(small)
            await p.download(large)
            await p.run(len, "call")
            await p.local(object)
            await p.local(object)
        with await p.empty_pinned(8):
            pass


@scenario("await a job that is done", opened)
async def _done(stage: Stage) -> None:
    async with stage.pool.partition(16) as p:
        job = p.run(lambda: 5)
        await job
        assert await job == 5


def nothing_much() -> None:
    call = greensched.current_call()
    assert call is not None
    greensched.launch(call.stream, LaunchConfig(grid=1, block=1), spin, 1000)


@scenario("capture a graph, and launch it elsewhere", opened)
async def _graph(stage: Stage) -> None:
    async with stage.pool.partitions(16, 16) as (p, q):
        with await p.capture(nothing_much) as graph:
            await graph.launch(p)
            stage.gates.append(await Gate.closed(q))
            graph.launch(q)
            await graph.launch(q)


@scenario("a feed", opened)
async def _feed(stage: Stage) -> None:
    async with stage.pool.partition(16) as p:
        stage.gates.append(await Gate.closed(p))  # so that it waits for the work on the first
        async for x in p.prefetch(np.ones(10) for _ in range(5)):
            p.copy(x, x)


@scenario("wait for room", opened)
async def _ready(stage: Stage) -> None:
    async with stage.pool.partition(16) as p:
        with await p.empty(4) as b:
            stage.gates.append(await Gate.closed(p))
            with pytest.raises(greensched.WouldBlock):
                while True:
                    p.copy(b, b)
            await p.drain()


@scenario("wait for room for a bound launch", opened)
async def _ready_for_bound(stage: Stage) -> None:
    async with stage.pool.partition(16) as p:
        config = LaunchConfig(grid=1, block=1)
        await p.prepare(config, spin)
        bound = p.bind(config, spin, 1000)
        stage.gates.append(await Gate.closed(p))
        with pytest.raises(greensched.WouldBlock):
            while True:
                bound()
        await p.drain()


@scenario("a checkpoint", opened)
async def _checkpoint(stage: Stage) -> None:
    async with anyio.create_task_group() as tasks:
        async with stage.pool.partition((16, 1024)) as p:
            stage.gates.append(await Gate.closed(p))
            tasks.start_soon(_queued, stage)
            p.context.is_green  # noqa: B018  from here on the whole context is waited for
            p.run(lambda: None)
            try:
                await p.checkpoint()
            finally:  # what it had or what it has now: never both, never none
                held = [lease for lease in stage.pool._manager.leases if lease.is_open]
                assert p._open_lease() in held
                assert p.sm_count == p._open_lease().grant.sms
                assert p._open_lease().executor.mask == p._open_lease().grant.mask
            await p.run(lambda: None)


@scenario("a checkpoint that gives way", opened)
async def _giving_way(stage: Stage) -> None:
    async def aged() -> None:
        async with stage.pool.partition(96):
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        async with stage.pool.partition((96, 1024)) as p:
            tasks.start_soon(aged)
            await anyio.sleep(0.100)  # it has aged, and the queue has had its tick
            await p.checkpoint()
            assert p.sm_count >= 96


@scenario("a feed over a checkpoint", opened)
async def _feed_over_checkpoint(stage: Stage) -> None:
    async with anyio.create_task_group() as tasks:
        async with stage.pool.partition((16, 1024)) as p:
            tasks.start_soon(_queued, stage)
            async for x in p.prefetch(
                np.ones(10) for _ in range(5)
            ):  # it moves once an executor is made
                p.copy(x, x)
                await p.checkpoint()


@scenario("pool.launch", opened_and_held)
async def _pool_launch(stage: Stage) -> None:
    await stage.pool.launch(LaunchConfig(grid=1, block=1), spin, 1000, sms=16)


@scenario("pool.run", opened_and_held)
async def _pool_run(stage: Stage) -> None:
    await stage.pool.run(lambda: None, sms=16)


@scenario("pool.measure", opened_and_held)
async def _measure(stage: Stage) -> None:
    await measure(
        stage.pool, time.monotonic, [16, 32], len, ("call",), device=0, service=None, repeats=1
    )


@scenario("pool.verify", opened)
async def _verify(stage: Stage) -> None:
    await stage.pool.verify()


@scenario("pool.prepare_local", opened)
async def _prepare_local(stage: Stage) -> None:
    service = greensched.ServiceClass("decode", sizes=(24, 88), cap=88)
    stage.pool.reconfigure(services=[service])  # no executor over 88 is made yet
    await stage.pool.prepare_local("decode", list)


@scenario("p.idle", opened)
async def _idle(stage: Stage) -> None:
    async with stage.pool.partition(ALL) as p:
        p.run(int)
        async with p.idle():
            await stage.hold(16)


@scenario("aclose with work in flight", opened_and_held)
async def _aclose(stage: Stage) -> None:
    await stage.pool.aclose(grace=60)


# -- running them -----------------------------------------------------------------------------


def run(backend: Backend, name: str, cancel_at: int | None) -> Steps:
    """Run a scenario, cancelled at its n-th wait; then check that everything is as before."""
    before, main = SCENARIOS[name]
    clock = simulated.VirtualClock(seed=cancel_at or 0)
    driver = simulated.open("h200", clock=clock)
    stage, steps = Stage(driver), Steps(cancel_at)

    async def whole() -> None:
        if before is not None:
            await before(stage)
        async with anyio.create_task_group() as tasks:
            # What the scenario waits for comes once it has waited for a while.
            tasks.start_soon(release_later, stage)
            with anyio.CancelScope() as scope:
                steps.cancel = scope.cancel
                await steps.drive(main(stage))
            assert scope.cancelled_caught == steps.is_cancelled or scope.cancel_called
            tasks.cancel_scope.cancel()
        await as_before(stage)

    clock.run(whole, backend=backend)
    for site in stage.abandoned:
        site.close()
    assert not driver.live(), (name, cancel_at, driver.live())
    return steps


async def release_later(stage: Stage) -> None:
    await anyio.sleep(0.5)
    stage.open_gates()
    await anyio.sleep(0.5)
    stage.open_gates()


async def as_before(stage: Stage) -> None:
    """Check that everything drains, can be granted again, and closes without a rest."""
    pool = stage.pool
    stage.open_gates()
    if pool.state is greensched.PoolState.OPENING:
        await pool.open()
    if pool.state is greensched.PoolState.OPEN:
        await until(lambda: pool.statistics().leases == 0)
        s = pool.statistics()
        assert (s.sms_free, s.sms_leased, s.sms_draining, s.waiting) == (s.sms_total, 0, 0, 0)
        async with pool.partition(ALL) as p:
            assert p.sm_count == s.sms_total
        memory = pool._manager.device_pools[0].memory
    for gate in stage.gates:
        gate._word.close()
    stage.gates.clear()
    if pool.state is greensched.PoolState.OPEN:
        gc.collect()  # buffers that a cancelled job was to give go with its traceback
        await until(lambda: memory.reap() is None and memory.used_bytes == 0)
    report = await pool.aclose()
    if report.abandoned:  # a cancelled aclose has no grace: what it left ends when its work has
        stage.abandoned = pool._manager.device_pools
        executors = [executor for site in stage.abandoned for executor in site.executors.values()]
        await until(lambda: all(executor.is_idle for executor in executors))
    await turns()


@pytest.fixture(autouse=True)
def few_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the prebuilt executors."""
    one_cell_executors(monkeypatch)


@pytest.mark.fault("A1", "A5")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelled_anywhere_nothing_is_lost(name: str, backend: Backend) -> None:
    """A scenario that is cancelled at any of its waits leaves everything as before."""
    undisturbed = run(backend, name, None)
    for number in range(len(undisturbed.waits)):
        steps = run(backend, name, number)
        assert steps.is_cancelled, (name, number)


@pytest.mark.fault("A2")
@pytest.mark.white_box
def test_every_place_that_can_wait_is_reached() -> None:
    """A scenario waits at, and is cancelled at, every await of the pool, leasing and execution."""
    found = [place for path in MODULES for place in awaits_in(path)]
    found = [place for place in found if place[1] not in EXCLUDED]
    reached: Counter[Place] = Counter()
    for backend in ("asyncio", "trio"):
        for name in SCENARIOS:
            # Cancelled at once it also waits where only a cancelled one does, to clean up.
            waits = run(backend, name, None).waits + run(backend, name, 0).waits  # type: ignore[arg-type]
            for wait in waits:
                at = {(Path(file).name, line) for file, line in wait}
                reached.update(place for place in found if (place[0], place[2]) in at)
    coroutines = Counter(f"{file}:{name}" for file, name, _ in found)
    for coroutine, number in sorted(coroutines.items()):
        mine = [place for place in found if f"{place[0]}:{place[1]}" == coroutine]
        hit = [place for place in mine if reached[place]]
        injected = sum(reached[place] for place in mine)
        print(f"{coroutine}: {number} found, {len(hit)} reached, {injected} injected")
    missed = [place for place in found if not reached[place]]
    assert not missed, missed
