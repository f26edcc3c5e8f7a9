"""The virtual clock: time passes only when no thread has work to do.

Threads take turns. Each *participant* (a loop's thread, a library thread) runs only while it has
the turn, and gives the turn up where it would wait: in a loop with nothing ready, at a mailbox or
in a blocking driver call. A seeded generator chooses the next participant, so a program has the
same interleaving for the same seed. When every participant waits, time jumps to the next due device
event, timer or deadline. An hour costs no more than the work in it.

`clock.run(main)` runs a program under it, on asyncio or trio. Threads that the clock does not know
(`asyncio.to_thread`, a test's own) run outside it, and time does not wait for them; use
`partition.run` instead. Several asyncio loops may share a clock, but only one trio run.

Lock order: the clock's lock, then a timeline's.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import random
import selectors
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVarTuple, Unpack

from greensched.driver.simulated.timeline import Timeline
from greensched.driver.types import Mailbox
from greensched.errors import DriverMisuse
from greensched.typing import T

Ts = TypeVarTuple("Ts")

#: Seconds for which a loop polls files and sockets when nothing is due on the clock.
LISTEN_S = 0.02


def _always() -> bool:
    return True


def _never() -> bool:
    return False


class Participant:
    """A thread that takes turns, with its condition, its deadline, and the gate where it waits."""

    def __init__(self, name: str, *, loop: bool = False) -> None:
        self.name = name
        self.loop = loop
        self.ready: Callable[[], bool] = _always
        self.deadline: int | None = None
        #: Whether this loop must look for new work, which another thread may have left.
        self.woken = False
        #: Whether nothing is due on the clock, so that only files and sockets can make it ready.
        self.listen = False
        self.looks: list[Callable[[], None]] = []
        self._gate = threading.Lock()
        self._gate.acquire()

    def can_run(self, now: int) -> bool:
        """Return whether its condition holds or its deadline has passed."""
        return self.woken or self.ready() or (self.deadline is not None and self.deadline <= now)

    def open(self) -> None:
        """Give it the turn."""
        self.woken = False
        self._gate.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait for the turn, for at most this many real seconds; negative means no limit."""
        return self._gate.acquire(timeout=seconds)


class VirtualClock:
    """Deterministic time for any number of simulated drivers.

    Args:
        seed: Determines the order in which runnable threads run.
    """

    virtual = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        #: Re-entrant, because a finaliser may wake a loop on a thread that holds it.
        self._lock = threading.RLock()
        self._now = 0
        self._timelines: list[Timeline] = []
        self._participants: list[Participant] = []
        self._running: Participant | None = None
        #: Whether a thread is choosing the next participant.
        self._deciding = False
        #: How many times a loop polled files and sockets.
        self._listened = 0
        self._mine = threading.local()

    # -- for the driver ------------------------------------------------------------------------

    def attach(self) -> Timeline:
        """Make a timeline of this clock."""
        timeline = Timeline(self)
        with self._lock:
            self._timelines.append(timeline)
        return timeline

    def detach(self, timeline: Timeline) -> None:
        """Forget a timeline. Nothing happens on it any more, and its waiters are woken."""
        with self._lock:
            if timeline in self._timelines:
                self._timelines.remove(timeline)
        self.wake(None)

    def now(self) -> int:
        """Return nanoseconds since the clock was made."""
        return self._now

    def poke(self) -> None:
        """Do nothing, because new work is found when every participant waits."""

    changed = poke

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block the calling thread until a condition holds. It counts as idle meanwhile."""
        self._pause(ready, None)

    def sleep(self, nanoseconds: int) -> None:
        """Block the calling thread for a time."""
        self._pause(_never, self._now + nanoseconds)

    def create_mailbox(self) -> Mailbox[Any]:
        """Make a queue to a library thread."""
        return _Mailbox(self)

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Start a daemon thread that takes turns, and waits for its first turn."""
        participant = Participant(name)
        with self._lock:
            self._participants.append(participant)

        def body() -> None:
            self._mine.participant = participant
            participant.wait()
            try:
                target()
            finally:
                self._leave(participant)

        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        self.wake(None)
        return thread

    def subscribe(self, look: Callable[[], None]) -> Callable[[], None]:
        """Call `look` on this loop's thread after a device progressed while the loop was idle."""
        participant = self._participant()
        if participant is None or not participant.loop:
            raise DriverMisuse(
                "this simulated driver runs on virtual time: run the program with clock.run(main)"
            )
        participant.looks.append(look)
        return functools.partial(participant.looks.remove, look)

    def wake(self, participant: Participant | None) -> None:
        """Make a loop look for work; restart the clock if every participant was waiting."""
        with self._lock:
            if participant is not None:
                participant.woken = True
            if self._running is None and not self._deciding:
                self._hand_over()

    # -- running a program ---------------------------------------------------------------------

    def run(
        self,
        main: Callable[..., Awaitable[T]],
        *args: object,
        backend: Literal["asyncio", "trio"] = "asyncio",
    ) -> T:
        """Run an async function to its end under this clock, as `asyncio.run` would."""
        self._refuse_participants()
        if backend == "asyncio":
            with asyncio.Runner(loop_factory=self.new_event_loop) as runner:
                return runner.run(_call(main, args))
        import trio

        participant = Participant("trio", loop=True)
        with self.taking_turns(participant):
            clock = _trio_clock(self, participant)
            return trio.run(main, *args, clock=clock, instruments=[clock])

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Make an asyncio loop on this clock, for `loop_factory` arguments."""
        return _VirtualLoop(self)

    @contextmanager
    def taking_turns(self, participant: Participant) -> Iterator[None]:
        """Make the calling thread a participant that has the turn when the block begins."""
        self._refuse_participants()
        self._enter(participant)
        self._mine.participant = participant
        try:
            yield
        finally:
            self._mine.participant = None
            self._leave(participant)

    def seconds(self) -> float:
        """Return the time, in seconds."""
        return self._now / 1e9

    def yield_turn(self, participant: Participant) -> None:
        """Let other participants run before a loop that has work, if they are chosen."""
        with self._lock:
            if not any(a is not participant and a.can_run(self._now) for a in self._participants):
                return
            participant.ready, participant.deadline = _always, None
            self._hand_over()
        participant.wait()

    def wait_idle(self, participant: Participant, timeout: float | None) -> float:
        """Wait in an idle loop; return for how long the loop must then poll files and sockets."""
        deadline = None
        if timeout is not None and timeout < math.inf:
            deadline = self._now + max(0, math.ceil(timeout * 1e9))
        participant.listen = False
        with self._lock:
            participant.ready, participant.deadline = _never, deadline
            self._hand_over()
        participant.wait()
        for look in tuple(participant.looks):
            look()
        return LISTEN_S if participant.listen else 0.0

    # -- turns ---------------------------------------------------------------------------------

    def _participant(self) -> Participant | None:
        return getattr(self._mine, "participant", None)

    def _refuse_participants(self) -> None:
        if self._participant() is not None:
            raise DriverMisuse(
                "this thread takes turns already: await here, or run a loop on a thread of its own"
            )

    def _pause(self, ready: Callable[[], bool], deadline: int | None) -> None:
        participant = self._participant()
        if participant is None:
            self._pause_foreign(ready, deadline)
            return
        # In a loop, because a loop's thread is also woken for its loop.
        while not (ready() or (deadline is not None and deadline <= self._now)):
            with self._lock:
                participant.ready, participant.deadline = ready, deadline
                self._wake_loops(but=participant)
                self._hand_over()
            participant.wait()

    def _pause_foreign(self, ready: Callable[[], bool], deadline: int | None) -> None:
        """Wait in a thread outside the clock, which runs outside the clock again afterwards."""
        if ready():
            return
        participant = Participant("a foreign thread")
        with self._lock:
            participant.ready, participant.deadline = ready, deadline
            self._participants.append(participant)
            if self._running is None:
                self._hand_over()
        while not participant.wait(LISTEN_S):
            self.wake(None)  # another such thread may have written what a device waits for
        self._leave(participant)

    def _wake_loops(self, but: Participant | None = None) -> None:
        """Wake the loops after a thread ran: it may have left work, which trio does not signal."""
        for participant in self._participants:
            participant.woken = participant.woken or (participant.loop and participant is not but)

    def _enter(self, participant: Participant) -> None:
        with self._lock:
            self._participants.append(participant)
            if self._running is None:
                self._running = participant
                return
            participant.ready = _always
        participant.wait()

    def _leave(self, participant: Participant) -> None:
        with self._lock:
            self._participants.remove(participant)
            if self._running is participant:
                self._wake_loops()
                self._hand_over()

    def _hand_over(self) -> None:
        """Give the turn to a participant that can run; let time pass until there is one."""
        self._deciding = True
        try:
            self._running = self._next()
        finally:
            self._deciding = False
        if self._running is not None:
            self._running.open()

    def _next(self) -> Participant | None:
        while True:
            can = [
                participant for participant in self._participants if participant.can_run(self._now)
            ]
            if can:
                return can[0] if len(can) == 1 else self._random.choice(can)
            if not self._advance():
                break
        loops = [participant for participant in self._participants if participant.loop]
        if not loops:
            return None
        self._listened += 1  # in turns, because each loop may have its own files and sockets
        chosen = loops[self._listened % len(loops)]
        chosen.listen = True
        return chosen

    def _advance(self) -> bool:
        """Let time pass until a change or a deadline that matters; False if nothing is due."""
        deadlines = [a.deadline for a in self._participants if a.deadline is not None]
        first = min(deadlines, default=math.inf)
        while not self._run_devices():
            times = [t for timeline in self._timelines if (t := timeline.next_time()) is not None]
            due = min(times, default=first)
            if due == first == math.inf:
                return False
            if self._now >= first:
                return True
            self._now = max(self._now, int(min(due, first)))
        for participant in self._participants:
            participant.woken = participant.woken or bool(participant.looks)
        return True

    def _run_devices(self) -> bool:
        happened = False
        for timeline in self._timelines:
            due = timeline.next_time()
            if timeline.held or (due is not None and due <= self._now):
                with timeline.lock:
                    happened |= timeline.run(self._now)
        return happened


class _Mailbox:
    """A queue whose reader counts as idle while it waits."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Add an item, which makes the reader runnable."""
        self._items.append(item)
        self._clock.wake(None)

    def get(self) -> Any:
        self._clock.wait(lambda: bool(self._items))
        return self._items.popleft()


async def _call(main: Callable[..., Awaitable[T]], args: tuple[object, ...]) -> T:
    return await main(*args)


# -- loops ------------------------------------------------------------------------------------


class _Selector(selectors.DefaultSelector):
    """A selector that lets virtual time pass instead of sleeping."""

    def __init__(self, clock: VirtualClock, participant: Participant) -> None:
        super().__init__()
        self._clock = clock
        self._participant = participant

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return ready files; if there are none, let virtual time pass."""
        if timeout is not None and timeout <= 0:
            self._clock.yield_turn(self._participant)
            return super().select(0)
        return super().select(0) or super().select(
            self._clock.wait_idle(self._participant, timeout)
        )


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time is the clock's."""

    def __init__(self, clock: VirtualClock) -> None:
        self._virtual_clock = clock
        self._participant = Participant("asyncio", loop=True)
        super().__init__(_Selector(clock, self._participant))

    def time(self) -> float:
        return self._virtual_clock.seconds()

    def run_forever(self) -> None:
        """Run, taking turns with the clock's other participants."""
        with self._virtual_clock.taking_turns(self._participant):
            super().run_forever()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Shut down as asyncio does, but without a time limit: those threads live in real time."""
        await super().shutdown_default_executor()

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Schedule as asyncio does, which makes the loop runnable."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        self._virtual_clock.wake(self._participant)
        return handle


def _trio_clock(clock: VirtualClock, participant: Participant) -> Any:
    """Make a trio clock (and instrument) on the virtual clock."""
    import trio

    class TrioClock(trio.abc.Clock, trio.abc.Instrument):
        def start_clock(self) -> None:
            pass

        def current_time(self) -> float:
            return clock.seconds()

        def deadline_to_sleep_time(self, deadline: float) -> float:
            # Trio calls this exactly when no task is ready: the loop is idle.
            timeout = None if deadline == math.inf else deadline - clock.seconds()
            return clock.wait_idle(participant, timeout)

        def before_io_wait(self, timeout: float) -> None:
            if timeout == 0:
                clock.yield_turn(participant)

    return TrioClock()
