"""Warnings about lease holders that keep requests waiting, with the place of the lease.

A lease of a range of sizes returns SMs only at its checkpoints. A holder that waits for work
reaches no checkpoint, so queued requests would wait for ever, without a message. The same is true
of a forgotten lease.

The place where a lease was taken is recorded with `Pool(hang_after=...)`, in Python's development
mode, and for ranges of sizes. Recording takes longer than taking a cached lease.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from types import FrameType

from greensched.execution.lease import Lease
from greensched.records import holder_name
from greensched.scheduling.requests import LONG_LEASE_S, Request

logger = logging.getLogger("greensched")

#: The warning comes once a request has waited, and the holder has reached no checkpoint, for this
#: many seconds: far longer than a step of any work that shares a GPU. The warning about a lease
#: without checkpoints comes once the lease and the wait have lasted for `LONG_LEASE_S`.
MOST_S = 1.0
#: Modules that may be called between the code that takes a lease and this one.
BETWEEN = ("greensched.", "contextlib", "asyncio.", "anyio.", "trio.")


def place() -> str:
    """Return the place outside this library where the calling code takes a lease."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(BETWEEN):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _suspended_at(task: object) -> str:
    """Return the place outside this library where a task of asyncio or trio waits."""
    get_coro = getattr(task, "get_coro", None)
    awaited: object = getattr(task, "coro", None) if get_coro is None else get_coro()
    location = ""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None and not str(frame.f_globals.get("__name__")).startswith(BETWEEN):
            location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None)
    return location


class HolderWatch:
    """Finds holders that keep requests waiting. All calls are under the manager's lock."""

    def __init__(self) -> None:
        #: For each holder that a warning named: its last checkpoint at that time.
        self._named: dict[Lease, float] = {}

    def warnings(self, now: float, leases: Iterable[Lease], firsts: Iterable[Request]) -> list[str]:
        """Return a warning for each holder not warned since its last checkpoint.

        Args:
            now: The time in seconds.
            leases: All leases of the pool.
            firsts: The first request of each line of the queue, where it has waited for `MOST_S`.
        """
        waiting = [request for request in firsts if _may_have_more(request)]
        devices = {device for request in waiting for device in request.devices}
        long = [request for request in waiting if now - request.arrived >= LONG_LEASE_S]
        kept = {device for request in long for device in request.devices}
        texts, before = [], self._named
        self._named = {}
        for lease in leases:
            grant = lease.grant
            gives = lease.is_open and grant.request.is_elastic and not grant.is_shared
            if gives and grant.device in devices and now - grant.since >= MOST_S:
                if before.get(lease) != grant.since:
                    texts.append(_warning(lease, now))
                self._named[lease] = grant.since
            is_fixed = not (gives or grant.over or grant.is_shared)
            if is_fixed and grant.device in kept and now - grant.began >= LONG_LEASE_S:
                if before.get(lease) != grant.began:
                    texts.append(_long_warning(lease, now))
                self._named[lease] = grant.began
        return texts


def _may_have_more(request: Request) -> bool:
    """Say whether a request waits for SMs, rather than for a limit of its own class."""
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
        f"{lease.ordinal} for {seconds:.0f} s, while others wait (for more than "
        f"{LONG_LEASE_S:g} s): {state}. Leave its block when its work is done; "
        "`python -X dev` and Pool(hang_after=...) note where each was taken"
    )
