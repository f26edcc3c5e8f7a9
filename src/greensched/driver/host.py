"""The host's side of a driver: time and threads, so that a simulation can own them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greensched.typing import Mailbox

if TYPE_CHECKING:
    import asyncio


class HostServices:
    """Time and threads as the process has them."""

    #: What makes a loop of asyncio on this driver's time, where it has a time of its own.
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None

    #: Seconds on the clock that deadlines, ageing and timers use. Monotonic; asked for each lease.
    time = staticmethod(time.monotonic)

    def create_mailbox(self) -> Mailbox[Any]:
        """A queue to one of our own threads."""
        return queue.SimpleQueue()

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Starts one of our own threads: a daemon, so that exit never waits for a kernel."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def subscribe(self, look: Callable[[], None]) -> Callable[[], None] | None:
        """Asks that `look` be called on this loop's thread whenever the device progressed.

        Only a driver that owns the loop's time can promise that (virtual time); it returns what
        ends the subscription. Others return None: look yourself.
        """
        return None
