"""Holders that keep others waiting: named in a warning, with the place where they took the lease.

A lease of a range of sizes gives SMs back at its checkpoints only. A holder that waits for work
comes to none, and the requests in the queue would wait for ever, without a word. So would they for
a lease that was forgotten.

Where a lease was taken is noted with `Pool(hang_after=...)`, in Python's development mode, and for
ranges of sizes; noting it takes longer than a cached lease does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from types import FrameType

from greensched.execution.lease import Lease
from greensched.records import holder_name
from greensched.scheduling.requests import Request

logger = logging.getLogger("greensched")

#: Seconds that a request waits, and a holder comes to no checkpoint, before the warning: far longer
#: than a step of anything that shares a GPU with others.
MOST_S = 1.0
#: Seconds that a request waits, and any other lease is held, before the warning. Source: the time
#: after which psycopg_pool and HikariCP give up a request by default.
LONG_S = 30.0
#: Modules between the code that takes a lease and the library.
BETWEEN = ("greensched.", "contextlib", "asyncio.", "anyio.", "trio.")


def place() -> str:
    """Return where the calling code takes a lease, outside this library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(BETWEEN):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _suspended_at(task: object) -> str:
    """Return where a task of asyncio or trio waits, outside this library."""
    get_coro = getattr(task, "get_coro", None)
    awaited: object = getattr(task, "coro", None) if get_coro is None else get_coro()
    found = ""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None and not str(frame.f_globals.get("__name__")).startswith(BETWEEN):
            found = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None)
    return found


class HolderWatch:
    """Finds the holders that keep others waiting. All calls are under the manager's lock."""

    def __init__(self) -> None:
        #: When it looks again.
        self._due = 0.0
        #: When each holder that was named had last come to a checkpoint.
        self._named: dict[Lease, float] = {}

    def warnings(
        self, now: float, leases: Iterable[Lease], firsts: Callable[[], Iterable[Request]]
    ) -> list[str]:
        """Return a warning for each holder not named since its last checkpoint; once a second.

        `firsts` returns the first request of each line of the queue, which has any number of them.
        """
        if now < self._due:
            return []
        self._due = now + MOST_S
        waiting = [one for one in firsts() if now - one.arrived >= MOST_S and _may_have_more(one)]
        devices = {device for one in waiting for device in one.devices}
        long = [one for one in waiting if now - one.arrived >= LONG_S]
        kept = {device for one in long for device in one.devices}
        found, before = [], self._named
        self._named = {}
        for lease in leases:
            grant = lease.grant
            gives = lease.is_open and grant.request.is_elastic and not grant.is_shared
            if gives and grant.device in devices and now - grant.since >= MOST_S:
                if before.get(lease) != grant.since:
                    found.append(_warning(lease, now))
                self._named[lease] = grant.since
            is_fixed = not (gives or grant.over or grant.is_shared)
            if is_fixed and grant.device in kept and now - grant.began >= LONG_S:
                if before.get(lease) != grant.began:
                    found.append(_long_warning(lease, now))
                self._named[lease] = grant.began
        return found


def _may_have_more(request: Request) -> bool:
    """Return whether the rules of its own class are not what a request waits for."""
    state = request.class_state
    return state.sms + request.fewest <= state.cap and state.tokens > 0


def _warning(lease: Lease, now: float) -> str:
    seconds, taken_at = now - lease.grant.since, lease.taken_at or "an unknown place"
    return (
        f"the partition taken at {taken_at} has {lease.grant.sms} SMs of device "
        f"{lease.ordinal}, and has come to no checkpoint for {seconds:.1f} s, while others wait "
        f"(for more than {MOST_S:g} s): await p.checkpoint() between pieces of work, and "
        "write `async with p.idle():` where it waits for work"
    )


def _long_warning(lease: Lease, now: float) -> str:
    grant, drains = lease.grant, lease.draining_since
    seconds, taken_at = now - grant.began, lease.taken_at or "an unknown place"
    holder = lease.holder or holder_name(grant.holder) or "an unknown task"
    if drains is not None:
        state = f"its block was left {now - drains:.0f} s ago, and its work has not ended"
    else:
        state = f"its task waits at {_suspended_at(grant.holder) or 'an unknown place'}"
    return (
        f"the partition that {holder} took at {taken_at} has held {grant.sms} SMs of device "
        f"{lease.ordinal} for {seconds:.0f} s, while others wait (for more than {LONG_S:g} s): "
        f"{state}. Leave its block when its work is done; "
        "`python -X dev` and Pool(hang_after=...) note where each was taken"
    )
