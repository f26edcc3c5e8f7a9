"""The simulated machine of one run: its devices, one kernel per class, and the kernels' trace.

A kernel does nothing, and costs what its class's curve says. The driver's timeline records when
each kernel ran; a slow host cannot lengthen it.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from greensched.capacity.host_costs import NO_COSTS, HostCost, HostCosts
from greensched.capacity.interference import Guard, slowdowns
from greensched.capacity.latency_tables import SpeedupCurve
from greensched.capacity.workload import ServiceProfile, waves
from greensched.device.arguments import KernelArguments
from greensched.device.device import Device
from greensched.device.launch import LaunchConfig, PreparedLaunch
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

#: The driver version to simulate by default, under which an H200 was measured.
VERSION = "13.0"


def models(spec: str) -> tuple[list[DeviceModel], tuple[int, int]]:
    """Return the device models of a spec such as `h200x2`, and the driver version to simulate."""
    return device_models.parse(spec if "@" in spec else f"{spec}@{VERSION}")


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel's run: times in nanoseconds, and the SMs as a mask."""

    service: str
    start: int
    end: int
    sms: int


class Machine:
    """Devices, kernels and streams under a virtual clock.

    Args:
        spec: The devices, as for `--gpus`.
        services: The classes.
        guard: The interference between kinds of work on disjoint SMs.
        seed: Determines the order of runnable threads.
        granularity: How finely pools split the devices.
        host: The host's time for operations.
    """

    def __init__(
        self,
        spec: str,
        services: Mapping[str, ServiceProfile],
        guard: Guard,
        seed: int = 0,
        *,
        granularity: Granularity = "coscheduled",
        host: HostCosts = NO_COSTS,
    ) -> None:
        gpu_models, version = models(spec)
        kinds = {name: service.curve.name for name, service in services.items()}
        slowed = slowdowns(guard, kinds)
        self.clock = VirtualClock(seed)
        self.services = dict(services)
        self.granularity = granularity
        self.host = host
        self._host_times = random.Random(f"host {seed}")
        self.driver = SimulatedDriver(
            [replace(model, interference=slowed) for model in gpu_models],
            version=version,
            clock=self.clock,
            strict_events=version != device_models.MEASURED,
        )
        self.sms = [model.sm_count for model in gpu_models]
        self.kernels = kernels(services.values())
        self.configs = {
            name: [
                service.curve.config(facts.sm_count, facts.max_threads_per_sm, waves(service))
                for facts in (model.facts(0) for model in gpu_models)
            ]
            for name, service in services.items()
        }
        #: The kernels that ran on each device, in the order of their ends.
        self.traces: list[list[KernelRun]] = [[] for _ in gpu_models]
        #: Returns the number of leases that the strategy's pool has granted.
        self.granted: Callable[[], int] = lambda: 0
        self._listeners: dict[tuple[int, str], Callable[[Span], None]] = {}
        self._done: list[asyncio.Future[None]] = []
        #: Closed with the machine: devices, contexts and streams.
        self.made = ExitStack()
        self.driver.on_span(self._record)

    @property
    def devices(self) -> range:
        """The devices' ordinals."""
        return range(len(self.sms))

    def now(self) -> int:
        """Return the virtual time in nanoseconds."""
        return self.clock.now()

    async def spend(self, cost: HostCost) -> None:
        """Let the host's time for an operation pass."""
        seconds = cost.seconds(self._host_times)
        if seconds:
            await asyncio.sleep(seconds)

    def listen(self, device: int, service: str, listener: Callable[[Span], None]) -> None:
        """Call a listener at the end of each kernel of a class on a device."""
        self._listeners[device, service] = listener

    def finish(self, future: asyncio.Future[None]) -> None:
        """Complete a future on the loop's thread before virtual time advances."""
        self._done.append(future)

    def close(self) -> None:
        """Close everything. May block: call it only after the loop has ended."""
        self.made.close()
        self.driver.close()

    def begin(self) -> Callable[[], None]:
        """Start to complete futures as kernels end. Call it on the loop's thread.

        Returns:
            A function that stops it.
        """
        return self.clock.subscribe(self._complete)

    def _complete(self) -> None:
        done, self._done = self._done, []
        for future in done:
            if not future.done():
                future.set_result(None)

    def _record(self, span: Span) -> None:
        if span.kind == "kernel" and span.name in self.services:
            self.traces[span.device].append(KernelRun(span.name, span.start, span.end, span.sms))
            listener = self._listeners.get((span.device, span.name))
            if listener is not None:
                listener(span)


def kernels(services: Iterable[ServiceProfile]) -> dict[str, Kernel]:
    """Make a kernel for each class, which does nothing but take the time of the class's curve."""
    profiles = list(services)
    source = "".join(
        f'extern "C" __global__ void {service.name}(unsigned long long ns) {{}}\n'
        for service in profiles
    )
    program = Program(source, name="simulation.cu")
    made = {}
    for service in profiles:
        kernel = made[service.name] = program.kernel(service.name)
        kernel.reference(_nothing)
        kernel.cost(functools.partial(_cost, service.curve))
    return made


def _nothing(_launch: LaunchFacts, _ns: Any) -> None:
    """Do nothing: only the kernel's time matters."""


def _cost(curve: SpeedupCurve, launch: LaunchFacts, ns: Any) -> Cost:
    return curve.cost(float(ns) * 1e-9, len(launch.sms))


class Launch:
    """A prepared launch on a plain stream. Call it with its nanoseconds on the whole device.

    Creating it may block, so it is created before a loop runs.
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
        self._plan.launch()  # the first launch on a context may block
        stream.sync()

    def __call__(self, ns: int) -> None:
        self._arguments.set(0, ns)
        self._plan.launch()
