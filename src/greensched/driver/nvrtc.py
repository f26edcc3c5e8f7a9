"""Compile CUDA source to machine code, through NVRTC. Needs no GPU and no driver.

NVRTC comes with `greensched[nvrtc]`; nothing else in greensched needs it. The first call finds and
loads it.

Headers: a source may `#include <cuda_fp16.h>` and other headers of the CUDA runtime.
cuda-pathfinder (`find_nvidia_header_directory("cudart")`) finds them: in the nvidia-cuda-runtime
wheel, which is part of `greensched[nvrtc]`, else in a conda environment, `CUDA_PATH`, `CUDA_HOME`,
or a toolkit of the system. CCCL's headers (`<cuda/std/...>`, and the `<nv/target>` that
cooperative_groups.h includes) are used where they are in the same place: pip install
'cuda-toolkit[cccl]'. A folder given in `options` is searched first.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cuda import pathfinder  # type: ignore[import-untyped]  # the wheel ships no types
from cuda.bindings import nvrtc  # type: ignore[import-untyped]  # the wheel ships no types

from greensched.errors import CompileFailed, DriverUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

_nvrtc: Final[Any] = nvrtc


class _Refused(Exception):
    """NVRTC returned a status; the text is its log where it has one, else the status."""


def _call(function: Any, *arguments: Any) -> Any:
    """Call NVRTC; return its results without the status, a tuple where there are several."""
    try:
        status, *answer = function(*arguments)
    except (KeyError, ValueError) as error:
        # A status newer than the wheel, as in driver.cuda.errors.
        raise _Refused(str(error)) from None
    except RuntimeError as error:
        # DynamicLibNotFoundError, or the error of older wheels for a missing library or symbol.
        raise DriverUnavailable(
            "the CUDA compiler (NVRTC) was not found: pip install 'greensched[nvrtc]'"
        ) from error
    if status:
        raise _Refused(f"{status.name} ({int(status)})")
    return answer[0] if len(answer) == 1 else tuple(answer)


@functools.cache
def _header_options() -> tuple[str, ...]:
    """Return the options for the installed headers, once per process.

    CCCL is taken only from beside the runtime's headers: another toolkit on the machine may have
    another version.
    """
    find = getattr(pathfinder, "find_nvidia_header_directory", None)  # cuda-pathfinder 1.3
    found = find("cudart") if find else None
    if found is None:
        return ()
    folders = [Path(found), Path(found) / "cccl"]
    return tuple(f"--include-path={folder}" for folder in folders if folder.is_dir())


def version() -> tuple[int, int]:
    """Return NVRTC's version, such as (13, 5). It compiles for no architecture newer than itself.

    Raises:
        DriverUnavailable: NVRTC is not installed.
    """
    major, minor = _call(_nvrtc.nvrtcVersion)
    return int(major), int(minor)


def compile(  # noqa: A001 - used as nvrtc.compile(...)
    source: str, *, name: str, arch: str, options: Sequence[str] = ()
) -> bytes:
    """Compile CUDA source. Blocks for 10 ms to seconds, without the GIL.

    Args:
        source: CUDA C++. A kernel must be `extern "C"` to be found by its name.
        name: the source's name in the compiler's messages, such as `saxpy.cu`.
        arch: a real architecture, such as `sm_90` (`DeviceFacts.arch`).
        options: NVRTC's, such as `--std=c++20`; see its documentation.

    Returns:
        A cubin: machine code for exactly this architecture (and later minor revisions of it).

    Raises:
        CompileFailed: with the compiler's log.
        DriverUnavailable: NVRTC is not installed.
    """
    arguments = [f"--gpu-architecture={arch}", *options, *_header_options()]
    try:
        program = _call(_nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), 0, [], [])
        try:
            _build(program, arguments)
            cubin = _read(_nvrtc.nvrtcGetCUBINSize, _nvrtc.nvrtcGetCUBIN, program)
        finally:
            _nvrtc.nvrtcDestroyProgram(program)
    except _Refused as refused:
        raise CompileFailed(name, arch, str(refused)) from None
    if not cubin:
        # NVRTC returns an empty cubin for a virtual architecture.
        problem = f"{arch} has no machine code: give a real architecture, such as sm_90"
        raise CompileFailed(name, arch, problem)
    return cubin


def _build(program: Any, arguments: Sequence[str]) -> None:
    encoded = [argument.encode() for argument in arguments]
    try:
        _call(_nvrtc.nvrtcCompileProgram, program, len(encoded), encoded)
    except _Refused as refused:
        raise _Refused(_log(program) or str(refused)) from None


def _read(size: Any, content: Any, program: Any) -> bytes:
    """Read a result of NVRTC: its size first, then its bytes into a buffer."""
    buffer = bytearray(_call(size, program))
    _call(content, program, buffer)
    return bytes(buffer)


def _log(program: Any) -> str:
    """Return the compiler's log, empty where it cannot be read."""
    try:
        raw = _read(_nvrtc.nvrtcGetProgramLogSize, _nvrtc.nvrtcGetProgramLog, program)
    except _Refused:
        return ""
    return raw.rstrip(b"\0").decode(errors="replace").strip()
