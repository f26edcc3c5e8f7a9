"""Find the driver, its version and its features. Each refusal is a sentence with a remedy.

Only `cuDriverGetVersion` and `cuInit` are called for this. Both are safe without a device, and no
other call may precede them (CUDA driver API, "Initialization"). Features are found by their
symbols, through `cuGetProcAddress`, which needs no `cuInit` either.
"""

from __future__ import annotations

from typing import Any, Final

from greensched import errors
from greensched.driver.cuda import errors as cuda_errors
from greensched.driver.cuda.bindings import cuda
from greensched.driver.status import unavailable
from greensched.typing import Feature

#: The oldest supported driver, as `cuDriverGetVersion` reports it: CUDA 13.0, R580.
OLDEST: Final = 13000

#: How to recognise a feature: a symbol of the driver, the CUDA version of its signature, and the
#: attribute that the wheel needs for it. A resource *type* has no symbol. Work queues came with
#: 13.1, so a function of that release represents them.
_SIGNS: Final[dict[Feature, tuple[str, int, str]]] = {
    Feature.STRUCTURED_SPLIT: ("cuDevSmResourceSplit", 13010, "cuDevSmResourceSplit"),
    Feature.WORKQUEUES: ("cuStreamGetDevResource", 13010, "CUdevWorkqueueConfigResource"),
    Feature.WRITE_VALUE: ("cuStreamWriteValue32", 11070, "cuStreamWriteValue32"),
}


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver, where any failure means that there is no usable driver."""
    try:
        return cuda_errors.call(function, *arguments)
    except errors.NotSupported as error:
        raise errors.DriverUnavailable(cuda_errors.NOT_A_DRIVER) from error
    except errors.CUDAError as error:
        raise unavailable(error) from error


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports: 1000 * major + 10 * minor.

    Raises:
        DriverUnavailable: There is no driver.
    """
    return int(_call(cuda.cuDriverGetVersion))


def initialise() -> None:
    """Make CUDA usable in this process. Calling it again is harmless, as it is for `cuInit`.

    Raises:
        DriverUnavailable: No usable driver, or one below CUDA 13.0; the message has the remedy.
    """
    version = driver_version()
    if version < OLDEST:
        raise errors.DriverUnavailable(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, but "
            "greensched needs 13.0: install driver R580 or newer"
        )
    _call(cuda.cuInit, 0)


def symbol_address(symbol: str, version: int) -> int:
    """Return the address of a driver function, or 0 if the driver lacks it.

    Args:
        symbol: The function's name in cuda.h, without a version suffix.
        version: The CUDA version of the wanted signature. If it is newer than the driver,
            `cuGetProcAddress` returns a status or address 0; both mean that it is missing.
    """
    try:
        failure, address, *_ = cuda.cuGetProcAddress(symbol.encode(), version, 0)
    except cuda_errors.UNKNOWN_STATUS:
        return 0
    except RuntimeError as error:
        raise cuda_errors.error_for_missing_library(error, "cuGetProcAddress") from error
    return 0 if failure else int(address or 0)


def has_feature(feature: Feature) -> bool:
    """Say whether both the driver and the wheel have a feature."""
    symbol, version, attribute = _SIGNS[feature]
    return hasattr(cuda, attribute) and symbol_address(symbol, version) != 0
