"""What a device has to give out, and what a context or a stream was given: SMs and work queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from greensched.device import splitting
from greensched.device.splitting import SMResourceOptions
from greensched.driver.interface import Driver
from greensched.driver.types import ContextHandle, DescriptorHandle, ResourceHandle
from greensched.errors import (
    CUDAError,
    InvalidCombination,
    InvalidRequest,
    WrongDevice,
)
from greensched.typing import SharingScope

#: Blocks of the largest thread-block cluster that every device with clusters takes. Source:
#: programming guide, "Thread Block Clusters".
PORTABLE_CLUSTER = 8


class SMResource:
    """Some SMs of a device, as the driver gave them out. Immutable; nothing to close.

    Made by a device's `resources`, a context's, a stream's, or a split; never by hand: the driver
    knows its own by opaque bytes inside.

    Args:
        cut: what all outputs of one split have in common; None: it can be split itself.
        is_trial: it came from a dry run, and nothing can be made of it.
        is_device: it is every SM of its device.
    """

    __slots__ = (
        "_driver",
        "coscheduled_alignment",
        "cut",
        "device",
        "flags",
        "handle",
        "is_trial",
        "min_partition_size",
        "sm_count",
    )

    def __init__(
        self,
        driver: Driver,
        device: int,
        handle: ResourceHandle,
        cut: object = None,
        *,
        is_trial: bool = False,
        is_device: bool = False,
    ) -> None:
        facts = driver.resource_facts(handle)
        if is_device and not facts.min_partition_size:
            facts = splitting.granularity(driver, handle, facts)
        self._driver = driver
        self.cut = cut
        self.is_trial = is_trial
        self.device = device
        #: The driver's own.
        self.handle = handle
        #: How many SMs.
        self.sm_count = facts.sm_count
        #: The smallest group it can be cut into. Of outputs and contexts 0 where the driver does
        #: not say (12.x); of a device it is tried there.
        self.min_partition_size = facts.min_partition_size
        #: SMs that are co-scheduled: counts are multiples. 0 as above.
        self.coscheduled_alignment = facts.coscheduled_alignment
        #: As the driver has them: 1 for a group that was backfilled (CUdevSmResourceGroup_flags).
        self.flags = facts.flags

    def split(
        self, options: SMResourceOptions, *, dry_run: bool = False
    ) -> tuple[list[SMResource], SMResource | None]:
        """Cuts it into groups of just the sizes asked for; does not block.

        All groups and the remainder of *one* call are disjoint, and may be combined in one
        context. Two calls start from the same SMs: their groups overlap. Nothing is reserved.

        Args:
            options: how many groups of how many SMs.
            dry_run: ask only. It makes the same split, so that it answers and is refused just as
                that; its outputs have their sizes, and can be used for nothing.

        Returns:
            The groups, as many as asked, and what is left over (None: nothing). A remainder
            promises no co-scheduled SMs.

        Raises:
            InvalidSplit: the device or the driver cannot; says why, and what is nearest.
            InvalidRequest: values that are none; or it is itself the output of a split (make a
                context of it, and split that context's `resources.sm`).
            NotSupported: groups that are not alike, backfill or preferred sizes, below CUDA 13.1.
        """
        if not isinstance(options, SMResourceOptions):
            raise InvalidRequest(
                f"split takes SMResourceOptions(count=...), and {options!r} is none"
            )
        groups = options.groups
        self._check_whole()
        cut = splitting.split(self._driver, self.device, self.handle, groups)
        return self._outputs(cut, trial=dry_run)

    def split_evenly(
        self, minimum: int, *, fine: bool = False
    ) -> tuple[list[SMResource], SMResource | None]:
        """As many equal groups as there can be: how a pool cuts a device. For the pool.

        `split` cuts the sizes that are asked for. How many groups a chip has room for only its
        driver can tell, by the older split by count, which rounds sizes up.

        Args:
            minimum: SMs of a group at least.
            fine: SMs need not be co-scheduled: finer groups, without large clusters.

        Raises:
            CUDAError: INVALID_RESOURCE_CONFIGURATION: no such group fits.
        """
        self._check_whole()
        cut = self._driver.split_by_count(self.handle, None, minimum, ignore_coscheduling=fine)
        return self._outputs(cut, trial=False)

    def _check_whole(self) -> None:
        if self.cut is not None:
            raise InvalidRequest(
                f"{self!r} is the output of a split, and cannot be split again: make a context "
                "of it, and split that context's resources.sm"
            )

    def _outputs(
        self, cut: splitting.Cut, *, trial: bool
    ) -> tuple[list[SMResource], SMResource | None]:
        handles, rest = cut
        mark = object()

        def output(handle: ResourceHandle) -> SMResource:
            return SMResource(self._driver, self.device, handle, mark, is_trial=trial)

        return [output(handle) for handle in handles], None if rest is None else output(rest)

    def __repr__(self) -> str:
        trial = ", of a dry run" if self.is_trial else ""
        return f"<SMResource: {self.sm_count} SMs of device {self.device}{trial}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkqueueResourceOptions:
    """What `WorkqueueResource.configure` shall set; None leaves it as it is.

    Attributes:
        sharing_scope: `"device_ctx"`: work queues are shared by all contexts;
            `"green_ctx_balanced"`: not with other contexts that ask for this, where that can be.
        concurrency_limit: how many streams are expected to have work at once, at least 1; a hint.
    """

    sharing_scope: SharingScope | None = None
    concurrency_limit: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is none, on every driver.

        Raises:
            InvalidRequest: no such scope or limit.
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
    """How a context uses the device's work queues: a configuration. Nothing to close.

    Made by a device's `resources`, a context's or a stream's, on drivers of CUDA 13.1 and newer.
    """

    __slots__ = ("_driver", "device", "handle")

    def __init__(self, driver: Driver, device: int, handle: ResourceHandle) -> None:
        self._driver = driver
        self.device = device
        #: The driver's own; another one after `configure`.
        self.handle = handle

    @property
    def sharing_scope(self) -> SharingScope:
        """Who shares its work queues."""
        return self._driver.workqueue_facts(self.handle).sharing_scope

    @property
    def concurrency_limit(self) -> int:
        """Streams expected to have work at once; at first CUDA_DEVICE_MAX_CONNECTIONS."""
        return self._driver.workqueue_facts(self.handle).concurrency_limit

    def configure(self, options: WorkqueueResourceOptions) -> None:
        """Changes it, for contexts made of it from here on. Does not block.

        Raises:
            InvalidRequest: these are no options; nothing is changed.
        """
        if not isinstance(options, WorkqueueResourceOptions):
            raise InvalidRequest(f"configure takes WorkqueueResourceOptions, not {options!r}")
        now = self._driver.workqueue_facts(self.handle)
        scope, limit = options.sharing_scope, options.concurrency_limit
        scope = now.sharing_scope if scope is None else scope
        limit = now.concurrency_limit if limit is None else limit
        self.handle = self._driver.configure_workqueue(self.handle, scope, limit)

    def __repr__(self) -> str:
        return (
            f"<WorkqueueResource: {self.sharing_scope}, {self.concurrency_limit} at once, "
            f"device {self.device}>"
        )


class DeviceResources:
    """What a device has to give out, or what a context was given. The driver is asked each time.

    Args:
        context: whose; None: the device's.
        check: raises where the context has ended.
    """

    __slots__ = ("_check", "_context", "_driver", "device")

    def __init__(
        self,
        driver: Driver,
        device: int,
        context: ContextHandle | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._driver = driver
        self._context = context
        self._check = check
        self.device = device

    @property
    def sm(self) -> SMResource:
        """The SMs; they can be split."""
        self._check()
        if self._context is None:
            whole = self._driver.device_resource(self.device)
            return SMResource(self._driver, self.device, whole, is_device=True)
        handle = self._driver.context_resource(self._context)
        return SMResource(self._driver, self.device, handle)

    @property
    def workqueue(self) -> WorkqueueResource:
        """The work-queue configuration, a copy of one's own to configure.

        Raises:
            NotSupported: a driver below CUDA 13.1.
        """
        self._check()
        if self._context is None:
            handle = self._driver.device_workqueue(self.device)
        else:
            handle = self._driver.context_workqueue(self._context)
        return WorkqueueResource(self._driver, self.device, handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """What `Device.create_context` makes a green context of.

    Attributes:
        resources: SMs (several: outputs of one split), and at most one work-queue configuration,
            which alone stands for every SM.
    """

    resources: Sequence[SMResource | WorkqueueResource]


def describe(driver: Driver, device: int, options: ContextOptions) -> DescriptorHandle:
    """What a green context is made of; the driver keeps it as long as the process lives.

    Raises: as `Device.create_context`.
    """
    resources = _checked(options)
    for resource in resources:
        if resource.device != device:
            raise WrongDevice("a resource", resource.device, device)
    sms = [resource for resource in resources if isinstance(resource, SMResource)]
    overlap = _overlap(sms)
    if overlap is not None:
        raise InvalidCombination(overlap)
    try:
        return driver.describe([resource.handle for resource in resources])
    except CUDAError as error:
        if error.status not in splitting.REFUSALS:
            raise
        raise InvalidCombination(_why_not(sms)) from error


def _checked(options: object) -> tuple[SMResource | WorkqueueResource, ...]:
    if not isinstance(options, ContextOptions):
        raise InvalidRequest(
            f"create_context takes ContextOptions(resources=[...]), and {options!r} is none"
        )
    given: object = options.resources
    resources = tuple(given) if isinstance(given, Sequence) else ()
    if not resources or not all(isinstance(r, (SMResource, WorkqueueResource)) for r in resources):
        raise InvalidRequest(
            f"resources={given!r}: a green context is made of a list of SMResource and "
            "WorkqueueResource objects, one at least"
        )
    if any(isinstance(r, SMResource) and r.is_trial for r in resources):
        raise InvalidRequest("nothing can be made of a dry run's outputs: split without dry_run")
    if sum(isinstance(r, WorkqueueResource) for r in resources) > 1:
        raise InvalidRequest("a context has one work-queue configuration at most")
    return resources


def _overlap(sms: Sequence[SMResource]) -> str | None:
    """Why SMs would be in a combination twice, if so.

    Driver 580 takes that, and counts them twice (docs/measurements/h200-580/resources.txt).
    """
    if len(sms) < 2:
        return None
    if any(one.cut is None for one in sms):
        return "only outputs of a split can be combined, and one of these is unsplit"
    if len({one.cut for one in sms}) > 1:
        return "they come from several splits, whose outputs overlap: make one split of all"
    if len({id(one.handle) for one in sms}) < len(sms):
        return "one of these is given twice"
    return None


def _why_not(sms: Sequence[SMResource]) -> str:
    """What is known to stand against a combination; the driver does not say."""
    if len({one.coscheduled_alignment for one in sms}) > 1:
        return (
            "from CUDA 13.1 on SMs of unequal alignment cannot be combined "
            f"({', '.join(str(one.coscheduled_alignment) for one in sms)})"
        )
    if len({one.flags for one in sms}) > 1:
        return "from CUDA 13.4 on SMs of unequal flags cannot be combined (backfill, or not)"
    return "the driver refused"


def max_cluster_size(compute_capability: tuple[int, int], sms: SMResource) -> int:
    """Blocks of the largest thread-block cluster that is sure to find room; 1: no clusters.

    A cluster lies on SMs that are co-scheduled.

    Args:
        compute_capability: of the device.
        sms: those of a context; of a split's outputs driver 580 does not say how they are aligned.
    """
    if compute_capability < (9, 0):
        return 1
    return min(PORTABLE_CLUSTER, max(1, sms.coscheduled_alignment))
