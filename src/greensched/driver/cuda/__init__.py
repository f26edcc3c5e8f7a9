"""The CUDA driver: the driver interface over `cuda.bindings.driver`.

    bindings    the one import of cuda.bindings.driver
    errors      statuses as exceptions
    init        find the driver, its version and its features
    devices, contexts, resources, streams, memory, modules    the driver calls
    driver      all of them together

Supports wheels 13.0 to 13.5 and drivers of CUDA 13.0 (R580) and newer. Importing this package loads
none of it; `open` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from greensched.errors import DriverUnavailable

if TYPE_CHECKING:
    from greensched.driver.cuda.driver import CudaDriver


def open() -> CudaDriver:  # noqa: A001 - `driver.open` chooses a driver, `driver.cuda.open` opens one
    """Make the CUDA driver, not yet initialised: this does not load libcuda.

    Raises:
        DriverUnavailable: cuda-bindings is missing, or older than 13.0.
    """
    try:
        from greensched.driver.cuda.driver import CudaDriver
    except ImportError as error:
        raise DriverUnavailable(
            f"cuda-bindings cannot be used ({error}): pip install 'cuda-bindings>=13,<14'"
        ) from error
    return CudaDriver()
