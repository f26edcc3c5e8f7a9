"""Which event loop runs on the calling thread, and what needs one. Imports none of them."""

from __future__ import annotations

import inspect
import sys
import threading
from types import FunctionType
from typing import Any, Final

#: The thread. Asked for every lease and job: what is final is, compiled, not looked up.
get_ident: Final = threading.get_ident
_COROUTINE: Final[int] = inspect.CO_COROUTINE


def running_asyncio() -> Any:
    """The asyncio loop that runs on this thread (uvloop's are such); None if there is none.

    Another thread may be in the middle of importing it: then no loop of it runs here yet.
    """
    events = sys.modules.get("asyncio.events")
    find = getattr(events, "_get_running_loop", None)
    return None if find is None else find()


def running_trio() -> Any:
    """The `trio` module, if a run of it is on this thread; else None.

    Another thread may be in the middle of importing it: then the module is there, and empty.
    """
    trio = sys.modules.get("trio")
    lowlevel = getattr(trio, "lowlevel", None)
    return trio if lowlevel is not None and lowlevel.in_trio_run() else None


def leave_library() -> None:
    """No loop runs in the current context, a copy of a task's, whatever it says there.

    anyio goes by sniffio's variable where that is installed, and would refuse to run a loop here.
    """
    library = sys.modules.get("sniffio")
    if library is None:
        return
    variable = getattr(library, "current_async_library_cvar", None)  # None: half imported
    if variable is not None and variable.get() is not None:
        variable.set(None)


def is_asynchronous(function: object) -> bool:
    """Whether calling it only makes a coroutine, for a loop to run: not where something calls."""
    if (
        type(function) is FunctionType and not function.__dict__
    ):  # most are, and it is for each call
        return bool(function.__code__.co_flags & _COROUTINE)
    called = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def on_loop_thread() -> bool:
    """Whether a loop of asyncio or trio runs on this thread."""
    return running_asyncio() is not None or running_trio() is not None
