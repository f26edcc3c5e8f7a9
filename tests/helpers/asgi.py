"""Call an application at the ASGI interface, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
from starlette.types import ASGIApp, Message

from greensched import Pool

REQUEST: Message = {"type": "http.request", "body": b"", "more_body": False}


async def call(
    app: ASGIApp,
    path: str = "/",
    messages: Sequence[Message] = (REQUEST,),
    *,
    every: float = 0,
    pool: Pool | None = None,
    leaves: anyio.Event | None = None,
    send: Callable[[Message], Any] | None = None,
) -> list[Message]:
    """Return what an application sends to a client with these messages.

    A message comes every so many seconds; the client disconnects once `leaves` is set. The request
    has the pool as its state, as with `asgi.lifespan`.
    """
    kind = messages[0]["type"].split(".")[0]
    scope = {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "client": ("there", 1),
        "server": ("here", 80),
        "state": {"pool": pool},
    }
    waiting, sent = iter(messages), list[Message]()

    async def receive() -> Message:
        await anyio.sleep(every)
        for message in waiting:
            return message
        await (leaves or anyio.Event()).wait()
        return {"type": f"{kind}.disconnect"} | ({"code": 1001} if kind == "websocket" else {})

    async def record(message: Message) -> None:
        sent.append(message)
        if send is not None:
            await send(message)

    await app(scope, receive, record)
    return sent
