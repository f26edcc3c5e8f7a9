"""Send requests to the inference server at random times, from a separate process: load.py address.

It prints, as JSON, the times to the first token (TTFT) and between tokens. The load is an open
loop: requests arrive at the given rate, however slow the server is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field

import httpx

#: Requests that are sent first, one after another, and not counted.
WARM_UP = 6
#: Tokens 0 to 499 are in every vocabulary.
TOKENS = 500


@dataclass
class Result:
    """What the clients measured; times in seconds."""

    sent: int = 0
    refused: int = 0
    #: Requests that received all their tokens, and those that did not.
    answered: int = 0
    wrong: int = 0
    ttft: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    seconds: float = 0.0


async def run(address: str, *, seconds: float, rate: float, longest: int, tokens: int) -> Result:
    """Send prompts of `longest` / 4 to `longest` tokens, `rate` per second."""
    rng, result = random.Random(1), Result()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
        warm_up = Result()
        for number in range(WARM_UP):
            await send(client, rng, longest * (number % 4 + 1) // 4, tokens, warm_up)
        began = time.perf_counter()
        when = rng.expovariate(rate)
        async with asyncio.TaskGroup() as tasks:
            while when < seconds:
                await asyncio.sleep(began + when - time.perf_counter())
                length = rng.randint(longest // 4, longest)
                tasks.create_task(send(client, rng, length, tokens, result))
                when += rng.expovariate(rate)
        result.seconds = time.perf_counter() - began
    result.wrong += warm_up.wrong
    return result


async def send(
    client: httpx.AsyncClient, rng: random.Random, length: int, tokens: int, result: Result
) -> None:
    prompt = [rng.randrange(TOKENS) for _ in range(length)]
    result.sent += 1
    last, received = time.perf_counter(), 0
    async with client.stream(
        "POST", "/generate", json={"prompt": prompt, "tokens": tokens}
    ) as response:
        if response.status_code == 429:
            result.refused += 1
            return
        async for line in response.aiter_lines():
            if line.startswith('data: {"token"'):
                now = time.perf_counter()
                (result.between if received else result.ttft).append(now - last)
                last, received = now, received + 1
    is_complete = response.status_code == 200 and received == tokens
    result.answered += is_complete
    result.wrong += not is_complete


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
