"""Tickets of a stream, as another thread or the device changes them."""

from __future__ import annotations

from contextlib import closing

from greensched import Device
from greensched.device.tickets import TicketMemory
from greensched.driver import simulated


def test_f30_15_a_ticket_is_not_reached_before_it_is_submitted() -> None:
    """The device may write a ticket before the submitting thread has said that it is submitted."""
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
