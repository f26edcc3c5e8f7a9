"""SM resources, the split, and green contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from greensched import errors
from greensched.driver.base import Driver
from greensched.driver.cuda.devices import device_handle
from greensched.driver.cuda.status import NEWER, ask, failed, lacking, newer
from greensched.driver.cuda.wheel import cuda
from greensched.typing import (
    ContextHandle,
    DescriptorHandle,
    GreenHandle,
    ResourceFacts,
    ResourceHandle,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from greensched.typing import EventHandle, StreamHandle

_SM: Final[Any] = cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM

#: CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING. A number, because the enum that has the name
#: was renamed in wheel 13.1, and the call takes a plain unsigned int.
_IGNORE_SM_COSCHEDULING: Final = 1

#: CU_GREEN_CTX_DEFAULT_STREAM: compulsory up to CUDA 13.2, allowed after.
_DEFAULT_STREAM: Final = 1

#: The driver's status where a resource cannot be cut as asked.
_INVALID_RESOURCE_CONFIGURATION: Final = 915

_record_green = cuda.cuGreenCtxRecordEvent
#: Missing in wheel 13.0; `Feature.STREAM_RESOURCES` says whether the driver has it too.
_of_stream: Any = getattr(cuda, "cuStreamGetDevResource", None)


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """A `CUdevResource` and what it says, read while it was certainly alive.

    `raw.sm` is a view that does not keep its resource alive up to wheel 13.4: of a resource that
    died first it reads freed memory. So nothing but `_resource` ever takes that view. `raw` also
    carries, in its opaque bytes, which split it came from; a copy of the numbers would not do.
    """

    raw: Any
    facts: ResourceFacts


def _resource(raw: Any) -> ResourceHandle:
    view = raw.sm
    facts = ResourceFacts(
        int(view.smCount), int(view.minSmPartitionSize), int(view.smCoscheduledAlignment)
    )
    return ResourceHandle(Resource(raw, facts))


def _own(resource: ResourceHandle) -> Resource:
    return cast("Resource", resource)


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
            raise errors.from_status(
                _INVALID_RESOURCE_CONFIGURATION, "cuDevSmResourceSplitByCount", None, detail
            )
        left = _resource(rest) if rest.type == _SM else None
        if left is not None and not _own(left).facts.sm_count:
            left = None
        return [_resource(part) for part in parts[:made]], left

    def describe(self, resources: Sequence[ResourceHandle]) -> DescriptorHandle:
        """`cuDevResourceGenerateDesc`; nothing frees a descriptor, so make each once."""
        raws = [_own(resource).raw for resource in resources]
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
