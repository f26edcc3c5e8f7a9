"""No call that can block runs on an event loop's thread (promise 5 of the design)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import trio

from greensched.driver.blocking import DRIVER_CALLS, Blocking
from greensched.driver.simulated import SimulatedDriver
from greensched.driver.simulated.address_space import POOL_STEP
from greensched.driver.simulated.machine import QUEUE_DEPTH
from greensched.errors import GreenschedError, LoopWouldBlock

from .machine import Machine

MAY = [name for name, mark in DRIVER_CALLS.items() if mark.blocking is Blocking.MAY]
#: Those of them that take no arguments.
ALONE = {
    *("device_count", "current", "pop_current", "priority_range", "memory_info", "create_event"),
    *("context_flags", "cache_config"),
}
OTHERS = [name for name, mark in DRIVER_CALLS.items() if mark.blocking is not Blocking.MAY]


def on_asyncio(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return function()

    return asyncio.run(main())


def on_trio(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return function()

    return trio.run(main)


LOOPS = pytest.mark.parametrize("on_loop", [on_asyncio, on_trio])


@LOOPS
@pytest.mark.parametrize("name", MAY)
def test_a_driver_call_that_may_block_is_refused(
    machine: Machine, name: str, on_loop: Callable[..., Any]
) -> None:
    """On a loop's thread it raises before any effect, with an alternative."""
    with pytest.raises(LoopWouldBlock, match=f"{name} can block.*worker thread"):
        on_loop(getattr(machine.driver, name))


@LOOPS
@pytest.mark.parametrize("name", OTHERS)
def test_a_driver_call_that_never_blocks_is_not(
    machine: Machine, name: str, on_loop: Callable[..., Any]
) -> None:
    """On a loop's thread it runs up to its arguments' check."""
    if name in ALONE:
        on_loop(getattr(machine.driver, name))
        return
    with pytest.raises((TypeError, GreenschedError)) as caught:
        on_loop(getattr(machine.driver, name))
    assert not isinstance(caught.value, LoopWouldBlock)


def test_a_worker_beside_a_loop_may_block(machine: Machine) -> None:
    """Other threads may block while a loop runs."""
    driver = machine.driver

    async def main() -> None:
        await asyncio.to_thread(driver.retain_primary, 0)

    asyncio.run(main())
    driver.release_primary(0)


@LOOPS
def test_a_first_launch_is_refused(machine: Machine, on_loop: Callable[..., Any]) -> None:
    """A first launch on a context may load code, so it is refused; later ones are not."""
    one, two = (machine.stream(green) for green in machine.greens(2))
    kernel = machine.kernel("first")
    bound = [
        machine.driver.bind_launch(stream, kernel, (1, 1, 1), (1, 1, 1), 0, 0)
        for stream in (one, two)
    ]
    with pytest.raises(LoopWouldBlock, match="the first launch of 'first'"):
        on_loop(bound[0])
    bound[0]()
    on_loop(bound[0])
    with pytest.raises(LoopWouldBlock):
        on_loop(bound[1])


@LOOPS
def test_a_loaded_kernel_launches_anywhere(machine: Machine, on_loop: Callable[..., Any]) -> None:
    """After `load_kernel` a first launch is like any other."""
    driver = machine.driver
    green = machine.green()
    stream, kernel = machine.stream(green), machine.kernel("loaded")
    driver.set_current(driver.green_context(green))
    driver.load_kernel(kernel)
    driver.set_current(machine.primary)
    on_loop(lambda: machine.launch(stream, kernel))
    machine.finish()
    assert list(machine.times()) == ["loaded"]


@LOOPS
def test_growing_a_pool_is_refused(machine: Machine, on_loop: Callable[..., Any]) -> None:
    """An allocation that makes the pool grow is refused, others are not."""
    driver, stream = machine.driver, machine.stream()
    assert driver.reserved_bytes(machine.pool) == 0
    with pytest.raises(LoopWouldBlock, match="the pool grows"):
        on_loop(lambda: machine.device_memory(64, stream))
    assert driver.reserved_bytes(machine.pool) == 0
    assert driver.live()["allocation"] == 0
    machine.device_memory(64, stream)
    assert driver.reserved_bytes(machine.pool) == POOL_STEP
    on_loop(lambda: machine.device_memory(POOL_STEP - 512, stream))
    with pytest.raises(LoopWouldBlock):
        on_loop(lambda: machine.device_memory(1, stream))


def test_a_full_stream_is_refused(machine: Machine) -> None:
    """With a full launch queue a submission is refused, and the stream stays usable."""
    driver = machine.driver
    word, stream, event = machine.word(), machine.stream(), machine.event()
    driver.record_event(event, stream)
    machine.finish()
    mark = driver.bind_mark(stream, word.address)
    gate = machine.hold(stream)

    def fill() -> None:
        for _ in range(QUEUE_DEPTH):
            mark(1)

    def submit_one_more() -> None:
        for submit in (lambda: mark(2), lambda: driver.record_event(event, stream)):
            with pytest.raises(LoopWouldBlock, match=f"behind {QUEUE_DEPTH} others"):
                submit()
        assert driver.query_event(event), "it still captures what it did"

    def body() -> None:
        with pytest.raises(LoopWouldBlock):
            on_asyncio(fill)
        on_asyncio(submit_one_more)
        gate.value = 1
        driver.synchronize_stream(stream)
        assert word.value == 1

    machine.inside(body)


def test_the_simulated_driver_has_every_driver_call() -> None:
    """Each is a method of a component, with the machine's checks."""
    assert not SimulatedDriver.__abstractmethods__
    for name in DRIVER_CALLS:
        assert hasattr(getattr(SimulatedDriver, name), "__wrapped__"), name
