"""The watchdog: finds work that does not end, and quarantines its executor.

A stream reaches its tickets in order. So the *turn* of its oldest outstanding work begins when the
previous ticket is reached, or when the work is submitted to an idle stream. While the stream waits
for another stream's work, the turn has not come. If no ticket comes within `hang_after` of a turn,
the work hangs: everything outstanding on its executor is given up (`TicketedStream.given_up`), and
its waiters get `DeviceHung`. The lease drains as usual: it holds its cells, so that they are not
granted, until its work has ended. If the work does end, the executor works as before.

A running kernel cannot be stopped, so nothing more can be done except to end the process: that is
the exit policy. A callable of `Partition.run` is not judged while it runs, only work that it
leaves. Each poller calls `Watchdog.look` after its polls, and at the time that `look` returns. If
neither the pool nor a class has a limit, no poller calls it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Final, Literal, Protocol, get_args

from greensched._validation import as_float, one_of
from greensched.device.tickets import TicketedStream
from greensched.driver.interface import Driver
from greensched.errors import DeviceHung, InvalidRequest
from greensched.execution.completion_poller import CompletionPoller, PollerRegistry
from greensched.execution.executor import Executor
from greensched.execution.lease import Lease
from greensched.leasing.device_pool import DevicePool
from greensched.leasing.lease_records import LeaseRecords
from greensched.records import Recorder, holder_name
from greensched.scheduling.services import ServiceClass

logger = logging.getLogger("greensched")

#: What happens to the process when work hangs, or a device is lost.
ExitPolicy = Literal["report", "terminate", "exit"]
#: The exit status of the process. Source: sysexits.h, EX_IOERR. A fleet's actor uses the same.
EXIT_STATUS: Final = 74
#: Hardware queues of a device. Source: CUDA C++ Programming Guide, environment variables:
#: CUDA_DEVICE_MAX_CONNECTIONS is 1 to 32, 8 by default.
DEFAULT_QUEUES: Final = 8
#: A timer may come early by this rounding error.
ROUNDING_S: Final = 1e-9


class WatchedHost(Protocol):
    """What the watchdog needs from the manager."""

    lock: RLock
    driver: Driver
    leases: set[Lease]
    device_pools: tuple[DevicePool, ...]
    pollers: PollerRegistry
    recorder: Recorder
    records: LeaseRecords


def checked_hang_after(hang_after: object) -> float | None:
    """Check a pool's limit.

    Raises:
        InvalidRequest: It is not a positive number.
    """
    if hang_after is None or as_float(hang_after) > 0:
        return None if hang_after is None else as_float(hang_after)
    raise InvalidRequest(f"hang_after={hang_after!r}: give seconds, above 0, or None for no limit")


def checked_exit_policy(policy: object) -> ExitPolicy:
    """Check an exit policy. Raises InvalidRequest for any other value."""
    return one_of("exit_policy", policy, get_args(ExitPolicy))  # type: ignore[return-value]  # checked


def has_limits(hang_after: float | None, services: Iterable[ServiceClass]) -> bool:
    """Say whether a pool or one of its classes has a limit."""
    return hang_after is not None or any(
        service_class.hang_after is not None for service_class in services
    )


def end_process(policy: ExitPolicy) -> None:
    """End the process as its exit policy demands."""
    if policy == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif policy == "exit":
        os._exit(EXIT_STATUS)


@dataclass(slots=True, eq=False)
class _Turn:
    """The turn of a stream's oldest outstanding work."""

    #: What the stream had written when the turn began.
    word: int
    began: float
    #: The limit of its class; before it is asked for, the shortest of the pool.
    limit: float
    hangs: bool = False
    #: The hanging work of another stream that this stream waits for.
    ahead: tuple[TicketedStream, int] | None = None


class Watchdog:
    """Finds work of one pool that does not end.

    Args:
        host: The manager.
        hang_after: The pool's limit in seconds. None: only classes have limits.
        exit_policy: What happens to the process when work hangs.
    """

    def __init__(
        self, host: WatchedHost, hang_after: float | None, exit_policy: ExitPolicy
    ) -> None:
        self._host = host
        self._time = host.driver.time
        self._hang_after = hang_after
        self._exit_policy = exit_policy
        self._shortest = math.inf
        self._turns: dict[TicketedStream, _Turn] = {}
        #: Whether the pool or a class has a limit.
        self.is_on = False

    def set_services_locked(self, services: Sequence[ServiceClass]) -> None:
        """Use the limits of these classes for turns from now on."""
        limits = [self._hang_after, *(service_class.hang_after for service_class in services)]
        self._shortest = min((limit for limit in limits if limit is not None), default=math.inf)
        self.is_on = has_limits(self._hang_after, services)
        self._host.pollers.set_watchdog_locked(self.look if self.is_on else None)
        self._host.recorder.set_names_jobs(self.is_on)

    def look(self, poller: CompletionPoller) -> float | None:
        """Judge all outstanding work; return in how many seconds some work may hang next.

        Runs on the thread of the poller's loop, after its poll.
        """
        now, turns = self._time(), self._turns
        for stream in tuple(poller.pending):
            if stream not in turns:
                turns[stream] = _Turn(stream.word[0], now, self._shortest)
        due = min((self._judge(stream, poller, now) for stream in tuple(turns)), default=math.inf)
        for stream in tuple(poller.pending):
            if stream.hang is not None:
                poller.give_up(stream)
        return None if due == math.inf else due - now

    # -- judging -----------------------------------------------------------------------------------

    def _judge(self, stream: TicketedStream, poller: CompletionPoller, now: float) -> float:
        """Return when a stream's work will hang if no ticket is reached before."""
        turn = self._turns.get(stream)
        if turn is None:  # another loop's poller has handled it
            return math.inf
        if stream.health.is_over or stream.reached(stream.submitted):
            self._turns.pop(stream, None)
            self._ended(stream, turn, poller, now)
            return math.inf
        word = stream.word[0]
        if word != turn.word or (turn.ahead is not None and turn.ahead[0].reached(turn.ahead[1])):
            self._ended(stream, turn, poller, now)
            turn = self._turns[stream] = _Turn(word, now, self._shortest)
        if turn.hangs:
            self._give_up(stream.owner)
            return math.inf
        ahead = _first_unreached(stream)
        if ahead is not None:
            turn.began = now
            if not ahead[0].hangs(ahead[1]):
                return math.inf
            turn.ahead = ahead
        elif now < turn.began + turn.limit - ROUNDING_S:
            return turn.began + turn.limit
        else:
            turn.limit = self._limit_of(stream)
            if now < turn.began + turn.limit - ROUNDING_S:
                return turn.began + turn.limit
        self._hangs(stream, turn, poller, now)
        return math.inf

    def _limit_of(self, stream: TicketedStream) -> float:
        with self._host.lock:
            lease = self._lease_locked(stream)
        limit = None if lease is None else lease.grant.class_state.rules.hang_after
        limit = self._hang_after if limit is None else limit
        return math.inf if limit is None else limit

    def _lease_locked(self, stream: TicketedStream) -> Lease | None:
        """Return the lease that has the stream's executor. A cached lease has no work."""
        having = (lease for lease in self._host.leases if lease.executor is stream.owner)
        return next((lease for lease in having if not lease.grant.over), None)

    # -- hanging work ----------------------------------------------------------------------------

    def _hangs(
        self, stream: TicketedStream, turn: _Turn, poller: CompletionPoller, now: float
    ) -> None:
        """Give up the work of a stream's executor, and report it."""
        executor = stream.owner
        assert isinstance(executor, Executor)
        with self._host.lock:
            turn.hangs = True
            if executor.hang is not None:  # its other stream hangs already
                return
            lease = self._lease_locked(stream)
            executor.hang = error = self._error_locked(stream, turn, lease, now)
            self._give_up(executor)
            pollers = self._host.pollers.all_locked()
        self._tell(lease, poller)
        for other in pollers:
            if other is not poller:
                other.kick_threadsafe()
        self._host.records.tell_rarely("%s", error, level=logging.ERROR)
        end_process(self._exit_policy)

    def _ended(
        self, stream: TicketedStream, turn: _Turn, poller: CompletionPoller, now: float
    ) -> None:
        """Use an executor again, because its hanging work has ended."""
        executor = stream.owner
        if not turn.hangs or not isinstance(executor, Executor):
            return
        turn.hangs = False
        with self._host.lock:
            others = (self._turns.get(other) for other in executor.streams)
            if any(turn is not None and turn.hangs for turn in others):
                return
            executor.hang = None
            lease = self._lease_locked(stream)
        self._tell(lease, poller)
        if not stream.health.is_over:
            message = "what hung on %r has ended, %.3g s after its turn"
            self._host.records.tell_rarely(
                message, executor, now - turn.began, level=logging.WARNING
            )

    def _give_up(self, executor: object) -> None:
        """Give up all work submitted to an executor so far."""
        assert isinstance(executor, Executor)
        for stream in executor.streams:
            stream.hang = executor.hang
            stream.given_up = stream.issued

    def _tell(self, lease: Lease | None, poller: CompletionPoller) -> None:
        if lease is None:
            return
        if lease.poller is poller:
            lease.hang_changed()
        else:
            lease.poller.loop.call_threadsafe(lease.hang_changed)

    def _error_locked(
        self, stream: TicketedStream, turn: _Turn, lease: Lease | None, now: float
    ) -> DeviceHung:
        executor = stream.owner
        assert isinstance(executor, Executor)
        grant = None if lease is None else lease.grant
        left = [job for job in executor.recent_jobs.copy() if not job[0].reached(job[1])]
        own = [name for owner, _, name in left if owner is stream]
        ahead = None if turn.ahead is None else turn.ahead[0].hang
        work = own[0] if own else ""
        if ahead is not None:
            work = f"{work or 'work'} (behind {ahead.work or 'work'} of {ahead.place})"
        return DeviceHung(
            work=work,
            behind=(*own[1:], *(name for owner, _, name in left if owner is not stream)),
            device=executor.ordinal,
            sms=executor.sm_count,
            cells=executor.mask,
            service="" if grant is None else grant.class_state.name,
            holder="" if lease is None else lease.holder or holder_name(lease.grant.holder),
            place="" if lease is None else lease.taken_at,
            leased=0.0 if grant is None else now - grant.began,
            hung=now - turn.began,
            hang_after=turn.limit,
            beside=self._beside_locked(executor, now),
            queues=_queues(),
        )

    def _beside_locked(self, executor: Executor, now: float) -> tuple[str, ...]:
        """Describe the device's other executors that have work, longest without progress first.

        Streams share the hardware queues of a device, and work behind a hung kernel in its queue
        waits. The driver does not report which streams share a queue.
        """
        ages: dict[Executor, float] = {}
        for stream, turn in self._turns.items():
            other = stream.owner
            if isinstance(other, Executor) and other.device is executor.device:
                ages[other] = max(ages.get(other, 0.0), now - turn.began)
        ages.pop(executor, None)
        oldest = sorted(ages, key=lambda key: -ages[key])
        return tuple(f"{other} for {ages[other]:.3g} s" for other in oldest)


def _queues() -> int:
    """Return the number of a device's hardware queues for this process."""
    setting = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(setting) if setting.isdecimal() else DEFAULT_QUEUES


def _first_unreached(stream: TicketedStream) -> tuple[TicketedStream, int] | None:
    """Return what a stream waits for on another stream, hanging work first, or None."""
    waits = [ahead for ahead in tuple(stream.behind) if not ahead[0].reached(ahead[1])]
    return next((wait for wait in waits if wait[0].hangs(wait[1])), waits[0] if waits else None)
