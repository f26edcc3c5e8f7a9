"""`open` while driver calls fail: it reports the first failure, or what the pool lacks."""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any

import anyio
import pytest

import greensched
from greensched import Pool, PoolState
from greensched.driver import simulated
from greensched.driver.simulated import Fail
from greensched.kernels import fill
from helpers.devices import SMALL_DEVICE

#: One of each class of errors: of a request, lack of capacity, a lost device, a driver's end.
STATUSES = ["INVALID_VALUE", "OUT_OF_MEMORY", "ILLEGAL_ADDRESS", "DEINITIALIZED"]


async def open_and_close(driver: simulated.SimulatedDriver) -> greensched.PoolStatistics:
    """Open a pool and return its statistics."""
    pool = Pool(driver=driver, prepare=[fill])
    await pool.open()
    try:
        return pool.statistics()
    finally:
        await pool.aclose()


@cache
def calls_of_open() -> list[tuple[str, int]]:
    """Return every driver call of an opening in order, with its number among equal names."""
    driver = simulated.open([SMALL_DEVICE])
    calls, call = list[tuple[str, int]](), driver.script.call

    def record(name: str) -> tuple[int | None, float]:
        answer = call(name)
        calls.append((name, driver.script.calls[name]))
        return answer

    driver.script.call = record  # type: ignore[method-assign]

    async def main() -> None:
        pool = Pool(driver=driver, prepare=[fill])
        await pool.open()
        del driver.script.call
        await pool.aclose()

    anyio.run(main)
    return calls


@pytest.mark.fault("I4")
@pytest.mark.parametrize("last", [None, 10**9], ids=["once", "from there on"])
@pytest.mark.parametrize("status", STATUSES)
def test_open_says_which_call_failed_first(
    status: str, last: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of `open` names the failed call, or statistics report what is missing."""
    caplog.set_level(logging.CRITICAL, "greensched")
    wrong, whole = [], anyio.run(open_and_close, simulated.open([SMALL_DEVICE]))
    calls = calls_of_open()
    for at, (name, nth) in enumerate(calls):
        if nth > 2 and (name, nth + 1) in calls:
            continue  # of each driver call the first, the second and the last one are tried
        driver = simulated.open([SMALL_DEVICE])
        failing = {(name, nth)} if last is None else set(calls[at:])
        for other, number in failing:
            driver.script.add(Fail(other, number, status, last=last))

        async def main(driver: simulated.SimulatedDriver = driver) -> greensched.PoolStatistics:
            with anyio.fail_after(20):
                return await open_and_close(driver)

        try:
            found = anyio.run(main)
        except greensched.GreenschedError as error:
            cause = error if isinstance(error, greensched.CUDAError) else error.__cause__
            if not (isinstance(cause, greensched.CUDAError) and _is(cause, name, status)):
                wrong.append((name, nth, repr(error)))
        else:
            is_told = any(f"{name}: {status}" in what for what in found.degraded)
            if not (is_told or found == whole):  # a second try did it
                wrong.append((name, nth, found))
        driver.close()
    assert not wrong


def _is(error: greensched.CUDAError, call: str, status: str) -> bool:
    return error.name == status and error.call.startswith(call)


@pytest.mark.fault("C5", "I4")
def test_a_single_lack_of_memory_costs_no_executor() -> None:
    """One refused green context is made again, so the pool lacks nothing."""
    whole = simulated.open("h200")
    driver = simulated.open("h200", faults=[Fail("create_green", 12, "OUT_OF_MEMORY")])

    async def executors(driver: simulated.SimulatedDriver) -> int:
        async with Pool(driver=driver) as pool:
            assert not pool.statistics().degraded
            return pool.statistics().executors

    assert anyio.run(executors, driver) == anyio.run(executors, whole)


@pytest.mark.fault("I4")
def test_a_single_lack_of_memory_costs_no_home_of_a_class() -> None:
    """A class with sizes gets its additional executors after one OUT_OF_MEMORY."""
    service = greensched.ServiceClass("decode", sizes=(24, 88), cap=88)

    async def made(driver: simulated.SimulatedDriver, **options: Any) -> int:
        async with Pool(driver=driver, **options):
            return driver.script.calls["create_green"]

    menu = anyio.run(made, simulated.open("h200"))
    driver = simulated.open("h200", faults=[Fail("create_green", menu + 1, "OUT_OF_MEMORY")])
    assert anyio.run(partial(made, driver, services=[service])) > menu + 1


@pytest.mark.fault("I4")
def test_executors_that_cannot_be_made_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A pool without some executors works, and reports it in statistics and a warning."""
    driver = simulated.open("h200", faults=[Fail("create_green", 12, "OUT_OF_MEMORY", last=13)])

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            assert p.sm_count == 8
            (what,) = pool.statistics().degraded
            assert "executors made at open: create_green: OUT_OF_MEMORY" in what
            assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [what]

    anyio.run(main)


@pytest.mark.fault("I4")
def test_a_failed_opening_is_tried_again() -> None:
    """A failed opening and cleanup leave nothing that a later opening meets."""
    driver = simulated.open([SMALL_DEVICE])
    calls = calls_of_open()
    for call, nth in calls[len(calls) // 2 :]:
        driver.script.add(Fail(call, nth, "INVALID_VALUE", last=nth))

    async def main() -> None:
        pool = Pool(driver=driver)
        with pytest.raises(greensched.CUDAError, match="INVALID_VALUE"):
            await pool.open()
        for fails in driver.script._fails.values():
            fails.clear()
        await pool.open()
        assert pool.state is PoolState.OPEN
        await pool.aclose()

    anyio.run(main)


@pytest.mark.fault("I4", "C1")
def test_a_trial_that_cannot_be_ended_is_no_answer() -> None:
    """If the trial of joining the remainder cannot be cleaned up, `open` says so."""
    driver = simulated.open("h20", faults=[Fail("synchronize_context", status="INVALID_VALUE")])
    with pytest.raises(greensched.CUDAError, match="synchronize_context: INVALID_VALUE"):
        anyio.run(open_and_close, driver)
