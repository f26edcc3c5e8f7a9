"""Event loops: one adapter for each running loop of asyncio (uvloop, too) or trio.

anyio is not used to wait: its primitives yield a whole turn of the loop where nothing has to be
waited for, and its events cost two and a half times a future (docs/internals/completion.md).
"""

from __future__ import annotations

import sys
import threading
from asyncio import _get_running_loop
from typing import Any, Final

from greensched._asynclib import running_asyncio, running_trio
from greensched.errors import NoLoop
from greensched.execution.eventloop.asyncio import AsyncioAdapter
from greensched.execution.eventloop.base import LoopAdapter
from greensched.execution.eventloop.trio import TrioAdapter

#: For each thread: the `latest` loop with its adapter, and the `adapters` of its open loops.
_local: Final[Any] = threading.local()


def current_adapter() -> LoopAdapter:
    """Return the adapter of the loop that runs on this thread.

    Raises:
        NoLoop: there is none.
    """
    key: Any = _get_running_loop()
    trio = None
    if key is None:
        trio = running_trio()
        if trio is None:
            raise NoLoop
        key = trio.lowlevel.current_trio_token()
    latest: tuple[Any, LoopAdapter] | None = getattr(_local, "latest", None)
    if latest is None or latest[0] is not key:
        adapters: dict[Any, LoopAdapter] = getattr(_local, "adapters", {})
        _local.adapters = {k: one for k, one in adapters.items() if not one.is_closed}
        if key not in _local.adapters:
            _local.adapters[key] = AsyncioAdapter(key) if trio is None else TrioAdapter(trio)
        latest = _local.latest = key, _local.adapters[key]
    return latest[1]


def current_trio() -> Any:
    """Return the `trio` module if its run is the loop on this thread; else None."""
    return running_trio() if "trio" in sys.modules and running_asyncio() is None else None
