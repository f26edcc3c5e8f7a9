"""Driver calls for devices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from greensched.driver.cuda.bindings import cuda
from greensched.driver.cuda.errors import call
from greensched.driver.interface import Driver
from greensched.typing import DeviceFacts

if TYPE_CHECKING:
    from greensched.typing import Dim3

#: Long enough for any name. The driver truncates at the given length (NUL included).
_NAME_BYTES: Final = 256

_LIMIT: Final[Any] = cuda.CUdevice_attribute


@functools.cache
def device_handle(device: int) -> Any:
    """Return the `CUdevice` of an ordinal, which stays the same for the life of the process."""
    return call(cuda.cuDeviceGet, device, detail=f"device {device}")


def _uuid(raw: bytes) -> str:
    """Format a device's UUID as nvidia-smi and CUDA_VISIBLE_DEVICES write it.

    A MIG instance has its own UUID, which nvidia-smi writes with `MIG-`, but the driver API does
    not show which kind a UUID is.
    """
    digits = raw.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


class Devices(Driver):
    """Driver calls for devices and their constant properties."""

    def device_count(self) -> int:
        """Call `cuDeviceGetCount`. `initialise` has already refused if no device is visible."""
        return int(call(cuda.cuDeviceGetCount))

    def device_facts(self, device: int) -> DeviceFacts:
        """Read attributes and `cuDeviceTotalMem`, without needing or making a context."""
        handle = device_handle(device)

        def limit(name: str) -> int:
            attribute = getattr(_LIMIT, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(call(cuda.cuDeviceGetAttribute, attribute, handle, detail=name))

        def dim3(name: str) -> Dim3:
            return limit(f"{name}_X"), limit(f"{name}_Y"), limit(f"{name}_Z")

        name: bytes = call(cuda.cuDeviceGetName, _NAME_BYTES, handle)
        return DeviceFacts(
            ordinal=device,
            name=name.split(b"\0", 1)[0].decode(errors="replace"),
            uuid=_uuid(bytes(call(cuda.cuDeviceGetUuid, handle).bytes)),
            compute_capability=(
                limit("COMPUTE_CAPABILITY_MAJOR"),
                limit("COMPUTE_CAPABILITY_MINOR"),
            ),
            sm_count=limit("MULTIPROCESSOR_COUNT"),
            memory_bytes=int(call(cuda.cuDeviceTotalMem, handle)),
            l2_bytes=limit("L2_CACHE_SIZE"),
            warp_size=limit("WARP_SIZE"),
            max_threads_per_block=limit("MAX_THREADS_PER_BLOCK"),
            max_threads_per_sm=limit("MAX_THREADS_PER_MULTIPROCESSOR"),
            max_block=dim3("MAX_BLOCK_DIM"),
            max_grid=dim3("MAX_GRID_DIM"),
            max_shared_bytes=limit("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            copy_engines=limit("ASYNC_ENGINE_COUNT"),
        )
