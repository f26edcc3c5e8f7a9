"""Worker threads: what blocks happens here, never on an event loop's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from greensched.context import Context
from greensched.driver.interface import Driver
from greensched.driver.types import Mailbox
from greensched.errors import CUDAError, DeviceFault
from greensched.typing import CaptureMode

logger = logging.getLogger("greensched")

Item = Callable[[], object]


class WorkerThread:
    """A thread that runs items one after another; it starts with the first.

    After each item the context is current that was current before it, whatever the item did.

    Args:
        driver: starts the thread.
        name: of the thread.
        context: entered for each item; None if the items enter contexts themselves.
        relaxed: use the relaxed capture mode, so that a call here invalidates no capture of another
            thread. Needs an initialised driver.
    """

    def __init__(
        self,
        driver: Driver,
        name: str,
        context: Context | None = None,
        *,
        relaxed: bool = True,
    ) -> None:
        self._relaxed = relaxed
        self._driver = driver
        self._name = name
        self._context = context
        self._lock = threading.Lock()
        #: Takes items once the thread has started.
        self.mailbox: Mailbox[Item | _Stop] | None = None

    def submit(self, item: Item) -> None:
        """Run an item after those before it. Never waits. Items catch their own exceptions.

        Raises:
            RuntimeError: the thread cannot be started.
        """
        mailbox = self.mailbox
        if mailbox is None:
            mailbox = self._start()
        mailbox.put(item)

    def submit_if_running(self, item: Item) -> None:
        """Submit an item if the thread is running; else do nothing."""
        mailbox = self.mailbox
        if mailbox is not None:
            mailbox.put(item)

    def post(self, item: Callable[[Exception | None], object]) -> None:
        """Submit an item that must run in any case, or its ticket would never be written.

        Its argument is None, or the error for which no thread could be started: then the item runs
        on the calling thread.
        """
        try:
            self.submit(partial(item, None))
        except RuntimeError as error:
            item(error)

    def stop(self) -> None:
        """End the thread after its submitted items, and wait for that. Idempotent."""
        mailbox, self.mailbox = self.mailbox, None
        if mailbox is not None:
            ended: Mailbox[None] = self._driver.create_mailbox()
            mailbox.put(_Stop(ended))
            ended.get()

    def dismiss(self) -> None:
        """End the thread after its submitted items, without waiting for it."""
        mailbox, self.mailbox = self.mailbox, None
        if mailbox is not None:
            mailbox.put(_Stop(self._driver.create_mailbox()))

    def _start(self) -> Mailbox[Item | _Stop]:
        with self._lock:
            if self.mailbox is None:
                mailbox: Mailbox[Any] = self._driver.create_mailbox()
                self._driver.start_thread(lambda: self._run(mailbox), self._name)
                self.mailbox = mailbox
            return self.mailbox

    def _run(self, mailbox: Mailbox[Any]) -> None:
        if self._relaxed:
            with suppress(CUDAError):
                self._driver.exchange_capture_mode(CaptureMode.RELAXED)
        while True:
            item = mailbox.get()
            if isinstance(item, _Stop):
                item.ended.put(None)
                return
            try:
                if self._context is None:
                    item()
                else:
                    self._run_in_context(item, self._context)
            except BaseException:  # the thread goes on: the executor's end waits for it
                logger.exception("%s: an item raised instead of handling its error", self._name)
            del item  # or it would live until the next item arrives

    def _run_in_context(self, item: Item, context: Context) -> None:
        """Run an item even if the context cannot be entered: a task waits for its result."""
        with ExitStack() as block:
            try:
                try:
                    block.enter_context(context.entered())
                except DeviceFault:
                    raise
                except CUDAError:  # once more: the item would fail for another cause
                    block.enter_context(context.entered())
            except CUDAError as error:
                logger.error("%s: its context cannot be entered: %s", self._name, error)
                if isinstance(error, DeviceFault):
                    context.health.fail(error)
            item()


class _Stop:
    """The last item of a thread."""

    def __init__(self, ended: Mailbox[None]) -> None:
        self.ended = ended
