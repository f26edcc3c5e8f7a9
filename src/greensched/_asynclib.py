"""Which async library runs on the calling thread. Imports no async library."""

from __future__ import annotations

import inspect
import sys
import threading
from types import FunctionType
from typing import Any, Final

#: The thread's identity, read for each lease and job. Compiled code need not look up a final name.
get_ident: Final = threading.get_ident


def running_asyncio() -> Any:
    """Return the asyncio loop (or uvloop) that runs on this thread, or None.

    While another thread is still importing asyncio, no asyncio loop can run here.
    """
    events = sys.modules.get("asyncio.events")
    find = getattr(events, "_get_running_loop", None)
    return None if find is None else find()


def running_trio() -> Any:
    """Return the `trio` module if trio runs on this thread, else None.

    While another thread is still importing trio, the module exists without its contents.
    """
    trio = sys.modules.get("trio")
    lowlevel = getattr(trio, "lowlevel", None)
    return trio if lowlevel is not None and lowlevel.in_trio_run() else None


def in_event_loop() -> bool:
    """Say whether a loop of asyncio or trio runs on this thread."""
    return running_asyncio() is not None or running_trio() is not None


def is_coroutine_function(function: object) -> bool:
    """Say whether calling this object only makes a coroutine, which needs a loop to run."""
    if type(function) is FunctionType and not function.__dict__:  # the usual case, made fast
        return bool(function.__code__.co_flags & inspect.CO_COROUTINE)
    called = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
