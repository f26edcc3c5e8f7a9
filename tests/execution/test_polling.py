"""The polling policy without a loop: it never hangs or spins without end, and checks in time."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched import DeviceLost, LaunchConfig, Pool
from greensched.driver import simulated
from greensched.driver.status import from_status
from greensched.execution.completion_poller import (
    GIL_YIELD_EVERY_S,
    IDLE_TURN_S,
    MAX_SAFETY_S,
    SAFETY_S,
    Action,
    CompletionPoller,
    PollPolicy,
)
from greensched.kernels import spin

ONE = LaunchConfig(grid=1, block=1)
BUDGET = 50e-6
IDLE, BUSY = IDLE_TURN_S / 2, IDLE_TURN_S * 10

polls = st.lists(
    st.fixed_dictionaries(
        {
            "turn": st.sampled_from([0.0, IDLE, BUSY, SAFETY_S, MAX_SAFETY_S, 1.0]),
            "progressed": st.booleans(),
            "on_device": st.booleans(),
            "outstanding": st.booleans(),
            "threads_busy": st.booleans(),
        }
    ),
    max_size=200,
)


class Loop:
    """A loop with its own clock that does what the policy says."""

    def __init__(self, budget: float = BUDGET) -> None:
        self.now = 1.0
        self.policy = PollPolicy(budget)
        self.policy.work_began(self.now)
        self.policy.checked_failures(self.now)
        self.policy.turn_began(self.now)
        self.last = Action(0.0)

    def poll(self, turn: float = IDLE, **facts: Any) -> Action:
        """Poll after a turn of some length and after the last action's delay."""
        immediate = self.last.delay == 0.0
        self.now += turn + (self.last.delay or 0.0)
        known = dict.fromkeys(("progressed", "on_device", "outstanding", "threads_busy"), False)
        self.last = self.policy.next(self.now, immediate=immediate, **{**known, **facts})
        if self.last.check_failures:
            self.policy.checked_failures(self.now)
        self.policy.turn_began(self.now)
        return self.last


@given(polls)
def test_outstanding_work_is_always_polled_again(steps: list[dict[str, Any]]) -> None:
    """With outstanding work the next poll is at most 50 ms away; without, there is none."""
    loop = Loop()
    for step in steps:
        action = loop.poll(**step)
        if step["outstanding"] or step["threads_busy"] or step["on_device"]:
            assert action.delay is None or 0.0 <= action.delay <= MAX_SAFETY_S
            assert action.delay is not None or not (step["outstanding"] or step["threads_busy"])
        else:
            assert action == Action(None)


@given(polls)
def test_failures_are_checked_in_time(steps: list[dict[str, Any]]) -> None:
    """A poll 50 ms after the last check queries the driver, however busy the loop is."""
    loop = Loop()
    checked = loop.now
    for step in steps:
        action = loop.poll(**{**step, "outstanding": True})
        assert action.check_failures or loop.now - checked <= MAX_SAFETY_S
        if action.check_failures:
            assert loop.now - checked > SAFETY_S
            checked = loop.now


@given(polls)
def test_the_gil_is_yielded_once_in_a_millisecond(steps: list[dict[str, Any]]) -> None:
    """The GIL is yielded while a thread has work, once in each interval."""
    loop = Loop()
    yielded = 0.0
    for step in steps:
        action = loop.poll(**step)
        due = loop.now - yielded > GIL_YIELD_EVERY_S
        assert action.yield_gil == (step["threads_busy"] and due)
        if action.yield_gil:
            yielded = loop.now


@given(st.floats(0, 1e-3), st.integers(1, 20))
def test_an_idle_loop_spins_no_longer_than_its_budget(budget: float, restarts: int) -> None:
    """Without progress, an idle loop sleeps once its budget is spent."""
    loop = Loop(budget)
    for _ in range(restarts):
        loop.policy.wait_began()
        spun = 0
        while loop.poll(on_device=True, outstanding=True).delay == 0.0:
            spun += 1
        assert loop.last.sleep
        assert (spun - 1) * IDLE <= budget


def test_a_busy_loop_polls_in_each_turn() -> None:
    """A busy loop's turns do not count against the budget."""
    loop = Loop()
    for _ in range(1000):
        action = loop.poll(BUSY, on_device=True, outstanding=True)
        assert action.delay == 0.0
        assert not action.sleep


def test_progress_renews_the_budget() -> None:
    """A loop that sees progress in time never sleeps."""
    loop = Loop()
    for turn in range(1000):
        action = loop.poll(progressed=turn % 5 == 0, on_device=True, outstanding=True)
        assert action.delay == 0.0


def test_the_safety_poll_backs_off() -> None:
    """It comes after 1 ms, later without progress, and at once after progress."""
    loop = Loop()
    delays = [loop.poll(outstanding=True).delay or 0.0 for _ in range(60)]
    assert delays[0] == SAFETY_S
    assert delays == sorted(delays)
    assert delays[-1] == MAX_SAFETY_S
    assert loop.poll(outstanding=True, progressed=True).delay == SAFETY_S


def test_a_loop_beside_a_thread_alternates() -> None:
    """An idle loop polls once after each pause and sleeps; a busy one pauses 1 ms."""
    idle = Loop()
    idle.poll(threads_busy=True)
    assert idle.last.sleep
    busy = Loop()
    assert busy.poll(BUSY, threads_busy=True).delay == GIL_YIELD_EVERY_S
    assert busy.poll(BUSY, threads_busy=True).delay == 0.0


@pytest.mark.fault("C1")
@pytest.mark.parametrize("is_kicked", [False, True], ids=["timer", "thread"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_poll_that_fails_is_tried_again(
    backend: str, is_kicked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiters wait a little longer, and the failure is logged."""
    poll, failures = CompletionPoller._poll, iter([ZeroDivisionError("of the test")])

    def failing(poller: CompletionPoller) -> bool:
        for failure in failures:
            raise failure
        return poll(poller)

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            monkeypatch.setattr(CompletionPoller, "_poll", failing)
            if is_kicked:  # as by a thread whose work is done
                p._open_lease().poller.kick_threadsafe()
                await anyio.sleep(0)
            await p.launch(ONE, spin, 1000)

    anyio.run(main, backend=backend)
    (record,) = caplog.records
    assert record.getMessage() == "a poll failed; it is tried again"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_callback_that_fails_stops_no_other(
    is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Later callbacks are called; the error is logged, or shows a lost device."""
    called = list[str]()

    def fail() -> None:
        called.append("first")
        if is_lost:
            raise from_status(700, "query_event")
        raise ZeroDivisionError

    async def main() -> None:
        pool = Pool(driver=driver)
        await pool.open()
        with pytest.raises(DeviceLost) if is_lost else nullcontext():
            async with pool.partition(8) as p:
                job = p.launch(ONE, spin, 1000)
                executor = p._open_lease().executor
                stream = executor.launch_stream
                executor.notify_when(stream, stream.issued, fail)
                executor.notify_when(stream, stream.issued, lambda: called.append("second"))
                await job
                await p.run(int)
        assert called == ["first", "second"]
        assert pool.is_ready is not is_lost
        await pool.aclose()

    driver = simulated.open("h200", clock=simulated.VirtualClock())
    driver.clock.run(main)
    said = [record.getMessage() for record in caplog.records]
    assert any("failed after the work of a stream" in text for text in said) is not is_lost
