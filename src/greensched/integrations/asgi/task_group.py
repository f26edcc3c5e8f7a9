"""A task group that raises its block's error unwrapped."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def open_task_group() -> AsyncGenerator[TaskGroup]:
    """Open an anyio task group. An error of the block cancels its tasks, and is not wrapped."""
    error = None
    try:
        async with anyio.create_task_group() as tasks:
            try:
                yield tasks
            except Exception as raised:
                error = raised
                tasks.cancel_scope.cancel()
        if error is not None:
            raise error
    finally:
        del error  # breaks the reference cycle: its traceback refers to this frame
