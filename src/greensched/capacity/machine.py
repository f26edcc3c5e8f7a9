"""The simulated machine of one run: its devices, a kernel for each class, and what happened.

A kernel of ours does nothing and costs what its class's curve says; the driver's timeline tells
when each one ran, which no slowness of the host can lengthen.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from greensched.capacity.interference import Guard, slowdowns
from greensched.capacity.latency_tables import SpeedupCurve
from greensched.capacity.workload import ServiceProfile
from greensched.device.device import Device
from greensched.device.launch import KernelArguments, LaunchConfig, PreparedLaunch
from greensched.device.streams import Stream
from greensched.driver.simulated import (
    DeviceModel,
    SimulatedDriver,
    Span,
    VirtualClock,
    device_models,
)
from greensched.kernels import Kernel, Program
from greensched.typing import Cost, Granularity, LaunchFacts

#: The driver whose rules apply unless others are asked for: the one that an H200 was asked under.
VERSION = "13.0"


def models(spec: str) -> tuple[list[DeviceModel], tuple[int, int]]:
    """The devices of `h200x2`, and the version to open them with."""
    return device_models.parse(spec if "@" in spec else f"{spec}@{VERSION}")


class Closable(Protocol):
    """A device, a context, a stream."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """One kernel as it ran, in nanoseconds."""

    service: str
    start: int
    end: int
    sms: int


class Machine:
    """Devices, kernels and streams under a virtual clock.

    Args:
        spec: as `--gpus`.
        services: the classes.
        guard: what kinds do to each other on disjoint SMs.
        seed: of the order in which runnable threads go.
        granularity: how finely pools cut the devices.
    """

    def __init__(
        self,
        spec: str,
        services: Mapping[str, ServiceProfile],
        guard: Guard,
        seed: int = 0,
        *,
        granularity: Granularity = "coscheduled",
    ) -> None:
        found, version = models(spec)
        kinds = {name: service.curve.name for name, service in services.items()}
        slowed = slowdowns(guard, kinds)
        self.clock = VirtualClock(seed)
        self.services = dict(services)
        self.granularity = granularity
        self.driver = SimulatedDriver(
            [replace(model, interference=slowed) for model in found],
            version=version,
            clock=self.clock,
            faults=(),
            without=(),
            strict_events=version != device_models.MEASURED,
        )
        self.sms = [model.sm_count for model in found]
        self.kernels = kernels(services.values())
        self.configs = {
            name: [service.curve.config(sms) for sms in self.sms]
            for name, service in services.items()
        }
        #: What ran on each device, in the order of its end.
        self.ran: list[list[DeviceTrace]] = [[] for _ in found]
        #: How many leases the arm's pool has granted.
        self.granted: Callable[[], int] = lambda: 0
        self._listeners: dict[tuple[int, str], Callable[[Span], None]] = {}
        self._done: list[asyncio.Future[None]] = []
        self._made: list[Closable] = []
        self.driver.on_span(self._hear)

    @property
    def devices(self) -> range:
        """Ordinals."""
        return range(len(self.sms))

    def now(self) -> int:
        """Nanoseconds of the virtual clock."""
        return self.clock.now()

    def listen(self, device: int, service: str, listener: Callable[[Span], None]) -> None:
        """Calls somebody with each kernel of a class on a device, as it ends."""
        self._listeners[device, service] = listener

    def finish(self, future: asyncio.Future[None]) -> None:
        """Gives a future its result on the loop's thread, before time goes on."""
        self._done.append(future)

    def keep(self, *made: Closable) -> None:
        """Ends something of an arm's when the machine is closed; what came last goes first."""
        self._made += made

    def close(self) -> None:
        """Ends everything; it may block, so no loop runs any more."""
        for made in reversed(self._made):
            made.close()
        self.driver.close()

    def begin(self) -> Callable[[], None]:
        """On the loop's thread: hears of what the devices did. Returns what ends that."""
        return self.clock.subscribe(self._look)

    def _look(self) -> None:
        done, self._done = self._done, []
        for future in done:
            if not future.done():
                future.set_result(None)

    def _hear(self, span: Span) -> None:
        if span.kind == "kernel" and span.name in self.services:
            self.ran[span.device].append(DeviceTrace(span.name, span.start, span.end, span.sms))
            listener = self._listeners.get((span.device, span.name))
            if listener is not None:
                listener(span)


def kernels(services: Iterable[ServiceProfile]) -> dict[str, Kernel]:
    """A kernel for each class: it does nothing, and takes what its curve says."""
    named = list(services)
    source = "".join(
        f'extern "C" __global__ void {each.name}(unsigned long long ns) {{}}\n' for each in named
    )
    program = Program(source, name="simulation.cu")
    made = {}
    for each in named:
        kernel = made[each.name] = program.kernel(each.name)
        kernel.reference(_nothing)
        kernel.cost(functools.partial(_cost, each.curve))
    return made


def _nothing(_launch: LaunchFacts, _ns: Any) -> None:
    """All that is to be seen of it is its time."""


def _cost(curve: SpeedupCurve, launch: LaunchFacts, ns: Any) -> Cost:
    return curve.cost(float(ns) * 1e-9, len(launch.sms))


class Launch:
    """A class's launch on a plain stream, made ready: call it with nanoseconds on the whole device.

    It blocks where it is made, so that is done before a loop runs.
    """

    def __init__(
        self, device: Device, stream: Stream, kernel: Kernel, config: LaunchConfig
    ) -> None:
        arguments = KernelArguments(kernel, device.ordinal)
        arguments.fill((0,))
        with device.primary.entered():
            handle = device.loader.load(kernel)
        self._arguments = arguments
        self._plan = PreparedLaunch(stream, config, kernel, handle, arguments)
        self._plan.fire()  # the first launch on a context may block
        stream.sync()

    def __call__(self, ns: int) -> None:
        self._arguments.set(0, ns)
        self._plan.fire()
