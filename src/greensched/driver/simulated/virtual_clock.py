"""The virtual clock: time that passes only when nobody has anything to do.

Threads take turns. Each *actor* (a loop's thread, one of our own threads) runs only while it
holds the turn, and gives it up where it would wait: a loop with nothing ready, a thread at its
mailbox or in a driver call that blocks. Who runs next is drawn from a seeded generator, so a
program gives the same interleaving for the same seed. When every actor waits, time jumps to the
next thing that is due: a device event, a timer, a deadline. An hour costs what happens in it.

A program runs under it by `clock.run(main)`, on asyncio or trio. Threads the clock does not know
(`asyncio.to_thread`, a test's own) run beside it, and time does not wait for them: use
`partition.run`. Several asyncio loops may share a clock; of trio, one.

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
from typing import Any, Literal, TypeVar, TypeVarTuple, Unpack

from greensched.driver.simulated.timeline import Timeline
from greensched.driver.types import Mailbox
from greensched.errors import DriverMisuse

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: When nothing is due at all, a loop listens to the outside world in slices of so long.
LISTEN_S = 0.02


def _always() -> bool:
    return True


def _never() -> bool:
    return False


class Participant:
    """A thread that takes turns: what it waits for, and the gate it waits at."""

    def __init__(self, name: str, *, loop: bool = False) -> None:
        self.name = name
        self.loop = loop
        self.ready: Callable[[], bool] = _always
        self.deadline: int | None = None
        #: Somebody did something that this loop should look at.
        self.nudged = False
        #: Nothing is due anywhere: only the outside world can go on.
        self.listen = False
        self.looks: list[Callable[[], None]] = []
        self._gate = threading.Lock()
        self._gate.acquire()

    def can_run(self, now: int) -> bool:
        """Whether what it waits for has come."""
        return self.nudged or self.ready() or (self.deadline is not None and self.deadline <= now)

    def open(self) -> None:
        """Lets it go on."""
        self.nudged = False
        self._gate.release()

    def wait(self, seconds: float = -1) -> bool:
        """Waits for its turn; so many real seconds at most, where that is said."""
        return self._gate.acquire(timeout=seconds)


class VirtualClock:
    """Deterministic time for any number of simulated drivers.

    Args:
        seed: of the order in which runnable threads go.
    """

    virtual = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        #: Re-entrant: a finaliser may wake a loop on a thread that is in here.
        self._lock = threading.RLock()
        self._now = 0
        self._timelines: list[Timeline] = []
        self._actors: list[Participant] = []
        self._running: Participant | None = None
        #: Somebody works out who is next.
        self._deciding = False
        #: How often a loop was let listen.
        self._listened = 0
        self._mine = threading.local()

    # -- for the driver ------------------------------------------------------------------------

    def attach(self) -> Timeline:
        """A timeline of this clock."""
        timeline = Timeline(self)
        with self._lock:
            self._timelines.append(timeline)
        return timeline

    def detach(self, timeline: Timeline) -> None:
        """Forgets a timeline: nothing on it comes to pass any more."""
        with self._lock:
            if timeline in self._timelines:
                self._timelines.remove(timeline)

    def now(self) -> int:
        """Nanoseconds since the clock was made."""
        return self._now

    def poke(self) -> None:
        """Nothing to do: what is new is seen when everybody waits."""

    changed = poke

    def wait(self, ready: Callable[[], bool]) -> None:
        """Blocks the calling thread until a condition holds; counts as idle meanwhile."""
        self._pause(ready, None)

    def sleep(self, nanoseconds: int) -> None:
        """Blocks the calling thread for a time."""
        self._pause(_never, self._now + nanoseconds)

    def create_mailbox(self) -> Mailbox[Any]:
        """A queue to one of our own threads."""
        return _Mailbox(self)

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Starts a daemon thread that takes turns; its first comes when it is drawn."""
        actor = Participant(name)
        with self._lock:
            self._actors.append(actor)

        def body() -> None:
            self._mine.actor = actor
            actor.wait()
            try:
                target()
            finally:
                self._leave(actor)

        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        self.nudge(None)
        return thread

    def subscribe(self, look: Callable[[], None]) -> Callable[[], None]:
        """Calls `look` on this loop's thread when a device progressed while the loop was idle."""
        actor = self._actor()
        if actor is None or not actor.loop:
            raise DriverMisuse(
                "this simulated driver runs on virtual time: run the program with clock.run(main)"
            )
        actor.looks.append(look)
        return functools.partial(actor.looks.remove, look)

    def nudge(self, actor: Participant | None) -> None:
        """Makes a loop look again; wakes the clock if everybody waited for the outside world."""
        with self._lock:
            if actor is not None:
                actor.nudged = True
            if self._running is None and not self._deciding:
                self._hand_over()

    # -- running a program ---------------------------------------------------------------------

    def run(
        self,
        main: Callable[..., Awaitable[T]],
        *args: object,
        backend: Literal["asyncio", "trio"] = "asyncio",
    ) -> T:
        """Runs an async function to its end under this clock, as `asyncio.run` would."""
        self._refuse_actors()
        if backend == "asyncio":
            with asyncio.Runner(loop_factory=self.new_event_loop) as runner:
                return runner.run(_call(main, args))
        import trio

        actor = Participant("trio", loop=True)
        with self.taking_turns(actor):
            clock = _trio_clock(self, actor)
            return trio.run(main, *args, clock=clock, instruments=[clock])

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """An asyncio loop on this clock, for `loop_factory` arguments."""
        return _VirtualLoop(self)

    @contextmanager
    def taking_turns(self, actor: Participant) -> Iterator[None]:
        """The calling thread is this actor, and holds the turn when the block begins."""
        self._refuse_actors()
        self._enter(actor)
        self._mine.actor = actor
        try:
            yield
        finally:
            self._mine.actor = None
            self._leave(actor)

    def seconds(self) -> float:
        """The time, in seconds."""
        return self._now / 1e9

    def turn(self, actor: Participant) -> None:
        """A loop with work ready lets others go first, if they are drawn."""
        with self._lock:
            if not any(a is not actor and a.can_run(self._now) for a in self._actors):
                return
            actor.ready, actor.deadline = _always, None
            self._hand_over()
        actor.wait()

    def idle(self, actor: Participant, timeout: float | None) -> float:
        """A loop has nothing ready: waits, then says how long to listen to the outside world."""
        deadline = None
        if timeout is not None and timeout < math.inf:
            deadline = self._now + max(0, math.ceil(timeout * 1e9))
        actor.listen = False
        with self._lock:
            actor.ready, actor.deadline = _never, deadline
            self._hand_over()
        actor.wait()
        for look in tuple(actor.looks):
            look()
        return LISTEN_S if actor.listen else 0.0

    # -- turns ---------------------------------------------------------------------------------

    def _actor(self) -> Participant | None:
        return getattr(self._mine, "actor", None)

    def _refuse_actors(self) -> None:
        if self._actor() is not None:
            raise DriverMisuse("this thread takes turns already: run a loop on a thread of its own")

    def _pause(self, ready: Callable[[], bool], deadline: int | None) -> None:
        def over() -> bool:
            return ready() or (deadline is not None and deadline <= self._now)

        actor = self._actor()
        if actor is None:
            self._pause_foreign(ready, deadline)
            return
        while not over():  # a loop's thread is also woken for its loop
            with self._lock:
                actor.ready, actor.deadline = ready, deadline
                self._nudge_loops(but=actor)
                self._hand_over()
            actor.wait()

    def _pause_foreign(self, ready: Callable[[], bool], deadline: int | None) -> None:
        """A thread that takes no turns waits, and goes on beside the clock, as it came."""
        if ready():
            return
        actor = Participant("a foreign thread")
        with self._lock:
            actor.ready, actor.deadline = ready, deadline
            self._actors.append(actor)
            if self._running is None:
                self._hand_over()
        while not actor.wait(LISTEN_S):
            self.nudge(None)  # another foreign thread may have written what a device waits for
        self._leave(actor)

    def _nudge_loops(self, but: Participant | None = None) -> None:
        """A thread has run: it may have left something for a loop (trio's entry queue is mute)."""
        for actor in self._actors:
            actor.nudged = actor.nudged or (actor.loop and actor is not but)

    def _enter(self, actor: Participant) -> None:
        with self._lock:
            self._actors.append(actor)
            if self._running is None:
                self._running = actor
                return
            actor.ready = _always
        actor.wait()

    def _leave(self, actor: Participant) -> None:
        with self._lock:
            self._actors.remove(actor)
            if self._running is actor:
                self._nudge_loops()
                self._hand_over()

    def _hand_over(self) -> None:
        """Gives the turn to whoever can run, and lets time pass until somebody can."""
        self._deciding = True
        try:
            self._running = self._next()
        finally:
            self._deciding = False
        if self._running is not None:
            self._running.open()

    def _next(self) -> Participant | None:
        while True:
            can = [actor for actor in self._actors if actor.can_run(self._now)]
            if can:
                return can[0] if len(can) == 1 else self._random.choice(can)
            if not self._advance():
                break
        loops = [actor for actor in self._actors if actor.loop]
        if not loops:
            return None
        self._listened += 1  # each in turn: any of them may have files and sockets of its own
        chosen = loops[self._listened % len(loops)]
        chosen.listen = True
        return chosen

    def _advance(self) -> bool:
        """Brings the devices up to now, or else time to the next thing due; false if nothing is."""
        if not self._run_devices():
            due = [a.deadline for a in self._actors if a.deadline is not None]
            due += [t for timeline in self._timelines if (t := timeline.next_time()) is not None]
            if not due:
                return False
            self._now = max(self._now, min(due))
            if not self._run_devices():
                return True
        for actor in self._actors:
            actor.nudged = actor.nudged or bool(actor.looks)
        return True

    def _run_devices(self) -> bool:
        happened = False
        for timeline in self._timelines:
            with timeline.lock:
                happened |= timeline.run(self._now)
        return happened


class _Mailbox:
    """A queue whose reader counts as idle while it waits."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Adds an item; the reader is runnable from here on."""
        self._items.append(item)
        self._clock.nudge(None)

    def get(self) -> Any:
        """The next item; waits for one."""
        self._clock.wait(lambda: bool(self._items))
        return self._items.popleft()


async def _call(main: Callable[..., Awaitable[T]], args: tuple[object, ...]) -> T:
    return await main(*args)


# -- loops ------------------------------------------------------------------------------------


class _Selector(selectors.DefaultSelector):
    """A selector that asks the clock to pass the time instead of sleeping."""

    def __init__(self, clock: VirtualClock, actor: Participant) -> None:
        super().__init__()
        self._clock = clock
        self._actor = actor

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready outside; where nothing is and nothing is due here, time passes."""
        if timeout is not None and timeout <= 0:
            self._clock.turn(self._actor)
            return super().select(0)
        return super().select(0) or super().select(self._clock.idle(self._actor, timeout))


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time is the clock's."""

    def __init__(self, clock: VirtualClock) -> None:
        self._virtual_clock = clock
        self._actor = Participant("asyncio", loop=True)
        super().__init__(_Selector(clock, self._actor))

    def time(self) -> float:
        """The clock's time, in seconds."""
        return self._virtual_clock.seconds()

    def run_forever(self) -> None:
        """Runs, taking turns with the clock's other actors."""
        with self._virtual_clock.taking_turns(self._actor):
            super().run_forever()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """As asyncio's, without its time limit: those threads live in real time."""
        await super().shutdown_default_executor()

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """As asyncio's; the loop is runnable from here on."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        self._virtual_clock.nudge(self._actor)
        return handle


def _trio_clock(clock: VirtualClock, actor: Participant) -> Any:
    """A trio clock (and instrument) on the virtual clock."""
    import trio

    class TrioClock(trio.abc.Clock, trio.abc.Instrument):
        def start_clock(self) -> None:
            pass

        def current_time(self) -> float:
            return clock.seconds()

        def deadline_to_sleep_time(self, deadline: float) -> float:
            # Trio asks this exactly when no task is ready: it is the loop's idling.
            timeout = None if deadline == math.inf else deadline - clock.seconds()
            return clock.idle(actor, timeout)

        def before_io_wait(self, timeout: float) -> None:
            if timeout == 0:
                clock.turn(actor)

    return TrioClock()
