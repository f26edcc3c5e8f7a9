"""Libraries, kernels, launches.

Kernels are `CUkernel`s of a library: a launch takes its context from the stream, and what is
current plays no part (CUDA driver API, cuLaunchKernel).
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Final

from greensched import errors
from greensched.driver.cuda.bindings import cuda, number
from greensched.driver.cuda.devices import device_handle
from greensched.driver.cuda.errors import NEWER, ask, failed, newer
from greensched.driver.interface import Driver
from greensched.driver.status import from_status
from greensched.driver.types import KernelHandle, KernelLimits, LibraryHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from greensched.driver.types import CodeImage, StreamHandle
    from greensched.typing import Dim3

#: The status behind the last parameter of a kernel.
_INVALID_VALUE: Final = 1
_INVALID_IMAGE: Final = 200

_ATTRIBUTE: Final[Any] = cuda.CUfunction_attribute


class Code(Driver):
    """What runs."""

    def load_code(self, image: CodeImage) -> LibraryHandle:
        """`cuLibraryLoadData`; the driver keeps its own copy, and loads lazily."""
        if not image.binary:
            # The driver would read past the end of it.
            raise from_status(
                _INVALID_IMAGE, "cuLibraryLoadData", None, f"{image.name} has no machine code"
            )
        library = ask(cuda.cuLibraryLoadData, image.binary, [], [], 0, [], [], 0, detail=image.name)
        return LibraryHandle(library)

    def unload_code(self, library: LibraryHandle) -> None:
        """`cuLibraryUnload`; its kernels' work must be done."""
        ask(cuda.cuLibraryUnload, library)

    def get_kernel(self, library: LibraryHandle, name: str) -> KernelHandle:
        """`cuLibraryGetKernel`; NOT_FOUND for a C++ name: the source says `extern "C"`."""
        return KernelHandle(ask(cuda.cuLibraryGetKernel, library, name.encode(), detail=name))

    def load_kernel(self, kernel: KernelHandle) -> None:
        """`cuKernelGetFunction` for the current context, and `cuFuncLoad` of that.

        Without it the first launch loads, and may synchronise the context to do so.
        """
        ask(cuda.cuFuncLoad, ask(cuda.cuKernelGetFunction, kernel))

    def kernel_layout(self, kernel: KernelHandle) -> tuple[tuple[int, int], ...] | None:
        """`cuKernelGetParamInfo` up to its INVALID_VALUE: the count can be asked from 13.2 only."""
        layout = []
        for index in itertools.count():
            try:
                offset, size = ask(cuda.cuKernelGetParamInfo, kernel, index)
            except errors.NotSupported:
                return None
            except errors.CUDAError as error:
                if error.status != _INVALID_VALUE:
                    raise
                break
            layout.append((int(offset), int(size)))
        return tuple(layout)

    def kernel_limits(self, kernel: KernelHandle, device: int) -> KernelLimits:
        """`cuKernelGetAttribute`, by device: no context is needed."""
        handle = device_handle(device)

        def limit(name: str) -> int:
            attribute = getattr(_ATTRIBUTE, f"CU_FUNC_ATTRIBUTE_{name}")
            return int(ask(cuda.cuKernelGetAttribute, attribute, kernel, handle, detail=name))

        return KernelLimits(
            limit("MAX_THREADS_PER_BLOCK"),
            limit("SHARED_SIZE_BYTES"),
            limit("NUM_REGS"),
            limit("LOCAL_SIZE_BYTES"),
        )

    def allow_shared(self, kernel: KernelHandle, device: int, nbytes: int) -> None:
        """`cuKernelSetAttribute`; at most the device's opt-in limit less the static part."""
        ask(
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
        """`cuLaunchKernel`, with everything bound that can be.

        Two things make it as cheap as the raw call (measured on the stand-in): the kernel is
        wrapped as the `CUfunction` that the driver lets it pass for, which a wheel would do
        again at each call, and a `partial` hands over the eleven arguments in C.
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
            except NEWER as error:
                raise newer(error, "cuLaunchKernel", geometry()) from None
            if status:
                raise failed(status, "cuLaunchKernel", geometry())

        def geometry() -> str:
            return f"grid {grid}, block {block}, {shared_bytes} bytes of shared memory"

        return launch_again
