"""Published figures on shared SMs: where sharing is bad, and where it is as good as anything."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from statistics import mean, median

from benchmarks.model.scenarios import (
    Check,
    beside,
    forever,
    pair,
    percentile,
    play,
    same,
    work,
)
from benchmarks.model.time_slicing import Sliced
from greensched.capacity.baselines import PriorityGate, Streams
from greensched.capacity.latency_tables import CURVES
from greensched.capacity.machine import Machine
from greensched.capacity.pool_strategies import Shared
from greensched.capacity.strategies import Client, Split, Strategy
from greensched.typing import Size

# -- 3: Tally's setting -------------------------------------------------------------------------

#: BERT inference of 4.05 ms, once every 8.1 ms (load 0.5; latencies are of requests alone, whose
#: p99 is 1.01 of their mean). Its kernels have the median length of BERT's in Orion's profile.
REQUEST_NS, KERNEL_NS, PERIOD_S = 4_050_000, 34_000, 0.0081
#: A step of each of six training jobs: 16 stretches of equal time, each with a number of kernels
#: and their average microseconds. The order of kernels matters, because a request meets either
#: large or small kernels of a step. From Orion's profiles of a V100 (MIT, eth-easl/orion at
#: aded65d, benchmarking/model_kernels/*_fb1). Each kernel is shorter on an A100 by the factor at
#: which that computes faster (15.7 to 19.5 TFLOPS) or reads faster (900 to 1555 GB/s), whichever
#: bounds it in the profile, or by the geometric mean of both if the profile does not say.
Stretch = tuple[int, int]
STEPS: dict[str, tuple[Stretch, ...]] = {
    "BERT, batch 8": (
        (275, 32), (66, 141), (67, 125), (63, 142), (91, 98), (62, 137), (80, 106), (81, 112),
        (62, 138), (75, 116), (77, 115), (70, 123), (69, 129), (74, 117), (801, 11), (2764, 3),
    ),
    "MobileNetV2, batch 64": (
        (172, 18), (21, 138), (70, 42), (88, 34), (71, 42), (61, 49), (55, 55), (67, 45),
        (38, 77), (27, 115), (10, 305), (11, 294), (14, 219), (6, 427), (10, 303), (169, 17),
    ),
    "MobileNetV2, batch 96": (
        (172, 26), (21, 204), (72, 60), (82, 53), (75, 60), (61, 72), (55, 78), (67, 64),
        (41, 110), (25, 220), (12, 335), (8, 453), (14, 340), (6, 643), (10, 450), (169, 25),
    ),
    "ResNet-101, batch 32": (
        (365, 20), (72, 100), (108, 65), (113, 64), (87, 81), (92, 85), (73, 92), (88, 81),
        (88, 80), (88, 81), (88, 81), (75, 96), (64, 113), (50, 149), (44, 158), (352, 20),
    ),
    "ResNet-50, batch 32": (
        (193, 23), (32, 133), (47, 94), (60, 69), (46, 94), (65, 67), (28, 165), (51, 79),
        (58, 79), (25, 162), (43, 100), (35, 129), (24, 187), (26, 161), (28, 162), (185, 21),
    ),
    "Transformer-XL, batch 8": (
        (138, 42), (124, 43), (125, 43), (127, 56), (42, 117), (98, 45), (125, 44), (119, 46),
        (119, 47), (128, 42), (127, 43), (113, 49), (98, 61), (8, 755), (988, 4), (1875, 3),
    ),
}  # fmt: skip
#: The fraction that TGS leaves to best effort in those runs, and Tally's bound on a turn.
TGS_RATE, TURN_NS = 0.79, 31_600
#: Requests in a run; about ten take as long as a training step.
REQUESTS = 40


def check_colocation(seed: int) -> Iterator[Check]:
    """Check short requests beside training, in four ways."""
    given = (
        "119 kernels of 34 us a request; kernels of six training steps, in their order; 2 ms "
        "slices; TGS's published rate; turns of 31.6 us"
    )
    what = "p99 of a 4 ms request beside training"
    steps = STEPS.values()
    mps = [_beside_training(Streams(), _training(step, seed), 1.0, seed) for step in steps]
    yield Check(f"{what}: MPS, mean of six", 5.72, mean(mps), given)
    yield Check(f"{what}: MPS, median of six", 4.82, median(mps), given)
    tgs = [_beside_training(Streams(), _training(step, seed), TGS_RATE, seed) for step in steps]
    yield Check(f"{what}: TGS, mean of six", 3.84, mean(tgs), given)
    slices = _beside_training(Sliced(), _training(STEPS["ResNet-50, batch 32"], seed), 1.0, seed)
    yield Check(f"{what}: time slices", 2.73, slices, given)
    tally = _beside_training(PriorityGate(), same(TURN_NS), 1.0, seed)
    yield Check(f"{what}: Tally", 1.074, tally, given)


def _training(step: tuple[Stretch, ...], seed: int) -> Iterator[int]:
    """Yield the lengths of a job's kernels, in ns, endlessly. The seed chooses where they begin."""
    first = random.Random(f"training {seed}").randrange(len(step))
    for number, us in itertools.cycle(step[first:] + step[:first]):
        yield from itertools.repeat(1000 * us, number)


def _beside_training(strategy: Strategy, lengths: Iterator[int], rate: float, seed: int) -> float:
    """Return a request's p99 relative to its time alone."""
    machine = Machine("a100", pair(work(108), work(108)), {}, seed)
    number = REQUEST_NS // KERNEL_NS
    pieces = (KERNEL_NS,) * number
    found: list[float] = []

    async def critical(client: Client) -> None:
        due = 0.0
        for _ in range(REQUESTS):
            due += PERIOD_S
            await asyncio.sleep(max(0.0, due - machine.now() / 1e9))
            began = machine.now()
            await client.run(pieces)
            found.append((machine.now() - began) / (number * KERNEL_NS))

    async def training(client: Client) -> None:
        for ns in lengths:
            await client.run((ns,))
            if rate < 1:
                await asyncio.sleep(ns * (1 / rate - 1) / 1e9)

    async def drive(_: Machine, client: Callable[[str], Client]) -> None:
        await beside(critical(client("critical")), training(client("other")))

    play(machine, strategy, drive)
    return percentile(found, 0.99)


# -- 4: nothing saturates -----------------------------------------------------------------------

#: Zamba2 on an A100: prefill takes 8.15 ms and decode 0.89 ms alone. The curves are of kernels
#: of the sister model Falcon-H1 (`tables`): the state-space scan, and attention at batch 8.
PREFILL_NS, DECODE_NS = 8_150_000, 890_000
#: SMs of prefill and decode, and the published times there (prefill took 8.33 to 8.57).
PUBLISHED_SPLITS = {(32, 76): (8.57, 1.07), (44, 64): (8.33, 0.96), (76, 32): (8.33, 1.39)}


def nothing_saturates(seed: int) -> Iterator[Check]:
    """Check small kernels that leave space: splits lose to plain streams, the pool does not."""
    given = "alone 8.15 and 0.89 ms; curves of ssm-b8 and attention-b8 of another model"
    prefill, decode = _side_by_side(Streams(), seed)
    yield Check("small kernels on two streams: prefill, ms", 8.16, prefill, given)
    yield Check("small kernels on two streams: decode, ms", 0.87, decode, given)
    _, ours = _side_by_side(Shared(), seed)
    yield Check("the same, shared classes of the pool, ms", 0.87, ours, given)
    split = {}
    for (a, b), (p, d) in PUBLISHED_SPLITS.items():
        split[a, b] = _side_by_side(_Halves({"other": a, "critical": b}), seed)
        yield Check(f"split {a}/{b}: prefill, ms", p, split[a, b][0], given)
        yield Check(f"split {a}/{b}: decode, ms", d, split[a, b][1], given)
    best = min(found[1] for found in split.values())
    yield Check("decode on the best split over plain streams", 0.96 / 0.87, best / decode, given)


class _Halves(Split):
    """A split with a given size for each class."""

    def __init__(self, given: dict[str, int]) -> None:
        super().__init__(next(iter(given.values())))
        self.given = given

    def sizes(self, _machine: Machine, _device: int) -> Mapping[str, Size]:
        """Return the published sizes."""
        return self.given


def _side_by_side(strategy: Strategy, seed: int) -> tuple[float, float]:
    """Return the milliseconds of prefill and decode, each in a loop."""
    machine = Machine("a100", pair(CURVES["ssm-b8"], CURVES["attention-b8"]), {}, seed)

    async def decode(client: Client) -> None:
        for _ in range(200):
            await client.run((DECODE_NS,))

    async def drive(_: Machine, client: Callable[[str], Client]) -> None:
        await beside(decode(client("critical")), forever(client("other"), same(PREFILL_NS)))

    play(machine, strategy, drive)
    lengths: dict[str, list[float]] = {"other": [], "critical": []}
    for ran in machine.traces[0]:
        if ran.end - ran.start > 1000:
            lengths[ran.service].append((ran.end - ran.start) / 1e6)
    other, critical = (sum(each) / len(each) for each in lengths.values())
    return other, critical
