"""The class of each driver status decides what happens: one table, for every status there is."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import anyio
import numpy as np
import pytest
from cuda.bindings import driver as cuda

import greensched
from greensched import Pool, PoolState
from greensched.driver import simulated
from greensched.driver.simulated import Fail
from greensched.driver.status import CLASSES, ErrorClass, error_class, from_status

STATUSES = {int(s): s.name.removeprefix("CUDA_ERROR_") for s in cuda.CUresult if int(s)}
#: The statuses after which no call succeeds: those of a lost device, and of a driver that ended.
LOSING = {*CLASSES[ErrorClass.LOST], 4}


def test_each_status_has_one_class() -> None:
    """Every status that cuda.bindings knows is in the table once, under its name."""
    listed = [row for names in CLASSES.values() for row in names.items()]
    assert len(listed) == len(dict(listed))
    assert dict(listed).items() >= STATUSES.items()
    assert error_class(12345) is ErrorClass.REQUEST


@pytest.mark.parametrize("status", STATUSES, ids=STATUSES.values())
def test_a_status_makes_the_error_of_its_class(status: int) -> None:
    """Only the loss of a device is a DeviceFault, and only lack of memory is OutOfMemory."""
    error = from_status(status, "launch")
    assert (error.status, error.name) == (status, STATUSES[status])
    assert isinstance(error, greensched.DeviceFault) == (status in LOSING)
    assert isinstance(error, greensched.OutOfMemory) == (status == 2)


@pytest.mark.parametrize("kind", ErrorClass)
def test_a_call_of_a_job_fails_as_its_class_says(
    kind: ErrorClass, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused allocation fails its job alone, unless its status is that of a lost device."""
    caplog.set_level(logging.CRITICAL, "greensched")

    async def refused(status: int) -> None:
        driver = simulated.open("h20")
        pool = Pool(driver=driver)
        await pool.open()
        with ExitStack() as stack:
            if status in LOSING:
                stack.enter_context(pytest.raises(greensched.DeviceLost, match=STATUSES[status]))
            async with pool.partition(8) as p:
                nth = driver.script.calls["allocate"] + 1
                driver.script.add(Fail("allocate", nth, status))
                with pytest.raises(greensched.GreenschedError, match=STATUSES[status]):
                    await p.upload(np.ones(4))
                assert (pool.state is PoolState.POISONED) == (status in LOSING)
                if status not in LOSING:
                    with await p.upload(np.ones(4)) as b:
                        assert (await p.download(b)).tolist() == [1.0] * 4
        await pool.aclose()

    for status in (min(CLASSES[kind]), max(CLASSES[kind])):
        anyio.run(refused, status)


@pytest.mark.fault("C13")
@pytest.mark.parametrize("call", ["initialise", "retain_primary", "create_green"])
@pytest.mark.parametrize("status", CLASSES[ErrorClass.ENVIRONMENT].values())
def test_a_machine_that_is_not_set_up_is_one_sentence_at_open(status: str, call: str) -> None:
    """If any call of `open` reports it, the error is DriverUnavailable and says what to do."""
    driver = simulated.open("h20", faults=[Fail(call, status=status)])

    async def main() -> None:
        pool = Pool(driver=driver)
        with pytest.raises(greensched.DriverUnavailable, match=status) as refused:
            await pool.open()
        assert len(str(refused.value).splitlines()) == 1
        assert pool.state is PoolState.NEW

    anyio.run(main)
    assert not driver.live()
