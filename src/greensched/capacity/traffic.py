"""Traffic: requests and their arrival times, from a file or from a seeded generator.

A request either has token counts to read and to write (a language model), or a class and a cost in
seconds of a whole idle device (a plain request).

The generators are fitted to published figures of traces, which are given beside their constants.
Equal seeds give equal traffic.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from greensched._validation import reason
from greensched.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at: Seconds since the beginning.
        context: Tokens to read; 0 for a plain request.
        generated: Tokens to write.
        service: The class of a plain request.
        cost: The cost of a plain request, in seconds of a whole idle device.
    """

    at: float
    context: int = 0
    generated: int = 0
    service: str = ""
    cost: float = 0.0


Traffic = Sequence[Arrival]


# -- from a file ------------------------------------------------------------------------------


def read(path: Path) -> list[Arrival]:
    """Read `TIMESTAMP,ContextTokens,GeneratedTokens`, `arrival,class,cost`, or JSONL of either.

    Columns are found by name, in upper or lower case. Times are seconds or ISO dates; the first
    becomes 0.

    Raises:
        InvalidRequest: The file cannot be read; the message says which line and why.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            if path.suffix == ".jsonl":
                lines = [(i, line) for i, line in enumerate(file, 1) if line.strip()]
                arrivals = [_arrival(path, i, _object(path, i, line)) for i, line in lines]
            else:
                arrivals = [_arrival(path, i, row) for i, row in enumerate(csv.DictReader(file), 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(f"{path}: {reason(error)}") from error
    if not arrivals:
        raise InvalidRequest(f"{path} has no request: give a trace with at least one")
    arrivals.sort(key=lambda arrival: arrival.at)
    return [replace(arrival, at=arrival.at - arrivals[0].at) for arrival in arrivals]


def _object(path: Path, number: int, line: str) -> Mapping[str, object]:
    try:
        row: Mapping[str, object] = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}:{number}: {error}") from error
    return row


def _arrival(path: Path, line: int, row: Mapping[str, object]) -> Arrival:
    if not isinstance(row, dict):
        raise InvalidRequest(f"{path}:{line}: {row!r} is not a JSON object")
    known = {str(key).strip().lower(): value for key, value in row.items()}
    try:
        if "contexttokens" in known:
            tokens = int(str(known["contexttokens"])), int(str(known["generatedtokens"]))
            return _checked(Arrival(_time(known["timestamp"]), *tokens))
        cost = float(str(known["cost"]))
        arrival = Arrival(_time(known["arrival"]), service=str(known["class"]), cost=cost)
        return _checked(arrival)
    except KeyError as error:
        raise InvalidRequest(
            f"{path}:{line}: no column {error}: a trace has TIMESTAMP, ContextTokens and "
            "GeneratedTokens, or arrival, class and cost"
        ) from error
    except ValueError as error:
        raise InvalidRequest(f"{path}:{line}: {error}") from error


def _checked(arrival: Arrival) -> Arrival:
    if not math.isfinite(arrival.at) or not 0 <= arrival.cost < math.inf:
        raise ValueError(f"{arrival} needs finite numbers >= 0")
    if arrival.service:
        return arrival
    if arrival.context < 1 or arrival.generated < 0:
        raise ValueError(f"{arrival} needs at least 1 token to read and 0 to write")
    return arrival


def _time(value: object) -> float:
    """Parse seconds or an ISO date, which may have seven digits of a second (Azure traces).

    A date without a zone is UTC, so that it means the same on every machine.
    """
    try:
        return float(str(value))
    except ValueError:
        text = str(value)
        whole, _, rest = text.partition(".")
        zone = rest.lstrip("0123456789")
        date = datetime.fromisoformat(whole + zone)
        part = float(f"0.{rest.removesuffix(zone)}0")
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() + part


# -- transformations --------------------------------------------------------------------------


def window(traffic: Traffic, seconds: float, seed: int) -> list[Arrival]:
    """Return a window of the traffic at a place chosen by the seed, or all of it if shorter."""
    end = traffic[-1].at
    if end <= seconds:
        return list(traffic)
    begin = random.Random(f"window {seed}").uniform(0.0, end - seconds)
    inside = (a for a in traffic if begin <= a.at < begin + seconds)
    return [replace(arrival, at=arrival.at - begin) for arrival in inside]


def faster(traffic: Traffic, factor: float) -> list[Arrival]:
    """Return the same requests at `factor` times the rate."""
    return [replace(arrival, at=arrival.at / factor) for arrival in traffic]


# -- token counts -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts with the published quantiles and mean.

    Between two quantiles the count (`log=False`) or its logarithm is linear, whichever can produce
    the mean. `least`, the smallest count, follows from the mean.
    """

    p50: float
    p90: float
    p99: float
    least: float
    log: bool

    def at(self, part: float) -> int:
        """Return the count below which this fraction of all requests lies."""
        marks = ((0.0, self.least), (0.5, self.p50), (0.9, self.p90), (0.99, self.p99))
        low = max(i for i, (q, _) in enumerate(marks) if q <= part)
        # Beyond the last published quantile, the last hundredth: at most 1.2 times that quantile.
        (q0, v0), (q1, v1) = (
            (marks[low], marks[low + 1]) if low < 3 else (marks[3], (1.0, 1.2 * self.p99))
        )
        inside = (part - q0) / (q1 - q0)
        value = v0 * (v1 / v0) ** inside if self.log else v0 + (v1 - v0) * inside
        return max(1, round(value))


#: Tokens read and written in the Azure conversation trace, the Azure code trace and the Mooncake
#: conversation trace: the published p50, p90 and p99, and `least` chosen to give the published
#: means, which tests check (1155 and 211; 2048 and 28; 12035 and 343).
CONVERSATION = Lengths(1020, 2734, 4142, 11, True), Lengths(129, 424, 601, 62, False)
CODE = Lengths(1469, 5188, 7436, 64, True), Lengths(13, 55, 251, 1, True)
LONG = Lengths(6909, 27367, 85400, 35, True), Lengths(350, 597, 1119, 39, True)


# -- generators -------------------------------------------------------------------------------

#: An endless series of seconds between arrivals.
Gaps = Iterator[float]


def poisson(rng: random.Random, rate: float) -> Gaps:
    """Yield exponential gaps."""
    while True:
        yield rng.expovariate(rate)


def paced(rng: random.Random, rate: float) -> Gaps:
    """Yield nearly equal gaps, so that below saturation no request waits for another."""
    while True:
        yield rng.uniform(0.9, 1.1) / rate


def lognormal(rng: random.Random, rate: float, sigma: float) -> Gaps:
    """Yield lognormal gaps, which form bursts, like the arrivals of Paella (SOSP'23)."""
    mu = -math.log(rate) - sigma * sigma / 2
    while True:
        yield rng.lognormvariate(mu, sigma)


def gamma(rng: random.Random, rate: float, variation: float) -> Gaps:
    """Yield gamma gaps with a coefficient of variation, which form bursts."""
    shape = 1 / variation**2
    while True:
        yield rng.gammavariate(shape, 1 / (rate * shape))


def breathing(rng: random.Random, rate: float, variation: float, period: float) -> Gaps:
    """Yield exponential gaps at a rate that is drawn again in each period."""
    shape = 1 / variation**2
    now, last, until, current = 0.0, 0.0, 0.0, rate
    while True:
        if now >= until:
            until += period
            current = rate * max(0.05, rng.gammavariate(shape, 1 / shape))
        gap = rng.expovariate(current)
        if now + gap >= until:  # exponential gaps are memoryless: draw again at the new rate
            now = until
            continue
        now += gap
        yield now - last
        last = now


@dataclass(frozen=True, slots=True)
class Generator:
    """A kind of traffic: its published rate, its gaps, and its tokens or costs."""

    rate: float
    gaps: Callable[[random.Random, float], Gaps]
    tokens: tuple[Lengths, Lengths] | None = None
    service: str = "inference"
    cost: float = 0.004


#: Generators by name, with the rates of the traces. Conversation: the variance of its counts per
#: minute is 20.6 x their mean, like a rate that varies by 24 % from minute to minute. Code: gaps
#: with a coefficient of variation of 13.2, a lognormal's with sigma = sqrt(ln(1 + 13.2^2)) = 2.27.
#: Bursty: sigma 1.5, Paella's milder setting. Requests: 4 ms at load 0.5 as in Tally; paced,
#: because Tally's p99 alone is 1.01 of the mean.
GENERATORS: dict[str, Generator] = {
    "poisson": Generator(5.53, poisson, CONVERSATION),
    "bursty": Generator(5.53, lambda rng, rate: lognormal(rng, rate, 1.5), CONVERSATION),
    "gamma": Generator(5.53, lambda rng, rate: gamma(rng, rate, 4.0), CONVERSATION),
    "azure-conv": Generator(
        5.53, lambda rng, rate: breathing(rng, rate, 0.243, 60.0), CONVERSATION
    ),
    "azure-code": Generator(2.57, lambda rng, rate: lognormal(rng, rate, 2.27), CODE),
    "mooncake": Generator(3.40, poisson, LONG),
    "paced": Generator(125.0, paced),
    "requests": Generator(125.0, poisson),
    "request-bursts": Generator(125.0, lambda rng, rate: lognormal(rng, rate, 1.5)),
}


def generate(name: str, seconds: float, seed: int) -> list[Arrival]:
    """Generate this many seconds of traffic.

    Raises:
        InvalidRequest: There is no such generator; the message lists them.
    """
    shape = GENERATORS.get(name)
    if shape is None:
        raise InvalidRequest(
            f"generator {name!r} does not exist: give one of {', '.join(GENERATORS)}"
        )
    rng = random.Random(f"{name} {seed}")
    arrivals, at = [], 0.0
    for gap in shape.gaps(rng, shape.rate):
        at += gap
        if at >= seconds:
            break
        arrivals.append(_drawn(rng, shape, at))
    return arrivals or [_drawn(rng, shape, 0.0)]


def _drawn(rng: random.Random, shape: Generator, at: float) -> Arrival:
    if shape.tokens is None:
        return Arrival(at, service=shape.service, cost=shape.cost)
    read, service_class = (lengths.at(rng.random()) for lengths in shape.tokens)
    return Arrival(at, read, service_class)
