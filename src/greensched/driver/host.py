"""The host's side of a driver: time and threads, so that a simulation can replace them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greensched.driver.types import Mailbox

if TYPE_CHECKING:
    import asyncio


class HostServices:
    """Time and threads of the process."""

    #: Makes an asyncio loop on this driver's time, if that is not the process's time.
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None

    #: Seconds on the clock for deadlines, ageing and timers. Monotonic; read for each lease.
    time = staticmethod(time.monotonic)

    def create_mailbox(self) -> Mailbox[Any]:
        """Make a queue to one of the library's threads."""
        return queue.SimpleQueue()

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Start one of the library's threads, a daemon, so that exit never waits for a kernel."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def subscribe(self, look: Callable[[], None]) -> Callable[[], None] | None:
        """Call `look` on this loop's thread whenever the device has progressed.

        Returns:
            A function that ends the subscription, or None if the driver does not control the loop's
            time, so that the caller must poll.
        """
        return None
