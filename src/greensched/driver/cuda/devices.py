"""Devices and contexts: the verbs that say where we are."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from greensched.driver.base import Driver
from greensched.driver.cuda.status import NEWER, ask, failed, newer
from greensched.driver.cuda.wheel import cuda
from greensched.typing import ContextHandle, DeviceFacts

if TYPE_CHECKING:
    from greensched.typing import Dim3

_get_current = cuda.cuCtxGetCurrent
_set_current = cuda.cuCtxSetCurrent

#: What `cuCtxGetCurrent` answers where nothing is current. A wrapper is true whatever it wraps,
#: and comparing two is cheaper than `int(context)`: 96 against 134 ns with the call (wheel 13.5,
#: stand-in).
_NO_CONTEXT: Final = cuda.CUcontext(0)

#: Long enough for any name: the driver cuts at the length it is given (NUL included).
_NAME_BYTES: Final = 256

_LIMIT: Final[Any] = cuda.CUdevice_attribute


@functools.cache
def device_handle(device: int) -> Any:
    """The `CUdevice` of an ordinal: the same for the life of the process, once it is answered."""
    return ask(cuda.cuDeviceGet, device, detail=f"device {device}")


def _uuid(raw: bytes) -> str:
    """A device's UUID as nvidia-smi and CUDA_VISIBLE_DEVICES write it.

    A MIG instance answers its own, which nvidia-smi writes with `MIG-`: the driver API does not
    say which it is.
    """
    digits = raw.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


class Devices(Driver):
    """Devices, primary contexts, and what is current on a thread."""

    def device_count(self) -> int:
        """`cuDeviceGetCount`; without a visible device `initialise` has refused already."""
        return int(ask(cuda.cuDeviceGetCount))

    def device_facts(self, device: int) -> DeviceFacts:
        """Attributes, and `cuDeviceTotalMem`: no context is needed or made."""
        handle = device_handle(device)

        def limit(name: str) -> int:
            attribute = getattr(_LIMIT, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(ask(cuda.cuDeviceGetAttribute, attribute, handle, detail=name))

        def dim3(name: str) -> Dim3:
            return limit(f"{name}_X"), limit(f"{name}_Y"), limit(f"{name}_Z")

        name: bytes = ask(cuda.cuDeviceGetName, _NAME_BYTES, handle)
        return DeviceFacts(
            ordinal=device,
            name=name.split(b"\0", 1)[0].decode(errors="replace"),
            uuid=_uuid(bytes(ask(cuda.cuDeviceGetUuid, handle).bytes)),
            compute_capability=(
                limit("COMPUTE_CAPABILITY_MAJOR"),
                limit("COMPUTE_CAPABILITY_MINOR"),
            ),
            sm_count=limit("MULTIPROCESSOR_COUNT"),
            memory_bytes=int(ask(cuda.cuDeviceTotalMem, handle)),
            l2_bytes=limit("L2_CACHE_SIZE"),
            warp_size=limit("WARP_SIZE"),
            max_threads_per_block=limit("MAX_THREADS_PER_BLOCK"),
            max_threads_per_sm=limit("MAX_THREADS_PER_MULTIPROCESSOR"),
            max_block=dim3("MAX_BLOCK_DIM"),
            max_grid=dim3("MAX_GRID_DIM"),
            max_shared_bytes=limit("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            copy_engines=limit("ASYNC_ENGINE_COUNT"),
        )

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

    def synchronize_context(self, context: ContextHandle) -> None:
        """`cuCtxSynchronize_v2` (13.0), which needs nothing current."""
        ask(cuda.cuCtxSynchronize_v2, context)

    def priority_range(self) -> tuple[int, int]:
        """`cuCtxGetStreamPriorityRange`; (0, 0) where priorities are not supported."""
        least, greatest = ask(cuda.cuCtxGetStreamPriorityRange)
        return int(least), int(greatest)
