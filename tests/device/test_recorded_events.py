"""Recording a new event on a stream when the driver refuses it."""

from __future__ import annotations

import pytest

from greensched import CUDAError, Device
from greensched.device.resources import ContextOptions
from greensched.driver import simulated
from greensched.driver.simulated import Fail


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("status", ["INVALID_HANDLE", "ILLEGAL_ADDRESS"])
def test_an_event_that_cannot_be_recorded_is_closed(status: str, times: int) -> None:
    """An event of the primary is replaced once by one of the stream's context."""
    driver = simulated.open("h20")
    device = Device(0, driver=driver)
    context = device.create_context(ContextOptions(resources=[device.resources.sm]))
    with context:
        stream = context.create_stream()
        first = driver.script.calls["record_event"] + 1
        driver.script.add(Fail("record_event", first, status, first + times - 1))
        if (status, times) == ("INVALID_HANDLE", 1):
            stream.record().close()
        else:
            with pytest.raises(CUDAError):
                stream.record()
        assert not driver.live()["event"]
        stream.close()
    context.close()
    device.close()
    driver.close()
