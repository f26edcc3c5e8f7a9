"""SM and work-queue resources, the splits, and green contexts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from greensched import errors
from greensched.driver.cuda.bindings import WHEEL_VERSION, cuda
from greensched.driver.cuda.devices import device_handle
from greensched.driver.cuda.errors import (
    call,
    error_for_missing_function,
)
from greensched.driver.cuda.init import driver_version, has_feature
from greensched.driver.interface import Driver
from greensched.driver.status import from_status
from greensched.driver.types import (
    ContextHandle,
    DescriptorHandle,
    GreenHandle,
    ResourceFacts,
    ResourceHandle,
    WorkqueueFacts,
)
from greensched.typing import Feature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from greensched.driver.types import EventHandle, SMGroup
    from greensched.typing import SharingScope

_SM: Final[Any] = cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM

#: CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING. A number, because wheel 13.1 renamed the enum
#: that contains the name, and the call takes a plain unsigned int.
_IGNORE_SM_COSCHEDULING: Final = 1

#: CU_GREEN_CTX_DEFAULT_STREAM: required up to CUDA 13.2, allowed after that.
_DEFAULT_STREAM: Final = 1

#: CU_DEV_SM_RESOURCE_GROUP_BACKFILL.
_BACKFILL: Final = 1

#: 32-bit words of a CU_DEV_SM_RESOURCE_GROUP_PARAMS: the count, the co-scheduled and the preferred
#: number, the flags, and words that must be 0. Source: cuda.h, 13.1 to 13.5.
_GROUP_WORDS: Final = 16

#: Whether the wheel takes a list of group parameters. Wheels from 13.3 on do, and also have this
#: name. Older ones take one object, and read as many groups from its address on.
_TAKES_LISTS: Final = hasattr(cuda.CUgreenCtxCreate_flags, "CU_GREEN_CTX_NONE")

#: Bytes of a CUdevResource. Source: cuda.h, 13.0 to 13.5.
_RESOURCE_BYTES: Final = 144

#: The driver's status if a resource cannot be split as requested.
_INVALID_RESOURCE_CONFIGURATION: Final = 915

#: Missing in wheel 13.0; `Feature.STRUCTURED_SPLIT` says whether the driver has it, too.
_split: Any = getattr(cuda, "cuDevSmResourceSplit", None)


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """A `CUdevResource` and its properties, which were read while it was certainly alive.

    Up to wheel 13.4, `raw.sm` is a view that does not keep its resource alive, so it may read freed
    memory. So only `_resource` takes that view. The opaque bytes of `raw` also identify the split
    that it came from, so a copy of the numbers cannot replace it.
    """

    raw: Any
    facts: ResourceFacts


@dataclass(frozen=True, slots=True, eq=False)
class Workqueue:
    """A `CUdevResource` of a work-queue configuration, and its properties."""

    raw: Any
    facts: WorkqueueFacts


def _resource(raw: Any) -> ResourceHandle:
    view = raw.sm
    facts = ResourceFacts(
        int(view.smCount),
        int(view.minSmPartitionSize),
        int(view.smCoscheduledAlignment),
        int(getattr(view, "flags", 0)),  # wheel 13.0 has no flags
    )
    return ResourceHandle(Resource(raw, facts))


def _left(raw: Any) -> ResourceHandle | None:
    """Return the remainder of a split; None if it is of type INVALID or has no SM."""
    left = _resource(raw) if raw is not None and raw.type == _SM else None
    return left if left is not None and _own(left).facts.sm_count else None


def _workqueue(raw: Any) -> ResourceHandle:
    view = raw.wqConfig
    scope: SharingScope = "green_ctx_balanced" if int(view.sharingScope) else "device_ctx"
    return ResourceHandle(Workqueue(raw, WorkqueueFacts(scope, int(view.wqConcurrencyLimit))))


def _workqueue_config() -> Any:
    """Return the type of a work-queue configuration, if wheel and driver have it."""
    if not has_feature(Feature.WORKQUEUES):
        version = driver_version()
        here = f"CUDA {version // 1000}.{version % 1000 // 10} with cuda-bindings {WHEEL_VERSION}"
        raise errors.NotSupported("a work-queue resource", "driver and bindings of CUDA 13.1", here)
    return cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG


def _own(resource: ResourceHandle) -> Resource:
    return cast("Resource", resource)


def _own_workqueue(workqueue: ResourceHandle) -> Workqueue:
    return cast("Workqueue", workqueue)


def _group_params(words: Any, groups: Sequence[SMGroup]) -> Any:
    """Return the groups in the form that the wheel takes. `words` is their memory."""
    for i, group in enumerate(groups):
        start = i * _GROUP_WORDS
        words[start : start + 4] = (
            group.sm_count,
            group.coscheduled_sm_count,
            group.preferred_coscheduled_sm_count,
            _BACKFILL if group.backfill else 0,
        )
    first, size = ctypes.addressof(words), 4 * _GROUP_WORDS
    params = [
        cuda.CU_DEV_SM_RESOURCE_GROUP_PARAMS(_ptr=first + i * size) for i in range(len(groups))
    ]
    return params if _TAKES_LISTS else params[0]


class Resources(Driver):
    """SM and work-queue resources, splits and green contexts."""

    def device_resource(self, device: int) -> ResourceHandle:
        """Call `cuDeviceGetDevResource`. An MPS thread percentage reduces the result."""
        return _resource(call(cuda.cuDeviceGetDevResource, device_handle(device), _SM))

    def context_resource(self, context: ContextHandle) -> ResourceHandle:
        """Call `cuCtxGetDevResource` for a primary context or a green context's view."""
        return _resource(call(cuda.cuCtxGetDevResource, context, _SM))

    def resource_facts(self, resource: ResourceHandle) -> ResourceFacts:
        """Return the properties read when it was made; a resource never changes."""
        return _own(resource).facts

    def split_by_count(
        self,
        resource: ResourceHandle,
        groups: int | None,
        minimum: int,
        *,
        ignore_coscheduling: bool = False,
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        """Call `cuDevSmResourceSplitByCount`; with 0 groups it returns how many are possible.

        Arguments are positional, because wheel 13.0 names the flags differently. The returned list
        is as long as requested; entries beyond the returned count are of type INVALID.
        """
        flags = _IGNORE_SM_COSCHEDULING if ignore_coscheduling else 0
        detail = f"groups of at least {minimum} SMs"
        whole = _own(resource).raw

        def split(wanted: int) -> Any:
            return call(
                cuda.cuDevSmResourceSplitByCount, wanted, whole, flags, minimum, detail=detail
            )

        if groups is None:
            _, groups, _ = split(0)
        parts, made, rest = split(groups) if groups else ([], 0, None)
        if not made:
            raise from_status(
                _INVALID_RESOURCE_CONFIGURATION, "cuDevSmResourceSplitByCount", None, detail
            )
        return [_resource(part) for part in parts[:made]], _left(rest)

    def split(
        self, resource: ResourceHandle, groups: Sequence[SMGroup]
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        """Call `cuDevSmResourceSplit` (CUDA 13.1), and read the chosen sizes from the results.

        Some wheels also write them into the parameters.
        """
        if _split is None:
            raise error_for_missing_function("cuDevSmResourceSplit")
        words = (ctypes.c_uint32 * (_GROUP_WORDS * len(groups)))()
        params = _group_params(words, groups)
        parts, rest = call(_split, len(groups), _own(resource).raw, 0, params, detail=str(groups))
        return [_resource(part) for part in parts], _left(rest)

    def device_workqueue(self, device: int) -> ResourceHandle:
        """Call `cuDeviceGetDevResource`, which has this type from CUDA 13.1 on."""
        kind = _workqueue_config()
        return _workqueue(call(cuda.cuDeviceGetDevResource, device_handle(device), kind))

    def context_workqueue(self, context: ContextHandle) -> ResourceHandle:
        """Call `cuCtxGetDevResource`, which has this type from CUDA 13.1 on."""
        return _workqueue(call(cuda.cuCtxGetDevResource, context, _workqueue_config()))

    def workqueue_facts(self, workqueue: ResourceHandle) -> WorkqueueFacts:
        """Return the properties that were read when it was made or configured."""
        return _own_workqueue(workqueue).facts

    def configure_workqueue(
        self, workqueue: ResourceHandle, sharing_scope: SharingScope, concurrency_limit: int
    ) -> ResourceHandle:
        """Copy the resource byte by byte, the only way to copy a wheel's resource."""
        raw = cuda.CUdevResource()
        ctypes.memmove(raw.getPtr(), _own_workqueue(workqueue).raw.getPtr(), _RESOURCE_BYTES)
        scopes = cuda.CUdevWorkqueueConfigScope
        view = raw.wqConfig
        view.sharingScope = (
            scopes.CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED
            if sharing_scope == "green_ctx_balanced"
            else scopes.CU_WORKQUEUE_SCOPE_DEVICE_CTX
        )
        view.wqConcurrencyLimit = concurrency_limit
        return _workqueue(raw)

    def describe(self, resources: Sequence[ResourceHandle]) -> DescriptorHandle:
        """Call `cuDevResourceGenerateDesc`. No call frees a descriptor, so make each only once."""
        raws = [cast("Resource | Workqueue", resource).raw for resource in resources]
        return DescriptorHandle(call(cuda.cuDevResourceGenerateDesc, raws, len(raws)))

    def create_green(self, descriptor: DescriptorHandle, device: int) -> GreenHandle:
        return GreenHandle(
            call(cuda.cuGreenCtxCreate, descriptor, device_handle(device), _DEFAULT_STREAM)
        )

    def destroy_green(self, green: GreenHandle) -> None:
        """Call `cuGreenCtxDestroy`. On CUDA 13.0 a stream that outlives it cannot be destroyed."""
        call(cuda.cuGreenCtxDestroy, green)

    def green_context(self, green: GreenHandle) -> ContextHandle:
        """Call `cuCtxFromGreenCtx`. Destroying this view is undefined behaviour."""
        return ContextHandle(call(cuda.cuCtxFromGreenCtx, green))

    def record_green(self, green: GreenHandle, event: EventHandle) -> None:
        """Call `cuGreenCtxRecordEvent`. The event may be of any context of the same primary."""
        call(cuda.cuGreenCtxRecordEvent, green, event)
