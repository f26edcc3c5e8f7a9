"""Find the driver, its version and its features. Every refusal is one sentence with a remedy.

Only `cuDriverGetVersion` and `cuInit` are called for that: both are safe without a device, and
before them no other call is (CUDA driver API, "Initialization"). Features are found by their
symbols, through `cuGetProcAddress`, which needs no `cuInit` either.
"""

from __future__ import annotations

from typing import Any, Final

from greensched import errors
from greensched.driver.cuda import errors as cuda_errors
from greensched.driver.cuda.bindings import cuda
from greensched.typing import Feature

#: The oldest supported driver, as `cuDriverGetVersion` reports it: CUDA 13.0, R580.
OLDEST: Final = 13000

#: The problem and its remedy, by the status of `cuDriverGetVersion` or `cuInit`. Sources: the
#: descriptions in cuda.h (13.5), and for 999 and 304 the usual cause.
_REMEDIES: Final[dict[int, str]] = {
    34: (
        "the libcuda.so.1 that was found is the toolkit's stub: take the `stubs` folder out of "
        "LD_LIBRARY_PATH, or install an NVIDIA driver of CUDA 13.0 (R580) or newer"
    ),
    36: "the driver is too old for this: install an NVIDIA driver of CUDA 13.0 (R580) or newer",
    46: (
        "every GPU is busy or in exclusive-process mode: end the other process, or set the compute "
        "mode to default (nvidia-smi -c 0)"
    ),
    100: (
        "the driver sees no GPU: check CUDA_VISIBLE_DEVICES and nvidia-smi, or start the container "
        "with access to the GPU (docker run --gpus all)"
    ),
    101: "CUDA_VISIBLE_DEVICES names a GPU that is not there: correct or unset it",
    304: (
        "the device files /dev/nvidia* cannot be used: give this user, or the container, access to "
        "them (docker run --gpus all)"
    ),
    802: (
        "the system is not ready to use its GPUs: start nvidia-fabricmanager, and wait until "
        "nvidia-smi -q shows the fabric as completed"
    ),
    803: (
        "libcuda.so.1 and the loaded kernel module are of different driver versions: reboot, or "
        "give the container the libraries of the host's driver"
    ),
    804: (
        "the forward-compatibility libcuda.so.1 does not work with this GPU: take the cuda-compat "
        "folder out of LD_LIBRARY_PATH, or install an NVIDIA driver of CUDA 13.0 (R580) or newer"
    ),
    805: "the MPS server cannot be reached: start it, or unset CUDA_MPS_PIPE_DIRECTORY",
    806: "the MPS server failed: restart nvidia-cuda-mps-control",
    807: "the MPS server is not ready: try again, or restart nvidia-cuda-mps-control",
    808: "the MPS server has as many clients as it takes: end one, or start another server",
    809: "the MPS server is out of connections: lower CUDA_DEVICE_MAX_CONNECTIONS",
    919: (
        "the NVLink fabric is not ready: start nvidia-fabricmanager, and wait until nvidia-smi -q "
        "shows the fabric as completed"
    ),
    999: (
        "the driver cannot start (unknown error): load the kernel module (nvidia-modprobe -u), and "
        "see the kernel's log for NVRM"
    ),
}

#: How a feature is recognised: a symbol of the driver, the CUDA version of its signature, and the
#: attribute that the wheel needs for it. A resource *type* has no symbol: work queues came with
#: 13.1, so a function of that release stands for them.
_SIGNS: Final[dict[Feature, tuple[str, int, str]]] = {
    Feature.STRUCTURED_SPLIT: ("cuDevSmResourceSplit", 13010, "cuDevSmResourceSplit"),
    Feature.STREAM_RESOURCES: ("cuStreamGetDevResource", 13010, "cuStreamGetDevResource"),
    Feature.WORKQUEUES: ("cuStreamGetDevResource", 13010, "CUdevWorkqueueConfigResource"),
    Feature.WRITE_VALUE: ("cuStreamWriteValue32", 11070, "cuStreamWriteValue32"),
}


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver, where a failure means that there is no usable driver."""
    try:
        return cuda_errors.call(function, *arguments)
    except errors.NotSupported as error:
        raise errors.DriverUnavailable(cuda_errors.NOT_A_DRIVER) from error
    except errors.CUDAError as error:
        remedy = _REMEDIES.get(error.status, "see nvidia-smi and the kernel's log")
        raise errors.DriverUnavailable(f"{remedy} ({error})") from error


def driver_version() -> int:
    """Return the newest CUDA that the driver supports: 1000 * major + 10 * minor.

    Raises:
        DriverUnavailable: there is no driver.
    """
    return int(_call(cuda.cuDriverGetVersion))


def initialise() -> None:
    """Make CUDA usable in this process. Calling it again is harmless: so is `cuInit`.

    Raises:
        DriverUnavailable: no usable driver, or one below CUDA 13.0; the message has the remedy.
    """
    version = driver_version()
    if version < OLDEST:
        raise errors.DriverUnavailable(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, and "
            "greensched needs 13.0: install driver R580 or newer"
        )
    _call(cuda.cuInit, 0)


def symbol_address(symbol: str, version: int) -> int:
    """Return the address of a driver function, 0 where the driver lacks it.

    Args:
        symbol: its name in cuda.h, without a version suffix.
        version: the CUDA version of the wanted signature. For one newer than the driver,
            `cuGetProcAddress` returns a status or address 0; both mean that it is missing.
    """
    try:
        failure, address, *_ = cuda.cuGetProcAddress(symbol.encode(), version, 0)
    except cuda_errors.UNKNOWN_STATUS:
        return 0
    except RuntimeError as error:
        raise cuda_errors.error_for_missing_library(error, "cuGetProcAddress") from error
    return 0 if failure else int(address or 0)


def has(feature: Feature) -> bool:
    """Return whether both the driver and the wheel have a feature."""
    symbol, version, attribute = _SIGNS[feature]
    return hasattr(cuda, attribute) and symbol_address(symbol, version) != 0
