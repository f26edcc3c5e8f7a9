"""Traffic: requests and when they come, from a file or from a seeded generator.

Two kinds of rows. *Tokens*: so many to read, so many to write (a language model). *Plain*: a class
and a cost, in seconds of a whole idle device.

The generators are fitted to published figures of traces, not to any file: `docs/capacity.md` has
the table. Equal seeds give equal traffic.
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

from greensched.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at: seconds from the beginning.
        context: tokens to read; 0: it is a plain one.
        generated: tokens to write.
        service: the class of a plain one.
        cost: of a plain one, in seconds of a whole idle device.
    """

    at: float
    context: int = 0
    generated: int = 0
    service: str = ""
    cost: float = 0.0


Traffic = Sequence[Arrival]


# -- from a file ------------------------------------------------------------------------------


def read(path: Path) -> list[Arrival]:
    """Reads `TIMESTAMP,ContextTokens,GeneratedTokens`, `arrival,class,cost`, or JSONL of either.

    Names of columns count, whatever their case; times are seconds or ISO dates, and begin at 0.

    Raises:
        InvalidRequest: it cannot be read; says which line and why.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            if path.suffix == ".jsonl":
                lines = [(i, line) for i, line in enumerate(file, 1) if line.strip()]
                found = [_arrival(path, i, _object(path, i, line)) for i, line in lines]
            else:
                found = [_arrival(path, i, row) for i, row in enumerate(csv.DictReader(file), 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(f"{path}: {error}") from error
    if not found:
        raise InvalidRequest(f"{path}: no request in it")
    found.sort(key=lambda arrival: arrival.at)
    return [replace(arrival, at=arrival.at - found[0].at) for arrival in found]


def _object(path: Path, number: int, line: str) -> Mapping[str, object]:
    try:
        row: Mapping[str, object] = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}:{number}: {error}") from error
    return row


def _arrival(path: Path, line: int, row: Mapping[str, object]) -> Arrival:
    if not isinstance(row, dict):
        raise InvalidRequest(f"{path}:{line}: {row!r} is no object")
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
        raise ValueError(f"{arrival} reads nothing or writes less than nothing")
    return arrival


def _time(value: object) -> float:
    """Seconds, or a date; one with seven digits of a second, too, as the Azure traces have.

    A date without a zone is of UTC: of this machine's own zone it would not be the same anywhere.
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


# -- what is done to traffic ------------------------------------------------------------------


def window(traffic: Traffic, seconds: float, seed: int) -> list[Arrival]:
    """So many seconds of it, from a place that the seed draws; all of it where it is no longer."""
    end = traffic[-1].at
    if end <= seconds:
        return list(traffic)
    begin = random.Random(f"window {seed}").uniform(0.0, end - seconds)
    inside = (a for a in traffic if begin <= a.at < begin + seconds)
    return [replace(arrival, at=arrival.at - begin) for arrival in inside]


def faster(traffic: Traffic, factor: float) -> list[Arrival]:
    """The same requests at so many times the rate, in the same order and shape."""
    return [replace(arrival, at=arrival.at / factor) for arrival in traffic]


# -- token counts -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts that has the published quantiles and the published mean.

    Between two quantiles it is a straight line, of the count (`log=False`) or of its logarithm,
    whichever can have the mean; the smallest count is what the mean then asks for.
    """

    p50: float
    p90: float
    p99: float
    least: float
    log: bool

    def at(self, part: float) -> int:
        """The count below which this part of all requests is."""
        marks = ((0.0, self.least), (0.5, self.p50), (0.9, self.p90), (0.99, self.p99))
        low = max(i for i, (q, _) in enumerate(marks) if q <= part)
        # Beyond the last quantile that was published: as steep again, for the last hundredth.
        (q0, v0), (q1, v1) = (
            (marks[low], marks[low + 1]) if low < 3 else (marks[3], (1.0, 1.2 * self.p99))
        )
        inside = (part - q0) / (q1 - q0)
        value = v0 * (v1 / v0) ** inside if self.log else v0 + (v1 - v0) * inside
        return max(1, round(value))


#: Tokens read and written in the Azure conversation trace, the Azure code trace and the Mooncake
#: conversation trace: p50, p90, p99 and mean as published (means
#: 1155 and 211; 2048 and 28; 12035 and 343). `least` makes the mean right (tests check it).
CONVERSATION = Lengths(1020, 2734, 4142, 11, True), Lengths(129, 424, 601, 62, False)
CODE = Lengths(1469, 5188, 7436, 64, True), Lengths(13, 55, 251, 1, True)
LONG = Lengths(6909, 27367, 85400, 35, True), Lengths(350, 597, 1119, 39, True)


# -- generators -------------------------------------------------------------------------------

#: Seconds between arrivals, one after another, for ever.
Gaps = Iterator[float]


def poisson(rng: random.Random, rate: float) -> Gaps:
    """Memoryless."""
    while True:
        yield rng.expovariate(rate)


def paced(rng: random.Random, rate: float) -> Gaps:
    """One after another, hardly varied: nobody waits for another request where there is room."""
    while True:
        yield rng.uniform(0.9, 1.1) / rate


def lognormal(rng: random.Random, rate: float, sigma: float) -> Gaps:
    """Bursts: gaps whose logarithm is normal, as Paella's (SOSP'23) arrivals are."""
    mu = -math.log(rate) - sigma * sigma / 2
    while True:
        yield rng.lognormvariate(mu, sigma)


def gamma(rng: random.Random, rate: float, variation: float) -> Gaps:
    """Bursts: gamma gaps of a coefficient of variation."""
    shape = 1 / variation**2
    while True:
        yield rng.gammavariate(shape, 1 / (rate * shape))


def breathing(rng: random.Random, rate: float, variation: float, period: float) -> Gaps:
    """Poisson at a rate that is drawn anew each period: crowds come and go."""
    shape = 1 / variation**2
    now, last, until, current = 0.0, 0.0, 0.0, rate
    while True:
        if now >= until:
            until += period
            current = rate * max(0.05, rng.gammavariate(shape, 1 / shape))
        gap = rng.expovariate(current)
        if now + gap >= until:  # memoryless: drawn again at the new rate
            now = until
            continue
        now += gap
        yield now - last
        last = now


@dataclass(frozen=True, slots=True)
class Generator:
    """A shape of traffic: its rate as published, its gaps, and its tokens or costs."""

    rate: float
    gaps: Callable[[random.Random, float], Gaps]
    tokens: tuple[Lengths, Lengths] | None = None
    service: str = "inference"
    cost: float = 0.004


#: By name. Rates are those of the traces. Conversation: the variance of its counts in a minute is
#: 20.6 x their mean, which a rate that varies by 24 % from minute to minute gives. Code: gaps of
#: coefficient of variation 13.2, which is a lognormal's of sigma = sqrt(ln(1 + 13.2^2)) = 2.27.
#: Bursty: sigma 1.5, Paella's milder setting. Requests: 4 ms at load 0.5, which is
#: Tally's; paced, as its requests must be, whose p99 alone is 1.01 of their mean.
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
    """So many seconds of a generator's traffic.

    Raises:
        InvalidRequest: no such generator; names those there are.
    """
    shape = GENERATORS.get(name)
    if shape is None:
        raise InvalidRequest(f"no generator {name!r}: there is {', '.join(GENERATORS)}")
    rng = random.Random(f"{name} {seed}")
    found, at = [], 0.0
    for gap in shape.gaps(rng, shape.rate):
        at += gap
        if at >= seconds:
            break
        found.append(_drawn(rng, shape, at))
    return found or [_drawn(rng, shape, 0.0)]


def _drawn(rng: random.Random, shape: Generator, at: float) -> Arrival:
    if shape.tokens is None:
        return Arrival(at, service=shape.service, cost=shape.cost)
    read, written = (lengths.at(rng.random()) for lengths in shape.tokens)
    return Arrival(at, read, written)
