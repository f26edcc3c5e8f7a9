"""Which event loop runs on the calling thread. Imports none of them."""

from __future__ import annotations

import asyncio
import sys
from typing import Any


def running_trio() -> Any:
    """The `trio` module, if a run of it is on this thread; else None.

    Another thread may be in the middle of importing it: then the module is there, and empty.
    """
    trio = sys.modules.get("trio")
    lowlevel = getattr(trio, "lowlevel", None)
    return trio if lowlevel is not None and lowlevel.in_trio_run() else None


def on_loop_thread() -> bool:
    """Whether a loop of asyncio or trio runs on this thread."""
    return asyncio._get_running_loop() is not None or running_trio() is not None
