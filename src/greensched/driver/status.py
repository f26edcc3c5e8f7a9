"""Driver statuses: their names, their classes, which decide what follows, and exceptions."""

from __future__ import annotations

import enum

from greensched.errors import CUDAError, DeviceFault, DriverUnavailable, OutOfMemory


class ErrorClass(enum.Enum):
    """What a status means for the job, the device and the process."""

    REQUEST = "fails the one job whose call returned it"
    CAPACITY = "the device lacks something now: it is tried again, done without, or fails one job"
    LOST = "the device is lost: the first is the cause, and nothing calls the driver any more"
    LIFECYCLE = "a context, or the driver, has ended: a bug, other code's doing, or the exit"
    ENVIRONMENT = "the machine is not set up: opening a pool fails with one sentence"
    PENDING = "no error: not done yet"


#: Every `CUresult` except success, by class. Source: cuda.h, enum cudaError_enum (13.5). LOST: the
#: process "must be terminated and relaunched". For 214, 220, 710 and 999 the header says less, but
#: nothing can be trusted after them. 911 (EXTERNAL_DEVICE) counts as REQUEST: the header says the
#: same about it, but it may also be a failure of the call alone.
CLASSES: dict[ErrorClass, dict[int, str]] = {
    ErrorClass.REQUEST: {
        1: "INVALID_VALUE",
        5: "PROFILER_DISABLED",
        6: "PROFILER_NOT_INITIALIZED",
        7: "PROFILER_ALREADY_STARTED",
        8: "PROFILER_ALREADY_STOPPED",
        200: "INVALID_IMAGE",
        202: "CONTEXT_ALREADY_CURRENT",
        205: "MAP_FAILED",
        206: "UNMAP_FAILED",
        207: "ARRAY_IS_MAPPED",
        208: "ALREADY_MAPPED",
        209: "NO_BINARY_FOR_GPU",
        210: "ALREADY_ACQUIRED",
        211: "NOT_MAPPED",
        212: "NOT_MAPPED_AS_ARRAY",
        213: "NOT_MAPPED_AS_POINTER",
        215: "UNSUPPORTED_LIMIT",
        216: "CONTEXT_ALREADY_IN_USE",
        217: "PEER_ACCESS_UNSUPPORTED",
        218: "INVALID_PTX",
        219: "INVALID_GRAPHICS_CONTEXT",
        221: "JIT_COMPILER_NOT_FOUND",
        222: "UNSUPPORTED_PTX_VERSION",
        223: "JIT_COMPILATION_DISABLED",
        224: "UNSUPPORTED_EXEC_AFFINITY",
        225: "UNSUPPORTED_DEVSIDE_SYNC",
        227: "INSUFFICIENT_LOADER_VERSION",
        300: "INVALID_SOURCE",
        301: "FILE_NOT_FOUND",
        302: "SHARED_OBJECT_SYMBOL_NOT_FOUND",
        303: "SHARED_OBJECT_INIT_FAILED",
        400: "INVALID_HANDLE",
        401: "ILLEGAL_STATE",
        402: "LOSSY_QUERY",
        500: "NOT_FOUND",
        701: "LAUNCH_OUT_OF_RESOURCES",
        703: "LAUNCH_INCOMPATIBLE_TEXTURING",
        704: "PEER_ACCESS_ALREADY_ENABLED",
        705: "PEER_ACCESS_NOT_ENABLED",
        708: "PRIMARY_CONTEXT_ACTIVE",
        711: "TOO_MANY_PEERS",
        712: "HOST_MEMORY_ALREADY_REGISTERED",
        713: "HOST_MEMORY_NOT_REGISTERED",
        720: "COOPERATIVE_LAUNCH_TOO_LARGE",
        800: "NOT_PERMITTED",
        801: "NOT_SUPPORTED",
        811: "CDP_NOT_SUPPORTED",
        812: "CDP_VERSION_MISMATCH",
        900: "STREAM_CAPTURE_UNSUPPORTED",
        901: "STREAM_CAPTURE_INVALIDATED",
        902: "STREAM_CAPTURE_MERGE",
        903: "STREAM_CAPTURE_UNMATCHED",
        904: "STREAM_CAPTURE_UNJOINED",
        905: "STREAM_CAPTURE_ISOLATION",
        906: "STREAM_CAPTURE_IMPLICIT",
        907: "CAPTURED_EVENT",
        908: "STREAM_CAPTURE_WRONG_THREAD",
        909: "TIMEOUT",
        910: "GRAPH_EXEC_UPDATE_FAILURE",
        911: "EXTERNAL_DEVICE",
        912: "INVALID_CLUSTER_SIZE",
        913: "FUNCTION_NOT_LOADED",
        916: "KEY_ROTATION",
        918: "GRAPH_RECAPTURE_FAILURE",
    },
    ErrorClass.CAPACITY: {
        2: "OUT_OF_MEMORY",
        47: "MULTICAST_RESOURCE_FULL",
        914: "INVALID_RESOURCE_TYPE",
        915: "INVALID_RESOURCE_CONFIGURATION",
    },
    ErrorClass.LOST: {
        214: "ECC_UNCORRECTABLE",
        220: "NVLINK_UNCORRECTABLE",
        226: "CONTAINED",
        700: "ILLEGAL_ADDRESS",
        702: "LAUNCH_TIMEOUT",
        710: "ASSERT",
        714: "HARDWARE_STACK_ERROR",
        715: "ILLEGAL_INSTRUCTION",
        716: "MISALIGNED_ADDRESS",
        717: "INVALID_ADDRESS_SPACE",
        718: "INVALID_PC",
        719: "LAUNCH_FAILED",
        721: "TENSOR_MEMORY_LEAK",
        810: "MPS_CLIENT_TERMINATED",
        999: "UNKNOWN",
    },
    ErrorClass.LIFECYCLE: {
        3: "NOT_INITIALIZED",
        4: "DEINITIALIZED",
        201: "INVALID_CONTEXT",
        709: "CONTEXT_IS_DESTROYED",
        917: "STREAM_DETACHED",
    },
    ErrorClass.ENVIRONMENT: {
        34: "STUB_LIBRARY",
        36: "CALL_REQUIRES_NEWER_DRIVER",
        46: "DEVICE_UNAVAILABLE",
        100: "NO_DEVICE",
        101: "INVALID_DEVICE",
        102: "DEVICE_NOT_LICENSED",
        304: "OPERATING_SYSTEM",
        802: "SYSTEM_NOT_READY",
        803: "SYSTEM_DRIVER_MISMATCH",
        804: "COMPAT_NOT_SUPPORTED_ON_DEVICE",
        805: "MPS_CONNECTION_FAILED",
        806: "MPS_RPC_FAILURE",
        807: "MPS_SERVER_NOT_READY",
        808: "MPS_MAX_CLIENTS_REACHED",
        809: "MPS_MAX_CONNECTIONS_REACHED",
        919: "FABRIC_NOT_READY",
    },
    ErrorClass.PENDING: {
        600: "NOT_READY",
    },
}
STATUS_NAMES: dict[int, str] = {n: name for names in CLASSES.values() for n, name in names.items()}
_CLASS_OF = {status: kind for kind, names in CLASSES.items() for status in names}

#: Statuses after which the process must be replaced. They include 4, DEINITIALIZED, which every
#: call returns once the driver shuts down.
STICKY: frozenset[int] = frozenset({4, *CLASSES[ErrorClass.LOST]})

#: Statuses after which the request may be tried again, or done without.
CAPACITY: frozenset[int] = frozenset(CLASSES[ErrorClass.CAPACITY])

#: The problem and its remedy for each status of a call at `open`. Sources: the
#: descriptions in cuda.h (13.5), and for 999 and 304 the usual cause.
_REMEDIES: dict[int, str] = {
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


def error_class(status: int) -> ErrorClass:
    """Return the class of a status; an unknown, newer status is REQUEST."""
    return _CLASS_OF.get(status, ErrorClass.REQUEST)


def unavailable(error: CUDAError) -> DriverUnavailable:
    """Return the error for a machine that is not set up, from an error of a call at `open`."""
    remedy = _REMEDIES.get(error.status, "see nvidia-smi and the kernel's log")
    return DriverUnavailable(f"{remedy} ({error})", error.name)


def from_status(status: int, call: str, name: str | None = None, detail: str = "") -> CUDAError:
    """Return the exception for a status. `name` is the wheel's name for it, if known."""
    if status == 2:
        return OutOfMemory(call)
    known = name or STATUS_NAMES.get(status, f"UNKNOWN_STATUS_{status}")
    kind = DeviceFault if status in STICKY else CUDAError
    return kind(status, known.removeprefix("CUDA_ERROR_"), call, detail)
