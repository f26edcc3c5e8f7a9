"""Cancel work on the GPU when the client of a request or a websocket disconnects."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive
from starlette.websockets import WebSocket, WebSocketDisconnect

from greensched.integrations.asgi.task_group import open_task_group

#: Bytes of a body that are kept for the application while a block watches for a disconnect. Beyond
#: that the watch pauses until the application reads, so that a client cannot fill the service's
#: memory. uvicorn's own buffer is 64 KiB; this one holds a usual JSON body.
MAX_KEPT = 1 << 20


class ReplayedMessages:
    """The messages of one connection: watches read them early, the application gets them in order.

    One task at a time reads from the connection; other tasks wait for its messages.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0
        self._is_being_read = False
        self._changed = anyio.Event()

    @property
    def has_left(self) -> bool:
        """True once the client has disconnected."""
        return bool(self._kept) and self._kept[-1]["type"].endswith(".disconnect")

    @property
    def is_empty(self) -> bool:
        return not self._kept

    async def receive(self) -> Message:
        """Return the next message as ASGI's `receive` does; a disconnect again and again."""
        await anyio.lowlevel.checkpoint()  # so that a loop over `receive` can always be cancelled
        await self._read_until(lambda: bool(self._kept), limit=None)
        message = self._kept[0]
        if not message["type"].endswith(".disconnect"):
            self._kept.popleft()
            self._kept_bytes -= _size(message)
            self._tell()
        return message

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has disconnected; keep what it sends before."""
        await self._read_until(lambda: self.has_left, limit=MAX_KEPT)

    async def _read_until(self, is_done: Callable[[], bool], limit: int | None) -> None:
        while not is_done():
            if self._is_being_read or (limit is not None and self._kept_bytes > limit):
                await self._changed.wait()
                continue
            self._is_being_read = True
            try:
                message = await self._receive()
                self._kept.append(message)
                self._kept_bytes += _size(message)
            finally:
                self._is_being_read = False
                self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _size(message: Message) -> int:
    return sum(len(message.get(part) or b"") for part in ("body", "bytes", "text"))


@asynccontextmanager
async def while_connected(connection: Request | WebSocket) -> AsyncGenerator[None]:
    """Open a block that is cancelled when the client disconnects. Plain endpoints are not.

    A queued request in the block leaves the queue immediately; leased SMs are released once the
    kernels that run there have ended. A `def` endpoint, which runs on a thread, cannot use it.

    In and after the block the application may read the body, or the websocket's messages, as
    usual: messages that the block reads early are kept, up to 1 MiB. While more than that is
    unread, a disconnect is not noticed. The block is an anyio cancel scope: each `await` in it
    after the disconnect is cancelled, too. So close resources that need an `await` after the block.

    Raises:
        ClientDisconnect: The block was cancelled; raised at its end. `PoolErrors` handles it.
        WebSocketDisconnect: The same, for a websocket.
    """
    before = connection._receive  # private: Starlette has no other way to replace it
    owner = getattr(before, "__self__", None)  # an outer block may have replaced it already
    messages = owner if isinstance(owner, ReplayedMessages) else ReplayedMessages(before)
    connection._receive = messages.receive
    has_left, has_ended = False, False

    async def watch(block: anyio.CancelScope) -> None:
        nonlocal has_left
        await messages.wait_for_disconnect()
        has_left = True
        block.cancel()

    try:
        async with open_task_group() as tasks:
            tasks.start_soon(watch, tasks.cancel_scope)
            yield
            has_ended = True
            tasks.cancel_scope.cancel()
    finally:
        if messages.is_empty:
            connection._receive = before
    if has_left and not has_ended:
        raise ClientDisconnect if isinstance(connection, Request) else WebSocketDisconnect(1006)
