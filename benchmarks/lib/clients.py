"""Clients of a server, in a process of their own: python -m benchmarks.lib.clients [address].

With --rate they come at random times, so many a second on average, and nobody waits for anybody.
With --together there are so many, and each asks again when it is answered. It prints, as JSON, the
status and the seconds of each; 0 is the status of who got no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import httpx

#: What is asked: the path, and what is sent there as JSON.
PATH, BODY = "/sum", [1.0, 2.0, 3.5]

Answers = list[tuple[int, float]]


async def come(address: str, seconds: float, rate: float, together: int) -> Answers:
    """The answers to all who came within so many seconds."""
    rng, found = random.Random(1), Answers()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=20, limits=limits) as client:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(together):
                tasks.create_task(_keep_asking(client, began + seconds, found))
            when = rng.expovariate(rate) if rate else seconds
            while when < seconds:
                await asyncio.sleep(began + when - time.perf_counter())
                tasks.create_task(_ask(client, found))
                when += rng.expovariate(rate)
    return found


async def _keep_asking(client: httpx.AsyncClient, until: float, found: Answers) -> None:
    while time.perf_counter() < until:
        await _ask(client, found)


async def _ask(client: httpx.AsyncClient, found: Answers) -> None:
    began = time.perf_counter()
    try:
        status = (await client.post(PATH, json=BODY)).status_code
    except httpx.HTTPError:
        status = 0
    found.append((status, time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--together", type=int, default=0)
    print(json.dumps(asyncio.run(come(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
