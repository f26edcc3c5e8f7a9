"""Share SM-time between classes: start-time fair queueing.

Each grant has a start tag: virtual time, or the finish tag of the previous grant of its class if
that is later. Its finish tag is the start tag plus its SM-seconds divided by the weight of the
class. The class with the smallest start tag is next. Virtual time is the start tag of the last
grant, and a class that begins to wait starts there, so an idle class saves nothing up. (Goyal, Vin
and Cheng, SIGCOMM 1996.)

How long a lease will take is not known when it is granted: its class is charged the expected
SM-seconds, and at the end of the lease the difference to those it took.
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

    def start_of(self, state: ClassState) -> float:
        """Return the start tag of the next grant of a class.

        While the class waits, the tag may lie before virtual time: its leases took less than it
        was charged.
        """
        return state.finish if state.waiting else max(self.now, state.finish)

    def charge(self, grant: Grant, seconds: float) -> None:
        """Charge the class of a new grant for the expected duration."""
        state = grant.class_state
        state.start = start = self.start_of(state)
        self.now = max(self.now, start)
        grant.charged = grant.sms * seconds
        state.finish = start + grant.charged / state.weight

    @staticmethod
    def settle(grant: Grant, now: float) -> None:
        """Charge the class of a grant that is over for what it took instead."""
        state = grant.class_state
        used = grant.used + grant.sms * (now - grant.since)
        state.finish += (used - grant.charged) / state.weight
        state.sm_time += used
        state.tokens -= used

    @staticmethod
    def charge_elapsed(grant: Grant, now: float) -> None:
        """Charge the class of a grant at a checkpoint for what exceeds the charge so far."""
        grant.used += grant.sms * (now - grant.since)
        grant.since = now
        if grant.used > grant.charged:
            state = grant.class_state
            state.finish += (grant.used - grant.charged) / state.weight
            grant.charged = grant.used
