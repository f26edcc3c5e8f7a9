"""Traffic: what files may say, and that generators have the figures they are fitted to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev, pvariance

import pytest

from greensched.capacity.traffic import (
    CODE,
    CONVERSATION,
    GENERATORS,
    LONG,
    Arrival,
    Lengths,
    faster,
    generate,
    read,
    window,
)
from greensched.errors import InvalidRequest


def write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_of_tokens(tmp_path: Path) -> None:
    """The Azure format is read, seven digits of a second and all, and begins at 0."""
    path = write(
        tmp_path,
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    first, second = read(path)
    assert first == Arrival(0.0, 374, 44)
    assert (second.context, second.generated) == (396, 109)
    assert second.at == pytest.approx(4.314579, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.csv", ("arrival,class,cost", "2,b,0.5", "1,a,0.25")),
        (
            "a.jsonl",
            (
                '{"arrival": 2, "class": "b", "cost": 0.5}',
                '{"arrival": 1, "class": "a", "cost": 0.25}',
            ),
        ),
    ],
)
def test_a_plain_trace(tmp_path: Path, name: str, lines: Sequence[str]) -> None:
    """Classes and costs, as CSV or JSONL, come in the order of their times."""
    found = read(write(tmp_path, name, *lines))
    assert found == [Arrival(0.0, service="a", cost=0.25), Arrival(1.0, service="b", cost=0.5)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("arrival,cost", "1,2"), "no column"),
        (("arrival,class,cost", "1,a,-2"), "a.csv:2"),
        (("arrival,class,cost", "soon,a,2"), "a.csv:2"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "1,0,2"), "at least 1 token"),
        (("arrival,class,cost",), "no request"),
    ],
)
def test_a_bad_trace_is_refused(tmp_path: Path, lines: Sequence[str], said: str) -> None:
    """What cannot be read is refused, with the place and the reason."""
    with pytest.raises(InvalidRequest, match=said):
        read(write(tmp_path, "a.csv", *lines))


@pytest.mark.parametrize("line", ["{", "[" * 99_999, '{"arrival": ' + "1" * 9_999 + "}", "[1]"])
def test_a_bad_line_of_jsonl_is_named(tmp_path: Path, line: str) -> None:
    """A line that is no object is refused with its number; empty ones are none."""
    with pytest.raises(InvalidRequest, match=r"a\.jsonl:3"):
        read(write(tmp_path, "a.jsonl", '{"arrival": 0, "class": "a", "cost": 1}', "", line))


def test_a_field_too_long_for_csv_is_refused(tmp_path: Path) -> None:
    """What the csv module refuses is an error of ours."""
    with pytest.raises(InvalidRequest, match="field larger"):
        read(write(tmp_path, "a.csv", "arrival,class,cost", "0,a," + "1" * 200_000))


def test_dates_have_zones_and_fractions(tmp_path: Path) -> None:
    """ISO dates as programs write them; one without a zone is of UTC on every machine."""
    dates = ("2024-03-31 00:30:00.5", "2024-03-31T00:30:01.000Z", "2024-03-31T04:30:00+02:00")
    lines = ("\ufeffarrival,class,cost", *(f"{date},a,1" for date in dates))
    assert [arrival.at for arrival in read(write(tmp_path, "a.csv", *lines))] == [0, 0.5, 7199.5]


def test_windows_and_rates() -> None:
    """A window begins at 0 and is another for another seed; faster traffic is the same requests."""
    traffic = generate("poisson", 600.0, 1)
    part = window(traffic, 60.0, 1)
    assert 0 <= part[0].at <= part[-1].at < 60
    assert part != window(traffic, 60.0, 2)
    assert part == window(traffic, 60.0, 1)
    assert [a.at * 2 for a in faster(part, 2.0)] == pytest.approx([a.at for a in part])


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_has_its_rate_and_its_seed(name: str) -> None:
    """Each comes at its published rate, and a seed gives the same traffic each time."""
    rate = GENERATORS[name].rate
    seconds = 20_000 / rate
    found = generate(name, seconds, 1)
    assert len(found) / seconds == pytest.approx(rate, rel=0.15)
    assert found[:50] == generate(name, seconds, 1)[:50] != generate(name, seconds, 2)[:50]


@pytest.mark.parametrize(
    ("lengths", "published"),
    [
        (CONVERSATION[0], 1155),
        (CONVERSATION[1], 211),
        (CODE[0], 2048),
        (CODE[1], 28),
        (LONG[0], 12_035),
        (LONG[1], 343),
    ],
)
def test_lengths_have_the_published_mean(lengths: Lengths, published: float) -> None:
    """Their quantiles are the published ones by construction, and their mean is within 3 %."""
    n = 5000
    assert mean(lengths.at((i + 0.5) / n) for i in range(n)) == pytest.approx(published, rel=0.03)
    assert lengths.at(0.5) == round(lengths.p50)
    assert lengths.at(0.99) == round(lengths.p99)


def test_conversations_come_as_published() -> None:
    """Gaps vary by 1.09 of their mean, counts in a minute by 20.6 (index of dispersion)."""
    found = [generate("azure-conv", 3500.0, seed) for seed in range(3)]
    gaps = [b.at - a.at for each in found for a, b in pairwise(each)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx(1.09, rel=0.1)
    counts = [
        n for each in found for n in Counter(int(arrival.at / 60) for arrival in each).values()
    ]
    assert pvariance(counts) / mean(counts) == pytest.approx(20.6, rel=0.4)


def test_an_unknown_generator_is_refused() -> None:
    """The message names those there are."""
    with pytest.raises(InvalidRequest, match="azure-conv"):
        generate("azur", 1.0, 1)
