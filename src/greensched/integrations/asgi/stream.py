"""Stream a response, or messages to a websocket, from a lease that no slow client prolongs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing

import anyio
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from greensched import Partition
from greensched.errors import InvalidRequest
from greensched.integrations.asgi.connection import while_connected
from greensched.integrations.asgi.errors import TRY_AGAIN_LATER
from greensched.integrations.asgi.task_group import open_task_group

logger = logging.getLogger("greensched")

#: As much as uvicorn itself buffers for a connection.
BUFFER = 64 * 1024
#: What a stream yields: str is sent as UTF-8.
Part = bytes | str


class LeaseStream(Response):
    """Take a lease, then stream what a generator yields on it.

        async def parts(p: Partition) -> AsyncGenerator[bytes]: ...

        return asgi.LeaseStream(pool.partition(16, deadline=0.5), parts, media_type="text/plain")

    The headers are sent with the first bytes of the generator. So `PoolErrors` can answer a refusal
    by the pool, or an error before these bytes, with 429, 503 or 504, and an error of another kind
    is 500. A `StreamingResponse` whose generator takes the lease has already sent 200 by then.

    The generator runs at most `buffer` bytes ahead of the client. A slow client does
    not keep the SMs: once the generator has waited for the client for `patience` seconds in all, it
    is closed and the lease ends. Buffered bytes are still sent; then the connection is cut, so that
    a client cannot mistake them for the whole response.
    When the client disconnects, the generator is cancelled, and the SMs are released once the
    kernels that run there have ended.

    Args:
        partition: The result of `pool.partition(...)`, not entered.
        generate: An async generator function of the lease, which yields bytes or str (as UTF-8).
        buffer: The most bytes that wait to be sent.
        patience: Seconds that the generator waits for the client in all.

    Raises:
        InvalidRequest: `buffer` is below 1 or `patience` is negative. Raised by the constructor.
    """

    def __init__(
        self,
        partition: AbstractAsyncContextManager[Partition],
        generate: Callable[[Partition], AsyncGenerator[Part]],
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
        background: BackgroundTask | None = None,
        *,
        buffer: int = BUFFER,
        patience: float = 1.0,
    ) -> None:
        self._partition, self._generate = partition, generate
        _check_bounds(buffer, patience)
        self._buffer, self._patience = buffer, patience
        super().__init__(None, status_code, headers, media_type, background)

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Set the headers without `Content-Length`, because the length is unknown."""
        super().init_headers(headers)
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts, has_begun = _Parts(self._buffer, self._patience), False

        async def send_parts(block: anyio.CancelScope) -> None:
            nonlocal has_begun
            start = {"type": "http.response.start", "status": self.status_code}
            part = await parts.take()
            has_begun = True
            try:
                await send({**start, "headers": self.raw_headers})
                while part is not None:
                    body = part.encode() if isinstance(part, str) else part
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    part = await parts.take()
                if not parts.is_cut:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except OSError:  # raised by ASGI 2.4 servers when the client has left
                block.cancel()

        try:
            async with while_connected(Request(scope, receive)), open_task_group() as tasks:
                async with self._partition as p:
                    tasks.start_soon(send_parts, tasks.cancel_scope)
                    await parts.fill(self._generate, p)
                parts.close()
        except ClientDisconnect:
            if not has_begun:
                raise
        if self.background is not None:
            await self.background()


async def stream_to_websocket(
    websocket: WebSocket,
    partition: AbstractAsyncContextManager[Partition],
    generate: Callable[[Partition], AsyncGenerator[Part]],
    *,
    buffer: int = BUFFER,
    patience: float = 1.0,
) -> None:
    """Take a lease, then send what a generator yields on it to an accepted websocket.

    Waits until everything is sent: bytes and str each as a message of their type. A refusal by the
    pool is raised, and `PoolErrors` then closes the websocket with 1013.

    The bounds are those of `LeaseStream`. Once the generator has waited for the client for
    `patience` seconds in all, it is closed, the lease ends, and the websocket is closed with 1013
    after the buffered messages. When the client disconnects, or this call is cancelled, the
    generator is cancelled, and the SMs are released once the kernels that run there have ended.

    The server must wait in `send` while the client does not read, as uvicorn does with each of its
    implementations of websockets. Such a server, and the sockets, hold some MB more than `buffer`.

    Args:
        websocket: The websocket, accepted.
        partition: The result of `pool.partition(...)`, not entered.
        generate: An async generator function of the lease, which yields bytes or str.
        buffer: The most bytes that wait to be sent.
        patience: Seconds that the generator waits for the client in all.

    Raises:
        InvalidRequest: `buffer` is below 1 or `patience` is negative; nothing was queued.
        WebSocketDisconnect: The client has disconnected. `PoolErrors` handles it.
    """
    _check_bounds(buffer, patience)
    parts, has_left = _Parts(buffer, patience), False

    async def send_parts(block: anyio.CancelScope) -> None:
        nonlocal has_left
        try:
            while (part := await parts.take()) is not None:
                if isinstance(part, str):
                    await websocket.send_text(part)
                else:
                    await websocket.send_bytes(part)
        except WebSocketDisconnect:
            has_left = True
            block.cancel()

    async with while_connected(websocket), open_task_group() as tasks:
        async with partition as p:
            tasks.start_soon(send_parts, tasks.cancel_scope)
            await parts.fill(generate, p)
        parts.close()
    if has_left:
        raise WebSocketDisconnect(1006)
    if parts.is_cut:
        await websocket.close(TRY_AGAIN_LATER, "the client read too slowly")


class _Parts:
    """Parts that are not sent yet, up to a limit of bytes."""

    def __init__(self, limit: int, patience: float) -> None:
        self._limit = limit
        self._patience = self._remaining = patience
        #: Each with its bytes.
        self._parts: deque[tuple[Part, int]] = deque()
        self._bytes = 0
        self._changed = anyio.Event()
        self._is_closed = False
        #: True once the generator has waited longer than `patience`: the stream has no end.
        self.is_cut = False

    async def fill(
        self, generate: Callable[[Partition], AsyncGenerator[Part]], p: Partition
    ) -> None:
        """Add what the generator yields; close it if it has waited longer than `patience`."""
        async with aclosing(generate(p)) as made:
            async for part in made:
                await self._put(part)
                if self.is_cut:
                    logger.warning(
                        "a stream waited for its client for more than %g s: the lease of %d SMs "
                        "ends, and the stream is cut",
                        self._patience,
                        p.sm_count,
                    )
                    return

    async def _put(self, part: Part) -> None:
        """Add a part, and wait while the limit is reached; cut the stream after `patience`."""
        if part:
            size = len(part.encode() if isinstance(part, str) else part)
            self._parts.append((part, size))
            self._bytes += size
            self._tell()
        began = anyio.current_time()
        with anyio.move_on_after(self._remaining) as wait:
            while self._bytes >= self._limit:
                await self._changed.wait()
        self._remaining -= anyio.current_time() - began
        self.is_cut = wait.cancelled_caught

    async def take(self) -> Part | None:
        """Wait for a part; return None after the last one."""
        while not self._parts:
            if self._is_closed:
                return None
            await self._changed.wait()
        part, size = self._parts.popleft()
        self._bytes -= size
        self._tell()
        return part

    def close(self) -> None:
        self._is_closed = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _check_bounds(buffer: int, patience: float) -> None:
    if buffer < 1 or not patience >= 0:
        raise InvalidRequest(
            f"buffer={buffer!r}, patience={patience!r}: give at least 1 byte, and seconds >= 0"
        )
