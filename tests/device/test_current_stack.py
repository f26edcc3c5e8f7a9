"""A thread's stack of contexts under random programs of blocks, pushes, pops and sets."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from greensched import (
    Context,
    ContextOptions,
    CUDAError,
    CurrentElsewhere,
    Device,
    DeviceFault,
    InvalidRequest,
    SMResourceOptions,
)
from greensched.device.current_context import here
from greensched.driver import simulated
from greensched.driver.interface import Driver
from greensched.driver.simulated import Fail

PROGRAMS, DEEP = 300, 5


class Planned(Exception):
    pass


@pytest.fixture
def contexts() -> Iterator[list[Context]]:
    """Return, of each of two devices, the primary, a new and a green context."""
    driver = simulated.open("h200x2")
    devices = [Device(number, driver=driver) for number in range(2)]
    groups = [device.resources.sm.split(SMResourceOptions(count=8))[0] for device in devices]
    made = [Context.create(device) for device in devices]
    made += [
        device.create_context(ContextOptions(resources=group))
        for device, group in zip(devices, groups, strict=True)
    ]
    yield [device.primary for device in devices] + made
    for child in (*made, *devices, driver):
        child.close()


class Program:
    """Random calls, and the stack that they should give, its top last."""

    def __init__(self, seed: int, contexts: list[Context]) -> None:
        self.rng = random.Random(seed)
        self.contexts = contexts
        self.driver: Driver = contexts[0].driver
        self.stack: list[Context] = []

    def run(self) -> None:
        self.body(0, 0)
        while self.stack:
            self.stack.pop().pop()
        assert self.driver.current() is None

    def body(self, depth: int, bottom: int) -> None:
        for _ in range(self.rng.randrange(1, 8)):
            context, what = self.rng.choice(self.contexts), self.rng.random()
            if what < 0.35 and depth < DEEP:
                with suppress(Planned):
                    self.block(context, depth)
            elif what < 0.5:
                context.set_current()
                self.stack[-1:] = [context]
            elif what < 0.65:
                context.push()
                self.stack.append(context)
            elif what < 0.85:
                self.pop(context, bottom)
            elif context in self.stack:
                with pytest.raises(InvalidRequest):
                    context.close()
            top = self.stack[-1] if self.stack else None
            assert Context.current(self.driver) is top

    def block(self, context: Context, depth: int) -> None:
        before = list(self.stack)
        try:
            with context:
                self.stack[-1:] = [context]
                self.body(depth + 1, len(self.stack))
                if self.rng.random() < 0.1:
                    raise Planned
        finally:
            self.stack = before

    def pop(self, context: Context, bottom: int) -> None:
        """Pop only the context on top, and never that of the block around it."""
        if len(self.stack) > bottom and context is self.stack[-1]:
            context.pop()
            self.stack.pop()
        else:
            with pytest.raises(InvalidRequest):
                context.pop()


@pytest.mark.parametrize("seed", range(3))
def test_the_stack_is_what_its_calls_say(contexts: list[Context], seed: int) -> None:
    """A block restores the stack, and a context on it cannot be closed."""
    for number in range(PROGRAMS):
        Program(seed * PROGRAMS + number, contexts).run()
        assert not here.unscoped
        assert not here.blocks
        assert not any(context.inside for context in contexts)
        assert all(
            context.ownership is None or context.ownership.owner is None for context in contexts
        )


@pytest.mark.parametrize("nth", [1, 2])
def test_a_lost_device_is_told_at_once(contexts: list[Context], nth: int) -> None:
    """A fault on entry or exit of a block is raised, and the call is not repeated."""
    driver = contexts[0].driver
    assert isinstance(driver, simulated.SimulatedDriver)
    with contexts[1]:
        failing = driver.script.calls["set_current"] + nth
        driver.script.add(Fail("set_current", failing, "ILLEGAL_ADDRESS"))
        with pytest.raises(DeviceFault), contexts[0]:
            pass
        assert driver.script.calls["set_current"] == failing


@pytest.mark.fault("C1")
@pytest.mark.parametrize("outer", [False, True], ids=["none before", "one before"])
def test_what_is_made_inside_is_not_lost_where_the_driver_does_not_say(
    contexts: list[Context], outer: bool
) -> None:
    """If the driver does not say what is current at a block's end, no object is lost."""
    driver = contexts[0].driver
    assert isinstance(driver, simulated.SimulatedDriver)
    with contexts[1] if outer else nullcontext():
        before = driver.current()
        with contexts[0].entered():
            driver.script.add(Fail("current", driver.script.calls["current"] + 1, "INVALID_VALUE"))
        assert driver.current() == before


@pytest.mark.fault("C1")
def test_a_context_that_cannot_be_made_current_is_free_for_other_threads(
    contexts: list[Context],
) -> None:
    """A failed `set_current` leaves no owner."""
    driver = contexts[0].driver
    assert isinstance(driver, simulated.SimulatedDriver)
    (green, *_) = [context for context in contexts if context.ownership is not None]
    assert green.ownership is not None
    driver.script.add(Fail("set_current", driver.script.calls["set_current"] + 1, "INVALID_VALUE"))
    with pytest.raises(CUDAError):
        green.set_current()
    assert green.ownership.owner is None
    assert not here.unscoped


@pytest.mark.parametrize("ends", [False, True], ids=["leaves", "thread ends"])
def test_a_thread_waits_for_the_owner_of_a_context(contexts: list[Context], ends: bool) -> None:
    """It enters once the owner has left the context, or the owner's thread has ended."""
    (green, *_) = [context for context in contexts if context.ownership is not None]
    ownership = green.ownership
    assert ownership is not None
    entered, leave, waits = threading.Event(), threading.Event(), threading.Event()

    def own() -> None:
        ownership.acquire(green)
        entered.set()
        leave.wait()
        if not ends:
            ownership.release()

    class Waiting(deque[Any]):
        def append(self, mailbox: object) -> None:
            super().append(mailbox)
            waits.set()

    def wait() -> None:
        ownership.acquire(green, wait=True)
        ownership.release()

    ownership._waiting = Waiting()
    threads = [threading.Thread(target=own), threading.Thread(target=wait)]
    threads[0].start()
    entered.wait()
    with pytest.raises(CurrentElsewhere):
        ownership.acquire(green)
    threads[1].start()
    waits.wait()
    leave.set()
    for thread in threads:
        thread.join()
    assert ownership.owner is None
