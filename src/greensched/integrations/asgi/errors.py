"""Answer a pool's errors in an ASGI application."""

from __future__ import annotations

import logging
import math
import random

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from greensched.errors import (
    DeadlineExceeded,
    DeadlineImpossible,
    DeviceFault,
    DeviceHung,
    DeviceLost,
    ForkedPool,
    NoPool,
    PoolClosed,
    PoolLost,
    QueueFull,
)

logger = logging.getLogger("greensched")

#: The response statuses of a pool's errors; other errors are 500. No client receives a 499, which
#: nginx uses in its log.
STATUS: dict[type[Exception], int] = {
    QueueFull: 429,
    PoolClosed: 503,
    ForkedPool: 503,
    DeviceLost: 503,
    DeviceFault: 503,
    DeviceHung: 503,
    DeadlineImpossible: 503,
    PoolLost: 503,
    NoPool: 503,
    DeadlineExceeded: 504,
    ClientDisconnect: 499,
}

#: The close code of a websocket that a pool refuses. Source: IANA's registry of close codes, "Try
#: Again Later". Before the websocket is accepted, servers answer 403 for any code.
TRY_AGAIN_LATER = 1013

#: Bytes of UTF-8 in a close frame behind its code. Source: RFC 6455, 5.5.
MAX_REASON = 123


class PoolErrors:
    """Middleware that turns a pool's errors into the responses of `STATUS`, as `{"detail": ...}`.

    A full queue is 429 with `Retry-After`: the pool's estimate times a random number from 1 to 2,
    so that refused clients return apart, in whole seconds, rounded up. A request that would miss
    its deadline is 503; its `Retry-After` is how late it would be. Errors that `STATUS` does not
    list, and errors in the middle of a response, pass through. An exception group (for example from
    an `asyncio.TaskGroup`) gets a response if all its errors are listed.

    * Mounted applications are covered: their own 500, sent before the error arrives here, is
      replaced. For this a complete response of status 500 is sent only when the application
      returns, after the response's own background tasks.
    * A refusal after a complete response, from a background task, is logged as a warning and passes
      through; the pool's statistics count it.
    * A websocket is closed with 1013, "try again later", before or after it was accepted. A
      websocket whose client has left ends without an error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._close(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = _Sent(send)
        try:
            await self.app(scope, receive, sent.send)
        except Exception as error:
            response = _response(error)
            if response is not None and sent.is_complete:
                logger.warning("a background task failed after its response: %s", error)
            if response is None or sent.has_begun:
                await sent.flush()
                raise
        else:
            await sent.flush()
            return
        await response(scope, receive, send)

    async def _close(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_closed = False

        async def send_and_record(message: Message) -> None:
            nonlocal is_closed
            is_closed = message["type"] == "websocket.close"
            await send(message)

        try:
            await self.app(scope, receive, send_and_record)
        except WebSocketDisconnect:
            return
        except Exception as error:
            if is_closed or any(_status(leaf) is None for leaf in _leaves(error)):
                raise
            reason = str(_leaves(error)[0]).encode()[:MAX_REASON].decode(errors="ignore")
        else:
            return
        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason})


class _Sent:
    """What an application has sent. A complete 500 is held back, because it may be replaced."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Message] = []
        #: True once a message was sent that cannot be replaced.
        self.has_begun = False
        #: True once a response was sent completely, so that a later error is a background task's.
        self.is_complete = False

    async def send(self, message: Message) -> None:
        is_500 = message["type"] == "http.response.start" and message["status"] == 500
        if is_500 or self._held:
            self._held.append(message)
            if is_500 or not message.get("more_body", False):
                return
            await self.flush()
            return
        self.has_begun = True
        await self._send(message)
        is_body = message["type"] == "http.response.body"
        self.is_complete = is_body and not message.get("more_body", False)

    async def flush(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self.has_begun = True
            await self._send(message)


def _response(error: Exception) -> Response | None:
    """Return the response to an error, or None if `STATUS` does not list it."""
    refusals = [(leaf, _status(leaf)) for leaf in _leaves(error)]
    if any(status is None for _, status in refusals):
        return None
    refusal, status = refusals[0]
    headers = {}
    if isinstance(refusal, QueueFull):
        # Otherwise clients that are refused together would return together.
        later = refusal.retry_after * random.uniform(1.0, 2.0)
        headers["Retry-After"] = seconds = _whole_seconds(later)
        refusal = QueueFull(refusal.waiting, int(seconds))  # the body says what the header does
    elif isinstance(refusal, DeadlineImpossible):
        headers["Retry-After"] = _whole_seconds(refusal.predicted - refusal.deadline)
    return JSONResponse({"detail": str(refusal)}, status or 500, headers)


def _whole_seconds(seconds: float) -> str:
    """Format seconds for HTTP: rounded up, at least 1."""
    return str(max(1, math.ceil(seconds)))


def _status(error: Exception) -> int | None:
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), None)


def _leaves(error: Exception) -> list[Exception]:
    """Return the errors in an exception group, at any depth, or the error itself."""
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [leaf for member in error.exceptions for leaf in _leaves(member)]
