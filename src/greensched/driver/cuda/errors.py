"""Turn the statuses of the CUDA wheel into exceptions.

Every call of the wheel returns a tuple. Its first item is a `CUresult`, which is true for a
failure. Instead of returning, a call may raise for:

* a status newer than the wheel: `KeyError(917)` up to 13.1, `ValueError("917 is not a valid
  CUresult")` from 13.2 on (and before that from functions that fill lists);
* a missing libcuda: `DynamicLibNotFoundError` from 13.4 on, a plain RuntimeError before;
* a symbol that the driver lacks: a RuntimeError.

So hot driver calls wrap the wheel's in `try ... except UNKNOWN_STATUS`, which costs nothing unless
it raises (CPython 3.11+); other calls use `call`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from cuda.pathfinder import (  # type: ignore[import-untyped]  # the wheel ships no types
    DynamicLibNotFoundError,
)

from greensched import errors
from greensched.driver.cuda.bindings import WHEEL_VERSION, cuda
from greensched.driver.status import from_status

if TYPE_CHECKING:
    from collections.abc import Callable

#: The wheel's exceptions for a status without a name in it.
UNKNOWN_STATUS: Final = (KeyError, ValueError)

#: The status "not yet" of queries. There is only one such object, so it is compared by `is`.
NOT_READY: Final[Any] = cuda.CUresult.CUDA_ERROR_NOT_READY

NO_LIBRARY: Final = (
    "no CUDA driver was found (libcuda.so.1): install an NVIDIA driver of CUDA 13.0 (R580) or "
    "newer, or start the container with access to the GPU (docker run --gpus all)"
)
NOT_A_DRIVER: Final = (
    "the libcuda.so.1 that was found is not an NVIDIA driver: take its folder out of "
    "LD_LIBRARY_PATH, or install an NVIDIA driver of CUDA 13.0 (R580) or newer"
)

_UNNAMED = re.compile(r"(\d+) is not a valid CUresult")
_NAMES: dict[int, str] = {int(member): member.name for member in cuda.CUresult}


def error_for_status(
    status: Any, call: str, detail: str = "", asked: int | None = None
) -> errors.CUDAError:
    """Return the exception for a status that the wheel has a name for.

    Args:
        status: A `CUresult` that is not success.
        call: The name of the driver function.
        detail: The arguments that matter, in words.
        asked: The requested bytes, if the call allocates memory.
    """
    number = int(status)
    if number == 2 and asked is not None:
        return errors.OutOfMemory(call, asked=asked)
    return from_status(number, call, status.name, detail)


def error_for_unknown_status(error: Exception, call: str, detail: str = "") -> Exception:
    """Return the exception for a status that the wheel has no name for.

    Args:
        error: The wheel's exception. Returned unchanged if it is not about a status (a KeyError or
            ValueError about an argument, which is a bug of greensched).
        call: The name of the driver function.
        detail: The arguments that matter, in words.
    """
    number: object = error.args[0] if error.args else None
    if isinstance(error, ValueError):
        match = _UNNAMED.search(str(number))
        number = int(match[1]) if match else None
    if not isinstance(number, int) or number in _NAMES:
        return error
    return from_status(number, call, None, detail)


def error_for_missing_library(error: RuntimeError, call: str) -> Exception:
    """Return the exception for a missing library or symbol; return `error` if it is neither."""
    text = str(error)
    if isinstance(error, DynamicLibNotFoundError) or "dlopen" in text:
        return errors.DriverUnavailable(NO_LIBRARY)
    if "cuGetProcAddress" in text:
        return errors.DriverUnavailable(NOT_A_DRIVER)
    if "not found" in text:
        return error_for_missing_function(call)
    return error


def error_for_missing_function(call: str) -> errors.NotSupported:
    """Return the exception for a function that this driver or wheel lacks."""
    return errors.NotSupported(
        call, "a newer driver or cuda-bindings", f"one without it (cuda-bindings {WHEEL_VERSION})"
    )


def call(
    function: Callable[..., Any], *arguments: Any, detail: str = "", asked: int | None = None
) -> Any:
    """Call the driver, where a tenth of a microsecond does not matter.

    Args:
        function: A function of the wheel.
        arguments: The arguments for the function.
        detail: The arguments that matter, in words.
        asked: The requested bytes, if the call allocates memory.

    Returns:
        The call's results without its status: None, a single value, or a tuple of values.

    Raises:
        CUDAError: Any status except success.
        NotSupported: The driver has no such function.
        DriverUnavailable: There is no driver.
    """
    name = function.__name__
    try:
        status, *answer = function(*arguments)
    except UNKNOWN_STATUS as error:
        raise error_for_unknown_status(error, name, detail) from None
    except RuntimeError as error:
        raise error_for_missing_library(error, name) from error
    if status:
        raise error_for_status(status, name, detail, asked)
    if len(answer) == 1:
        return answer[0]
    return tuple(answer) if answer else None
