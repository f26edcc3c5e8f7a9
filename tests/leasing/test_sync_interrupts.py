"""Ctrl-C while `pool.sync` starts or ends: it is a cancellation that leaves nothing open."""

from __future__ import annotations

import signal
import threading
from typing import Any

import anyio
import pytest

from greensched import Pool, PoolState
from greensched.driver import simulated
from helpers.interrupts import interrupted_when


@pytest.mark.fault("D10", "I3")
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 1.0])
def test_an_interrupt_of_an_opening_leaves_a_closed_pool(share: float) -> None:
    """Ctrl-C during or just after the opening closes the pool."""
    driver = simulated.open("h20")
    with Pool(driver=driver).sync:
        calls = sum(driver.script.calls.values())
    for _ in range(3):
        driver = simulated.open("h20")
        pool = Pool(driver=driver)
        script, begun = driver.script, threading.Event()

        def comes(script: Any = script, begun: threading.Event = begun) -> bool:
            return begun.is_set() and sum(script.calls.values()) >= share * calls

        with interrupted_when(comes):
            begun.set()
            with pool.sync:
                threading.Event().wait(20)
        assert pool.state is PoolState.CLOSED
        assert pool.sync._loop._thread is None
        assert not driver.live()


@pytest.mark.fault("I3")
def test_an_interrupt_of_the_end_of_a_loop_is_raised_behind_it(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C while the loop's thread starts or is joined is raised afterwards."""
    pool = Pool(driver="simulated:h20")
    # A shell's background jobs, whose children may run the tests, ignore SIGINT.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, former))
    for step in ("enter", "leave"):
        loop = pool.sync._loop
        real = getattr(type(loop), step)

        def interrupted(*args: Any, real: Any = real) -> Any:
            signal.raise_signal(signal.SIGINT)
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(type(loop), step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.sync.call(anyio.sleep, 0)
        assert loop._thread is None
