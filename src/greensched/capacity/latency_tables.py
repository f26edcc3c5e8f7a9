"""The time of work by SMs: published tables, or measured ones.

A table keeps the measured steps (multi-head latent attention is flat from 64 to 120 SMs and then
nearly halves). Between two sizes time is linear in 1/SMs. A fit a/SMs + b gives `b`, the part of
the time that does not depend on SMs, and that other work on the same SMs does not lengthen.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from greensched._validation import reason
from greensched.device.launch import LaunchConfig
from greensched.errors import InvalidRequest
from greensched.typing import Cost

#: A kernel needs no more SMs than bring it within this factor of its best time (LithOS's slip
#: is 1.05 to 1.1).
USEFUL = 1.05
#: Threads in a block of a kernel that fills a device: three or four blocks take a whole SM.
FULL_BLOCK = 512
#: Threads in a block of a kernel that leaves space on each SM: one block per SM that it can use.
SLIM_BLOCK = 256


@dataclass(frozen=True)
class SpeedupCurve:
    """Milliseconds of one kind of work by SMs. Only their ratios are used.

    Attributes:
        name: The name of the curve in services.
        sms: The sizes, rising.
        ms: The time at each size.
        fills: Whether its grids fill the device, so that later kernels wait; otherwise it leaves
            space on every SM.
        source: The source of the figures.
        sizes: Tokens of a prompt, or requests of a batch, rising. Empty: the built-in model's.
        seconds: The time of a pass of each of these sizes on the whole device.
        by_size: The milliseconds of each of these sizes at each number of SMs. Empty: every size
            is slowed down as the largest.
        bandwidth: Bytes a second that it draws alone on the whole device; 0 if not measured.
        sm_watts: Extra power of a working SM over an idle one; 0 if not measured.
    """

    name: str
    sms: tuple[int, ...]
    ms: tuple[float, ...]
    fills: bool = True
    source: str = ""
    sizes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    by_size: tuple[tuple[float, ...], ...] = ()
    bandwidth: float = 0.0
    sm_watts: float = 0.0
    _slower: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    _by_size: dict[int, list[float]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.sms, self.sms[1:], strict=False))
        if not self.sms or len(self.sms) != len(self.ms) or not rising or self.sms[0] < 1:
            raise InvalidRequest(
                f"curve {self.name!r}: sms={self.sms!r}, ms={self.ms!r}: give rising sizes of at "
                "least 1, and a time for each"
            )
        if not all(0 < ms < float("inf") for ms in self.ms):
            raise InvalidRequest(f"curve {self.name!r}: ms={self.ms!r}: give finite times above 0")
        rising = all(a < b for a, b in pairwise(self.sizes))
        finite = all(0 < value < float("inf") for value in self.seconds)
        if not (rising and finite and len(self.sizes) == len(self.seconds)):
            raise InvalidRequest(
                f"curve {self.name!r}: sizes={self.sizes!r}, seconds={self.seconds!r}: give rising "
                "sizes, and a finite time above 0 for each"
            )

    def at(self, sms: float) -> float:
        """Return the milliseconds on this many SMs. Below the smallest size time is a/SMs."""
        return self._on(sms, self.ms)

    def _on(self, sms: float, ms: tuple[float, ...]) -> float:
        if sms <= self.sms[0]:
            return ms[0] * self.sms[0] / sms
        if sms >= self.sms[-1]:
            return ms[-1]
        high = bisect_left(self.sms, sms)
        a, b = self.sms[high - 1], self.sms[high]
        part = (1 / a - 1 / sms) / (1 / a - 1 / b)
        return ms[high - 1] + part * (ms[high] - ms[high - 1])

    def slowdown(self, sms: int, seconds: float = 0.0) -> float:
        """Return how many times longer a pass takes on so many SMs than on the whole device.

        Args:
            sms: The number of SMs.
            seconds: Its duration on the whole device; 0 for the largest.
        """
        if seconds and self.by_size:
            return self._slowdown_of(sms, seconds)
        slower = self._slower.get(sms)
        if slower is None:
            slower = self._slower[sms] = self.at(sms) / self.ms[-1]
        return slower

    def _slowdown_of(self, sms: int, seconds: float) -> float:
        """Interpolate between the passes that take less and more on the whole device."""
        slower = self._by_size.get(sms)
        if slower is None:
            slower = self._by_size[sms] = [self._on(sms, row) / row[-1] for row in self.by_size]
        high = bisect_left(self.seconds, seconds)
        if high in (0, len(slower)):
            return slower[min(high, len(slower) - 1)]
        low, up = self.seconds[high - 1 : high + 1]
        return slower[high - 1] + (seconds - low) / (up - low) * (slower[high] - slower[high - 1])

    @cached_property
    def flat(self) -> float:
        """The fraction of its whole-device time that more SMs do not shorten."""
        n, x = len(self.sms), [1 / s for s in self.sms]
        # Least squares of the relative error, as in the published fits.
        weights = [1 / ms**2 for ms in self.ms]
        w, wx = sum(weights), sum(a * b for a, b in zip(weights, x, strict=True))
        wxx = sum(a * b * b for a, b in zip(weights, x, strict=True))
        wy = sum(a * b for a, b in zip(weights, self.ms, strict=True))
        wxy = sum(a * b * c for a, b, c in zip(weights, x, self.ms, strict=True))
        if n == 1 or w * wxx == wx * wx:
            return 0.0
        b = (wy * wxx - wx * wxy) / (w * wxx - wx * wx)
        return min(0.99, max(0.0, b / self.ms[-1]))

    @cached_property
    def width(self) -> int:
        """The number of SMs that it can use."""
        return next(
            s for s, ms in zip(self.sms, self.ms, strict=True) if ms <= USEFUL * self.ms[-1]
        )

    def config(self, sms: int, threads: int = 2048, waves: int = 1) -> LaunchConfig:
        """Return the launch configuration of one piece of work.

        Args:
            sms: The SMs of the device.
            threads: The most threads on an SM.
            waves: How many times its blocks fill the SMs, one wave after another.
        """
        if self.fills:
            return LaunchConfig(grid=waves * (threads // FULL_BLOCK) * sms, block=FULL_BLOCK)
        return LaunchConfig(grid=min(self.width, sms), block=SLIM_BLOCK)

    def cost(self, seconds: float, sms: int) -> Cost:
        """Return the cost on this many SMs of work that takes `seconds` on the whole device.

        Alone it takes the table's time. The part that more SMs would shorten is shared with other
        work on the same SMs.
        """
        whole = seconds * 1e9
        # If the bytes are known there is no flat part: the bytes limit what SMs can shorten.
        fixed = 0.0 if self.bandwidth else self.flat * whole
        able = sms if self.fills else min(sms, self.width)
        return Cost(
            fixed_ns=fixed,
            sm_ns=(self.slowdown(sms, seconds) * whole - fixed) * able,
            dram_bytes=self.bandwidth * seconds,
            sm_watts=self.sm_watts,
        )

    def least(self, slowdown: float, sizes: tuple[int, ...]) -> int:
        """Return the least size with at most this slowdown, or the last size if there is none."""
        return next((size for size in sizes if self.slowdown(size) <= slowdown), sizes[-1])


def load(path: Path) -> dict[str, SpeedupCurve]:
    """Read measured curves.

    The file is one of three: a JSON object `{name: {"sms": [...], "ms": [...], "fills": true}}`; a
    file of `greensched measure`, with sizes, bytes and watts; or a file of `LatencyCurve.save` with
    one curve, which is named after the file.

    Raises:
        InvalidRequest: The file cannot be read, or a curve is invalid.
    """
    try:
        loaded = json.loads(path.read_text())
        if "latency" in loaded:  # a pool's measurement, whose median is used
            rows = sorted(
                (int(row["sms"]), 1e3 * float(row["median"])) for row in loaded["latency"]
            )
            loaded = {path.stem: {"sms": [r[0] for r in rows], "ms": [r[1] for r in rows]}}
        loaded.pop("host", None)  # read by `host_costs`
        loaded.pop("commit", None)  # committed measurements name the commit
        return {name: _curve(name, curve, path) for name, curve in loaded.items()}
    except (
        OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise InvalidRequest(
            f"{path} is not a table of curves, such as "
            f'{{"mine": {{"sms": [8, 16], "ms": [2, 1]}}}}: {reason(error)}'
        ) from error


def _curve(name: str, table: dict[str, Any], path: Path) -> SpeedupCurve:
    ms = tuple(float(value) for value in table["ms"])
    by_size = table.get("ms_by_size", [])
    seconds = tuple(float(row[-1]) / 1e3 for row in by_size)
    moved = table.get("bytes") or [0.0]
    return SpeedupCurve(
        name,
        tuple(int(value) for value in table["sms"]),
        ms,
        bool(table.get("fills", True)),
        str(table.get("source", path)),
        tuple(int(value) for value in table.get("sizes", [])),
        seconds,
        tuple(tuple(map(float, row)) for row in by_size),
        bandwidth=float(moved[-1]) / seconds[-1] if seconds else 0.0,
        sm_watts=float(table.get("sm_watts", 0.0)),
    )


# -- published --------------------------------------------------------------------------------

_H = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 132)
_HOPPER = "Hopper, 132 SMs, green contexts (Yi-sir/Cuda-Kernel-Interference-Performance)"
_A = (14, 28, 40, 54, 68, 82, 94, 108)
_AMPERE = "A100, 108 SMs, green contexts, solo (asuan99/prefill-layer-alloc)"


def _hopper(name: str, *ms: float) -> SpeedupCurve:
    return SpeedupCurve(name, _H, ms, True, _HOPPER)


def _ampere(name: str, *ms: float) -> SpeedupCurve:
    return SpeedupCurve(name, _A, ms, False, _AMPERE)


#: Read from labelled bars: the kernel on S SMs, another kernel on the other 128 - S (132: alone).
#: The first of a pair is the measurement with the less disturbing other kernel.
MLA = _hopper(
    "mla-decode", 1.040, 0.523, 0.388, 0.262, 0.260, 0.197, 0.197, 0.135,
    0.134, 0.134, 0.134, 0.135, 0.136, 0.137, 0.137, 0.075,
)  # fmt: skip
MOE = _hopper(
    "moe", 4.689, 2.356, 1.583, 1.199, 0.974, 0.819, 0.715, 0.632,
    0.580, 0.548, 0.516, 0.479, 0.467, 0.451, 0.440, 0.407,
)  # fmt: skip
MOE_BESIDE_GEMM = (
    4.711, 2.372, 1.604, 1.227, 0.996, 0.845, 0.737, 0.659,
    0.600, 0.567, 0.533, 0.495, 0.480, 0.456, 0.440, 0.408,
)  # fmt: skip
GEMM = _hopper(
    "gemm", 59.88, 33.00, 20.20, 16.39, 12.27, 10.32, 8.77, 7.94,
    6.81, 6.24, 5.70, 5.26, 4.85, 4.54, 4.15, 3.85,
)  # fmt: skip

#: Small batches: the second half of each curve is nearly flat, so the grids leave space (and two
#: streams ran side by side at no cost on such a model). Requests for 27 and 81 SMs got 28 and 82.
CURVES: dict[str, SpeedupCurve] = {
    curve.name: curve
    for curve in (
        MLA,
        MOE,
        GEMM,
        _ampere("attention-b8", 0.184, 0.112, 0.090, 0.078, 0.070, 0.068, 0.065, 0.062),
        _ampere("attention-b32", 3.28, 1.73, 1.17, 0.888, 0.760, 0.603, 0.602, 0.486),
        _ampere("attention-b128", 50.6, 25.4, 17.7, 13.3, 10.6, 9.20, 8.39, 7.59),
        _ampere("ssm-b8", 0.628, 0.559, 0.545, 0.527, 0.524, 0.516, 0.512, 0.517),
        _ampere("ssm-b32", 1.66, 0.947, 0.773, 0.679, 0.627, 0.594, 0.591, 0.586),
        _ampere("ssm-b256", 11.8, 6.15, 4.84, 4.06, 3.64, 3.32, 3.24, 3.16),
    )
}
