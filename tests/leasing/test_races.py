"""Grants that meet a cancellation, a deadline or the pool's end in one turn of the loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

import greensched
from greensched import ALL, REST, CloseReport, LaunchConfig, Partition, Pool, PoolState
from greensched.driver import simulated
from greensched.kernels import spin
from helpers.gate import Gate
from helpers.small_executors import one_cell_executors
from helpers.waiting import turns, until

ONE = LaunchConfig(grid=1, block=1)


class Race:
    """A pool whose SMs are all held, so that requests queue, and the outcome of each request."""

    def __init__(self, driver: simulated.SimulatedDriver) -> None:
        self.driver = driver
        self.pool = Pool(driver=driver)
        self.told: list[str] = []
        self._held = self.pool.partition(ALL)

    async def begin(self) -> None:
        await self.pool.open()
        await self._held.__aenter__()

    def grant(self) -> None:
        """Return everything: the first request of the queue is granted before this returns."""
        self._held._granted_lease().end()

    async def all_free(self) -> None:
        """Return everything while no request waits: every SM comes free."""
        self.grant()
        await until(lambda: self.free() == (132, 0, 0, 0))

    async def ask(self, name: str, sms: Any = ALL, **options: Any) -> None:
        """Lease SMs, and record the outcome."""
        try:
            async with self.pool.partition(sms, **options):
                self.told.append(f"{name} granted")
        except anyio.get_cancelled_exc_class():
            self.told.append(f"{name} cancelled")
            raise
        except greensched.GreenschedError as error:
            self.told.append(f"{name} {type(error).__name__}")

    async def queue(
        self, tasks: anyio.abc.TaskGroup, name: str, sms: Any = ALL
    ) -> anyio.CancelScope:
        """Start a task whose request is queued; return the scope that cancels it."""
        scope, waiting = anyio.CancelScope(), self.pool.statistics().waiting

        async def asking() -> None:
            with scope:
                await self.ask(name, sms)

        tasks.start_soon(asking)
        await until(lambda: self.pool.statistics().waiting == waiting + 1)
        return scope

    def free(self) -> tuple[int, int, int, int]:
        """Return the SMs that are free, leased and draining, and the requests that wait."""
        s = self.pool.statistics()
        return s.sms_free, s.sms_leased, s.sms_draining, s.waiting

    def occupy_builder(self) -> None:
        """Delay the next executor by a hundredth of a second."""
        manager = self.pool._manager
        manager.builder.thread.submit(lambda: self.driver.clock.sleep(10**7))

    async def all_is_back(self) -> None:
        """Check that every SM can be granted once more, and that the pool closes."""
        assert self.free() == (132, 0, 0, 0)
        async with self.pool.partition(ALL) as p:
            assert p.sm_count == 132
        assert not (await self.pool.aclose()).abandoned


Script = Callable[[Race], Awaitable[None]]


@pytest.fixture(params=[(b, s) for b in ("asyncio", "trio") for s in range(2)], ids=str)
def race(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a script on each kind of loop, with several orders of threads.

    An executor of 24 SMs is not made beforehand.
    """
    one_cell_executors(monkeypatch)
    backend, seed = request.param
    clock = simulated.VirtualClock(seed=seed)
    driver = simulated.open("h200", clock=clock)

    def run(script: Script) -> Race:
        race = Race(driver)

        async def main() -> None:
            await race.begin()
            await script(race)

        clock.run(main, backend=backend)
        assert not driver.live(), driver.live()
        return race

    return run


@pytest.mark.fault("A2")
def test_granted_then_cancelled(race: Any) -> None:
    """Granted and cancelled before it could go on, a request gives all back, and the next has it.

    On trio what was granted first counts: there a task that is to go on cannot be cancelled
    before its next wait.
    """

    async def script(race: Race) -> None:
        async with anyio.create_task_group() as tasks:
            scope = await race.queue(tasks, "first")
            await race.queue(tasks, "second")
            race.grant()
            assert race.free() == (0, 132, 0, 1)
            scope.cancel()
            await until(lambda: len(race.told) == 2)
        s = race.pool.statistics()
        assert (s.requested, s.granted, s.cancelled) == (3, 3, 0)
        await race.all_is_back()

    told = race(script).told
    assert told in (["first cancelled", "second granted"], ["first granted", "second granted"])


@pytest.mark.fault("A2")
def test_cancelled_then_granted(race: Any) -> None:
    """A request that is cancelled in the queue, then granted before its task runs, returns all."""

    async def script(race: Race) -> None:
        async with anyio.create_task_group() as tasks:
            scope = await race.queue(tasks, "first")
            await race.queue(tasks, "second")
            scope.cancel()
            race.grant()
            await until(lambda: len(race.told) == 2)
        await race.all_is_back()

    assert race(script).told == ["first cancelled", "second granted"]


@pytest.mark.parametrize("order", ["granted first", "cancelled first"])
def test_many_cancelled_as_they_are_granted(race: Any, order: str) -> None:
    """Of many grants in one turn every other one is cancelled; the rest are served."""

    async def script(race: Race) -> None:
        async with anyio.create_task_group() as tasks:
            scopes = [await race.queue(tasks, str(i), 8) for i in range(24)]
            if order == "granted first":
                race.grant()
            for scope in scopes[::2]:
                scope.cancel()
            if order == "cancelled first":
                race.grant()
            await until(lambda: len(race.told) == 24)
        await race.all_is_back()

    told = race(script).told
    assert {f"{i} granted" for i in range(1, 24, 2)} <= set(told)
    assert sorted(line.split()[0] for line in told) == sorted(map(str, range(24)))


def test_a_joint_grant_is_given_back_whole(race: Any) -> None:
    """A joint request that is cancelled as it is granted leaves no part behind."""

    async def script(race: Race) -> None:
        async def both() -> None:
            with scope:
                async with race.pool.partitions(16, REST):
                    race.told.append("both granted")

        scope = anyio.CancelScope()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(both)
            await until(lambda: race.pool.statistics().waiting == 1)
            await race.queue(tasks, "next")
            race.grant()
            scope.cancel()
            await until(lambda: "next granted" in race.told)
        await race.all_is_back()

    race(script)


def test_a_deadline_passes_as_it_is_granted(race: Any) -> None:
    """A request whose deadline passes in the turn of its grant has one outcome."""

    async def script(race: Race) -> None:
        pool, driver = race.pool, race.driver
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: race.ask("first", deadline=1.0))
            await until(lambda: pool.statistics().waiting == 1)
            asked = driver.time()
            await race.queue(tasks, "second")
            await anyio.sleep(asked + 1.0 - driver.time())
            race.grant()
            await until(lambda: len(race.told) == 2)
        s = pool.statistics()
        assert s.requested == s.granted + s.expired + s.cancelled
        await race.all_is_back()

    assert sorted(race(script).told) in (  # both are told in one turn, in any order
        ["first granted", "second granted"],
        ["first DeadlineExceeded", "second granted"],
    )


def test_granted_before_its_deadline_and_heard_after(race: Any) -> None:
    """A deadline that passes between the grant and the task's next turn has no effect."""

    async def script(race: Race) -> None:
        pool = race.pool
        manager = pool._manager
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: race.ask("first", deadline=1.0))
            await until(lambda: pool.statistics().waiting == 1)
            await race.queue(tasks, "second")
            race.grant()
            assert manager.scheduler.tick(race.driver.time() + 2.0) == ([], [])
        assert pool.statistics().expired == 0
        await race.all_is_back()

    assert race(script).told == ["first granted", "second granted"]


def test_the_deadline_and_a_cancellation_in_one_turn(race: Any) -> None:
    """A request whose deadline passes as it is cancelled leaves the queue once."""

    async def script(race: Race) -> None:
        pool, driver = race.pool, race.driver
        scope = anyio.CancelScope()

        async def asking() -> None:
            with scope:
                await race.ask("first", deadline=1.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asking)
            await until(lambda: pool.statistics().waiting == 1)
            await anyio.sleep(1.0)
            pool._manager._on_queue_tick()  # the deadline passes here
            scope.cancel()
        s = pool.statistics()
        assert (s.waiting, s.expired + s.cancelled) == (0, 1)
        assert driver.time() >= 1.0
        race.grant()
        await turns()
        await race.all_is_back()

    assert race(script).told in (["first cancelled"], ["first DeadlineExceeded"])


def test_cancelled_while_its_executor_is_made(race: Any) -> None:
    """The cancelled request held nothing, and the next one uses the executor."""

    async def script(race: Race) -> None:
        pool = race.pool
        await race.all_free()
        made = pool.statistics().executors_made
        race.occupy_builder()
        scope = anyio.CancelScope()

        async def asking() -> None:
            with scope:
                await race.ask("first", 24)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asking)
            await until(lambda: race.free() == (132, 0, 0, 1))
            scope.cancel()
        assert race.free() == (132, 0, 0, 0)
        await until(lambda: pool.statistics().executors_made == made + 1)
        async with pool.partition_nowait(24) as p:
            assert p.sm_count == 24
        await race.all_is_back()

    assert race(script).told == ["first cancelled"]


def test_what_does_not_wait_has_nothing_made(race: Any) -> None:
    """A refused `partition_nowait` has no executor made, then or later."""

    async def script(race: Race) -> None:
        pool = race.pool
        await race.all_free()
        made = pool.statistics().executors_made
        for _ in range(3):
            with pytest.raises(greensched.WouldBlock, match="no executor"):
                pool.partition_nowait(24)
            await race.ask("one", 8)
        assert pool.statistics().executors_made == made
        await race.all_is_back()

    assert race(script).told == ["one granted"] * 3


def test_an_error_in_making_an_executor_is_raised(
    race: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that waits for the executor raises; the next one may succeed."""

    def refuse(*_: object) -> None:
        raise MemoryError("no room for it")

    async def script(race: Race) -> None:
        await race.all_free()
        with monkeypatch.context() as patch:
            patch.setattr("greensched.leasing.executor_builder.Executor", refuse)
            with pytest.raises(MemoryError, match="no room"):
                await race.ask("first", 24)
        await race.ask("second", 24)
        await race.all_is_back()

    assert race(script).told == ["second granted"]


def test_cells_whose_executor_is_made_can_be_granted(race: Any) -> None:
    """Other requests can have the cells meanwhile, whichever become free first."""

    async def script(race: Race) -> None:
        pool = race.pool
        await race.all_free()
        race.occupy_builder()
        async with anyio.create_task_group() as tasks:
            await race.queue(tasks, "first", 24)
            async with AsyncExitStack() as block:
                for _ in range(12):
                    await block.enter_async_context(pool.partition_nowait(8))
                assert race.told == []
        await race.all_is_back()

    assert race(script).told == ["first granted"]


def test_several_leave_while_one_executor_is_made(race: Any) -> None:
    """An executor for a cancelled request serves a later grant of its cells."""

    async def script(race: Race) -> None:
        pool = race.pool
        await race.all_free()
        made = pool.statistics().executors_made
        race.occupy_builder()
        for _ in range(3):
            with anyio.move_on_after(0.001):
                await race.ask("one", 24)
        await race.ask("last", 24)
        assert pool.statistics().executors_made == made + 1
        await race.all_is_back()

    assert race(script).told == ["one cancelled"] * 3 + ["last granted"]


def test_the_queue_is_closed_as_it_is_cancelled(race: Any) -> None:
    """Queued requests raise, and one that is cancelled in that turn leaves nothing."""

    async def script(race: Race) -> None:
        pool = race.pool
        async with anyio.create_task_group() as tasks:
            scopes = [await race.queue(tasks, str(i)) for i in range(4)]
            tasks.start_soon(pool.aclose)
            await until(lambda: pool.state is PoolState.CLOSING)
            for scope in scopes[::2]:
                scope.cancel()
            race.grant()
            await until(lambda: len(race.told) == 4)
        assert pool.state is PoolState.CLOSED
        assert race.free() == (132, 0, 0, 0)

    told = race(script).told
    assert {"1 PoolClosed", "3 PoolClosed"} <= set(told)
    assert not [line for line in told if "granted" in line]


@pytest.mark.fault("E1")
def test_two_closings_at_once(race: Any) -> None:
    """Two concurrent `aclose` calls wait for one end and return one report."""

    async def script(race: Race) -> None:
        reports: list[CloseReport] = []

        async def close() -> None:
            reports.append(await race.pool.aclose())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            tasks.start_soon(close)
            await until(lambda: race.pool.state is PoolState.CLOSING)
            await turns()
            assert not reports
            race.grant()
        assert len(reports) == 2
        assert reports[0] is reports[1]
        assert not reports[0].abandoned

    race(script)


@pytest.mark.fault("E1")
def test_one_of_two_closings_is_cancelled(race: Any) -> None:
    """Cancelling the first `aclose` ends the grace; the second one returns."""

    async def script(race: Race) -> None:
        pool, reports, scope = race.pool, list[CloseReport](), anyio.CancelScope()

        async def close() -> None:
            with scope:
                await pool.aclose(grace=1000)

        async def wait() -> None:
            reports.append(await pool.aclose())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            await until(lambda: pool.state is PoolState.CLOSING)
            tasks.start_soon(wait)
            await turns()
            race.grant()
            scope.cancel()
        assert pool.state is PoolState.CLOSED
        assert len(reports) == 1
        assert not reports[0].abandoned
        assert race.driver.time() < 1000

    race(script)


def test_the_last_job_is_done_as_its_block_is_cancelled(race: Any) -> None:
    """A block that is cancelled in the turn in which its work ends returns its SMs."""

    async def script(race: Race) -> None:
        pool = race.pool
        await race.all_free()
        scope = anyio.CancelScope()
        gates: list[Gate] = []

        async def use() -> None:
            with scope:
                async with pool.partition(16) as p:
                    gates.append(await Gate.closed(p))
                    p.launch(ONE, spin, 1000)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            await until(lambda: pool.statistics().sms_draining == 16)
            gates[0].open()
            scope.cancel()
        await until(lambda: race.free() == (132, 0, 0, 0))
        gates[0]._word.close()
        await race.all_is_back()

    race(script)


def test_nowait_in_the_turn_of_a_grant(race: Any) -> None:
    """`partition_nowait` never takes a grant of a task that has not run since."""

    async def script(race: Race) -> None:
        pool = race.pool
        async with anyio.create_task_group() as tasks:
            await race.queue(tasks, "first")
            race.grant()
            with pytest.raises(greensched.WouldBlock):
                pool.partition_nowait(8)
            await until(lambda: race.told == ["first granted"])
        await until(lambda: race.free() == (132, 0, 0, 0))
        held: Partition = pool.partition_nowait(8)
        async with held:
            assert held.sm_count == 8
        await race.all_is_back()

    race(script)
