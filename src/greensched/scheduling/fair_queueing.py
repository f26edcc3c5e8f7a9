"""Shares of SM-time: start-time fair queueing between classes.

Each grant has a start tag, the later of the virtual time and the finish tag of its class's grant
before; its finish tag is that plus its SM-seconds by the class's weight. Whoever has the least
start tag is next. Virtual time is the start tag of the last grant; a class that begins to wait
starts there, so who asked for nothing saved nothing up. (Goyal, Vin and Cheng, SIGCOMM 1996.)

How long a lease will take is not known when it is granted: its class is charged what is expected,
and at its end what it took instead.
"""

from __future__ import annotations

from greensched.scheduling.class_state import ClassState
from greensched.scheduling.requests import Grant


class VirtualTime:
    """Virtual time, and what each class is charged."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        #: The start tag of the last grant.
        self.now = 0.0

    def start_of(self, flow: ClassState) -> float:
        """The start tag of a class's next grant.

        While it waits that may lie before virtual time: its leases took less than it was charged.
        """
        return flow.finish if flow.waiting else max(self.now, flow.finish)

    def charge(self, flow: ClassState, lease: Grant, seconds: float) -> None:
        """A lease is granted, and expected to take so long."""
        flow.start = start = self.start_of(flow)
        self.now = max(self.now, start)
        lease.charged = lease.sms * seconds
        flow.finish = start + lease.charged / flow.weight

    @staticmethod
    def settle(flow: ClassState, lease: Grant, now: float) -> None:
        """A lease is over: its class is charged what it took."""
        took = lease.had + lease.sms * (now - lease.since)
        flow.finish += (took - lease.charged) / flow.weight
        flow.sm_time += took
        flow.tokens -= took

    @staticmethod
    def pay(flow: ClassState, lease: Grant, now: float) -> None:
        """A lease is at a checkpoint: its class is charged at once for what exceeds the charge."""
        lease.had += lease.sms * (now - lease.since)
        lease.since = now
        if lease.had > lease.charged:
            flow.finish += (lease.had - lease.charged) / flow.weight
            lease.charged = lease.had
