"""`python -m benchmarks.micro.traces NAME FILE`: write a trace that no policy was developed with.

`crowd`: requests of chat, with lognormal lengths, and for 20 s of each 150 s three times as many.
`sessions`: agents, whose prompts grow with each of their turns, a few seconds apart.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

#: Seconds of a trace, and the seed of both, which was used for nothing else.
SECONDS, SEED = 1200.0, 4242
MOST_TOKENS = 8192

#: A request: its time, the tokens of its prompt, and those of its answer.
Request = tuple[float, int, int]


def _tokens(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, min(MOST_TOKENS, round(median * rng.lognormvariate(0.0, sigma))))


def crowd(rng: random.Random) -> Iterator[Request]:
    """Yield requests that come three times as often in some seconds."""
    at = 0.0
    while at < SECONDS:
        at += rng.expovariate(12.0 if at % 150.0 > 130.0 else 4.0)
        yield at, _tokens(rng, 400, 1.2), _tokens(rng, 150, 0.8)


def sessions(rng: random.Random) -> Iterator[Request]:
    """Yield the turns of agents, each of which reads all that was said before."""
    start = 0.0
    while start < SECONDS:
        start += rng.expovariate(0.8)
        at, context = start, 0
        for _ in range(rng.randint(1, 12)):
            context = min(MOST_TOKENS, context + _tokens(rng, 300, 1.0))
            answer = _tokens(rng, 80, 0.7)
            yield at, context, answer
            context, at = context + answer, at + rng.lognormvariate(1.1, 0.7)


TRACES: dict[str, Callable[[random.Random], Iterator[Request]]] = {
    "crowd": crowd,
    "sessions": sessions,
}


def main(name: str, path: Path) -> None:
    found = sorted(each for each in TRACES[name](random.Random(SEED)) if each[0] < SECONDS)
    rows = [f"{at:.4f},{prompt},{answer}\n" for at, prompt, answer in found]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
