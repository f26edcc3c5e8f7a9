"""SM and work-queue resources, and the green contexts made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from greensched.driver.simulated import sm_split
from greensched.driver.simulated.address_space import GREEN_BYTES, LOST_BYTES
from greensched.driver.simulated.handles import Context, Green
from greensched.driver.simulated.machine import Component
from greensched.driver.status import from_status
from greensched.driver.types import (
    ContextHandle,
    DescriptorHandle,
    GreenHandle,
    ResourceFacts,
    ResourceHandle,
    SMGroup,
    WorkqueueFacts,
)
from greensched.errors import DriverMisuse
from greensched.typing import Feature, SharingScope


class Resources(Component):
    """Driver calls for resources, splits and green contexts."""

    # -- SMs -------------------------------------------------------------------------------------

    def device_resource(self, device: int) -> ResourceHandle:
        return ResourceHandle(self._whole(device))

    def context_resource(self, context: ContextHandle) -> ResourceHandle:
        target = self.machine.expect(context, Context, "context_resource")
        whole, green = self._whole(target.device), target.green
        if green is None:
            return ResourceHandle(whole)
        minimum, alignment = green.grain
        return ResourceHandle(
            replace(
                whole,
                mask=green.mask,
                origin="green",
                sm_count=green.sm_count,
                minimum=minimum,
                alignment=alignment,
            )
        )

    def resource_facts(self, resource: ResourceHandle) -> ResourceFacts:
        target = self.machine.expect(resource, sm_split.Resource, "resource_facts")
        return target.facts(self.machine.version)

    def split_by_count(
        self,
        resource: ResourceHandle,
        groups: int | None,
        minimum: int,
        *,
        ignore_coscheduling: bool = False,
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        source = self.machine.expect(resource, sm_split.Resource, "split_by_count")
        model = self.machine.devices[source.device].model
        return _handles(
            *sm_split.split_by_count(model, source, groups, minimum, fine=ignore_coscheduling)
        )

    def split(
        self, resource: ResourceHandle, groups: Sequence[SMGroup]
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        self.machine.require(Feature.STRUCTURED_SPLIT, "a structured split", "CUDA 13.1")
        source = self.machine.expect(resource, sm_split.Resource, "split")
        if not groups:
            raise from_status(1, "split")
        model = self.machine.devices[source.device].model
        return _handles(*sm_split.split(model, source, groups, self.machine.version))

    def _whole(self, device: int) -> sm_split.Resource:
        model = self.machine.device(device).model
        return sm_split.whole_device(model, device, self.machine)

    # -- work queues -----------------------------------------------------------------------------

    def device_workqueue(self, device: int) -> ResourceHandle:
        self._require_workqueues()
        ordinal = self.machine.device(device).ordinal
        return ResourceHandle(sm_split.Workqueue(ordinal, self.machine))

    def context_workqueue(self, context: ContextHandle) -> ResourceHandle:
        """Return the configuration that a context was given, or else its device's."""
        self._require_workqueues()
        target = self.machine.expect(context, Context, "context_workqueue")
        configured = target.green.workqueue if target.green is not None else None
        return ResourceHandle(configured or sm_split.Workqueue(target.device, self.machine))

    def workqueue_facts(self, workqueue: ResourceHandle) -> WorkqueueFacts:
        return self.machine.expect(workqueue, sm_split.Workqueue, "workqueue_facts").facts

    def configure_workqueue(
        self, workqueue: ResourceHandle, sharing_scope: SharingScope, concurrency_limit: int
    ) -> ResourceHandle:
        source = self.machine.expect(workqueue, sm_split.Workqueue, "configure_workqueue")
        return ResourceHandle(
            replace(source, sharing_scope=sharing_scope, concurrency_limit=concurrency_limit)
        )

    def _require_workqueues(self) -> None:
        self.machine.require(Feature.WORKQUEUES, "a work-queue resource", "CUDA 13.1")

    # -- green contexts --------------------------------------------------------------------------

    def describe(self, resources: Sequence[ResourceHandle]) -> DescriptorHandle:
        expect = self.machine.expect
        parts = [
            expect(r, sm_split.Workqueue, "describe")
            if isinstance(r, sm_split.Workqueue)
            else expect(r, sm_split.Resource, "describe")
            for r in resources
        ]
        if not parts:
            raise from_status(1, "describe")
        return DescriptorHandle(sm_split.combine(parts, self.machine.version, self._whole))

    def create_green(self, descriptor: DescriptorHandle, device: int) -> GreenHandle:
        """Make a green context, which retains the primary, once the device is idle."""
        machine = self.machine
        made_of = machine.expect(descriptor, sm_split.Descriptor, "create_green")
        if made_of.device != device:
            raise from_status(101, "create_green")
        machine.wait_until_idle(machine.device(device))
        with machine.timeline.lock:
            machine.memory[device].open(GREEN_BYTES, "create_green")
        machine.retain_primary(device)
        ident = machine.register(device, "green context")
        green = machine.own(Green(ident, machine.primaries[device], made_of))
        machine.own(green.view)
        return GreenHandle(green)

    def destroy_green(self, green: GreenHandle) -> None:
        """End a green context whose streams have no work in flight.

        An H200 also ends a context that is current or has work in flight (`driver_edges`,
        `destroy_in_flight`), and its streams can then never be destroyed. Here it is refused, as
        the interface forbids it. After a device fault the fault is not raised (`poison`).
        """
        machine = self.machine
        ended = machine.expect(green, Green, "destroy_green")
        device = machine.devices[ended.device]
        if ended.view.threads:
            raise DriverMisuse(f"{ended!r} destroyed while current on {list(ended.view.threads)}")
        with machine.timeline.lock:
            busy = [s for s in device.streams.values() if s.green == ended.ident and not s.idle]
        if busy and device.fault is None:
            raise DriverMisuse(f"{ended!r} destroyed with work in flight")
        for stream in ended.streams:
            stream.detached = True
            machine.end_capture(stream)
        ended.alive = ended.view.alive = False
        with machine.timeline.lock:
            machine.memory[ended.device].close(GREEN_BYTES - LOST_BYTES)
        machine.unregister(ended.device, "green context")
        machine.release_primary(ended.device)

    def green_context(self, green: GreenHandle) -> ContextHandle:
        """Return the view, the same object each time."""
        return ContextHandle(self.machine.expect(green, Green, "green_context").view)


def _handles(
    groups: list[sm_split.Resource], rest: sm_split.Resource | None
) -> tuple[list[ResourceHandle], ResourceHandle | None]:
    return [ResourceHandle(r) for r in groups], None if rest is None else ResourceHandle(rest)
