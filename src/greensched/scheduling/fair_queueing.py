"""Share SM-time between classes: start-time fair queueing.

Each grant has a start tag: virtual time, or the finish tag of its class's previous grant if that is
later. Its finish tag is the start tag plus its SM-seconds divided by the weight of the class. The
class with the smallest start tag is next. Virtual time is the start tag of the last grant. A class
that begins to wait starts at the virtual time, so an idle class saves nothing up. (Goyal, Vin and
Cheng, SIGCOMM 1996.)

The duration of a lease is unknown when it is granted. So its class is first charged the expected
SM-seconds, and at the end of the lease the charge is corrected to the used SM-seconds.
"""

from __future__ import annotations

from greensched.scheduling.class_state import ClassState
from greensched.scheduling.requests import Grant


class VirtualTime:
    """Virtual time, and the charges of each class."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        #: The start tag of the last grant.
        self.now = 0.0

    def start_of(self, state: ClassState) -> float:
        """Return the start tag of the next grant of a class.

        While the class waits, the tag may be before virtual time, because its leases took less than
        it was charged.
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
        """Replace the charge for an ended grant by its actual SM-seconds."""
        state = grant.class_state
        used = grant.used + grant.sms * (now - grant.since)
        state.finish += (used - grant.charged) / state.weight
        state.sm_time += used
        state.tokens -= used

    @staticmethod
    def charge_elapsed(grant: Grant, now: float) -> None:
        """At a checkpoint, charge a grant's class for SM-seconds beyond the charge so far."""
        grant.used += grant.sms * (now - grant.since)
        grant.since = now
        if grant.used > grant.charged:
            state = grant.class_state
            state.finish += (grant.used - grant.charged) / state.weight
            grant.charged = grant.used
