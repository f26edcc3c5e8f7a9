"""Tickets of a stream that another thread or the device changes."""

from __future__ import annotations

from contextlib import closing

import pytest

from greensched import Device
from greensched.device.tickets import TicketMemory
from greensched.driver import simulated
from greensched.errors import InvalidRequest
from greensched.typing import CaptureMode


@pytest.mark.fault("I15")
def test_a_ticket_is_not_reached_before_it_is_submitted() -> None:
    """A ticket that the device wrote early counts only once it is submitted."""
    with closing(Device(0, driver=simulated.open("h200"))) as device:
        words = TicketMemory(device.primary)
        stream = words.create_stream(device.primary)
        ticket = stream.issue()
        stream.word[0] = ticket
        assert not stream.reached(ticket)
        stream.submitted = ticket
        assert stream.reached(ticket)
        stream.close()
        words.close()


@pytest.mark.fault("I15")
def test_no_order_is_taken_from_a_stream_that_captures() -> None:
    """An event recorded there would draw the waiting stream into the capture."""
    with closing(Device(0, driver=simulated.open("h200"))) as device:
        words = TicketMemory(device.primary)
        stream, other = [words.create_stream(device.primary) for _ in range(2)]
        driver = device.driver
        driver.begin_capture(stream.stream.handle, CaptureMode.RELAXED)
        with pytest.raises(InvalidRequest, match="capturing"):
            stream.order_before(other.stream.address)
        driver.destroy_graph(driver.end_capture(stream.stream.handle))
        stream.order_before(other.stream.address)
        for one in (stream, other, words):
            one.close()
