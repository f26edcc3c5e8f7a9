"""No user code runs under a lock: during every callback another thread can use the pool."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import greensched
from greensched import ALL, LaunchConfig, Pool, ServiceClass
from greensched.driver import simulated
from greensched.execution.call_context import hooks
from greensched.kernels import spin
from greensched.scheduling.policy import ClassView, RequestView, SizingView
from helpers.waiting import until

ONE = LaunchConfig(grid=1, block=1)
EVERY_SM = 78
#: Seconds after which there will be no answer.
NEVER = 20.0


class PoolCaller:
    """Calls a pool from another thread, and records by name which callbacks got an answer."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.answered = dict[str, bool]()
        self._busy = threading.local()

    def ask(self, name: str) -> None:
        """Have another thread call every method that reads the pool, and wait for it."""
        pool = self.pool
        if pool is None or getattr(self._busy, "is_asking", False) or not pool.devices:
            return
        done = threading.Event()

        def ask() -> None:
            self._busy.is_asking = True  # what this thread logs itself asks nothing
            pool.statistics(), pool.leases(), repr(pool), pool.is_ready, pool.hung
            done.set()

        threading.Thread(target=ask, daemon=True).start()
        is_answered = done.wait(NEVER)
        self.answered[name] = self.answered.get(name, True) and is_answered


@pytest.fixture
def caller() -> Iterator[PoolCaller]:
    """Call the pool in each log handler and call hook, too."""
    caller = PoolCaller()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            caller.ask(f"log {record.levelname}")

    def hook(_: object, __: object) -> Callable[[Callable[[], Any]], Any]:
        caller.ask("call hook")

        def wrap(call: Callable[[], Any]) -> Any:
            caller.ask("call wrapper")
            return call()

        return wrap

    logger, handler = logging.getLogger("greensched"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    greensched.register_call_hook(hook)
    yield caller
    hooks.remove(hook)
    logger.setLevel(level)
    logger.removeHandler(handler)


class Own:
    """A policy and a duration curve whose every method calls the pool."""

    def __init__(self, caller: PoolCaller) -> None:
        self.ask = caller.ask

    def rank(self, request: RequestView) -> tuple[float, ...]:
        self.ask("rank")
        return (-request.priority,)

    def may_overtake(self, first: RequestView, now: float) -> bool:
        self.ask("may_overtake")
        return True

    def class_rank(self, service: ClassView) -> tuple[float, ...]:
        self.ask("class_rank")
        return (-service.priority,)

    def size(self, request: RequestView, view: SizingView) -> tuple[int, int]:
        self.ask("size")
        return view.sizes[0], view.sizes[-1]

    def at(self, sms: int) -> float:
        self.ask("at")
        return 0.01

    def observe(self, sms: int, seconds: float) -> None:
        self.ask("observe")


class Value:
    """An object that is kept with an executor and closed with it."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        ask("local")
        self._ask = ask

    def close(self) -> None:
        self._ask("local close")


def kernel(ask: Callable[[str], None]) -> greensched.Kernel:
    """A kernel whose reference and cost call the pool."""
    kernel = greensched.Program('extern "C" __global__ void asks() {}').kernel("asks")

    @kernel.reference
    def reference(_: object) -> None:
        ask("reference")

    @kernel.cost
    def cost(_: object) -> greensched.typing.Cost:
        ask("cost")
        return greensched.typing.Cost(fixed_ns=1000)

    return kernel


@pytest.mark.fault("I9", "D12")
def test_each_callback_may_wait_for_a_thread_that_asks_the_pool(caller: PoolCaller) -> None:
    """The pool answers another thread during each kind of callback."""
    own, asks = Own(caller), kernel(caller.ask)
    driver = simulated.open("h20", faults=[simulated.Hang("spin", 3)])

    async def use(pool: Pool, service: str) -> None:
        async with pool.partition((48, ALL), service=service, duration=own) as p:
            await p.launch(ONE, spin, 1000)
            await p.checkpoint(own)

    async def main() -> None:
        services = [ServiceClass("a"), ServiceClass("b")]
        async with Pool(driver=driver, policy=own, services=services, hang_after=0.2) as pool:
            caller.pool = pool
            pool.watch(lambda record: caller.ask(type(record).__name__))
            async with pool.partition(EVERY_SM, service="a", duration=own) as p:
                tasks = [asyncio.create_task(use(pool, name)) for name in "ab"]
                await until(lambda: pool.statistics().waiting == 2)
                job = p.launch(ONE, asks)
                job.add_done_callback(lambda _: caller.ask("done callback"))
                await job
                big = np.ones(2**20)
                x = await p.upload(big, progress=lambda *_: caller.ask("progress"))
                await p.run(caller.ask, "call")
                await p.local(lambda: Value(caller.ask))
                x.close()
            await asyncio.gather(*tasks)
            with pytest.raises(greensched.TooManySMs):
                async with pool.partition(1000):
                    pass
            with pytest.raises(greensched.DeviceHung):
                async with pool.partition(8) as p:
                    await p.launch(ONE, spin, 1000)
            await pool.aclose(grace=0.0)

    asyncio.run(main())
    driver.close()
    expected = {"rank", "may_overtake", "class_rank", "size", "at", "observe", "call hook"}
    expected |= {"call", "call wrapper", "done callback", "progress", "local", "reference", "cost"}
    expected |= {"Requested", "Queued", "Granted", "Submitted", "Done", "Released", "Drained"}
    expected |= {"log DEBUG", "log ERROR", "log WARNING"}
    assert expected <= set(caller.answered), expected - set(caller.answered)
    assert [name for name, is_answered in caller.answered.items() if not is_answered] == []


@pytest.mark.fault("I9")
def test_a_value_is_closed_beside_a_pool_that_answers(caller: PoolCaller) -> None:
    """The pool answers another thread while it closes an executor's values."""

    async def main() -> None:
        async with Pool(driver="simulated:h20") as pool:
            caller.pool = pool
            async with pool.partition(8) as p:
                await p.local(lambda: Value(caller.ask))

    asyncio.run(main())
    assert caller.answered["local close"]
    assert all(caller.answered.values())
