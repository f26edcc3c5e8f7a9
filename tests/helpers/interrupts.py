"""Send an interrupt to the main thread, as Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from helpers.waiting import until


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Send a Ctrl-C once the condition holds; the block must end with KeyboardInterrupt."""
    main, done, seen = threading.get_ident(), threading.Event(), threading.Event()

    def is_seen() -> bool:
        """Send it until it is seen: a signal just before a blocking call may wait for its end."""
        if not seen.is_set():
            signal.pthread_kill(main, signal.SIGINT)
        return seen.is_set()

    def handle(*_: object) -> None:
        if not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    async def wait() -> None:
        await until(condition)
        await until(is_seen)

    def interrupt() -> None:
        asyncio.run(wait())
        done.set()

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, handle)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        thread.join()
        assert done.is_set()
    finally:
        signal.signal(signal.SIGINT, before)
