"""Contexts: the verbs that say where we are, and how a context is made and set up."""

from __future__ import annotations

from typing import Any, Final

from greensched.driver.cuda.bindings import cuda
from greensched.driver.cuda.devices import device_handle
from greensched.driver.cuda.errors import NEWER, ask, failed, lacking, newer
from greensched.driver.interface import Driver
from greensched.driver.types import ContextHandle
from greensched.errors import CUDAError, NotSupported
from greensched.typing import CacheConfig, ContextFlags, Limit

_get_current = cuda.cuCtxGetCurrent
_set_current = cuda.cuCtxSetCurrent

#: What `cuCtxGetCurrent` answers where nothing is current. A wrapper is true whatever it wraps,
#: and comparing two is cheaper than `int(context)`: 96 against 134 ns with the call (wheel 13.5,
#: stand-in).
_NO_CONTEXT: Final = cuda.CUcontext(0)

#: Source: cuda.h, CUDA_ERROR_UNSUPPORTED_LIMIT.
_UNSUPPORTED_LIMIT: Final = 215

#: The wheel's names, members of enums of its own.
_LIMITS: Final[dict[Limit, Any]] = {limit: cuda.CUlimit(int(limit)) for limit in Limit}
_CACHES: Final[dict[CacheConfig, Any]] = {c: cuda.CUfunc_cache(int(c)) for c in CacheConfig}


class Contexts(Driver):
    """Primary contexts, contexts of their own, and what is current on a thread."""

    def retain_primary(self, device: int) -> ContextHandle:
        """`cuDevicePrimaryCtxRetain`; the context does not become current."""
        return ContextHandle(ask(cuda.cuDevicePrimaryCtxRetain, device_handle(device)))

    def release_primary(self, device: int) -> None:
        """`cuDevicePrimaryCtxRelease`; a context that ends stays on the stacks it is on."""
        ask(cuda.cuDevicePrimaryCtxRelease, device_handle(device))

    def primary_state(self, device: int) -> tuple[int, bool]:
        """`cuDevicePrimaryCtxGetState`."""
        flags, active = ask(cuda.cuDevicePrimaryCtxGetState, device_handle(device))
        return int(flags), bool(active)

    def current(self) -> ContextHandle | None:
        """`cuCtxGetCurrent`, which answers NULL, not an error, where there is none."""
        try:
            status, context = _get_current()
        except NEWER as error:
            raise newer(error, "cuCtxGetCurrent") from None
        if status:
            raise failed(status, "cuCtxGetCurrent")
        found: ContextHandle | None = None if context == _NO_CONTEXT else context
        return found

    def set_current(self, context: ContextHandle | None) -> None:
        """`cuCtxSetCurrent`; NULL pops, and does nothing to an empty stack."""
        try:
            (status,) = _set_current(_NO_CONTEXT if context is None else context)
        except NEWER as error:
            raise newer(error, "cuCtxSetCurrent") from None
        if status:
            raise failed(status, "cuCtxSetCurrent")

    def push_current(self, context: ContextHandle) -> None:
        """`cuCtxPushCurrent`."""
        ask(cuda.cuCtxPushCurrent, context)

    def pop_current(self) -> ContextHandle:
        """`cuCtxPopCurrent`; INVALID_CONTEXT on an empty stack."""
        return ContextHandle(ask(cuda.cuCtxPopCurrent))

    def set_primary_flags(self, device: int, flags: ContextFlags) -> None:
        """`cuDevicePrimaryCtxSetFlags`, which overwrites what was set before."""
        ask(cuda.cuDevicePrimaryCtxSetFlags, device_handle(device), _known(flags))

    def create_context(self, device: int, flags: ContextFlags) -> ContextHandle:
        """`cuCtxCreate` (13.x: three arguments), which pushes it; then it is popped."""
        made = ContextHandle(ask(cuda.cuCtxCreate, None, _known(flags), device_handle(device)))
        try:
            ask(cuda.cuCtxPopCurrent)
        except CUDAError:
            ask(cuda.cuCtxDestroy, made)
            raise
        return made

    def destroy_context(self, context: ContextHandle) -> None:
        """`cuCtxDestroy`, never for a primary or the view of a green one."""
        ask(cuda.cuCtxDestroy, context)

    def context_device(self, context: ContextHandle) -> int:
        """`cuCtxGetDevice_v2` (13.0), which needs nothing current."""
        return int(ask(cuda.cuCtxGetDevice_v2, context))

    def context_flags(self) -> ContextFlags:
        """`cuCtxGetFlags`; core-dump flags, which are nobody's here, are left out."""
        return ContextFlags(int(ask(cuda.cuCtxGetFlags)) & int(~ContextFlags(0)))

    def limit(self, limit: Limit) -> int:
        """`cuCtxGetLimit`."""
        try:
            return int(ask(cuda.cuCtxGetLimit, _LIMITS[limit], detail=limit.name))
        except CUDAError as error:
            raise _unsupported(error, limit) from None

    def set_limit(self, limit: Limit, nbytes: int) -> None:
        """`cuCtxSetLimit`; one of the stack may wait until the device is idle."""
        try:
            ask(cuda.cuCtxSetLimit, _LIMITS[limit], nbytes, detail=f"{limit.name}, {nbytes} bytes")
        except CUDAError as error:
            raise _unsupported(error, limit) from None

    def cache_config(self) -> CacheConfig:
        """`cuCtxGetCacheConfig`."""
        return CacheConfig(int(ask(cuda.cuCtxGetCacheConfig)))

    def set_cache_config(self, config: CacheConfig) -> None:
        """`cuCtxSetCacheConfig`."""
        ask(cuda.cuCtxSetCacheConfig, _CACHES[config])

    def synchronize_context(self, context: ContextHandle) -> None:
        """`cuCtxSynchronize_v2` (13.0), which needs nothing current."""
        ask(cuda.cuCtxSynchronize_v2, context)

    def priority_range(self) -> tuple[int, int]:
        """`cuCtxGetStreamPriorityRange`; (0, 0) where priorities are not supported."""
        least, greatest = ask(cuda.cuCtxGetStreamPriorityRange)
        return int(least), int(greatest)


def _known(flags: ContextFlags) -> int:
    """The flags as a number, where the wheel's header still has each of them."""
    for flag in flags:
        if not hasattr(cuda.CUctx_flags, f"CU_CTX_{flag.name}"):
            raise lacking(f"a context with {flag.name}")
    return int(flags)


def _unsupported(error: CUDAError, limit: Limit) -> Exception:
    """What is told where the device has nothing that a limit limits."""
    if error.status != _UNSUPPORTED_LIMIT:
        return error
    return NotSupported(f"the limit {limit.name}", "a device that has it", "one without it")
