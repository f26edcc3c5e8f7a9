"""How long a kernel takes on a simulated device: when it has space, and at what speed it runs.

Kernels share SMs and memory bandwidth by the model in `contention`. A green context isolates SMs
only: all contexts share the memory system.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from greensched.driver.simulated.contention import clock, settle, speeds
from greensched.driver.simulated.timeline import (
    DeviceState,
    Operation,
    StartResult,
    Timeline,
)
from greensched.errors import CUDAError
from greensched.typing import Cost


class KernelOp(Operation):
    """A kernel. It queues for space on its SMs, and occupies the space from its start on.

    First comes its fixed time (or it runs until its `until` is true), then its work, which shares
    SMs and bandwidth. `start` is when its first blocks had space.
    """

    kind = "kernel"

    def __init__(
        self,
        name: str,
        cost: Cost,
        blocks: int,
        part: float,
        sms: int,
        body: Callable[[], CUDAError | None],
        priority: int = 0,
    ) -> None:
        super().__init__(name)
        self.cost = cost
        self.sms = sms
        self.cap = min(cost.sms or blocks, blocks, sms.bit_count())
        self.part = part  # the fraction of an SM that a block occupies
        self.occupancy = min(blocks * part, self.cap)
        self.waves = blocks * part / self.occupancy
        self.priority = priority
        self.effect = body  # type: ignore[method-assign]  # one call less for each kernel
        self.started = False
        self.working = False
        self.yields = False
        #: Whether the end of the present wave, or of the last full one, is scheduled.
        self.watched = False
        self.is_last_wave = self.waves == int(self.waves)
        self.resident_since = 0  # when its present blocks began
        self.done = 0.0  # fraction done of its fixed time, then of its work
        self.speed = 0.0  # fraction done per nanosecond
        self.since = 0  # when `done` was last updated
        self.version = 0  # of its scheduled end: a change of speed makes the older one void

    def begin(self, timeline: Timeline) -> StartResult:
        """Queue for space. The kernel starts once earlier kernels leave some."""
        self.stream.device.kernels[self] = None
        _share(timeline, self.stream.device)
        return StartResult.RUNNING

    def go(self, timeline: Timeline) -> None:
        """Start the kernel, which now has space."""
        self.started = True
        self.start = self.since = self.resident_since = timeline.now
        if self.cost.until is not None:
            timeline.held[self] = self.cost.until
            if self.limit < math.inf:
                timeline.at(math.ceil(self.limit), lambda: self._leave(timeline))
        elif not self.cost.fixed_ns:
            self._work(timeline)

    @property
    def limit(self) -> float:
        """The time at which the kernel ends even if its `until` is still false."""
        return self.start + (math.inf if self.cost.limit_ns is None else self.cost.limit_ns)

    def resume(self, timeline: Timeline, when: int) -> None:
        """End the kernel: its `until` is true. The host may notice this after the limit."""
        timeline.at(math.ceil(min(when, self.limit)), lambda: self._leave(timeline))

    def wait_for_space(self, timeline: Timeline, space: float) -> None:
        """Continue its fixed time, at full speed unless a more urgent kernel took space from it."""
        if self.started and not self.working and self.cost.until is None and self.cost.fixed_ns:
            pace = min(1.0, space / self.occupancy) if self.yields else 1.0
            self.advance(timeline, pace / self.cost.fixed_ns)

    def advance(self, timeline: Timeline, speed: float) -> None:
        """Continue its fixed time or its work at this speed."""
        if speed == self.speed:
            return
        self.done += self.speed * (timeline.now - self.since)
        self.since, self.speed = timeline.now, speed
        self.version += 1
        if speed == 0:  # displaced: it ends only once it has space again
            return
        version = self.version
        # The small number prevents a rounding error from costing a whole nanosecond.
        left = max(0, math.ceil((1.0 - self.done) / speed - 1e-6))
        timeline.at(timeline.now + left, lambda: self._advanced(timeline, version))

    def _advanced(self, timeline: Timeline, version: int) -> None:
        """End the fixed time or the work."""
        if self.version != version:
            return
        if self.working:
            self._leave(timeline)
        elif self in self.stream.device.kernels and self._work(timeline):  # else the device failed
            _share(timeline, self.stream.device)

    def _work(self, timeline: Timeline) -> bool:
        """Begin the phase that more SMs would shorten; return whether there is one."""
        if self.cost.sm_ns <= 0 and self.cost.dram_bytes <= 0:
            if self.cost.fixed_ns:
                self._leave(timeline)
            else:  # it has begun in the middle of the others' shares
                timeline.at(timeline.now, lambda: self._leave(timeline))
            return False
        self.working = True
        self.done, self.speed, self.since = 0.0, 0.0, timeline.now
        return True

    def watch(self, timeline: Timeline, *, urgent: bool) -> None:
        """Schedule the time at which its blocks leave space for a waiting kernel.

        For a more urgent kernel this is the end of the present wave, otherwise of the last full
        one.
        """
        if self.watched or self.waves <= 1 or not self.speed:
            return
        if not urgent and self.is_last_wave:
            return
        done, waves = self._progress(timeline)
        if urgent:
            wave = 1 / (waves * self.speed)
            over = timeline.now - self.resident_since
            left = wave - over % wave
        else:
            left = (math.floor(self.waves) / waves - done) / self.speed
        self.watched = True
        when = timeline.now + max(1, math.ceil(left))
        timeline.at(when, lambda: self._wave_ended(timeline))

    def _progress(self, timeline: Timeline) -> tuple[float, float]:
        """Return the fraction done of its fixed time or work, and the number of waves in it."""
        done = self.done + self.speed * (timeline.now - self.since)
        # Fixed time is in whole waves. The last wave of work is shorter in proportion to its size.
        return done, self.waves if self.working else math.ceil(self.waves)

    def _wave_ended(self, timeline: Timeline) -> None:
        """Let waiting kernels use the space that a wave leaves."""
        self.watched = False
        device = self.stream.device
        if self not in device.kernels:
            return
        done, waves = self._progress(timeline)
        if not self.is_last_wave and done * waves >= math.floor(self.waves) - 1e-6:
            self.is_last_wave = True
            full = math.floor(self.waves) * self.occupancy
            self.occupancy = max(self.waves * self.occupancy - full, self.cap * self.part)
        self.yields = _is_preceded(self, cast("list[KernelOp]", list(device.kernels)))
        _share(timeline, device)

    def _leave(self, timeline: Timeline) -> None:
        """End, and give its space to waiting kernels. Repeated calls do nothing."""
        device = self.stream.device
        if self in device.kernels:
            del device.kernels[self]
            timeline.held.pop(self, None)
            timeline.end(self)
            _share(timeline, device)


def _share(timeline: Timeline, device: DeviceState) -> None:
    """Update the space and speed of all kernels on a device after their set has changed."""
    kernels = cast("list[KernelOp]", list(device.kernels))
    for kernel in kernels:
        if kernel.yields and not _is_preceded(kernel, kernels):
            kernel.yields, kernel.resident_since = False, timeline.now
    runs, shares, spaces = settle(kernels)
    begun = [
        kernel for kernel, run in zip(kernels, runs, strict=True) if run and not kernel.started
    ]
    for kernel in begun:
        kernel.go(timeline)
    if any(kernel.working for kernel in begun):
        runs, shares, spaces = settle(kernels)
    model = device.model
    watts = sum(
        kernel.cost.sm_watts * (share if kernel.working else min(space, kernel.cap))
        for kernel, share, space in zip(kernels, shares, spaces, strict=True)
        if kernel.started
    )
    pace = clock(watts, model.idle_watts, model.power_limit)
    working = [i for i, kernel in enumerate(kernels) if kernel.working and shares[i] > 0]
    busy = [kernels[i] for i in working]
    compute = [shares[i] for i in working]
    rates = speeds(busy, compute, model.dram_bandwidth, model.sm_bandwidth, pace)
    slowed = model.interference
    if slowed is not None and len(busy) > 1:
        factors = slowed(
            [(kernel.name, share) for kernel, share in zip(busy, compute, strict=True)]
        )
        rates = [speed / factor for speed, factor in zip(rates, factors, strict=True)]
    for kernel, speed in zip(busy, rates, strict=True):
        kernel.advance(timeline, speed)
    for kernel, share, space in zip(kernels, shares, spaces, strict=True):
        if kernel.working and share <= 0:
            kernel.advance(timeline, 0.0)
        kernel.wait_for_space(timeline, space)
    if not all(runs):
        _watch(timeline, kernels, runs)


def _is_preceded(kernel: KernelOp, kernels: list[KernelOp]) -> bool:
    """Say whether a more urgent kernel uses one of its SMs."""
    return any(k.priority < kernel.priority and k.sms & kernel.sms for k in kernels)


def _watch(timeline: Timeline, kernels: list[KernelOp], runs: list[bool]) -> None:
    """Watch for space that running kernels will leave to kernels without space."""
    for waiting, run in zip(kernels, runs, strict=True):
        if run or waiting.started:
            continue
        for kernel in kernels:
            if kernel.started and not kernel.yields and kernel.sms & waiting.sms:
                kernel.watch(timeline, urgent=waiting.priority < kernel.priority)
