"""Classes of work: what a service does with a request, and its configuration.

There are four roles. *prefill* reads the prompts of a language model one at a time. *decode* writes
their tokens, in each step one token of each running request. *request* is work of a given cost.
*loop* is best effort without end. A pass of prefill or decode is split by layers into `blocks`
segments, between which SMs can move. On plain streams both take turns block by block, as the
kernels of their layers would.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from greensched._validation import reason
from greensched.capacity.latency_tables import CURVES, SpeedupCurve
from greensched.capacity.traffic import Traffic
from greensched.errors import InvalidRequest

Role = Literal["prefill", "decode", "request", "loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProfile:
    """A class of work: its configuration in the pool, and its behaviour.

    Attributes:
        name: The name of the class.
        role: One of the roles of this module.
        curve: Its time by SMs.
        reserve: SMs of each device that are reserved for it.
        cap: The most SMs that it may have; 0 for all.
        priority: Larger goes first.
        weight: Its share relative to other classes.
        target: Its latency target as a multiple of its alone-p99.
        latency: Its latency target in seconds; 0 to use `target`.
        max_wait_for_reserve: The longest wait in seconds for lent SMs of its reserve; negative for
            half its latency.
        segment: Seconds on the whole device of one piece of a request or loop.
        blocks: Segments of a pass of prefill or decode.
        batch: The most requests decoded together.
        depth: Pieces that a loop keeps in flight.
    """

    name: str
    role: Role
    curve: SpeedupCurve
    reserve: int = 0
    cap: int = 0
    priority: int = 0
    weight: float = 1.0
    target: float = 2.0
    latency: float = 0.0
    max_wait_for_reserve: float = -1.0
    segment: float = 0.001
    blocks: int = 4
    batch: int = 256
    depth: int = 1

    @property
    def is_best_effort(self) -> bool:
        """Say whether only its throughput counts."""
        return self.role == "loop"

    def seconds(self, size: float) -> float:
        """Return the whole-device seconds of a prompt of this many tokens, or of a decode step.

        A step's size is its batch. The curve's seconds are used if it was measured by size.
        """
        curve = self.curve
        if not curve.sizes:
            return _through(PROMPT if self.role == "prefill" else STEP, size)
        points = list(zip(curve.sizes, curve.seconds, strict=True))
        if self.role == "prefill" or len(points) == 1:
            points.insert(0, (0, 0.0))
        return _through(points, size)


#: Seconds of prompts and of decode steps by size, for Llama-2-70B on a group of 8 H100: Splitwise's
#: perf_model.csv (MIT, Mutinifni/splitwise-sim). A simulated device represents such a
#: group, because with tensor parallelism all GPUs do the same at the same time.
PROMPT = ((0, 0.0), (512, 0.054), (2_048, 0.137), (8_192, 0.845))
#: Beyond 64 the last slope continues, an extrapolation.
STEP = ((1, 0.0306), (32, 0.0386), (64, 0.0502))


def _through(points: Sequence[tuple[int, float]], x: float) -> float:
    """Interpolate linearly between points. Beyond them the last segment continues."""
    high = min(max(1, bisect_left([p[0] for p in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = points[high - 1], points[high]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


#: Seconds of a wave of thread blocks: after it, SMs are free for a kernel of higher priority. Waves
#: of products take 45 us in torch's training on an H200, and 230 us in W2's (`benchmarks.model`).
WAVE_S, WAVE_OF_PASS_S = 0.0001, 0.000045
#: Kernels of a pass of a language model: eight in each of 32 layers. A segment stands for many
#: kernels, and a wave of it for one wave of each of them, after which a kernel of higher priority
#: can start.
KERNELS = 256
#: The prompt and the batch from whose durations the number of waves is computed.
USUAL_PROMPT, USUAL_BATCH = 1_024, 32


def waves(service: ServiceProfile) -> int:
    """Return how many times the blocks of a usual piece fill the SMs."""
    usual = {"prefill": USUAL_PROMPT, "decode": USUAL_BATCH}.get(service.role)
    if usual is None:
        return max(1, round(service.segment / WAVE_S))
    return max(1, round(service.seconds(usual) / (KERNELS * WAVE_OF_PASS_S)))


def saturation(traffic: Traffic, services: Mapping[str, ServiceProfile], devices: int) -> float:
    """Return by what factor the traffic's rate could grow before the devices saturate.

    Computed as if one class at a time used all of each device, and decoding ran at its
    largest batch, which is the most that plain time sharing can do.
    """
    seconds = traffic[-1].at or 1.0
    decode = next((s for s in services.values() if s.role == "decode"), None)
    each_token = decode.seconds(decode.batch) / decode.batch if decode else 0.0
    prefill = next((s for s in services.values() if s.role == "prefill"), None)
    work = 0.0
    for arrival in traffic:
        if arrival.service:
            work += arrival.cost
        else:
            work += prefill.seconds(arrival.context) if prefill else 0.0
            work += max(0, arrival.generated - 1) * each_token
    times = devices * seconds / work if work else 1.0
    if not 0 < times < math.inf:
        raise InvalidRequest(
            f"{seconds:g} s of traffic have {work:g} s of work: give traffic with some work, and "
            "a finite amount of it per second"
        )
    return times


# -- services by name, or from a file ---------------------------------------------------------

#: A language model on each device: tokens have precedence, prompts get what they leave.
LLM = (
    ServiceProfile(
        name="decode",
        role="decode",
        curve=CURVES["moe"],
        reserve=48,
        priority=10,
        target=5.0,
        max_wait_for_reserve=0.0,  # decoding hardly ever pauses: its reserve is never lent
    ),
    ServiceProfile(name="prefill", role="prefill", curve=CURVES["gemm"], target=5.0),
)
#: Requests in many small kernels, those of attention at batch 8.
_INFERENCE = ServiceProfile(
    name="inference",
    role="request",
    curve=CURVES["attention-b8"],
    reserve=64,
    priority=10,
    target=1.3,
    segment=0.0002,
)
#: Requests of about 4 ms beside a training loop, which continues in pieces of 0.25 ms: seven of its
#: kernels of 34 us.
W2 = (
    replace(_INFERENCE, cap=64),
    ServiceProfile(name="training", role="loop", curve=CURVES["gemm"], segment=0.00025),
)
#: The control: two kinds of kernels that leave space, on a device that they do not fill.
W8 = (
    _INFERENCE,
    ServiceProfile(name="scan", role="loop", curve=CURVES["ssm-b8"], segment=0.002),
)
SERVICES: dict[str, tuple[ServiceProfile, ...]] = {"llm": LLM, "w2": W2, "w8": W8}


def services(spec: str, tables: Mapping[str, SpeedupCurve] = CURVES) -> dict[str, ServiceProfile]:
    """Return the classes of a built-in set, or read them from a JSON file.

    The file is `{"classes": {name: {"role": ..., "curve": ..., ...}}}`, with `ServiceProfile`'s
    attributes.

    Raises:
        InvalidRequest: the file cannot be read, or a value is invalid.
    """
    built_in = SERVICES.get(spec)
    if built_in is not None:
        # A table with the name of the class, as `greensched measure` writes, has precedence over
        # that of its curve.
        curves = {s.name: tables.get(s.name) or tables.get(s.curve.name, s.curve) for s in built_in}
        return {s.name: replace(s, curve=_of_role(s.role, curves[s.name])) for s in built_in}
    try:
        classes = json.loads(Path(spec).read_text())["classes"]
        profiles = {name: _service(name, dict(fields), tables) for name, fields in classes.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f"services {spec!r}: neither {' nor '.join(SERVICES)}, nor a file of "
            f'{{"classes": {{name: {{"role": ..., "curve": ...}}}}}}: {reason(error)}'
        ) from error
    return _validate(profiles)


def _service(
    name: str, entry: dict[str, Any], tables: Mapping[str, SpeedupCurve]
) -> ServiceProfile:
    known = {f.name for f in fields(ServiceProfile)} - {"name"}
    unknown = sorted(entry.keys() - known)
    if unknown:
        raise InvalidRequest(
            f"class {name!r}: unknown attributes {', '.join(unknown)}: give some of "
            f"{', '.join(sorted(known))}"
        )
    curve = tables.get(str(entry.get("curve")))
    if curve is None:
        raise InvalidRequest(
            f"class {name!r}: curve {entry.get('curve')!r} does not exist: give one of "
            f"{', '.join(tables)}"
        )
    if entry.get("role") not in get_args(Role):
        raise InvalidRequest(
            f"class {name!r}: role={entry.get('role')!r}: give one of {', '.join(get_args(Role))}"
        )
    curve = _of_role(entry["role"], curve)
    return ServiceProfile(**(entry | {"name": name, "curve": curve}))


def _of_role(role: str, curve: SpeedupCurve) -> SpeedupCurve:
    """Keep the times by size for decode steps only, because other roles run in pieces of a pass."""
    return curve if role == "decode" else replace(curve, by_size=())


#: The least seconds of a piece of work, because no kernel is shorter.
LEAST_SEGMENT = 1e-6
#: Fields of a class, their types, and their allowed values.
RULES: tuple[tuple[tuple[str, ...], tuple[type, ...], Callable[[float], bool], str], ...] = (
    (("priority",), (int,), lambda _: True, "a whole number"),
    (("reserve", "cap"), (int,), lambda n: n >= 0, "a whole number of at least 0"),
    (("blocks", "batch", "depth"), (int,), lambda n: n >= 1, "a whole number of at least 1"),
    (("max_wait_for_reserve",), (int, float), lambda _: True, "a number"),
    (("latency",), (int, float), lambda x: x >= 0, "a number of at least 0"),
    (("weight", "target"), (int, float), lambda x: x > 0, "a number above 0"),
    (("segment",), (int, float), lambda x: x >= LEAST_SEGMENT, f"at least {LEAST_SEGMENT:g} s"),
)


def _validate(profiles: dict[str, ServiceProfile]) -> dict[str, ServiceProfile]:
    roles = [service.role for service in profiles.values()]
    if roles.count("prefill") != roles.count("decode") or roles.count("prefill") > 1:
        raise InvalidRequest(
            f"roles of the classes: {', '.join(roles)}: a language model is one class of role "
            "prefill and one of role decode"
        )
    for service in profiles.values():
        for names, kinds, is_valid, wanted in RULES:
            for field in names:
                value = getattr(service, field)
                is_number = isinstance(value, kinds) and not isinstance(value, bool)
                if not is_number or not -math.inf < value < math.inf or not is_valid(value):
                    raise InvalidRequest(
                        f"class {service.name!r}: {field}={value!r}: give {wanted}"
                    )
    return profiles
