"""Libraries, kernels and launches.

Kernels are `CUkernel`s of a library: a launch takes its context from the stream, not from the
thread (CUDA driver API, cuLaunchKernel).
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Final

from greensched import errors
from greensched.driver.cuda.bindings import cuda, number
from greensched.driver.cuda.devices import device_handle
from greensched.driver.cuda.errors import (
    UNKNOWN_STATUS,
    call,
    error_for_status,
    error_for_unknown_status,
)
from greensched.driver.interface import Driver
from greensched.driver.status import from_status
from greensched.driver.types import KernelHandle, KernelLimits, LibraryHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from greensched.driver.types import CodeImage, StreamHandle
    from greensched.typing import Dim3

#: The status of `cuKernelGetParamInfo` for an index after the last parameter.
_INVALID_VALUE: Final = 1
_INVALID_IMAGE: Final = 200

_ATTRIBUTE: Final[Any] = cuda.CUfunction_attribute


class Modules(Driver):
    """Libraries, kernels and launches."""

    def load_code(self, image: CodeImage) -> LibraryHandle:
        """Call `cuLibraryLoadData`. The driver keeps its own copy, and loads lazily."""
        if not image.binary:
            # The driver would read past the end of empty bytes.
            raise from_status(
                _INVALID_IMAGE, "cuLibraryLoadData", None, f"{image.name} has no machine code"
            )
        library = call(
            cuda.cuLibraryLoadData, image.binary, [], [], 0, [], [], 0, detail=image.name
        )
        return LibraryHandle(library)

    def unload_code(self, library: LibraryHandle) -> None:
        """Call `cuLibraryUnload`. The work of its kernels must be done."""
        call(cuda.cuLibraryUnload, library)

    def get_kernel(self, library: LibraryHandle, name: str) -> KernelHandle:
        """Call `cuLibraryGetKernel`; NOT_FOUND for a mangled C++ name (use `extern "C"`)."""
        return KernelHandle(call(cuda.cuLibraryGetKernel, library, name.encode(), detail=name))

    def load_kernel(self, kernel: KernelHandle) -> None:
        """Call `cuKernelGetFunction` for the current context, and `cuFuncLoad` for the result.

        Otherwise the first launch loads, and may synchronise the context to do so.
        """
        call(cuda.cuFuncLoad, call(cuda.cuKernelGetFunction, kernel))

    def kernel_layout(self, kernel: KernelHandle) -> tuple[tuple[int, int], ...] | None:
        """Call `cuKernelGetParamInfo` until it returns INVALID_VALUE; only 13.2 can count."""
        layout = []
        for index in itertools.count():
            try:
                offset, size = call(cuda.cuKernelGetParamInfo, kernel, index)
            except errors.NotSupported:
                return None
            except errors.CUDAError as error:
                if error.status != _INVALID_VALUE:
                    raise
                break
            layout.append((int(offset), int(size)))
        return tuple(layout)

    def kernel_limits(self, kernel: KernelHandle, device: int) -> KernelLimits:
        """Call `cuKernelGetAttribute`, which needs a device but no context."""
        handle = device_handle(device)

        def limit(name: str) -> int:
            attribute = getattr(_ATTRIBUTE, f"CU_FUNC_ATTRIBUTE_{name}")
            return int(call(cuda.cuKernelGetAttribute, attribute, kernel, handle, detail=name))

        return KernelLimits(
            limit("MAX_THREADS_PER_BLOCK"),
            limit("SHARED_SIZE_BYTES"),
            limit("LOCAL_SIZE_BYTES"),
        )

    def allow_shared(self, kernel: KernelHandle, device: int, nbytes: int) -> None:
        """Call `cuKernelSetAttribute`: at most the device's opt-in limit minus static memory."""
        call(
            cuda.cuKernelSetAttribute,
            _ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            nbytes,
            kernel,
            device_handle(device),
            detail=f"{nbytes} bytes of shared memory",
        )

    def bind_launch(
        self,
        stream: StreamHandle,
        kernel: KernelHandle,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        parameters: int,
    ) -> Callable[[], None]:
        """Bind `cuLaunchKernel` with all its arguments.

        Two things make it as cheap as the raw call (measured on the stand-in). The kernel is
        wrapped once as a `CUfunction`, which the driver accepts in its place and a wheel would make
        at each call. And a `partial` passes the eleven arguments in C.
        """
        launch = functools.partial(
            cuda.cuLaunchKernel,
            cuda.CUfunction(number(kernel)),
            *grid,
            *block,
            shared_bytes,
            stream,
            parameters,
            0,
        )

        def launch_again() -> None:
            try:
                (status,) = launch()
            except UNKNOWN_STATUS as error:
                raise error_for_unknown_status(error, "cuLaunchKernel", geometry()) from None
            if status:
                raise error_for_status(status, "cuLaunchKernel", geometry())

        def geometry() -> str:
            return f"grid {grid}, block {block}, {shared_bytes} bytes of shared memory"

        return launch_again
