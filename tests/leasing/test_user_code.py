"""User code inside decisions: policies, duration curves, and their errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

import greensched
from greensched import ALL, LaunchConfig, Partition, Pool, ServiceClass
from greensched.kernels import spin
from greensched.scheduling.policy import ClassView, RequestView, SizingView
from helpers.waiting import until

ONE = LaunchConfig(grid=1, block=1)
EVERY_SM = 78
METHODS = ["may_overtake", "class_rank", "size", "at", "observe"]


class Own:
    """A policy and a duration curve of which one method calls the test's hook."""

    def __init__(self, method: str, hook: Callable[[Any], object]) -> None:
        self.method = method
        self.hook = hook
        self.is_armed = False
        self.calls = 0

    def _call(self, method: str, seen: Any = None) -> None:
        if self.is_armed and method == self.method:
            self.calls += 1
            self.hook(seen)

    def rank(self, request: RequestView) -> tuple[float, ...]:
        self._call("rank", request)
        return (-request.priority,)

    def may_overtake(self, first: RequestView, now: float) -> bool:
        self._call("may_overtake", first)
        return True

    def class_rank(self, service: ClassView) -> tuple[float, ...]:
        self._call("class_rank", service)
        return (-service.priority,)

    def size(self, request: RequestView, view: SizingView) -> tuple[int, int]:
        self._call("size", request)
        return view.sizes[0], view.sizes[-1]

    def at(self, sms: int) -> float:
        self._call("at")
        return 0.01

    def observe(self, sms: int, seconds: float) -> None:
        self._call("observe")


async def serve(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


class World:
    """A pool with a user's policy, on a loop that continues after an interrupt."""

    def __init__(self, own: Own) -> None:
        self.own = own
        self.loop = asyncio.new_event_loop()
        self.pool = Pool(
            driver="simulated:h20", policy=own, services=[ServiceClass("a"), ServiceClass("b")]
        )
        self.held = list[Partition]()
        self.run(self.pool.open())

    def run(self, main: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(main)

    async def use(self, service: str) -> None:
        least = 48 if self.own.method == "may_overtake" else 8  # more than one lease leaves
        async with self.pool.partition((least, ALL), service=service, duration=self.own) as p:
            await p.launch(ONE, spin, 1000)
            await p.checkpoint(self.own)

    def hold(self) -> None:
        """Lease every SM by two leases."""
        for sms in (40, EVERY_SM - 40):
            held = self.pool.partition(sms, service="a", duration=self.own)
            self.run(held.__aenter__())
            self.held.append(held)

    def release(self) -> None:
        """End the first remaining lease."""
        self.run(self.held.pop(0).__aexit__(None, None, None))

    def queue(self) -> list[asyncio.Task[None]]:
        async def ask() -> list[asyncio.Task[None]]:
            tasks = [asyncio.create_task(self.use(service)) for service in "abab"]
            await until(lambda: self.pool.statistics().waiting == len(tasks))
            return tasks

        return self.run(ask())

    def end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Check that every request was served and no SM was lost."""
        self.own.is_armed = False
        while self.held:
            self.release()
        self.run(serve(tasks))
        s = self.pool.statistics()
        assert (s.sms_free, s.leases, s.waiting) == (EVERY_SM, 0, 0)
        assert s.requested == s.granted + s.cancelled + s.expired
        assert not self.run(self.pool.aclose()).abandoned
        self.loop.close()


@pytest.mark.fault("I8")
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_in_a_policy_loses_no_sm(method: str, interrupt: type[BaseException]) -> None:
    """The decision is completed and its grants delivered; then the interrupt is raised."""

    def hook(_: Any) -> None:
        raise interrupt

    world = World(Own(method, hook))
    world.hold()
    tasks = world.queue()
    world.own.is_armed = True
    with pytest.raises(interrupt):
        world.release()
    assert world.own.calls
    world.end(tasks)


@pytest.mark.fault("I8")
@pytest.mark.parametrize("method", ["class_rank", "size", "at"])
def test_an_interrupt_while_a_request_is_granted_gives_its_sms_back(method: str) -> None:
    """The caller gets the interrupt of its own decision and holds nothing."""

    def hook(_: Any) -> None:
        raise KeyboardInterrupt

    world = World(Own(method, hook))
    tasks = []
    if method == "class_rank":  # it is asked for while others wait
        world.hold()
        tasks = world.queue()
    world.own.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        world.run(world.use("b"))
    assert world.own.calls
    world.end(tasks)


@pytest.mark.fault("I8")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_rank_that_raises_is_counted_as_nothing(error: type[BaseException]) -> None:
    """The caller gets the error, and the counts of requests stay consistent."""

    def hook(_: Any) -> None:
        raise error("no rank")

    world = World(Own("rank", hook))
    world.hold()
    before = world.pool.statistics()
    world.own.is_armed = True
    with pytest.raises(error, match="no rank"):
        world.run(world.use("a"))
    after = world.pool.statistics()
    assert replace(after, services={}) == replace(before, services={})
    assert [one.granted for one in after.services.values()] == [
        one.granted for one in before.services.values()
    ]
    world.own.is_armed = False
    world.release()
    world.end([])


@pytest.mark.fault("I9")
@pytest.mark.parametrize("method", ["rank", *METHODS])
def test_a_policy_that_asks_its_pool_gets_a_snapshot(method: str) -> None:
    """Inside a decision, statistics and `repr` work, and changes of the pool are refused."""
    seen = list[object]()

    def hook(view: Any) -> None:
        s = world.pool.statistics()
        seen.append(s.sms_free + s.sms_leased + s.sms_draining <= EVERY_SM)
        seen.append(repr(world.pool).startswith("<Pool: open"))
        changes: list[Callable[[], object]] = [
            lambda: world.pool.partition_nowait(8),
            lambda: world.pool.observe("a", 1.0),
            lambda: world.pool.reconfigure(policy="fifo"),
            *([lambda: setattr(view, "priority", 1000.0)] if view is not None else []),
        ]
        for change in changes:
            with pytest.raises((greensched.InvalidRequest, AttributeError)):
                change()

    world = World(Own(method, hook))
    world.hold()
    world.own.is_armed = True
    tasks = world.queue()
    while world.held:
        world.release()
    world.run(serve(tasks))
    assert seen
    assert all(seen)
    world.end(tasks)


@pytest.mark.fault("I9")
def test_the_sync_pool_is_refused_inside_a_decision() -> None:
    """The loop of `pool.sync` would wait for the decision that waits for it."""
    pool = Pool(driver="simulated:h20")
    with pool.sync:
        with pool._lifecycle.lock, pytest.raises(greensched.InvalidRequest, match="statistics"):
            pool.sync.close()
        with pool.sync.partition(8) as p:
            assert p.sm_count == 8


@pytest.mark.fault("I9")
@pytest.mark.parametrize("method", METHODS)
def test_a_log_handler_may_print_the_pool_while_a_policy_fails(method: str) -> None:
    """The failure is logged outside of every lock."""
    printed = list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert not world.pool._lifecycle.lock._is_owned()
            printed.append(f"{record.getMessage()} {world.pool!r}")

    def hook(_: Any) -> None:
        raise ValueError

    world = World(Own(method, hook))
    handler, logger = Handler(), logging.getLogger("greensched")
    logger.addHandler(handler)
    try:
        world.hold()
        tasks = world.queue()
        world.own.is_armed = True
        world.release()
    finally:
        logger.removeHandler(handler)
    assert any(f".{method}() failed" in line and "<Pool: open" in line for line in printed)
    world.end(tasks)


@pytest.mark.fault("I9")
def test_a_view_that_a_policy_keeps_does_not_change() -> None:
    """A view shows the state at the time of its decision."""
    kept = list[Any]()
    world = World(Own("class_rank", kept.append))
    world.hold()
    world.own.is_armed = True
    tasks = world.queue()
    waited = [view.waiting for view in kept]
    world.release()
    world.end(tasks)
    assert [view.waiting for view in kept[: len(waited)]] == waited
    assert max(waited) > 0
