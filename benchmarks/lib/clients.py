"""Clients of a server, in a process of their own: `python -m benchmarks.lib.clients ADDRESS`.

With `--rate` requests come at Poisson times, so many a second, and do not wait for each other. With
`--together` so many clients each make a request again when it is answered. Prints the status and
the seconds of each request as JSON; a request without an answer has the status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import httpx

#: The path of a request, and its JSON body.
PATH, BODY = "/sum", [1.0, 2.0, 3.5]

Answers = list[tuple[int, float]]


async def run(address: str, seconds: float, rate: float, together: int) -> Answers:
    """Make requests for so many seconds; return the answers."""
    rng, found = random.Random(1), Answers()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=20, limits=limits) as client:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(together):
                tasks.create_task(_repeat(client, began + seconds, found))
            when = rng.expovariate(rate) if rate else seconds
            while when < seconds:
                await asyncio.sleep(began + when - time.perf_counter())
                tasks.create_task(_request(client, found))
                when += rng.expovariate(rate)
    return found


async def _repeat(client: httpx.AsyncClient, until: float, found: Answers) -> None:
    while time.perf_counter() < until:
        await _request(client, found)


async def _request(client: httpx.AsyncClient, found: Answers) -> None:
    began = time.perf_counter()
    try:
        status = (await client.post(PATH, json=BODY)).status_code
    except httpx.HTTPError:
        status = 0
    found.append((status, time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lib.clients")
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, required=True, help="how long")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second")
    parser.add_argument("--together", type=int, default=0, help="clients at once")
    print(json.dumps(asyncio.run(run(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
