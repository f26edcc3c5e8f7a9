"""Awaiting a job. A room of its own, because what awaits is Python in a compiled build, too."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from greensched.loops import current_door
from greensched.typing import T

if TYPE_CHECKING:
    from greensched.jobs import Job


def until_done(job: Job[T]) -> Generator[Any, None, T]:
    """See `Job.__await__`."""
    waiter = job.next_look()
    # On trio an await is a checkpoint, wait or not. To ask asyncio costs a system call.
    if waiter is None and "trio" in sys.modules and asyncio._get_running_loop() is None:
        yield from current_door().checkpoint().__await__()
    while waiter is not None:
        yield from waiter.__await__()
        waiter = job.next_look()
    return job.result()
