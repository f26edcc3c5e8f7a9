"""Driver statuses: their names, which of them end the process, and their exceptions."""

from __future__ import annotations

from greensched.errors import CUDAError, DeviceFault, OutOfMemory

#: The `CUresult` values that greensched names itself. Source: cuda.h, enum cudaError_enum (13.5).
STATUS_NAMES: dict[int, str] = {
    1: "INVALID_VALUE",
    2: "OUT_OF_MEMORY",
    3: "NOT_INITIALIZED",
    4: "DEINITIALIZED",
    34: "STUB_LIBRARY",
    36: "CALL_REQUIRES_NEWER_DRIVER",
    46: "DEVICE_UNAVAILABLE",
    100: "NO_DEVICE",
    101: "INVALID_DEVICE",
    200: "INVALID_IMAGE",
    201: "INVALID_CONTEXT",
    209: "NO_BINARY_FOR_GPU",
    214: "ECC_UNCORRECTABLE",
    220: "NVLINK_UNCORRECTABLE",
    226: "CONTAINED",
    400: "INVALID_HANDLE",
    500: "NOT_FOUND",
    600: "NOT_READY",
    700: "ILLEGAL_ADDRESS",
    701: "LAUNCH_OUT_OF_RESOURCES",
    702: "LAUNCH_TIMEOUT",
    709: "CONTEXT_IS_DESTROYED",
    710: "ASSERT",
    714: "HARDWARE_STACK_ERROR",
    715: "ILLEGAL_INSTRUCTION",
    716: "MISALIGNED_ADDRESS",
    717: "INVALID_ADDRESS_SPACE",
    718: "INVALID_PC",
    719: "LAUNCH_FAILED",
    720: "COOPERATIVE_LAUNCH_TOO_LARGE",
    721: "TENSOR_MEMORY_LEAK",
    800: "NOT_PERMITTED",
    801: "NOT_SUPPORTED",
    802: "SYSTEM_NOT_READY",
    803: "SYSTEM_DRIVER_MISMATCH",
    804: "COMPAT_NOT_SUPPORTED_ON_DEVICE",
    810: "MPS_CLIENT_TERMINATED",
    900: "STREAM_CAPTURE_UNSUPPORTED",
    901: "STREAM_CAPTURE_INVALIDATED",
    905: "STREAM_CAPTURE_ISOLATION",
    907: "CAPTURED_EVENT",
    914: "INVALID_RESOURCE_TYPE",
    915: "INVALID_RESOURCE_CONFIGURATION",
    917: "STREAM_DETACHED",
    919: "FABRIC_NOT_READY",
    999: "UNKNOWN",
}

#: After these the process must be replaced: it "must be terminated and relaunched" (cuda.h,
#: 13.5). Of 214, 220, 710 and 999 the header says less, and nothing is trusted after them. 911
#: (EXTERNAL_DEVICE) is not one of them: it says the same, but may also be the call's own failure.
#: 4 is returned once the driver shuts down, by every call from then on.
STICKY: frozenset[int] = frozenset(
    {4, 214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999}
)

#: The device has no memory left, or does not take a resource or a set of them: what was asked may
#: be tried again, or done without.
CAPACITY: frozenset[int] = frozenset({2, 914, 915})


def from_status(status: int, call: str, name: str | None = None, detail: str = "") -> CUDAError:
    """Make the exception of a status. `name` is the wheel's name for it, where there is one."""
    if status == 2:
        return OutOfMemory(call)
    known = name or STATUS_NAMES.get(status, f"UNKNOWN_STATUS_{status}")
    kind = DeviceFault if status in STICKY else CUDAError
    return kind(status, known.removeprefix("CUDA_ERROR_"), call, detail)
