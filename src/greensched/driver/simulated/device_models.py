"""Device models by name: the properties of simulated GPUs, with a source for each figure.

SM counts, memory and bandwidth are from the vendor's data sheets, unless a comment says measured.
The layout of a chip's SMs in GPCs is not published and differs from chip to chip. A layout here
gives every known split result of its model, or is even if none is known. Measured means on an H200
or H100 under driver 580 (docs/measurements/h200-580/probe.json and
h100-580/bandwidth.json).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from greensched.errors import InvalidRequest
from greensched.typing import DeviceFacts

#: How much kernels slow each other: takes the name of each working kernel and its compute in
#: whole-SM equivalents; returns a factor of at least 1 for each.
Interference = Callable[[Sequence[tuple[str, float]]], Sequence[float]]

GB = 10**9
MIB = 2**20

#: Threads per SM, if not 2048. Source: programming guide, table of technical specifications.
THREADS_PER_SM = {(7, 5): 1024, (8, 9): 1536, (12, 0): 1536}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """A simulated device. Bandwidths are in bytes a second, latencies in nanoseconds."""

    name: str
    compute_capability: tuple[int, int]
    #: The number of SMs of each GPC.
    gpcs: tuple[int, ...]
    memory_bytes: int
    dram_bandwidth: float
    l2_bytes: int
    #: Host to device and device to host, each with an engine. PCIe 5.0 x16: 64 GB/s minus protocol.
    link_bandwidth: float = 55 * GB
    #: To another device of its model, in each direction; 0 means no access to each other's memory.
    #: Half of the data sheet's NVLink figure, which counts both directions; over PCIe the link's.
    peer_bandwidth: float = 0.0
    copy_engines: int = 3
    max_shared_bytes: int = 99 * 1024
    #: From a launch to its start on an idle partition. 3.9 us: HoloHub's median on an RTX 6000 Ada
    #: beside a saturating load (including CUPTI's own cost).
    launch_latency_ns: int = 3_900
    #: From enqueueing a copy to its first byte. 1.5 us: an assumption.
    copy_latency_ns: int = 1_500
    #: The most that one SM draws, in bytes a second; infinite if not measured.
    sm_bandwidth: float = math.inf
    #: The power of an idle board, and the most that a board may draw, in watts; infinite if
    #: unknown.
    idle_watts: float = 0.0
    power_limit: float = math.inf
    #: The effect of kernels on each other beyond SMs and bandwidth, if measured, or None.
    interference: Interference | None = None

    @property
    def sm_count(self) -> int:
        """The number of SMs."""
        return sum(self.gpcs)

    def sms_of_gpcs(self) -> list[list[int]]:
        """Return the SM ids of each GPC. Ids count row by row; a row has a TPC (2 SMs) of each GPC.

        Source: the SMs on which the groups of one split ran (`disjoint` of the probe).
        """
        ids: list[list[int]] = [[] for _ in self.gpcs]
        number = count()
        for row in range(0, max(self.gpcs), 2):
            for gpc, sms in zip(ids, self.gpcs, strict=True):
                gpc += [next(number) for _ in range(row, min(row + 2, sms))]
        return ids

    def facts(self, ordinal: int) -> DeviceFacts:
        """Return the properties that a driver reports for it as device `ordinal`."""
        return DeviceFacts(
            ordinal=ordinal,
            name=f"Simulated {self.name}",
            uuid=f"GPU-51b00000-0000-0000-0000-{ordinal:012x}",
            compute_capability=self.compute_capability,
            sm_count=self.sm_count,
            memory_bytes=self.memory_bytes,
            l2_bytes=self.l2_bytes,
            warp_size=32,
            max_threads_per_block=1024,
            max_threads_per_sm=THREADS_PER_SM.get(self.compute_capability, 2048),
            max_block=(1024, 1024, 64),
            max_grid=(2**31 - 1, 65535, 65535),
            max_shared_bytes=self.max_shared_bytes,
            copy_engines=self.copy_engines,
        )


def even(sms: int, gpcs: int) -> tuple[int, ...]:
    """Distribute `sms` SMs over `gpcs` GPCs in whole TPCs (2 SMs), as evenly as possible."""
    tpcs = sms // 2
    return tuple(2 * (tpcs // gpcs + (i < tpcs % gpcs)) for i in range(gpcs))


#: From the SM ids of an H200 (`disjoint`: their rows are of 8, then of 7, then of 6 TPCs). It also
#: gives the published splits of others: 15 x 8 + 12 of an H100 SXM, 6 x 16 + 36 and
#: 1 x 72 + 60 of a GH200.
HOPPER_SXM = (18, 18, 18, 18, 18, 18, 16, 8)
HOPPER_SHARED = 227 * 1024

_hopper = partial(
    DeviceModel,
    compute_capability=(9, 0),
    max_shared_bytes=HOPPER_SHARED,
    peer_bandwidth=450 * GB,
)

PRESETS: dict[str, DeviceModel] = {
    "h200": _hopper(
        name="H200",
        gpcs=HOPPER_SXM,
        memory_bytes=143_771 * MIB,  # measured: nvidia-smi
        dram_bandwidth=3.95e12,  # measured: copies of 0.5 and 2 GiB; the data sheet has 4.8
        sm_bandwidth=95e9,  # measured: a copy on 8 and 16 SMs (`scaling`)
        idle_watts=120.0,  # measured: what is left of 295 W and 446 W with 16 SMs of training more
        power_limit=700.0,  # measured: the most that training drew
        l2_bytes=60 * MIB,  # measured (`device`)
    ),
    "h100": _hopper(
        name="H100 SXM",
        gpcs=HOPPER_SXM,
        memory_bytes=80 * GB,
        dram_bandwidth=2.85e12,  # measured: two partitions of copies; the data sheet has 3.35
        sm_bandwidth=95e9,  # measured: copies on 8 SMs
        idle_watts=118.0,  # measured: what arithmetic on 16 to 120 SMs draws, less 2.7 W an SM
        power_limit=700.0,  # measured: nvidia-smi
        l2_bytes=50 * MIB,
    ),
    "h20": _hopper(
        name="H20",
        gpcs=even(78, 8),
        memory_bytes=96 * GB,
        dram_bandwidth=4.0e12,
        l2_bytes=60 * MIB,
    ),
    "gh200": _hopper(
        name="GH200",
        gpcs=HOPPER_SXM,
        memory_bytes=96 * GB,
        dram_bandwidth=4.0e12,
        l2_bytes=60 * MIB,
        link_bandwidth=400e9,
    ),
    "a100": DeviceModel(
        name="A100 SXM",
        compute_capability=(8, 0),
        gpcs=even(108, 7),
        memory_bytes=80 * GB,
        dram_bandwidth=2.039e12,
        l2_bytes=40 * MIB,
        link_bandwidth=26e9,
        max_shared_bytes=163 * 1024,
        peer_bandwidth=300 * GB,
    ),
    "l40s": DeviceModel(
        name="L40S",
        compute_capability=(8, 9),
        gpcs=even(142, 12),
        memory_bytes=48 * GB,
        dram_bandwidth=0.864e12,
        l2_bytes=96 * MIB,
        link_bandwidth=26e9,
        copy_engines=2,
        peer_bandwidth=26e9,
    ),
    "b200": DeviceModel(
        name="B200",
        compute_capability=(10, 0),
        gpcs=even(148, 8),
        memory_bytes=180 * GB,
        dram_bandwidth=8.0e12,
        l2_bytes=126 * MIB,
        max_shared_bytes=HOPPER_SHARED,
        peer_bandwidth=900 * GB,
    ),
    "rtx4090": DeviceModel(
        name="RTX 4090",
        compute_capability=(8, 9),
        gpcs=even(128, 11),
        memory_bytes=24 * GB,
        dram_bandwidth=1.008e12,
        l2_bytes=72 * MIB,
        link_bandwidth=26e9,
        copy_engines=2,
    ),
    "rtx5090": DeviceModel(
        name="RTX 5090",
        compute_capability=(12, 0),
        gpcs=even(170, 11),
        memory_bytes=32 * GB,
        dram_bandwidth=1.792e12,
        l2_bytes=96 * MIB,
        copy_engines=2,
    ),
    "rtxpro6000": DeviceModel(
        name="RTX PRO 6000",
        compute_capability=(12, 0),
        gpcs=even(188, 12),
        memory_bytes=96 * GB,
        dram_bandwidth=1.792e12,
        l2_bytes=128 * MIB,
        copy_engines=2,
        peer_bandwidth=55 * GB,
    ),
    "t4": DeviceModel(
        name="T4",
        compute_capability=(7, 5),
        gpcs=even(40, 5),
        memory_bytes=16 * GB,
        dram_bandwidth=0.32e12,
        l2_bytes=4 * MIB,
        link_bandwidth=13e9,
        copy_engines=2,
        max_shared_bytes=64 * 1024,
    ),
}

#: The CUDA versions a simulated driver can be, as in `simulated:h200@13.1`.
VERSIONS = ((13, 0), (13, 1), (13, 2), (13, 3), (13, 4))

#: The version of the measured driver, and the default. It allows more than is documented; for the
#: other versions only the documentation is known.
MEASURED = (13, 0)

#: The most devices of a simulated machine: four times as many as the largest GPU hosts have.
MOST_DEVICES = 64

_SPEC = re.compile(r"(?P<devices>[^@]+?)(?:@(?P<major>\d{1,4})\.(?P<minor>\d{1,4}))?")
_SEVERAL = re.compile(r"(?P<name>.+)x(?P<count>[1-9]\d{0,8})")


def parse(spec: str) -> tuple[list[DeviceModel], tuple[int, int]]:
    """Parse `h200`, `h200x2`, `h200x2+l40s`, `h100@13.0` into devices and a driver version.

    Raises:
        InvalidRequest: A device or version is unknown, or there are too many devices; the message
            names the known ones.
    """
    whole = _SPEC.fullmatch(spec.strip().lower())
    if whole is None:
        raise InvalidRequest(
            f"{spec!r} is not a simulated device: give h200, h200x2+l40s or h100@13.1"
        )
    version = (int(whole["major"]), int(whole["minor"])) if whole["major"] else MEASURED
    if version not in VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        raise InvalidRequest(f"no simulated CUDA {version[0]}.{version[1]}: give one of {known}")
    several = [_several(part) for part in whole["devices"].split("+")]
    total = sum(count for _, count in several)
    if total > MOST_DEVICES:
        raise InvalidRequest(
            f"{spec!r} has {total} devices: a simulated machine has at most {MOST_DEVICES}"
        )
    return [model for model, count in several for _ in range(count)], version


def _several(part: str) -> tuple[DeviceModel, int]:
    """Return a model and how many of them are requested."""
    name, count = part.strip(), 1
    several = _SEVERAL.fullmatch(name)
    if name not in PRESETS and several is not None:  # the x of rtx4090 is no multiplier
        name, count = several["name"], int(several["count"])
    if name not in PRESETS:
        raise InvalidRequest(f"no simulated device {part!r}: give one of {', '.join(PRESETS)}")
    return PRESETS[name], count
