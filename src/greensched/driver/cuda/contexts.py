"""Driver calls for contexts: the current context, and creating and configuring contexts."""

from __future__ import annotations

from typing import Any, Final

from greensched.driver.cuda.bindings import cuda
from greensched.driver.cuda.devices import device_handle
from greensched.driver.cuda.errors import (
    UNKNOWN_STATUS,
    call,
    error_for_missing_function,
    error_for_status,
    error_for_unknown_status,
)
from greensched.driver.interface import Driver
from greensched.driver.types import ContextHandle
from greensched.errors import CUDAError, NotSupported
from greensched.typing import CacheConfig, ContextFlags, Limit

_get_current = cuda.cuCtxGetCurrent
_set_current = cuda.cuCtxSetCurrent

#: The result of `cuCtxGetCurrent` if no context is current. A wrapper is always true, and comparing
#: two is cheaper than `int(context)`: 96 against 134 ns with the call (wheel 13.5,
#: stand-in).
_NO_CONTEXT: Final = cuda.CUcontext(0)

#: Source: cuda.h, CUDA_ERROR_UNSUPPORTED_LIMIT.
_UNSUPPORTED_LIMIT: Final = 215

#: The wheel's own enums.
_LIMITS: Final[dict[Limit, Any]] = {limit: cuda.CUlimit(int(limit)) for limit in Limit}
_CACHES: Final[dict[CacheConfig, Any]] = {c: cuda.CUfunc_cache(int(c)) for c in CacheConfig}


class Contexts(Driver):
    """Primary contexts, contexts of `create_context`, and the current context of a thread."""

    def retain_primary(self, device: int) -> ContextHandle:
        """Call `cuDevicePrimaryCtxRetain`; the context does not become current."""
        return ContextHandle(call(cuda.cuDevicePrimaryCtxRetain, device_handle(device)))

    def release_primary(self, device: int) -> None:
        """Call `cuDevicePrimaryCtxRelease`; an ended context stays on the threads' stacks."""
        call(cuda.cuDevicePrimaryCtxRelease, device_handle(device))

    def primary_state(self, device: int) -> tuple[int, bool]:
        flags, active = call(cuda.cuDevicePrimaryCtxGetState, device_handle(device))
        return int(flags), bool(active)

    def current(self) -> ContextHandle | None:
        """Call `cuCtxGetCurrent`, which returns NULL, and no error, if no context is current."""
        try:
            status, context = _get_current()
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuCtxGetCurrent") from None
        if status:
            raise error_for_status(status, "cuCtxGetCurrent")
        handle: ContextHandle | None = None if context == _NO_CONTEXT else context
        return handle

    def set_current(self, context: ContextHandle | None) -> None:
        """Call `cuCtxSetCurrent`. NULL pops a context, and does nothing to an empty stack."""
        try:
            (status,) = _set_current(_NO_CONTEXT if context is None else context)
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuCtxSetCurrent") from None
        if status:
            raise error_for_status(status, "cuCtxSetCurrent")

    def push_current(self, context: ContextHandle) -> None:
        call(cuda.cuCtxPushCurrent, context)

    def pop_current(self) -> ContextHandle:
        """Call `cuCtxPopCurrent`, which returns INVALID_CONTEXT for an empty stack."""
        return ContextHandle(call(cuda.cuCtxPopCurrent))

    def set_primary_flags(self, device: int, flags: ContextFlags) -> None:
        """Call `cuDevicePrimaryCtxSetFlags`, which overwrites earlier flags."""
        call(cuda.cuDevicePrimaryCtxSetFlags, device_handle(device), _known(flags))

    def create_context(self, device: int, flags: ContextFlags) -> ContextHandle:
        """Call `cuCtxCreate` (13.x: three arguments), which pushes the context, and pop it."""
        made = ContextHandle(call(cuda.cuCtxCreate, None, _known(flags), device_handle(device)))
        try:
            call(cuda.cuCtxPopCurrent)
        except CUDAError:
            call(cuda.cuCtxDestroy, made)
            raise
        return made

    def destroy_context(self, context: ContextHandle) -> None:
        """Call `cuCtxDestroy`, never for a primary or the view of a green context."""
        call(cuda.cuCtxDestroy, context)

    def context_device(self, context: ContextHandle) -> int:
        """Call `cuCtxGetDevice_v2` (CUDA 13.0), which needs no current context."""
        return int(call(cuda.cuCtxGetDevice_v2, context))

    def context_flags(self) -> ContextFlags:
        """Call `cuCtxGetFlags`, without core-dump flags, which the interface lacks."""
        return ContextFlags(int(call(cuda.cuCtxGetFlags)) & int(~ContextFlags(0)))

    def limit(self, limit: Limit) -> int:
        try:
            return int(call(cuda.cuCtxGetLimit, _LIMITS[limit], detail=limit.name))
        except CUDAError as error:
            raise _unsupported(error, limit) from None

    def set_limit(self, limit: Limit, nbytes: int) -> None:
        """Call `cuCtxSetLimit`. Setting the stack may wait until the device is idle."""
        try:
            call(cuda.cuCtxSetLimit, _LIMITS[limit], nbytes, detail=f"{limit.name}, {nbytes} bytes")
        except CUDAError as error:
            raise _unsupported(error, limit) from None

    def cache_config(self) -> CacheConfig:
        return CacheConfig(int(call(cuda.cuCtxGetCacheConfig)))

    def set_cache_config(self, config: CacheConfig) -> None:
        call(cuda.cuCtxSetCacheConfig, _CACHES[config])

    def synchronize_context(self, context: ContextHandle) -> None:
        """Call `cuCtxSynchronize_v2` (CUDA 13.0), which needs no current context."""
        call(cuda.cuCtxSynchronize_v2, context)

    def priority_range(self) -> tuple[int, int]:
        """Call `cuCtxGetStreamPriorityRange`; (0, 0) if priorities are not supported."""
        least, greatest = call(cuda.cuCtxGetStreamPriorityRange)
        return int(least), int(greatest)


def _known(flags: ContextFlags) -> int:
    """Return the flags as a number; refuse a flag that the wheel's header no longer has."""
    for flag in flags:
        if not hasattr(cuda.CUctx_flags, f"CU_CTX_{flag.name}"):
            raise error_for_missing_function(f"a context with {flag.name}")
    return int(flags)


def _unsupported(error: CUDAError, limit: Limit) -> Exception:
    """Return the exception for a device that lacks the resource of a limit."""
    if error.status != _UNSUPPORTED_LIMIT:
        return error
    return NotSupported(f"the limit {limit.name}", "a device that has it", "one without it")
