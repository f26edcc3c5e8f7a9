"""The SMs of a device, a context or a stream, and how they are cut."""

from __future__ import annotations

from collections.abc import Sequence

from greensched.driver.base import Driver
from greensched.typing import DescriptorHandle, ResourceHandle


class SMResource:
    """Some SMs of a device, as the driver gave them out. Immutable; nothing to close.

    Made by `Device.resources`, a context's, a stream's, or a split; never by hand: the driver
    knows its own by opaque bytes inside.
    """

    __slots__ = (
        "_driver",
        "coscheduled_alignment",
        "device",
        "handle",
        "min_partition_size",
        "sm_count",
    )

    def __init__(self, driver: Driver, device: int, handle: ResourceHandle) -> None:
        facts = driver.resource_facts(handle)
        self._driver = driver
        self.device = device
        self.handle = handle
        #: How many SMs.
        self.sm_count = facts.sm_count
        #: The smallest group it can be cut into; 0 where the driver does not say.
        self.min_partition_size = facts.min_partition_size
        #: Sizes of groups are multiples of this; 0 where the driver does not say.
        self.coscheduled_alignment = facts.coscheduled_alignment

    def split_by_count(
        self, minimum: int, groups: int | None = None, *, ignore_coscheduling: bool = False
    ) -> tuple[list[SMResource], SMResource | None]:
        """Cuts it into equal groups of at least `minimum` SMs; does not block.

        All groups and the remainder of *one* call are disjoint, and may be combined in one
        context. Two calls start from the same SMs: their groups overlap.

        Args:
            minimum: SMs of a group, rounded up to what the device can do.
            groups: how many are wanted; there may be fewer, because groups do not cross the
                chip's internal borders. None: as many as there can be.
            ignore_coscheduling: finer groups, at the price of thread-block clusters.

        Returns:
            The groups, and what is left over (None: nothing).

        Raises:
            CUDAError: INVALID_RESOURCE_CONFIGURATION: no such group fits, or this is itself the
                output of a split (make a context of it, and split that context's resource).
        """
        handles, rest = self._driver.split_by_count(
            self.handle, groups, minimum, ignore_coscheduling=ignore_coscheduling
        )
        cut = [SMResource(self._driver, self.device, handle) for handle in handles]
        return cut, None if rest is None else SMResource(self._driver, self.device, rest)

    def __repr__(self) -> str:
        return f"<SMResource: {self.sm_count} SMs of device {self.device}>"


def describe(driver: Driver, resources: Sequence[SMResource]) -> DescriptorHandle:
    """What a green context is made of; the driver keeps it as long as the process lives."""
    return driver.describe([resource.handle for resource in resources])
