"""Worker threads, on which everything blocking runs, never on an event loop's thread."""

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
    """A thread that runs items one after another. The first item starts it.

    After each item the context that was current before it is current again, whatever the item did.

    Args:
        driver: Starts the thread.
        name: The name of the thread.
        context: Entered for each item. None: the items enter contexts themselves.
        relaxed: Use the relaxed capture mode, so that no call here invalidates another thread's
            capture. Needs an initialised driver.
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
        #: Receives items once the thread has started.
        self.mailbox: Mailbox[Item | _Stop] | None = None
        self._is_dismissed = False

    def submit(self, item: Item) -> None:
        """Run an item after earlier ones. Never waits. Items catch their own exceptions.

        Raises:
            RuntimeError: The thread cannot be started.
        """
        mailbox = self.mailbox
        if mailbox is None:
            mailbox = self._start()
        mailbox.put(item)
        if self._is_dismissed:  # an earlier item submitted this one: the thread ends after it
            self.dismiss()

    def submit_if_running(self, item: Item) -> None:
        """Submit an item if the thread is running; otherwise do nothing."""
        mailbox = self.mailbox
        if mailbox is not None:
            mailbox.put(item)

    def post(self, item: Callable[[Exception | None], object]) -> None:
        """Submit an item that must run in any case, or else its ticket would never be written.

        Its argument is None, or the error that prevented the start of a thread. With an error it
        runs on the calling thread.
        """
        try:
            self.submit(partial(item, None))
        except RuntimeError as error:
            item(error)

    def stop(self) -> None:
        """End the thread after its submitted items, and wait for its end. Idempotent."""
        mailbox, self.mailbox = self.mailbox, None
        if mailbox is not None:
            ended: Mailbox[None] = self._driver.create_mailbox()
            mailbox.put(_Stop(ended))
            ended.get()

    def dismiss(self) -> None:
        """End the thread after its submitted items, and later ones, without waiting for it."""
        self._is_dismissed = True
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
            except BaseException:  # the thread continues, as the executor's end waits for it
                logger.exception("%s: an item raised instead of handling its error", self._name)
            del item  # otherwise it would live until the next item arrives

    def _run_in_context(self, item: Item, context: Context) -> None:
        """Run an item even if the context cannot be entered: a task waits for its result."""
        if context.health.is_over:  # no call follows the loss of a device
            item()
            return
        block = ExitStack()
        try:
            try:
                block.enter_context(context.entered())
            except DeviceFault:
                raise
            except CUDAError:  # try again, because the item would fail for another reason
                block.enter_context(context.entered())
        except CUDAError as error:
            logger.error("%s: its context cannot be entered: %s", self._name, error)
            if isinstance(error, DeviceFault):
                context.health.fail(error)
        try:
            item()
        finally:
            try:
                block.close()
            except DeviceFault as error:  # for example because the driver was closed meanwhile
                context.health.fail(error)


class _Stop:
    """The last item of a thread."""

    def __init__(self, ended: Mailbox[None]) -> None:
        self.ended = ended
