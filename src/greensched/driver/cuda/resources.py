"""SM and work-queue resources, the splits, and green contexts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from greensched import errors
from greensched.driver.cuda.bindings import WHEEL_VERSION, cuda
from greensched.driver.cuda.devices import device_handle
from greensched.driver.cuda.errors import NEWER, ask, failed, lacking, newer
from greensched.driver.cuda.init import driver_version, has
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

    from greensched.driver.types import EventHandle, SMGroup, StreamHandle
    from greensched.typing import SharingScope

_SM: Final[Any] = cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM

#: CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING. A number, because the enum that has the name
#: was renamed in wheel 13.1, and the call takes a plain unsigned int.
_IGNORE_SM_COSCHEDULING: Final = 1

#: CU_GREEN_CTX_DEFAULT_STREAM: compulsory up to CUDA 13.2, allowed after.
_DEFAULT_STREAM: Final = 1

#: CU_DEV_SM_RESOURCE_GROUP_BACKFILL.
_BACKFILL: Final = 1

#: 32-bit words of a CU_DEV_SM_RESOURCE_GROUP_PARAMS: the count, the co-scheduled and the preferred
#: number, the flags, and what must be 0. Source: cuda.h, 13.1 to 13.5.
_GROUP_WORDS: Final = 16

#: Whether the wheel takes a list of group parameters: from 13.3 on, which also has this name. The
#: older ones take one object, and read on behind it as far as the number of groups says.
_TAKES_LISTS: Final = hasattr(cuda.CUgreenCtxCreate_flags, "CU_GREEN_CTX_NONE")

#: Bytes of a CUdevResource. Source: cuda.h, 12.4 to 13.5.
_RESOURCE_BYTES: Final = 144

#: The driver's status where a resource cannot be cut as asked.
_INVALID_RESOURCE_CONFIGURATION: Final = 915

_record_green = cuda.cuGreenCtxRecordEvent
#: Missing in wheel 13.0; `Feature.STREAM_RESOURCES` says whether the driver has it too.
_of_stream: Any = getattr(cuda, "cuStreamGetDevResource", None)
#: Missing in wheel 13.0; `Feature.STRUCTURED_SPLIT` says whether the driver has it too.
_split: Any = getattr(cuda, "cuDevSmResourceSplit", None)


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """A `CUdevResource` and what it says, read while it was certainly alive.

    `raw.sm` is a view that does not keep its resource alive up to wheel 13.4: of a resource that
    died first it reads freed memory. So nothing but `_resource` ever takes that view. `raw` also
    carries, in its opaque bytes, which split it came from; a copy of the numbers would not do.
    """

    raw: Any
    facts: ResourceFacts


@dataclass(frozen=True, slots=True, eq=False)
class Workqueue:
    """A `CUdevResource` of a work-queue configuration, and what it says."""

    raw: Any
    facts: WorkqueueFacts


def _resource(raw: Any) -> ResourceHandle:
    view = raw.sm
    facts = ResourceFacts(
        int(view.smCount),
        int(view.minSmPartitionSize),
        int(view.smCoscheduledAlignment),
        int(getattr(view, "flags", 0)),  # wheel 13.0 has none
    )
    return ResourceHandle(Resource(raw, facts))


def _left(raw: Any) -> ResourceHandle | None:
    """What a split left over; None where it is of type INVALID, or of no SM."""
    left = _resource(raw) if raw is not None and raw.type == _SM else None
    return left if left is not None and _own(left).facts.sm_count else None


def _workqueue(raw: Any) -> ResourceHandle:
    view = raw.wqConfig
    scope: SharingScope = "green_ctx_balanced" if int(view.sharingScope) else "device_ctx"
    return ResourceHandle(Workqueue(raw, WorkqueueFacts(scope, int(view.wqConcurrencyLimit))))


def _workqueue_config() -> Any:
    """The type of a work-queue configuration, where wheel and driver have it."""
    if not has(Feature.WORKQUEUES):
        version = driver_version()
        here = f"CUDA {version // 1000}.{version % 1000 // 10} with cuda-bindings {WHEEL_VERSION}"
        raise errors.NotSupported("a work-queue resource", "driver and bindings of CUDA 13.1", here)
    return cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG


def _own(resource: ResourceHandle) -> Resource:
    return cast("Resource", resource)


def _own_workqueue(workqueue: ResourceHandle) -> Workqueue:
    return cast("Workqueue", workqueue)


def _group_params(words: Any, groups: Sequence[SMGroup]) -> Any:
    """The groups as the installed wheel takes them; `words` is the memory they lie in."""
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
    """Who may have which SMs."""

    def device_resource(self, device: int) -> ResourceHandle:
        """`cuDeviceGetDevResource`; under an MPS thread percentage not all of them are ours."""
        return _resource(ask(cuda.cuDeviceGetDevResource, device_handle(device), _SM))

    def context_resource(self, context: ContextHandle) -> ResourceHandle:
        """`cuCtxGetDevResource`, of a primary context or of the view of a green one."""
        return _resource(ask(cuda.cuCtxGetDevResource, context, _SM))

    def stream_resource(self, stream: StreamHandle) -> ResourceHandle:
        """`cuStreamGetDevResource` (13.1), also for streams that others made."""
        if _of_stream is None:
            raise lacking("cuStreamGetDevResource")
        return _resource(ask(_of_stream, stream, _SM))

    def resource_facts(self, resource: ResourceHandle) -> ResourceFacts:
        """What was read when the resource was made: a resource never changes."""
        return _own(resource).facts

    def split_by_count(
        self,
        resource: ResourceHandle,
        groups: int | None,
        minimum: int,
        *,
        ignore_coscheduling: bool = False,
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        """`cuDevSmResourceSplitByCount`; a request of 0 groups is its question "how many?".

        Arguments go by position: wheel 13.0 calls the flags differently. The list that comes back
        is as long as was asked; what lies beyond the returned count is of type INVALID.
        """
        flags = _IGNORE_SM_COSCHEDULING if ignore_coscheduling else 0
        detail = f"groups of at least {minimum} SMs"
        whole = _own(resource).raw

        def split(wanted: int) -> Any:
            return ask(
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
        """`cuDevSmResourceSplit` (13.1). What was discovered is read off the results.

        Wheels write it back into the parameters or not, by their version.
        """
        if _split is None:
            raise lacking("cuDevSmResourceSplit")
        words = (ctypes.c_uint32 * (_GROUP_WORDS * len(groups)))()
        params = _group_params(words, groups)
        parts, rest = ask(_split, len(groups), _own(resource).raw, 0, params, detail=str(groups))
        return [_resource(part) for part in parts], _left(rest)

    def device_workqueue(self, device: int) -> ResourceHandle:
        """`cuDeviceGetDevResource` (13.1 for this type)."""
        kind = _workqueue_config()
        return _workqueue(ask(cuda.cuDeviceGetDevResource, device_handle(device), kind))

    def context_workqueue(self, context: ContextHandle) -> ResourceHandle:
        """`cuCtxGetDevResource` (13.1 for this type)."""
        return _workqueue(ask(cuda.cuCtxGetDevResource, context, _workqueue_config()))

    def workqueue_facts(self, workqueue: ResourceHandle) -> WorkqueueFacts:
        """What was read when it was made or configured."""
        return _own_workqueue(workqueue).facts

    def configure_workqueue(
        self, workqueue: ResourceHandle, sharing_scope: SharingScope, concurrency_limit: int
    ) -> ResourceHandle:
        """A copy byte by byte: a wheel's resource can be copied in no other way."""
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
        """`cuDevResourceGenerateDesc`; nothing frees a descriptor, so make each once."""
        raws = [cast("Resource | Workqueue", resource).raw for resource in resources]
        return DescriptorHandle(ask(cuda.cuDevResourceGenerateDesc, raws, len(raws)))

    def create_green(self, descriptor: DescriptorHandle, device: int) -> GreenHandle:
        """`cuGreenCtxCreate`."""
        return GreenHandle(
            ask(cuda.cuGreenCtxCreate, descriptor, device_handle(device), _DEFAULT_STREAM)
        )

    def destroy_green(self, green: GreenHandle) -> None:
        """`cuGreenCtxDestroy`; on CUDA 13.0 a stream that outlives it can never be destroyed."""
        ask(cuda.cuGreenCtxDestroy, green)

    def green_context(self, green: GreenHandle) -> ContextHandle:
        """`cuCtxFromGreenCtx`; to destroy that view is undefined behaviour."""
        return ContextHandle(ask(cuda.cuCtxFromGreenCtx, green))

    def record_green(self, green: GreenHandle, event: EventHandle) -> None:
        """`cuGreenCtxRecordEvent`; the event may be of any context of the same primary."""
        try:
            (status,) = _record_green(green, event)
        except NEWER as error:
            raise newer(error, "cuGreenCtxRecordEvent") from None
        if status:
            raise failed(status, "cuGreenCtxRecordEvent")
