"""The real clock: modelled time is the host's monotonic time, which one thread follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from greensched.driver.host import HostServices
from greensched.driver.simulated.timeline import Timeline
from greensched.driver.status import from_status

#: Seconds between two checks of the conditions that hold a kernel or stream.
HELD_POLL_S = 250e-6
#: Seconds without work after which the thread ends; the next work starts another.
IDLE_S = 2.0


class RealClock(HostServices):
    """Runs a timeline as time passes.

    The device's thread does all work of the timeline, including references, so that no caller waits
    for it. If the host cannot keep up, results are seen late, but the modelled times do not
    change.
    """

    virtual = False

    def __init__(self) -> None:
        self._origin = time.monotonic_ns()
        self._timeline = timeline = Timeline(self)
        self._work = threading.Condition(timeline.lock)
        self._changed = threading.Condition(timeline.lock)
        self._asleep_until: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def attach(self) -> Timeline:
        """Return the timeline of this clock; each driver has its own real clock."""
        return self._timeline

    def detach(self, timeline: Timeline) -> None:
        """End the thread after its present action."""
        with self._work:
            self._closed = True
            self._work.notify()
            self._changed.notify_all()

    def now(self) -> int:
        """Return nanoseconds since the clock was made."""
        return time.monotonic_ns() - self._origin

    def poke(self) -> None:
        """Wake the thread if something is due before its wake-up. The caller holds the lock."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._run, name="greensched-simulated-gpu", daemon=True
            )
            self._thread.start()
        due = self._timeline.next_time()
        if due is not None and (self._asleep_until is None or due < self._asleep_until):
            self._work.notify()

    def changed(self) -> None:
        """Have waiting threads check their conditions. The caller holds the lock."""
        self._changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block the calling thread until a condition holds; `changed` triggers its check."""
        with self._changed:
            if ready():
                return
            self.poke()
            self._changed.wait_for(lambda: ready() or self._closed)
            if not ready():
                raise from_status(4, "a wait for the device")

    def sleep(self, nanoseconds: int) -> None:
        """Block the calling thread for a time."""
        time.sleep(nanoseconds / 1e9)

    def _run(self) -> None:
        with self._work:
            idle = False
            while not self._closed and not idle:
                if self._timeline.run(self.now()):
                    self.changed()
                idle = self._sleep()
            self._thread = None

    def _sleep(self) -> bool:
        """Wait until something is due; return whether nothing was due for `IDLE_S`.

        Work may come after the end of the wait but before the lock is taken again. This notifies
        nothing, so what is due is read again.
        """
        due = self._timeline.next_time()
        delay = IDLE_S if due is None else (due - self.now()) / 1e9
        if self._timeline.held:
            delay = min(delay, HELD_POLL_S)
        if delay <= 0:
            return False
        self._asleep_until = due
        notified = self._work.wait(delay)
        self._asleep_until = 0
        is_idle = due is None and not notified and not self._timeline.held
        return is_idle and self._timeline.next_time() is None
