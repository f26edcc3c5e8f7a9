"""Clients of the inference server, at random times, in a process of their own: load.py [address].

It prints, as JSON, how long they waited for their first token (TTFT) and between two tokens. Nobody
waits for anybody: clients come at the rate that is asked for, however slow the server is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field

import httpx

#: So many come first, one after the other, and are not counted.
WARM_UP = 6
#: Any vocabulary has these tokens.
TOKENS = 500


@dataclass
class Found:
    """What the clients saw. Seconds."""

    sent: int = 0
    refused: int = 0
    #: Those who got all the tokens that they asked for, and those who did not.
    answered: int = 0
    wrong: int = 0
    ttft: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    seconds: float = 0.0


async def run(address: str, *, seconds: float, rate: float, longest: int, tokens: int) -> Found:
    """Sends prompts of up to so many tokens, a quarter of that at least, at a rate a second."""
    rng, found = random.Random(1), Found()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
        warm_up = Found()
        for number in range(WARM_UP):
            await ask(client, rng, longest * (number % 4 + 1) // 4, tokens, warm_up)
        began = time.perf_counter()
        when = rng.expovariate(rate)
        async with asyncio.TaskGroup() as tasks:
            while when < seconds:
                await asyncio.sleep(began + when - time.perf_counter())
                length = rng.randint(longest // 4, longest)
                tasks.create_task(ask(client, rng, length, tokens, found))
                when += rng.expovariate(rate)
        found.seconds = time.perf_counter() - began
    found.wrong += warm_up.wrong
    return found


async def ask(
    client: httpx.AsyncClient, rng: random.Random, length: int, tokens: int, found: Found
) -> None:
    prompt = [rng.randrange(TOKENS) for _ in range(length)]
    found.sent += 1
    asked, got = time.perf_counter(), 0
    last = asked
    async with client.stream(
        "POST", "/generate", json={"prompt": prompt, "tokens": tokens}
    ) as response:
        if response.status_code == 429:
            found.refused += 1
            return
        async for line in response.aiter_lines():
            if line.startswith('data: {"token"'):
                now = time.perf_counter()
                (found.between if got else found.ttft).append(now - last)
                last, got = now, got + 1
    is_right = response.status_code == 200 and got == tokens
    found.answered += is_right
    found.wrong += not is_right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = vars(parser.parse_args())
    print(json.dumps(asdict(asyncio.run(run(**options)))))


if __name__ == "__main__":
    main()
