"""The real driver: the verbs of `driver.base` over `cuda.bindings.driver`.

    wheel       the one import of cuda.bindings.driver
    status      statuses become our exceptions here, once
    startup     is there a driver, which one, and what can it do
    devices, contexts, resources, streams, memory, code       the verbs
    driver      all of them together

Wheels 13.0 to 13.5 and drivers of CUDA 13.0 (R580) and newer. Importing this package loads none
of it; `open` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from greensched.errors import DriverUnavailable

if TYPE_CHECKING:
    from greensched.driver.cuda.driver import CudaDriver


def open() -> CudaDriver:  # noqa: A001 - `driver.open` chooses a driver, `driver.cuda.open` opens one
    """The real driver, not yet initialised: this touches no libcuda.

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
