"""Statuses become our exceptions here, once.

A wheel answers every call with a tuple that begins with a `CUresult`, true when the call failed.
Three things come instead of one:

* a status newer than the wheel: `KeyError(917)` up to 13.1, `ValueError("917 is not a valid
  CUresult")` from 13.2 on (and, from functions that fill lists, already before);
* no libcuda: `DynamicLibNotFoundError` from 13.4 on, a plain RuntimeError before;
* a symbol that the driver lacks: a RuntimeError.

So hot verbs wrap the call in `try ... except NEWER`, which costs nothing while nothing is raised
(CPython 3.11+), and the others go through `ask`.
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

#: What a wheel raises for a status it has no name for.
NEWER: Final = (KeyError, ValueError)

#: The status that is an answer of the querying verbs. One object, so `is` tells it.
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


def failed(status: Any, call: str, detail: str = "", asked: int | None = None) -> errors.CUDAError:
    """The exception for a status that the wheel has a name for.

    Args:
        status: a `CUresult` that is not success.
        call: the driver function.
        detail: what it was called for.
        asked: bytes that were asked for, where the call asks for memory.
    """
    number = int(status)
    if number == 2 and asked is not None:
        return errors.OutOfMemory(call, asked=asked)
    return from_status(number, call, status.name, detail)


def numbered(number: int, call: str) -> errors.CUDAError:
    """The exception for a status as the driver has it, from a call that went past the wheel."""
    return from_status(number, call, _NAMES.get(number))


def newer(error: Exception, call: str, detail: str = "") -> Exception:
    """The exception for a status that the wheel has no name for.

    Args:
        error: what the wheel raised; returned as it is where it speaks of something else (a
            KeyError or ValueError of an argument, which is a bug of ours).
        call: the driver function.
        detail: what it was called for.
    """
    number: object = error.args[0] if error.args else None
    if isinstance(error, ValueError):
        found = _UNNAMED.search(str(number))
        number = int(found[1]) if found else None
    if not isinstance(number, int) or number in _NAMES:
        return error
    return from_status(number, call, None, detail)


def missing(error: RuntimeError, call: str) -> Exception:
    """The exception for a library or symbol that is not there; `error` where it is neither."""
    text = str(error)
    if isinstance(error, DynamicLibNotFoundError) or "dlopen" in text:
        return errors.DriverUnavailable(NO_LIBRARY)
    if "cuGetProcAddress" in text:
        return errors.DriverUnavailable(NOT_A_DRIVER)
    if "not found" in text:
        return lacking(call)
    return error


def lacking(call: str) -> errors.NotSupported:
    """The exception for a function that this driver, or this wheel, does not have."""
    return errors.NotSupported(
        call, "a newer driver or cuda-bindings", f"one without it (cuda-bindings {WHEEL_VERSION})"
    )


def ask(function: Callable[..., Any], *arguments: Any, detail: str = "") -> Any:
    """Calls the driver where a tenth of a microsecond does not matter.

    Returns:
        What the call answers beside its status: None, the one value, or a tuple of them.

    Raises:
        CUDAError: any status but success.
        NotSupported: the driver has no such function.
        DriverUnavailable: there is no driver.
    """
    call = function.__name__
    try:
        status, *answer = function(*arguments)
    except NEWER as error:
        raise newer(error, call, detail) from None
    except RuntimeError as error:
        raise missing(error, call) from error
    if status:
        raise failed(status, call, detail)
    if len(answer) == 1:
        return answer[0]
    return tuple(answer) if answer else None
