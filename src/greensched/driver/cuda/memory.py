"""Stream-ordered device memory, pinned memory, and copies."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING, Any, Final

from greensched import errors
from greensched.driver.cuda.bindings import cuda
from greensched.driver.cuda.devices import device_handle
from greensched.driver.cuda.errors import (
    UNKNOWN_STATUS,
    call,
    error_for_status,
    error_for_unknown_status,
)
from greensched.driver.interface import Driver
from greensched.driver.types import HostMemory, MemoryPoolHandle

if TYPE_CHECKING:
    from greensched.driver.types import ContextHandle, StreamHandle

#: CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP: valid in every context, and
#: addressable by the device, as `cuStreamWriteValue32` requires.
_PORTABLE_DEVICEMAP: Final = 1 | 2
#: A pool returns unused memory beyond this at the next synchronisation. The default is 0.
_KEEP_EVERYTHING: Final = 2**64 - 1

_POOL_ATTRIBUTE: Final[Any] = cuda.CUmemPool_attribute
_ATTRIBUTE_KIND: Final = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_ATTRIBUTE_ORDINAL: Final = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
#: CU_MEMORYTYPE_DEVICE, which also applies to managed memory.
_DEVICE_MEMORY: Final = 2
_INVALID_VALUE: Final = 1

#: Every registered mapping, by its address. If a mapping's owner is collected (a pool abandoned at
#: work), the mapping must stay while the device uses it, and its address must not be reused.
_registered: Final[dict[int, mmap.mmap]] = {}

_allocate = cuda.cuMemAllocFromPoolAsync
_free = cuda.cuMemFreeAsync


def _pool_properties(device: int) -> Any:
    """Describe plain device memory, not shared with other processes (the fields that are 0)."""
    properties = cuda.CUmemPoolProps()
    properties.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(device)
    return properties


def _location(device: int) -> Any:
    location = cuda.CUmemLocation()
    location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


class Memory(Driver):
    """Memory and copies. Addresses are plain ints, as kernel arguments are."""

    def create_memory_pool(self, device: int) -> MemoryPoolHandle:
        """Call `cuMemPoolCreate`, as the device's default pool belongs to the whole process."""
        pool = call(cuda.cuMemPoolCreate, _pool_properties(device), detail=f"device {device}")
        try:
            call(
                cuda.cuMemPoolSetAttribute,
                pool,
                _POOL_ATTRIBUTE.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                cuda.cuuint64_t(_KEEP_EVERYTHING),
            )
        except errors.GreenschedError:
            with contextlib.suppress(errors.GreenschedError):
                call(cuda.cuMemPoolDestroy, pool)
            raise
        return MemoryPoolHandle(pool)

    def destroy_memory_pool(self, pool: MemoryPoolHandle) -> None:
        """Call `cuMemPoolDestroy`. Allocated memory stays until it is freed."""
        call(cuda.cuMemPoolDestroy, pool)

    def can_access_peer(self, device: int, peer: int) -> bool:
        handles = device_handle(device), device_handle(peer)
        return bool(call(cuda.cuDeviceCanAccessPeer, *handles, detail=f"{device} of {peer}"))

    def share_memory_pool(self, pool: MemoryPoolHandle, device: int) -> None:
        """Call `cuMemPoolSetAccess`. Mapping the pool's present memory may take long."""
        access = cuda.CUmemAccessDesc()
        access.location = _location(device)
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call(cuda.cuMemPoolSetAccess, pool, [access], 1, detail=f"for device {device}")

    def reserved_bytes(self, pool: MemoryPoolHandle) -> int:
        attribute = _POOL_ATTRIBUTE.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        return int(call(cuda.cuMemPoolGetAttribute, pool, attribute))

    def allocate(self, pool: MemoryPoolHandle, nbytes: int, stream: StreamHandle) -> int:
        """Call `cuMemAllocFromPoolAsync`, which returns INVALID_VALUE for 0 bytes."""
        try:
            status, address = _allocate(nbytes, pool, stream)
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuMemAllocFromPoolAsync") from None
        if status:
            raise error_for_status(
                status, "cuMemAllocFromPoolAsync", f"{nbytes} bytes", asked=nbytes
            )
        return int(address)

    def free(self, address: int, stream: StreamHandle) -> None:
        try:
            (status,) = _free(address, stream)
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuMemFreeAsync") from None
        if status:
            raise error_for_status(status, "cuMemFreeAsync")

    def allocate_host(self, nbytes: int) -> HostMemory:
        """Register a mapping by `cuMemHostRegister`: portable, and initially zero.

        Unlike with `cuMemHostAlloc`, a view that is still used after `free_host` (by a job whose
        completion is queried, or by a caller's array) then reads valid memory.
        """
        try:
            mapping = mmap.mmap(-1, nbytes)
        except OSError:
            raise errors.OutOfMemory("mmap", nbytes) from None
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        call(cuda.cuMemHostRegister, address, size, _PORTABLE_DEVICEMAP, asked=nbytes)
        _registered[address] = mapping  # no later mapping is at an address that stays registered
        try:
            device_address = int(call(cuda.cuMemHostGetDevicePointer, address, 0))
        except errors.GreenschedError:
            with contextlib.suppress(errors.GreenschedError):
                call(cuda.cuMemHostUnregister, address)
                del _registered[address]
            raise
        return HostMemory(address, device_address, nbytes, memoryview(mapping))

    def free_host(self, memory: HostMemory) -> None:
        """Call `cuMemHostUnregister`. The bytes live as long as a view of them."""
        call(cuda.cuMemHostUnregister, memory.address)
        _registered.pop(memory.address, None)

    def memory_info(self) -> tuple[int, int]:
        """Call `cuMemGetInfo`, which covers the whole device and all processes, not a partition."""
        free, total = call(cuda.cuMemGetInfo)
        return int(free), int(total)

    def memory_device(self, address: int) -> int | None:
        """Call `cuPointerGetAttribute`, which returns INVALID_VALUE for memory not from CUDA."""
        try:
            kind = call(cuda.cuPointerGetAttribute, _ATTRIBUTE_KIND, address)
            if int(kind) != _DEVICE_MEMORY:
                return None
            return int(call(cuda.cuPointerGetAttribute, _ATTRIBUTE_ORDINAL, address))
        except errors.CUDAError as error:
            if error.status == _INVALID_VALUE:
                return None
            raise

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: StreamHandle) -> None:
        """Call `cuMemcpyHtoDAsync`. The host memory must live until the copy is done."""
        call(cuda.cuMemcpyHtoDAsync, address, host, nbytes, stream, detail=f"{nbytes} bytes")

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: StreamHandle) -> None:
        """Call `cuMemcpyDtoHAsync`. The host memory must live until the copy is done."""
        call(cuda.cuMemcpyDtoHAsync, host, address, nbytes, stream, detail=f"{nbytes} bytes")

    def copy(self, target: int, source: int, nbytes: int, stream: StreamHandle) -> None:
        call(cuda.cuMemcpyDtoDAsync, target, source, nbytes, stream, detail=f"{nbytes} bytes")

    def copy_peer(
        self,
        target: int,
        target_context: ContextHandle,
        source: int,
        source_context: ContextHandle,
        nbytes: int,
        stream: StreamHandle,
    ) -> None:
        """Call `cuMemcpyPeerAsync`, which uses the given contexts, not the current one.

        Source: programming guide, stream-ordered allocation: for other copies of a pool's memory
        the context of their stream must be current.
        """
        call(
            cuda.cuMemcpyPeerAsync,
            target,
            target_context,
            source,
            source_context,
            nbytes,
            stream,
            detail=f"{nbytes} bytes",
        )

    def set_bytes(self, address: int, value: int, nbytes: int, stream: StreamHandle) -> None:
        call(cuda.cuMemsetD8Async, address, value, nbytes, stream, detail=f"{nbytes} bytes")
