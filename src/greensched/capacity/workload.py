"""What a service does with a request: segments of GPU work, and what an operator says of a class.

Four roles. *prefill* reads the prompts of a language model, one at a time; *decode* writes their
tokens, all running requests together, one token each a step; *request* is work of a given cost;
*loop* is best effort without end. A pass of prefill or decode is cut by layers into `blocks`
segments, the places where SMs can change hands. On plain streams both take turns block by block,
as the kernels of their layers would.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from greensched.capacity.latency_tables import CURVES, SpeedupCurve
from greensched.capacity.traffic import Traffic
from greensched.errors import InvalidRequest

Role = Literal["prefill", "decode", "request", "loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProfile:
    """A class of work, as the operator would tell the pool, and how it behaves.

    Attributes:
        name: of the class.
        role: see the module.
        curve: its time against SMs.
        reserve: SMs that are its own, of each device.
        cap: SMs it may have at most; 0: all.
        priority: larger first.
        weight: its share against others.
        target: what its latency is held to, as a multiple of its alone-p99.
        latency: the same in seconds; 0: by `target`.
        max_wait_for_reserve: seconds it waits at most for what is lent of its reserve; below 0:
            half its latency.
        segment: seconds on the whole device of one piece of work of a request or loop.
        blocks: segments of a pass of prefill or decode.
        batch: requests decoded together at most.
        depth: pieces a loop keeps in flight.
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
        """Whether only its throughput counts."""
        return self.role == "loop"


#: Seconds to read a prompt, and for a step of decoding, of Llama-2-70B on a group of 8 H100:
#: Splitwise's perf_model.csv (MIT, Mutinifni/splitwise-sim). A simulated device stands for such a
#: group: in tensor parallelism all GPUs do the same at the same time.
PROMPT = ((0, 0.0), (512, 0.054), (2_048, 0.137), (8_192, 0.845))
#: Beyond 64 the last slope goes on: an extrapolation.
STEP = ((1, 0.0306), (32, 0.0386), (64, 0.0502))


def _through(points: Sequence[tuple[int, float]], x: float) -> float:
    """Straight lines through points, the last one going on."""
    high = min(max(1, bisect_left([p[0] for p in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = points[high - 1], points[high]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def prompt_seconds(tokens: int) -> float:
    """Seconds on the whole device to read a prompt."""
    return _through(PROMPT, tokens)


def step_seconds(batch: float) -> float:
    """Seconds on the whole device for one token of each of so many requests."""
    return _through(STEP, batch)


def saturation(traffic: Traffic, services: Mapping[str, ServiceProfile], devices: int) -> float:
    """How many times faster the traffic may come before the devices cannot keep up. Arithmetic.

    All of a device's time is used, by one class at a time, and decoding is at its largest batch:
    what plain time sharing can do at the very most.
    """
    seconds = traffic[-1].at or 1.0
    decode = next((s for s in services.values() if s.role == "decode"), None)
    each_token = step_seconds(decode.batch) / decode.batch if decode else 0.0
    work = 0.0
    for arrival in traffic:
        if arrival.service:
            work += arrival.cost
        else:
            work += prompt_seconds(arrival.context) + max(0, arrival.generated - 1) * each_token
    times = devices * seconds / work if work else 1.0
    if not 0 < times < math.inf:
        raise InvalidRequest(
            f"{seconds:g} s of traffic with {work:g} s of work in it: that is no load to speak of"
        )
    return times


# -- services by name, or from a file ---------------------------------------------------------

#: A language model on each device: tokens first, prompts with what they leave.
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
#: Requests of about 4 ms in many small kernels, beside a training loop. The small kernels are those
#: of attention at batch 8; training goes on in pieces of 0.25 ms, seven of its kernels of 34 us.
W2 = (
    ServiceProfile(
        name="inference",
        role="request",
        curve=CURVES["attention-b8"],
        reserve=64,
        cap=64,
        priority=10,
        target=1.3,
        segment=0.0002,
    ),
    ServiceProfile(name="training", role="loop", curve=CURVES["gemm"], segment=0.00025),
)
#: The control: kernels that leave room beside others that do, on a device that neither fills.
W8 = (
    ServiceProfile(
        name="inference",
        role="request",
        curve=CURVES["attention-b8"],
        reserve=64,
        priority=10,
        target=1.3,
        segment=0.0002,
    ),
    ServiceProfile(name="scan", role="loop", curve=CURVES["ssm-b8"], segment=0.002),
)
SERVICES: dict[str, tuple[ServiceProfile, ...]] = {"llm": LLM, "w2": W2, "w8": W8}


def services(said: str, tables: Mapping[str, SpeedupCurve] = CURVES) -> dict[str, ServiceProfile]:
    """Classes by the name of a built-in set, or from a JSON file.

    The file: `{"classes": {name: {"role": ..., "curve": ..., ...}}}`, with `ServiceProfile`'s
    attributes.

    Raises:
        InvalidRequest: it cannot be read, or says what makes no sense.
    """
    built_in = SERVICES.get(said)
    if built_in is not None:
        return {s.name: replace(s, curve=tables.get(s.curve.name, s.curve)) for s in built_in}
    try:
        classes = json.loads(Path(said).read_text())["classes"]
        found = {name: _service(name, dict(each), tables) for name, each in classes.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f"services {said!r}: neither {' nor '.join(SERVICES)}, nor a file of "
            f'{{"classes": {{name: {{"role": ..., "curve": ...}}}}}}: {error!r}'
        ) from error
    return _sensible(found)


def _service(name: str, said: dict[str, Any], tables: Mapping[str, SpeedupCurve]) -> ServiceProfile:
    known = {f.name for f in fields(ServiceProfile)} - {"name"}
    unknown = sorted(said.keys() - known)
    if unknown:
        raise InvalidRequest(f"class {name!r} has no {', '.join(unknown)}: it has {sorted(known)}")
    curve = tables.get(str(said.get("curve")))
    if curve is None:
        raise InvalidRequest(f"class {name!r}: no curve {said.get('curve')!r}: {', '.join(tables)}")
    if said.get("role") not in get_args(Role):
        raise InvalidRequest(f"class {name!r}: its role is one of {', '.join(get_args(Role))}")
    return ServiceProfile(**(said | {"name": name, "curve": curve}))


#: What a class is told, by what it is.
WHOLE = ("reserve", "cap", "priority", "blocks", "batch", "depth")
REAL = ("weight", "target", "latency", "max_wait_for_reserve", "segment")
#: Seconds of a piece of work, at least: no kernel is shorter.
LEAST_SEGMENT = 1e-6


def _sensible(found: dict[str, ServiceProfile]) -> dict[str, ServiceProfile]:
    roles = [service.role for service in found.values()]
    if roles.count("prefill") != roles.count("decode") or roles.count("prefill") > 1:
        raise InvalidRequest("a language model is one class that prefills and one that decodes")
    for service in found.values():
        for name, kinds, what in ((WHOLE, int, "a whole number"), (REAL, (int, float), "a number")):
            for field in name:
                value = getattr(service, field)
                is_one = isinstance(value, kinds) and not isinstance(value, bool)
                if not is_one or not -math.inf < value < math.inf:
                    raise InvalidRequest(f"class {service.name!r}: {field}={value!r}: give {what}")
        if service.reserve < 0 or service.cap < 0 or service.latency < 0:
            raise InvalidRequest(f"class {service.name!r}: reserve, cap, latency are not below 0")
        if not (service.segment >= LEAST_SEGMENT and service.blocks >= 1 and service.batch >= 1):
            raise InvalidRequest(
                f"class {service.name!r}: segment is a microsecond or more, blocks and "
                "batch are above 0"
            )
        if not (service.target > 0 and service.depth >= 1 and service.weight > 0):
            raise InvalidRequest(f"class {service.name!r}: target, depth, weight are above 0")
    return found
