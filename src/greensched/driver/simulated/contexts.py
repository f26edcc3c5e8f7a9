"""Contexts of the simulated driver: primary and green ones, and SM resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

from greensched.driver.simulated import sm_split
from greensched.driver.simulated.address_space import GREEN_BYTES, LOST_BYTES
from greensched.driver.simulated.base import Options
from greensched.driver.simulated.context_stack import Stacks, one_way_to_wait
from greensched.driver.simulated.device_models import DeviceModel
from greensched.driver.simulated.handles import Context, Green, SimulatedStream
from greensched.driver.simulated.timeline import Device, Signal, Stream
from greensched.driver.status import from_status
from greensched.driver.types import (
    ContextHandle,
    DescriptorHandle,
    GreenHandle,
    ResourceFacts,
    ResourceHandle,
    SMGroup,
    StreamHandle,
    WorkqueueFacts,
)
from greensched.errors import DriverMisuse
from greensched.typing import ContextFlags, Feature, SharingScope


class Contexts(Stacks):
    """The verbs for contexts and resources."""

    def __init__(self, devices: Iterable[DeviceModel], **options: Unpack[Options]) -> None:
        super().__init__(devices, **options)
        self._primaries: dict[int, Context] = {}
        self._users: dict[int, int] = {}
        self._flags: dict[int, ContextFlags] = {}

    # -- primary contexts ----------------------------------------------------------------------

    def retain_primary(self, device: int) -> ContextHandle:
        """Makes the primary context, or counts one more user."""
        return self._retain(device)

    def release_primary(self, device: int) -> None:
        """Counts one user less; the last must have destroyed what it made."""
        self._release(device)

    def _retain(self, device: int) -> ContextHandle:
        self._unfaulted(self._device(device), "retain_primary")
        with self.timeline.lock:
            if not self._users.get(device):
                primary = Context(self._born(device, "primary"), device)
                primary.flags |= self._flags.get(device, ContextFlags.SCHED_AUTO)
                self._primaries[device] = self._own(primary)
            self._users[device] = self._users.get(device, 0) + 1
            return ContextHandle(self._primaries[device])

    def _release(self, device: int) -> None:
        with self.timeline.lock:
            if not self._users.get(device):
                raise from_status(201, "release_primary")
            self._users[device] -= 1
            if self._users[device]:
                return
            primary = self._primaries.pop(device)
            self.memory[device].contexts = 0
            self._died(device, "primary")
            primary.alive = False
        left = {kind: n for (dev, kind), n in self._live.items() if dev == device and n}
        if left and self.devices[device].fault is None:
            raise DriverMisuse(f"the primary context of device {device} ended with {left} alive")
        if primary.threads:
            raise DriverMisuse(f"{primary!r} ended while current on {list(primary.threads)}")

    def primary_state(self, device: int) -> tuple[int, bool]:
        """(flags, active)."""
        self._device(device)
        return int(self._flags.get(device, 0)), bool(self._users.get(device))

    def set_primary_flags(self, device: int, flags: ContextFlags) -> None:
        """How the primary context is made; one that is active has them from here on."""
        self._unfaulted(self._device(device), "set_primary_flags")
        one_way_to_wait(flags, "set_primary_flags")
        self._flags[device] = flags
        primary = self._primaries.get(device)
        if primary is not None:
            primary.flags = flags | ContextFlags.MAP_HOST

    # -- waiting for a context -------------------------------------------------------------------

    def synchronize_context(self, context: ContextHandle) -> None:
        """Waits for all its streams; of a primary, for its green contexts' too."""
        ctx = self._expect(context, Context, "synchronize_context")
        device = self.devices[ctx.device]
        self._refuse_capture("synchronize_context")
        self._wait_for(self._work_so_far(device, ctx), device, "synchronize_context")

    def priority_range(self) -> tuple[int, int]:
        """(least, greatest), as an H200 said (`device`)."""
        self._unfaulted(self.devices[self._thread.stack[-1].device], "priority_range")
        return 0, -5

    # -- resources -------------------------------------------------------------------------------

    def device_resource(self, device: int) -> ResourceHandle:
        """Every SM of a device."""
        return ResourceHandle(sm_split.whole_device(self._device(device).model, device, self))

    def context_resource(self, context: ContextHandle) -> ResourceHandle:
        """The SMs a context was given."""
        ctx = self._expect(context, Context, "context_resource")
        whole = sm_split.whole_device(self.devices[ctx.device].model, ctx.device, self)
        if ctx.green is None:
            return ResourceHandle(whole)
        green = ctx.green
        return ResourceHandle(
            replace(
                whole,
                mask=green.mask,
                origin="green",
                sm_count=green.sm_count,
                minimum=green.grain[0],
                alignment=green.grain[1],
            )
        )

    def stream_resource(self, stream: StreamHandle) -> ResourceHandle:
        """The SMs a stream's context was given."""
        if not self.supports(Feature.STREAM_RESOURCES):
            raise self._lacks("asking a stream for its SMs", "CUDA 13.1")
        return self.context_resource(ContextHandle(self._stream(stream, "stream_resource").context))

    def resource_facts(self, resource: ResourceHandle) -> ResourceFacts:
        """Size, least group and alignment."""
        return self._expect(resource, sm_split.Resource, "resource_facts").facts(self.version)

    def split_by_count(
        self,
        resource: ResourceHandle,
        groups: int | None,
        minimum: int,
        *,
        ignore_coscheduling: bool = False,
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        """Cuts a resource into equal groups."""
        source = self._expect(resource, sm_split.Resource, "split_by_count")
        model = self.devices[source.device].model
        cut, rest = sm_split.split_by_count(
            model, source, groups, minimum, fine=ignore_coscheduling
        )
        return _handles(cut, rest)

    def split(
        self, resource: ResourceHandle, groups: Sequence[SMGroup]
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        """Cuts a resource into the groups asked for."""
        if not self.supports(Feature.STRUCTURED_SPLIT):
            raise self._lacks("a structured split", "CUDA 13.1")
        source = self._expect(resource, sm_split.Resource, "split")
        if not groups:
            raise from_status(1, "split")
        model = self.devices[source.device].model
        return _handles(*sm_split.split(model, source, groups, self.version))

    def device_workqueue(self, device: int) -> ResourceHandle:
        """The device's work-queue configuration."""
        self._need_workqueues()
        return ResourceHandle(sm_split.Workqueue(self._device(device).ordinal, self))

    def context_workqueue(self, context: ContextHandle) -> ResourceHandle:
        """What a context was given; else its device's."""
        self._need_workqueues()
        ctx = self._expect(context, Context, "context_workqueue")
        given = ctx.green.workqueue if ctx.green is not None else None
        return ResourceHandle(given or sm_split.Workqueue(ctx.device, self))

    def workqueue_facts(self, workqueue: ResourceHandle) -> WorkqueueFacts:
        """Who shares it, and how much work it expects."""
        return self._expect(workqueue, sm_split.Workqueue, "workqueue_facts").facts

    def configure_workqueue(
        self, workqueue: ResourceHandle, sharing_scope: SharingScope, concurrency_limit: int
    ) -> ResourceHandle:
        """A copy with other values."""
        given = self._expect(workqueue, sm_split.Workqueue, "configure_workqueue")
        return ResourceHandle(
            replace(given, sharing_scope=sharing_scope, concurrency_limit=concurrency_limit)
        )

    def _need_workqueues(self) -> None:
        if not self.supports(Feature.WORKQUEUES):
            raise self._lacks("a work-queue resource", "CUDA 13.1")

    def describe(self, resources: Sequence[ResourceHandle]) -> DescriptorHandle:
        """One descriptor of several resources."""
        parts = [
            self._expect(r, sm_split.Workqueue, "describe")
            if isinstance(r, sm_split.Workqueue)
            else self._expect(r, sm_split.Resource, "describe")
            for r in resources
        ]
        if not parts:
            raise from_status(1, "describe")

        def whole(device: int) -> sm_split.Resource:
            return sm_split.whole_device(self._device(device).model, device, self)

        return DescriptorHandle(sm_split.combine(parts, self.version, whole))

    def create_green(self, descriptor: DescriptorHandle, device: int) -> GreenHandle:
        """A green context; retains the primary. Waits until nothing runs."""
        made_of = self._expect(descriptor, sm_split.Descriptor, "create_green")
        if made_of.device != device:
            raise from_status(101, "create_green")
        self._settle(self._device(device))
        with self.timeline.lock:
            self.memory[device].open(GREEN_BYTES, "create_green")
        self._retain(device)
        ident = self._born(device, "green context")
        primary = self._primaries[device]
        green = self._own(Green(ident, primary, made_of))
        self._own(green.view)
        return GreenHandle(green)

    def destroy_green(self, green: GreenHandle) -> None:
        """Ends a green context: its streams first, and nothing in flight.

        An H200 ends one also while it is current, or with work in flight (`driver_edges`,
        `destroy_in_flight`), and its streams can never be ended then. That is refused here: the
        port forbids it, and nothing good comes of it. After a device fault it does not answer
        that (`poison`).
        """
        gone = self._expect(green, Green, "destroy_green")
        device = self.devices[gone.device]
        faulty = device.fault is not None
        if gone.view.threads:
            raise DriverMisuse(f"{gone!r} destroyed while current on {list(gone.view.threads)}")
        with self.timeline.lock:
            busy = [s for s in device.streams.values() if s.green == gone.ident and not s.idle]
        if busy and not faulty:
            raise DriverMisuse(f"{gone!r} destroyed with work in flight")
        for stream in gone.streams:
            stream.detached = True
            self._end_capture(stream)
        gone.alive = gone.view.alive = False
        with self.timeline.lock:
            self.memory[gone.device].close(GREEN_BYTES - LOST_BYTES)
        self._died(gone.device, "green context")
        self._release(gone.device)

    def green_context(self, green: GreenHandle) -> ContextHandle:
        """The same view each time."""
        return ContextHandle(self._expect(green, Green, "green_context").view)

    # -- waiting ---------------------------------------------------------------------------------

    def _work_so_far(self, device: Device, context: Context | None) -> Signal:
        """What the streams of a context, or (None) of the whole device, have now."""
        with self.timeline.lock:
            streams = device.streams.values()
            return self.timeline.follow([s for s in streams if _covers(context, s)])

    def _wait_for(self, marker: Signal, device: Device, what: str) -> None:
        """Blocks until it has come to pass, or never can."""
        self.clock.wait(lambda: marker.done or device.fault is not None)
        self._unfaulted(device, what)

    def _settle(self, device: Device) -> None:
        """Blocks until all work that the device has now is done, or never can be.

        Making a green context waits for that, and giving back pinned memory, unloading code, and a
        kernel's first use; every other verb that an H200 was asked beside a stream stuck in a
        kernel, or in a wait for a word, returned (docs/measurements/h200-580/stuck-and-lost.json).
        """
        if device.fault is None:
            marker = self._work_so_far(device, None)
            self.clock.wait(lambda: marker.done or device.fault is not None)

    def _settle_code(self, device: Device) -> None:
        """The same, to change the code there; much else waits for that, too."""
        with self.timeline.lock:
            device.changes += 1
        try:
            self._settle(device)
        finally:
            with self.timeline.lock:
                device.changes -= 1
                self.clock.changed()


def _handles(
    cut: list[sm_split.Resource], rest: sm_split.Resource | None
) -> tuple[list[ResourceHandle], ResourceHandle | None]:
    return [ResourceHandle(r) for r in cut], None if rest is None else ResourceHandle(rest)


def _covers(context: Context | None, stream: Stream) -> bool:
    """Whether the work of a context includes a stream's: a primary's that of its green ones."""
    if context is None:
        return True
    if context.own or context.green is not None:
        return stream.green == context.ident
    return not (isinstance(stream, SimulatedStream) and stream.context.own)
