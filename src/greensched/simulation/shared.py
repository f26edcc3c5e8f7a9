"""What is known of SMs that two share: where that is bad, and where nothing is better."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from greensched.simulation.arms import Arm, Seat, Split
from greensched.simulation.machine import Machine
from greensched.simulation.scenes import (
    Check,
    beside,
    forever,
    pair,
    percentile,
    play,
    same,
    work,
)
from greensched.simulation.sizing import Unsplit
from greensched.simulation.slices import Sliced
from greensched.simulation.streams import PriorityGate, Streams
from greensched.simulation.tables import CURVES

# -- 3: Tally's setting -------------------------------------------------------------------------

#: BERT inference of 4.05 ms, one each 8.1 ms (load 0.5; latencies are of requests by themselves:
#: alone their p99 is 1.01 of their mean). Its kernels: the median of BERT's in Orion's profile.
REQUEST_NS, KERNEL_NS, PERIOD_S = 4_050_000, 34_000, 0.0081
#: Kernels of training: the same profile's median and p99, and at most the longest of its training
#: steps (3.7 ms).
TRAIN_MEDIAN_NS, TRAIN_P99_NS, TRAIN_MOST_NS = 34_000, 515_000, 3_700_000
#: What TGS lets best effort have in those runs; Tally's bound on a turn.
TGS_RATE, TURN_NS = 0.79, 31_600
REQUESTS = 120


def colocation(seed: int) -> Iterator[Check]:
    """Short requests beside training, in four ways."""
    given = (
        "119 kernels of 34 us a request; training kernels of median 34, p99 515 us; 2 ms slices; "
        "TGS's published rate; turns of 31.6 us"
    )
    what = "p99 of a 4 ms request beside training"
    mps = _beside_training(Streams(), _training(seed), 1.0, seed)
    # One population of kernels stands for six training jobs: their p99 were 2.2 to 11.9 x.
    yield Check(f"{what}: MPS, mean of six", 5.72, mps, given)
    yield Check(f"{what}: MPS, median of six", 4.82, mps, given)
    tgs = _beside_training(Streams(), _training(seed), TGS_RATE, seed)
    yield Check(f"{what}: TGS", 3.84, tgs, given)
    slices = _beside_training(Sliced(), _training(seed), 1.0, seed)
    yield Check(f"{what}: time slices", 2.73, slices, given)
    tally = _beside_training(PriorityGate(), same(TURN_NS), 1.0, seed)
    yield Check(f"{what}: Tally", 1.074, tally, given)


def _training(seed: int) -> Iterator[int]:
    rng = random.Random(f"training {seed}")
    sigma = math.log(TRAIN_P99_NS / TRAIN_MEDIAN_NS) / 2.3263
    while True:
        yield min(TRAIN_MOST_NS, round(rng.lognormvariate(math.log(TRAIN_MEDIAN_NS), sigma)))


def _beside_training(arm: Arm, lengths: Iterator[int], rate: float, seed: int) -> float:
    """p99 of a request over what it takes alone."""
    machine = Machine("a100", pair(work(108), work(108)), {}, seed)
    number = REQUEST_NS // KERNEL_NS
    pieces = (KERNEL_NS,) * number
    found: list[float] = []

    async def critical(seat: Seat) -> None:
        due = 0.0
        for _ in range(REQUESTS):
            due += PERIOD_S
            await asyncio.sleep(max(0.0, due - machine.now() / 1e9))
            began = machine.now()
            await seat.run(pieces)
            found.append((machine.now() - began) / (number * KERNEL_NS))

    async def training(seat: Seat) -> None:
        for ns in lengths:
            await seat.run((ns,))
            if rate < 1:
                await asyncio.sleep(ns * (1 / rate - 1) / 1e9)

    async def drive(_: Machine, seat: Callable[[str], Seat]) -> None:
        await beside(critical(seat("critical")), training(seat("other")))

    play(machine, arm, drive)
    return percentile(found, 0.99)


# -- 4: nothing saturates -----------------------------------------------------------------------

#: Zamba2 on an A100: prefill 8.15 ms and decode 0.89 ms alone. Their curves are those of kernels
#: of the sister model Falcon-H1 (`tables`): the state-space scan, and attention at batch 8.
PREFILL_NS, DECODE_NS = 8_150_000, 890_000
#: Prefill's and decode's SMs, and what decode took there; prefill took 8.33 to 8.57.
PUBLISHED_SPLITS = {(32, 76): (8.57, 1.07), (44, 64): (8.33, 0.96), (76, 32): (8.33, 1.39)}


def nothing_saturates(seed: int) -> Iterator[Check]:
    """Small kernels that leave room: splits lose against plain streams, and our pool does not."""
    given = "alone 8.15 and 0.89 ms; curves of ssm-b8 and attention-b8 of another model"
    prefill, decode = _side_by_side(Streams(), seed)
    yield Check("small kernels on two streams: prefill, ms", 8.16, prefill, given)
    yield Check("small kernels on two streams: decode, ms", 0.87, decode, given)
    _, ours = _side_by_side(Unsplit(), seed)
    yield Check("the same, classes of our pool that are unsplit, ms", 0.87, ours, given)
    split = {}
    for (a, b), (p, d) in PUBLISHED_SPLITS.items():
        split[a, b] = _side_by_side(_Halves({"other": a, "critical": b}), seed)
        yield Check(f"split {a}/{b}: prefill, ms", p, split[a, b][0], given)
        yield Check(f"split {a}/{b}: decode, ms", d, split[a, b][1], given)
    best = min(found[1] for found in split.values())
    yield Check("decode on the best split over plain streams", 0.96 / 0.87, best / decode, given)


@dataclass
class _Halves(Split):
    given: dict[str, int] = None  # type: ignore[assignment]  # always given

    def __init__(self, given: dict[str, int]) -> None:
        super().__init__(next(iter(given.values())))
        self.given = given

    def sizes(self, _machine: Machine, _device: int) -> dict[str, int]:
        """As published."""
        return self.given


def _side_by_side(arm: Arm, seed: int) -> tuple[float, float]:
    """Milliseconds of prefill and decode, both in a loop."""
    machine = Machine("a100", pair(CURVES["ssm-b8"], CURVES["attention-b8"]), {}, seed)

    async def decode(seat: Seat) -> None:
        for _ in range(200):
            await seat.run((DECODE_NS,))

    async def drive(_: Machine, seat: Callable[[str], Seat]) -> None:
        await beside(decode(seat("critical")), forever(seat("other"), same(PREFILL_NS)))

    play(machine, arm, drive)
    lengths: dict[str, list[float]] = {"other": [], "critical": []}
    for ran in machine.ran[0]:
        if ran.end - ran.start > 1000:
            lengths[ran.service].append((ran.end - ran.start) / 1e6)
    other, critical = (sum(each) / len(each) for each in lengths.values())
    return other, critical
