"""The settings of the measured figures, and the model's predictions for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.model import engine
from benchmarks.model.hosts import HOSTS, Host
from benchmarks.model.two_users import (
    ARITHMETIC_W,
    NARROW,
    Setting,
    arithmetic,
    grid_work,
    kept,
    lent,
    moves,
    percentile,
    rounds_of,
    run,
    shared,
)
from greensched.capacity.host_costs import HostCost
from greensched.capacity.measured import Key, inputs_and_rows
from greensched.driver.simulated.contention import clock, speeds
from greensched.driver.simulated.device_models import PRESETS
from greensched.typing import Cost

PLAIN = ("streams", "priority", "split")
W1_CASES = ("spin 0.04 ms", "spin 0.25 ms", "spin 2 ms", "spin 10 ms", "spin 2 ms on half")
#: Seconds of a request outside its kernels: the launch of the first one, and the way back.
REQUEST_S = 13e-6
#: Bytes of W7's copy, and of a saxpy of 2**24 items.
COPY_BYTES, SAXPY_BYTES = 8 * 2**26, 12 * 2**24
#: Blocks of W2's products, and products of a training step.
PRODUCT_BLOCKS, PRODUCTS = 2304, 6

Predicted = Iterator[tuple[Key, float]]


def inputs() -> dict[Key, float]:
    """Return every measured figure by its key, including inputs."""
    return {row.key: row.value for row in inputs_and_rows()}


@dataclass(frozen=True, slots=True)
class Run:
    """How a workload was run on one GPU: seconds of a slice; launches and seconds of a request.

    `same` is how many times longer a request takes alone on the split's SMs than on all SMs.
    """

    seconds: float
    launches: int = 1
    alone: float = 0.0
    split: int = 80
    same: float = 1.0


#: For the H100 as in its file. For the H200 launches are the request's time over the kernel's, and
#: seconds follow from the program's 320 s, its shares and the arms.
RUNS = {
    ("h200", "W1"): Run(0.25),
    ("h100", "W1"): Run(0.10),
    ("h200", "W7"): Run(0.72, 11, 0.000611),
    ("h100", "W7"): Run(0.10, 8, 0.000627),
    ("h200", "W8"): Run(0.89, 25, 0.00102),
    ("h100", "W8"): Run(0.10, 22, 0.0010035),
    ("h200", "W2"): Run(1.2, 57, 0.00401, 64),
    ("h100", "W2"): Run(0.10, 56, 0.0039714, 32, 1.363),
}
#: The number of rounds of a case that was cut short.
CUT = {("h100", "W2", "load 0.5"): 2}


def _w1(gpu: str, case: str) -> Setting:
    alone = inputs()[gpu, "W1", case, "other alone", "other"]
    if case.endswith("half"):
        grid, waves = 66, 1
    else:
        waves = int(min(max(float(case.split()[1]) * 1e3 / 20, 2), 32))
        grid = 264 * waves
    return Setting(
        gpu,
        grid_work("critical", 4, 256, lambda _: Cost(fixed_ns=2_000)),
        grid_work("other", grid, 1024, rounds_of(grid, 2, alone / waves)),
        request=(1,),
        piece=(1,),
        split=8,
        seconds=RUNS[gpu, "W1"].seconds,
        host=HOSTS[gpu],
        services={"lease each": kept(8), "lease held": kept(8)},
    )


def _w7(gpu: str, _case: str) -> Setting:
    run = RUNS[gpu, "W7"]
    return Setting(
        gpu,
        grid_work("critical", 1056, 512, moves(SAXPY_BYTES, NARROW)),
        grid_work("other", 1056, 1024, moves(COPY_BYTES)),
        request=(1,) * run.launches,
        piece=(1,),
        split=run.split,
        seconds=run.seconds,
        host=HOSTS[gpu],
        load=0.3 / run.alone,
        services={"pool": kept(run.split)},
    )


def _w8(gpu: str, _case: str) -> Setting:
    run = RUNS[gpu, "W8"]
    each = 1e9 * (run.alone - REQUEST_S) / run.launches
    work = {
        name: grid_work(name, 25, 256, lambda _: Cost(fixed_ns=each))
        for name in ("critical", "other")
    }
    return Setting(
        gpu,
        work["critical"],
        work["other"],
        request=(1,) * run.launches,
        piece=(1,) * run.launches,
        split=run.split,
        seconds=run.seconds,
        host=HOSTS[gpu],
        load=0.3 / run.alone,
        other_requests=True,
        services={"shared": shared(run.split), "reserve kept": kept(run.split)},
    )


def _w2(gpu: str, case: str) -> Setting:
    run = RUNS[gpu, "W2"]
    load = float(case.split()[1])
    each = 1e9 * (run.alone - REQUEST_S) / run.launches
    # Two blocks on an SM take as much longer as was measured.
    work = each * (run.same - 1)

    def little(sms: int) -> Cost:
        return Cost(fixed_ns=each - work, sm_ns=max(1.0, work) * min(64, sms) * -(-64 // sms))

    step = inputs()[gpu, "W2", case, "other alone", "other"]
    update = SAXPY_BYTES / PRESETS[gpu].dram_bandwidth * 1e6
    product = arithmetic(PRODUCT_BLOCKS, (step - update) / PRODUCTS / -(-PRODUCT_BLOCKS // 132))
    return Setting(
        gpu,
        grid_work("critical", 64, 256, little),
        grid_work("other", PRODUCT_BLOCKS, 256, product, moves(SAXPY_BYTES, NARROW)),
        request=(1,) * run.launches,
        piece=(1,) * PRODUCTS + (2,),
        split=run.split,
        seconds=run.seconds,
        host=HOSTS[gpu],
        load=load / run.alone,
        services={
            "reserve kept": kept(run.split),
            "reserve lent": lent(run.split),
            "reserve lent 1.5 ms": lent(run.split, 0.0015),
        },
        rounds=CUT.get((gpu, "W2", case), 5),
    )


def _isolation(gpu: str, case: str) -> Setting:
    alone = inputs()[gpu, "isolation", "alone", "alone", "p50"]
    # A block of 512 threads and 20,000 iterations: 852 us on 120 SMs with 1056 of them (`scaling`).
    block_us = 852 * 120 / 1056
    big = {
        "arithmetic": lambda _: Cost(sm_ns=4e3 * block_us * 2112, sm_watts=ARITHMETIC_W),
        "copies": moves(2 * 2**30),
    }[case]
    return Setting(
        gpu,
        grid_work("critical", 16, 256, lambda _: Cost(fixed_ns=1e3 * (alone - 11.0))),
        grid_work("other", 2112, 1024, big),
        request=(1,),
        piece=(1,),
        split=16,
        seconds=0.4,
        host=Host(start=HostCost(11.0, 20.0)),
        rounds=1,
        pause=0.0,
        to_end=True,
    )


#: For each workload, the function that makes its settings, and its cases.
SETTINGS: dict[str, tuple[Callable[[str, str], Setting], tuple[str, ...]]] = {
    "W1": (_w1, W1_CASES),
    "W7": (_w7, ("copy",)),
    "W8": (_w8, ("two small",)),
    "W2": (_w2, ("load 0.25", "load 0.5", "load 0.75")),
    "isolation": (_isolation, ("arithmetic", "copies")),
}


def two_users(gpu: str, workload: str, case: str, arm: str) -> Predicted:
    """Predict the figures of one arm."""
    build, _ = SETTINGS[workload]
    found = run(build(gpu, case), arm)
    yield (gpu, workload, case, arm, "p50"), percentile(found.critical, 0.5)
    yield (gpu, workload, case, arm, "p99"), percentile(found.critical, 0.99)
    if workload != "isolation":
        yield (gpu, workload, case, arm, "other"), percentile(found.other, 0.5)


def arms(gpu: str, workload: str, case: str) -> tuple[str, ...]:
    """Return the arms of a case."""
    build, _ = SETTINGS[workload]
    return (*PLAIN, *build(gpu, case).services)


# -- bandwidth ------------------------------------------------------------------------------------


@dataclass
class _Copying:
    """A kernel that only moves bytes, in the form that `speeds` needs."""

    cost: Cost


def bandwidths() -> Predicted:
    """Predict the gigabytes per second of copies on some SMs, alone and beside others."""
    for key in inputs():
        gpu, workload, case, arm, _ = key
        if workload != "bandwidth":
            continue
        sizes = [int(n) for n in re.findall(r"\d+", arm)]
        widths = [int(n) for n in re.findall(r"\d+", case)]
        parts = sizes[1:] or sizes
        loads = [
            _Copying(Cost(dram_bytes=1.0, sm_bandwidth=NARROW if width == 4 else None))
            for width in widths
        ]
        model = PRESETS[gpu]
        found = speeds(loads, parts, model.dram_bandwidth, model.sm_bandwidth)
        yield key, found[parts.index(sizes[0]) if len(parts) > 1 else 0]


# -- torch ----------------------------------------------------------------------------------------

#: SMs of the model's partition, and of training beside it, in several cases.
MODEL_SMS, TRAINING_SMS, FEW_SMS, ALL_SMS = 48, 84, 16, 132
#: Watts of an SM in training: what 16 SMs added (446 W minus 295 W). In the model: 295 W alone
#: on 48 SMs, minus an idle board's 120.
TRAINING_W, MODEL_W = (446 - 295) / 16, (295 - 120) / 48
#: Microseconds of an eager pass on the GPU, alone on 48 SMs; and of a thread's hop.
EAGER_GPU_US, HOP_US = 1_960, 104
#: Kernels of the model, eleven in each of six layers; and how much longer a pass takes on 48 SMs.
MODEL_KERNELS, MODEL_SLOWER = 66, 1.93
#: A product of training: 8192 x 4096 x 4096, twice the time of 4096 cubed (`torch_interop` of the
#: probe: 174 us), in tiles of 128 x 256, one per SM; and the bytes of its elementwise kernel.
PRODUCT_US, PRODUCT_TILES, ELEMENTWISE_BYTES = 348, 1024, 100e6
#: The highest clock, in MHz.
MHZ = 1980


def torch_model() -> Predicted:
    """Predict a torch model in a partition beside training, from the power that both draw."""
    given = inputs()
    board = PRESETS["h200"]

    def pace(training: int, model: int) -> float:
        watts = training * TRAINING_W + model * MODEL_W
        return clock(watts, board.idle_watts, board.power_limit)

    rate = given["h200", "torch", "graph", "streams", "steps/s"] / (ALL_SMS * pace(ALL_SMS, 0))
    for arm, training in (("partition", TRAINING_SMS), ("partition 16", FEW_SMS)):
        slower = 1 / pace(training, MODEL_SMS)
        on_gpu = given["h200", "torch", "graph", "alone", "on GPU"]
        yield ("h200", "torch", "graph", arm, "on GPU"), on_gpu * slower
        for part in ("p50", "p99"):
            alone = given["h200", "torch", "graph", "alone", part]
            yield ("h200", "torch", "graph", arm, part), alone + on_gpu * (slower - 1)
        yield ("h200", "torch", "graph", arm, "MHz"), MHZ / slower
        yield ("h200", "torch", "graph", arm, "steps/s"), rate * training / slower
    slower = 1 / pace(TRAINING_SMS, MODEL_SMS)
    for part in ("p50", "p99"):
        alone = given["h200", "torch", "eager", "alone", part]
        yield ("h200", "torch", "eager", "partition", part), alone + EAGER_GPU_US * (slower - 1)
    yield ("h200", "torch", "graph", "streams", "MHz"), MHZ * pace(ALL_SMS, 0)
    yield ("h200", "torch", "graph", "priority", "MHz"), MHZ * pace(ALL_SMS, 0)


def torch_on_streams() -> Predicted:
    """Predict the torch model on streams beside training, whose products its kernels wait for."""
    alone = inputs()["h200", "torch", "graph", "plain alone", "p50"]
    each = 1e3 * (alone - HOP_US) / MODEL_KERNELS
    work = each * (MODEL_SLOWER - 1) / (ALL_SMS / MODEL_SMS - 1)

    def little(sms: int) -> Cost:
        return Cost(fixed_ns=each - work, sm_ns=work * ALL_SMS, sms=sms, sm_watts=MODEL_W)

    def product(_sms: int) -> Cost:
        return Cost(sm_ns=1e3 * PRODUCT_US * ALL_SMS, sm_watts=TRAINING_W)

    setting = Setting(
        "h200",
        grid_work("critical", 128, 256, little),
        grid_work("other", 2 * PRODUCT_TILES, 1024, product, moves(ELEMENTWISE_BYTES)),
        request=(1,) * MODEL_KERNELS,
        piece=(1, 1, 2) * 4 + (1,) * 4,
        split=MODEL_SMS,
        seconds=0.5,
        host=Host(start=HostCost(HOP_US, 2 * HOP_US)),
        rounds=1,
        pause=0.0,
        to_end=True,
    )
    for arm in ("streams", "priority"):
        found = run(setting, arm)
        for part, at in (("p50", 0.5), ("p99", 0.99)):
            for case in ("graph", "eager"):  # both wait for the device
                yield ("h200", "torch", case, arm, part), percentile(found.critical, at)
        yield ("h200", "torch", "graph", arm, "steps/s"), 1e6 / percentile(found.other, 0.5)


def engines(progress: Callable[[str], None]) -> Predicted:
    """Predict the LLM engine."""
    arms = {(k[2], k[3]): None for k in inputs() if k[1] == "engine"}
    for rate, arm in arms:
        progress(f"engine {rate} {arm}")
        yield from engine.predict(int(rate.removesuffix("/s")), arm)


def predict(workloads: Sequence[str], progress: Callable[[str], None]) -> Predicted:
    """Predict every figure, or those of some workloads. Takes minutes."""
    quick: dict[str, tuple[Callable[[], Predicted], ...]] = {
        "bandwidth": (bandwidths,),
        "torch": (torch_model, torch_on_streams),
        "engine": (partial(engines, progress),),
    }
    for name, predictions in quick.items():
        if not workloads or name in workloads:
            for each in predictions:
                yield from each()
    for workload, (_, cases) in SETTINGS.items():
        if workloads and workload not in workloads:
            continue
        for gpu in ("h100", "h200"):
            for case in cases:
                if (gpu, workload, case, "split", "p50") in inputs():
                    for arm in arms(gpu, workload, case):
                        progress(f"{gpu} {workload} {case} {arm}")
                        yield from two_users(gpu, workload, case, arm)
