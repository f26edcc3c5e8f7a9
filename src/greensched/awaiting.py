"""Awaiting a job. A room of its own, because what awaits is Python in a compiled build, too."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from greensched.errors import WrongThread
from greensched.loops import current_door
from greensched.typing import T

if TYPE_CHECKING:
    from greensched.jobs import Job


def until_done(job: Job[T]) -> Generator[Any, None, T]:
    """See `Job.__await__`."""
    track, ticket = job.track, job.ticket
    if track.reached(ticket):
        # On trio an await is a checkpoint, wait or not. To ask asyncio costs a system call.
        if "trio" in sys.modules and asyncio._get_running_loop() is None:
            yield from current_door().checkpoint().__await__()
        return job.outcome()
    if track.fault is None:
        if track.crew.lane.context.is_entered:
            raise WrongThread("no `await` inside `with p.context:`: leave that block first")
        completion = track.crew.home.completion()
        while track.fault is None:
            yield from completion.wait(track, ticket).__await__()
            if track.reached(ticket):
                return job.outcome()
    return job.result()
