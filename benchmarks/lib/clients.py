"""Clients of a server, in a process of their own: `python -m benchmarks.lib.clients ADDRESS`.

With `--rate` requests come at Poisson times, so many a second, and do not wait for each other. With
`--together` so many clients each make a request again when it is answered. Beside them `--slow`
readers each take a stream, read it slowly, leave after a second, and come back. Each request has a
connection of its own. Prints `Found` as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import httpx

#: The path of a request, and its JSON body; the path of a stream.
PATH, BODY, STREAM = "/sum", [1.0, 2.0, 3.5], "/stream"
#: A slow reader takes what one read of its socket returns, then waits so many seconds.
PAUSE_S = 0.1
#: Seconds after which a slow reader leaves, and until one that got no stream comes back.
READING_S = 1.0
#: The statuses of a request that was not answered: its connection was refused, or broke.
REFUSED, BROKEN = -1, 0


class Answer(NamedTuple):
    """How a request ended: an HTTP status, or `REFUSED` or `BROKEN`.

    Times are in seconds: from the request to its end, and its end by the clock of all processes.
    """

    status: int
    took: float
    ended: float


@dataclass(slots=True)
class Found:
    """The answers of requests, and of streams: until their first bytes."""

    answers: list[Answer] = field(default_factory=list)
    streams: list[Answer] = field(default_factory=list)

    @classmethod
    def read(cls, text: bytes) -> Found:
        """Return what the process printed."""
        return cls(
            **{name: [Answer(*each) for each in of] for name, of in json.loads(text).items()}
        )


async def run(address: str, seconds: float, rate: float, together: int, slow: int) -> Found:
    """Make requests for so many seconds; return how they ended."""
    rng, found = random.Random(1), Found()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=20, limits=limits) as client:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(together):
                tasks.create_task(_repeat(client, began + seconds, found))
            for _ in range(slow):
                tasks.create_task(_read_slowly(client, began + seconds, found))
            when = rng.expovariate(rate) if rate else seconds
            while when < seconds:
                await asyncio.sleep(began + when - time.monotonic())
                tasks.create_task(_request(client, found))
                when += rng.expovariate(rate)
    return found


async def _repeat(client: httpx.AsyncClient, until: float, found: Found) -> None:
    while time.monotonic() < until:
        await _request(client, found)


async def _request(client: httpx.AsyncClient, found: Found) -> None:
    began = time.monotonic()
    try:
        status = (await client.post(PATH, json=BODY)).status_code
    except httpx.HTTPError as error:
        status = _unanswered(error)
    found.answers.append(_answer(status, began))


async def _read_slowly(client: httpx.AsyncClient, until: float, found: Found) -> None:
    while (began := time.monotonic()) < until:
        status = None
        try:
            async with client.stream("GET", STREAM) as response:
                status = response.status_code
                found.streams.append(_answer(status, began))
                if status == 200:
                    async for _ in response.aiter_raw():
                        await asyncio.sleep(PAUSE_S)
                        if time.monotonic() - began > READING_S:
                            break
        except httpx.HTTPError as error:  # afterwards the service may cut it
            if status is None:
                found.streams.append(_answer(_unanswered(error), began))
        await asyncio.sleep(began + READING_S - time.monotonic())


def _answer(status: int, began: float) -> Answer:
    now = time.monotonic()
    return Answer(status, now - began, now)


def _unanswered(error: httpx.HTTPError) -> int:
    return REFUSED if isinstance(error, httpx.ConnectError) else BROKEN


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lib.clients")
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, required=True, help="how long")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second")
    parser.add_argument("--together", type=int, default=0, help="clients at once")
    parser.add_argument("--slow", type=int, default=0, help="slow readers of a stream")
    print(json.dumps(asdict(asyncio.run(run(**vars(parser.parse_args()))))))


if __name__ == "__main__":
    main()
