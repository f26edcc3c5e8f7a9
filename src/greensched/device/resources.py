"""Resources of a device, a context or a stream: SMs and work queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from greensched.device import splitting
from greensched.device.splitting import SMResourceOptions
from greensched.driver.interface import Driver
from greensched.driver.kept_handles import Cut
from greensched.driver.types import ContextHandle, DescriptorHandle, ResourceHandle
from greensched.errors import (
    CUDAError,
    InvalidCombination,
    InvalidRequest,
    WrongDevice,
)
from greensched.typing import SharingScope

#: The largest thread-block cluster, in blocks, that every device with clusters accepts. Source:
#: programming guide, "Thread Block Clusters".
PORTABLE_CLUSTER = 8


class SMResource:
    """Some SMs of a device. Immutable. Nothing has to be closed.

    Made by the `resources` of a device, context or stream, or by a split, but never directly,
    because it holds opaque bytes of the driver.

    Args:
        cut: An object that all outputs of one split share. None: this is not an output of a split,
            and can be split.
        is_trial: Whether it came from a dry run, so that no context can be made of it.
    """

    __slots__ = (
        "_driver",
        "coscheduled_alignment",
        "cut",
        "device_id",
        "flags",
        "handle",
        "is_trial",
        "min_partition_size",
        "sm_count",
    )

    def __init__(
        self,
        driver: Driver,
        device_id: int,
        handle: ResourceHandle,
        cut: object = None,
        *,
        is_trial: bool = False,
    ) -> None:
        facts = driver.resource_facts(handle)
        self._driver = driver
        self.cut = cut
        self.is_trial = is_trial
        self.device_id = device_id
        #: The driver's handle.
        self.handle = handle
        #: The number of SMs.
        self.sm_count = facts.sm_count
        #: The smallest group of a split. 0 for outputs of a split if the driver does not report it.
        self.min_partition_size = facts.min_partition_size
        #: The number of SMs that are co-scheduled; counts are multiples of it. 0 as above.
        self.coscheduled_alignment = facts.coscheduled_alignment
        #: The driver's flags: 1 for a group with backfill (CUdevSmResourceGroup_flags).
        self.flags = facts.flags

    def split(
        self, options: SMResourceOptions, *, dry_run: bool = False
    ) -> tuple[list[SMResource], SMResource | None]:
        """Split it into groups of exactly the sizes in `options`. Does not block.

        All groups and the remainder of *one* call are disjoint, and may be combined in one context.
        Groups of two calls overlap, because both start from the same SMs. Nothing is reserved.

        Args:
            options: The number of groups, and their SMs.
            dry_run: Whether only to test. The split and its refusals are the same; the outputs have
                their sizes, but no context can be made of them.

        Returns:
            The groups, and the remainder or None. A remainder may have no co-scheduled SMs.

        Raises:
            InvalidSplit: The split is not possible; says why, and the nearest sizes.
            InvalidRequest: A value is invalid, or this object is itself an output of a split (make
                a context of it, and split that context's `resources.sm`).
            NotSupported: Unequal groups, backfill or preferred sizes need CUDA 13.1.
        """
        if not isinstance(options, SMResourceOptions):
            raise InvalidRequest(f"split takes SMResourceOptions(count=...); got {options!r}")
        groups = options.groups
        self._check_whole()
        cut = splitting.split(self._driver, self.device_id, self.handle, groups)
        return self._outputs(cut, trial=dry_run)

    def split_evenly(
        self, minimum: int, *, fine: bool = False
    ) -> tuple[list[SMResource], SMResource | None]:
        """Split it into as many equal groups as possible, in the same way for each pool.

        How many groups fit on a chip, only the driver knows. This uses the older split by count,
        which rounds sizes up.

        Args:
            minimum: The least number of SMs of a group.
            fine: Whether SMs need not be co-scheduled, which allows finer groups but not large
                clusters.

        Raises:
            CUDAError: INVALID_RESOURCE_CONFIGURATION if no such group fits.
        """
        self._check_whole()

        def split() -> Cut:
            return self._driver.split_by_count(self.handle, None, minimum, ignore_coscheduling=fine)

        cut = self._driver.kept.cut(self.device_id, minimum, fine, split)
        return self._outputs(cut, trial=False)

    def _check_whole(self) -> None:
        if self.cut is not None:
            raise InvalidRequest(
                f"{self!r} is the output of a split, and cannot be split again: make a context "
                "of it, and split that context's resources.sm"
            )

    def _outputs(self, cut: Cut, *, trial: bool) -> tuple[list[SMResource], SMResource | None]:
        handles, rest = cut
        mark = object()

        def output(handle: ResourceHandle) -> SMResource:
            return SMResource(self._driver, self.device_id, handle, mark, is_trial=trial)

        return [output(handle) for handle in handles], None if rest is None else output(rest)

    def __repr__(self) -> str:
        trial = ", of a dry run" if self.is_trial else ""
        return f"<SMResource: {self.sm_count} SMs of device {self.device_id}{trial}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkqueueResourceOptions:
    """The settings of `WorkqueueResource.configure`. None leaves a setting unchanged.

    Attributes:
        sharing_scope: `"device_ctx"`: all contexts share work queues. `"green_ctx_balanced"`: not
            shared with other contexts that have this setting, if possible.
        concurrency_limit: The number of streams that will have work at once, at least 1. A hint.
    """

    sharing_scope: SharingScope | None = None
    concurrency_limit: int | None = None

    def __post_init__(self) -> None:
        """Check the values, equally for every driver.

        Raises:
            InvalidRequest: The scope is unknown, or the limit out of range.
        """
        scope, limit = self.sharing_scope, self.concurrency_limit
        if scope is not None and scope not in get_args(SharingScope):
            known = " or ".join(map(repr, get_args(SharingScope)))
            raise InvalidRequest(f"sharing_scope={scope!r}: give {known}")
        if limit is not None and (type(limit) is not int or not 1 <= limit <= splitting.MOST):
            raise InvalidRequest(
                f"concurrency_limit={limit!r}: give a number from 1 to {splitting.MOST}"
            )


class WorkqueueResource:
    """How a context uses the device's work queues. Nothing has to be closed.

    Made by the `resources` of a device, context or stream. Needs a driver of CUDA 13.1.
    """

    __slots__ = ("_driver", "device_id", "handle")

    def __init__(self, driver: Driver, device_id: int, handle: ResourceHandle) -> None:
        self._driver = driver
        self.device_id = device_id
        #: The driver's handle, a new one after `configure`.
        self.handle = handle

    @property
    def sharing_scope(self) -> SharingScope:
        """Which contexts share its work queues."""
        return self._driver.workqueue_facts(self.handle).sharing_scope

    @property
    def concurrency_limit(self) -> int:
        """The streams that will have work at once; initially CUDA_DEVICE_MAX_CONNECTIONS."""
        return self._driver.workqueue_facts(self.handle).concurrency_limit

    def configure(self, options: WorkqueueResourceOptions) -> None:
        """Change the settings for contexts made of it later. Does not block.

        Raises:
            InvalidRequest: Not `WorkqueueResourceOptions`; nothing is changed.
        """
        if not isinstance(options, WorkqueueResourceOptions):
            raise InvalidRequest(f"configure takes WorkqueueResourceOptions; got {options!r}")
        now = self._driver.workqueue_facts(self.handle)
        scope, limit = options.sharing_scope, options.concurrency_limit
        scope = now.sharing_scope if scope is None else scope
        limit = now.concurrency_limit if limit is None else limit
        self.handle = self._driver.configure_workqueue(self.handle, scope, limit)

    def __repr__(self) -> str:
        return (
            f"<WorkqueueResource: {self.sharing_scope}, {self.concurrency_limit} at once, "
            f"device {self.device_id}>"
        )


class DeviceResources:
    """The resources of a device or a context. Each property reads from the driver.

    Args:
        context: The context. None: the device.
        check: Raises if the context has ended.
    """

    __slots__ = ("_check", "_context", "_driver", "device_id")

    def __init__(
        self,
        driver: Driver,
        device_id: int,
        context: ContextHandle | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._driver = driver
        self._context = context
        self._check = check
        self.device_id = device_id

    @property
    def sm(self) -> SMResource:
        """The SMs, which can be split."""
        self._check()
        if self._context is None:
            handle = self._driver.device_resource(self.device_id)
        else:
            handle = self._driver.context_resource(self._context)
        return SMResource(self._driver, self.device_id, handle)

    @property
    def workqueue(self) -> WorkqueueResource:
        """A copy of the work-queue configuration, which can be changed by `configure`.

        Raises:
            NotSupported: The driver is older than CUDA 13.1.
        """
        self._check()
        if self._context is None:
            handle = self._driver.device_workqueue(self.device_id)
        else:
            handle = self._driver.context_workqueue(self._context)
        return WorkqueueResource(self._driver, self.device_id, handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """The resources of a green context, for `Device.create_context`.

    Attributes:
        resources: SMs (if several, outputs of one split), and at most one work-queue configuration.
            Without SMs the context has every SM.
    """

    resources: Sequence[SMResource | WorkqueueResource]


def describe(driver: Driver, device_id: int, options: ContextOptions) -> DescriptorHandle:
    """Create a green context's descriptor, which the driver keeps until the process ends.

    Raises: As `Device.create_context`.
    """
    resources = _checked(options)
    for resource in resources:
        if resource.device_id != device_id:
            raise WrongDevice("a resource", resource.device_id, device_id)
    sms = [resource for resource in resources if isinstance(resource, SMResource)]
    overlap = _overlap(sms)
    if overlap is not None:
        raise InvalidCombination(overlap)
    try:
        return driver.describe([resource.handle for resource in resources])
    except CUDAError as error:
        if error.status not in splitting.REFUSALS:
            raise
        raise InvalidCombination(_explain(sms)) from error


def _checked(options: object) -> tuple[SMResource | WorkqueueResource, ...]:
    if not isinstance(options, ContextOptions):
        raise InvalidRequest(
            f"create_context takes ContextOptions(resources=[...]); got {options!r}"
        )
    requested: object = options.resources
    resources = tuple(requested) if isinstance(requested, Sequence) else ()
    if not resources or not all(isinstance(r, (SMResource, WorkqueueResource)) for r in resources):
        raise InvalidRequest(
            f"resources={requested!r}: a green context is made of a list of SMResource and "
            "WorkqueueResource objects, at least one"
        )
    if any(isinstance(r, SMResource) and r.is_trial for r in resources):
        raise InvalidRequest(
            "no context can be made of a dry run's outputs: split without dry_run=True"
        )
    if sum(isinstance(r, WorkqueueResource) for r in resources) > 1:
        raise InvalidRequest(
            f"resources={requested!r}: a context has one work-queue configuration at most"
        )
    return resources


def _overlap(sms: Sequence[SMResource]) -> str | None:
    """Return why a combination would contain SMs twice, or None.

    Driver 580 accepts this, and counts them twice (docs/measurements/h200-580/resources.txt).
    """
    if len(sms) < 2:
        return None
    if any(resource.cut is None for resource in sms):
        return "only outputs of a split can be combined, and one of these is unsplit"
    if len({resource.cut for resource in sms}) > 1:
        return "they come from several splits, whose outputs overlap: make one split of all"
    if len({id(resource.handle) for resource in sms}) < len(sms):
        return "one of these is given twice"
    return None


def _explain(sms: Sequence[SMResource]) -> str:
    """Return the known reason for refusing a combination; the driver gives none."""
    if len({resource.coscheduled_alignment for resource in sms}) > 1:
        return (
            "from CUDA 13.1 on SMs of unequal alignment cannot be combined "
            f"({', '.join(str(resource.coscheduled_alignment) for resource in sms)})"
        )
    if len({resource.flags for resource in sms}) > 1:
        return "from CUDA 13.4 on SMs of unequal flags cannot be combined (backfill, or not)"
    return "the driver refused"


def max_cluster_size(compute_capability: tuple[int, int], sms: SMResource) -> int:
    """Return the most blocks of a thread-block cluster that always fits; 1 without clusters.

    A cluster runs on co-scheduled SMs.

    Args:
        compute_capability: The device's.
        sms: The SMs of a context, because driver 580 does not report the alignment of a split's
            outputs.
    """
    if compute_capability < (9, 0):
        return 1
    return min(PORTABLE_CLUSTER, max(1, sms.coscheduled_alignment))
