"""The policy of polling: when a loop looks at its tickets, and when it sleeps. Pure.

Figures and reasons are in docs/internals/completion.md.

1. *Poll once a turn.* While a task waits for the device, the loop polls in each of its turns, until
   `spin_budget` seconds of *idle* time have passed: a busy loop polls for ever at no cost, an idle
   one does not burn a core.
2. *Sleep.* Then a thread blocks in the driver, and the loop sleeps. A safety poll comes after 1 ms,
   and later the longer nothing has happened: a wake-up that is late or lost costs little, and never
   hangs. While any ticket is outstanding, awaited or not, there is a next poll.
3. *Check for failures.* After a device fault no ticket is written, and only asking the driver
   tells. A sleeping loop asks at each safety poll, once in 1 ms at most; a busy one every 50 ms.
4. *Yield the GIL.* Beside a busy loop a thread that needs the GIL can starve for seconds. While one
   has work to do, the loop lets go of the GIL for 50 us each millisecond.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: A turn of the loop shorter than this had nothing else to do, and counts against the budget.
#: 10 us: an empty turn takes 2-4 us, a turn with work tens.
IDLE_TURN_S: Final = 10e-6
#: The first safety poll: asyncio cannot sleep for less than 1 ms, and uvloop spins if asked to.
SAFETY_S: Final = 1e-3
#: Later ones come after this fraction of the time since the last progress, up to the most.
SAFETY_FRACTION: Final = 0.125
MAX_SAFETY_S: Final = 0.050
#: How often the GIL is yielded to a thread with work to do, and for how long.
GIL_YIELD_EVERY_S: Final = 1e-3
GIL_YIELD_S: Final = 50e-6


class Action(NamedTuple):
    """What the poller is to do after a poll.

    Attributes:
        delay: seconds until the next poll; None: none is needed.
        sleep: have threads wait in the driver meanwhile.
        check_failures: ask the driver whether a device has failed.
        yield_gil: let go of the GIL for `GIL_YIELD_S` first.
    """

    delay: float | None
    sleep: bool = False
    check_failures: bool = False
    yield_gil: bool = False


class PollPolicy:
    """Decides, after each poll of one loop, what comes next. All times are of one clock.

    Args:
        spin_budget: seconds of idle time in which the loop polls in each turn.
    """

    def __init__(self, spin_budget: float) -> None:
        self._spin_budget = spin_budget
        self._idle_spent = 0.0
        self._turn_began = 0.0
        self._last_progress = 0.0
        self._last_yield = 0.0
        self._last_check = 0.0

    def work_began(self, now: float) -> None:
        """Note that a stream has outstanding work, of which it had none."""
        self._last_progress = now

    def progressed(self, now: float) -> None:
        """Note that a ticket was found reached."""
        self._last_progress, self._idle_spent = now, 0.0

    def wait_began(self) -> None:
        """Note that a task waits, or a thread has work to do: the budget begins anew."""
        self._idle_spent = 0.0

    def thread_ran(self, now: float) -> None:
        """Note that a thread has done its work, so that it had the GIL just now."""
        self._last_yield = now

    def checked_failures(self, now: float) -> None:
        """Note that the driver was asked for failures."""
        self._last_check = now

    def turn_began(self, now: float) -> None:
        """Note the end of a poll: from here on the loop does other things."""
        self._turn_began = now

    def next(
        self,
        now: float,
        *,
        progressed: bool,
        on_device: bool,
        outstanding: bool,
        threads_busy: bool,
        immediate: bool,
    ) -> Action:
        """Decide what comes after a poll.

        Args:
            now: the time of the poll.
            progressed: the poll found a ticket reached.
            on_device: a task waits for work that is on its stream.
            outstanding: some stream has work.
            threads_busy: a thread has work to do for this loop.
            immediate: this poll was scheduled for the turn behind the last one.
        """
        turn = now - self._turn_began
        idle = turn < IDLE_TURN_S
        if progressed:
            self.progressed(now)
        elif idle:
            self._idle_spent += turn
        yield_gil = threads_busy and now - self._last_yield > GIL_YIELD_EVERY_S
        if yield_gil:
            self._last_yield = now
        unchecked = now - self._last_check
        if on_device and self._idle_spent < self._spin_budget:
            return Action(0.0, False, unchecked > MAX_SAFETY_S, yield_gil)
        if threads_busy and not (idle and immediate):
            # A busy loop, which only has to yield the GIL, need not poll in each turn. Whether it
            # is busy, the turn behind a pause does not show.
            delay = GIL_YIELD_EVERY_S if immediate else 0.0
            return Action(delay, False, unchecked > MAX_SAFETY_S, yield_gil)
        if outstanding or threads_busy:
            backed_off = (now - self._last_progress) * SAFETY_FRACTION
            delay = min(MAX_SAFETY_S, max(SAFETY_S, backed_off))
            # With many executors the loop sleeps often: not each time is the driver asked.
            return Action(delay, True, unchecked > SAFETY_S, yield_gil)
        return Action(None, yield_gil=yield_gil)
