"""Compile CUDA source to machine code, through NVRTC. Needs no GPU and no driver.

NVRTC comes with `greensched[nvrtc]`, and nothing else in greensched needs it. The first call finds
and loads it.

Headers: a source may `#include <cuda_fp16.h>` and other headers of the CUDA runtime.
cuda-pathfinder (`find_nvidia_header_directory("cudart")`) finds them in the nvidia-cuda-runtime
wheel, which is part of `greensched[nvrtc]`, or else in a conda environment, `CUDA_PATH`,
`CUDA_HOME`, or a toolkit of the system. CCCL's headers (`<cuda/std/...>`, and the `<nv/target>`
that cooperative_groups.h includes) are used if they are in the same place: pip install
'cuda-toolkit[cccl]'. A folder given in `options` is searched first.

The compiler itself reports what a source includes: its preprocessor writes the text to compile,
and the files that it opened (`preprocess`). NVRTC has no documented option for this;
`-Xcudafe` passes an option to its front end (measured: 13.0, 13.2, 13.4).
"""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cuda import pathfinder  # type: ignore[import-untyped]  # the wheel ships no types
from cuda.bindings import nvrtc  # type: ignore[import-untyped]  # the wheel ships no types

from greensched.errors import CompileFailed, DriverUnavailable, install_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Options that give a folder of headers, or a header in such a folder. Source: NVRTC user guide,
#: "Supported Compile Options".
_HEADER_OPTIONS = "--pre-include", "-include"
_FOLDER_OPTIONS = "--include-path", "-I", "--use-bundled-headers"
#: Prefix of the names of headers that NVRTC has in memory.
_IN_MEMORY = "__nv_"

_nvrtc: Final[Any] = nvrtc


class _Refused(Exception):
    """NVRTC returned a status. The text is its log, or otherwise the status."""


def _call(function: Any, *arguments: Any) -> Any:
    """Call NVRTC; return its results without the status, as a tuple if there are several."""
    try:
        status, *answer = function(*arguments)
    except (KeyError, ValueError) as error:
        # A status newer than the wheel, as in driver.cuda.errors.
        raise _Refused(str(error)) from None
    except RuntimeError as error:
        # DynamicLibNotFoundError, or the error of older wheels for a missing library or symbol.
        raise DriverUnavailable(
            f"the CUDA compiler (NVRTC) was not found: {install_command('nvrtc')}"
        ) from error
    if status:
        raise _Refused(f"{status.name} ({int(status)})")
    return answer[0] if len(answer) == 1 else tuple(answer)


@functools.cache
def header_folders() -> tuple[str, ...]:
    """Return the folders of the installed headers; searched for once per process.

    CCCL is taken only from the runtime headers' location, because another toolkit on the machine
    may have another version.
    """
    find = getattr(pathfinder, "find_nvidia_header_directory", None)  # cuda-pathfinder 1.3
    runtime_headers = find("cudart") if find else None
    if runtime_headers is None:
        return ()
    folders = [Path(runtime_headers), Path(runtime_headers) / "cccl"]
    return tuple(str(folder) for folder in folders if folder.is_dir())


def _header_options() -> tuple[str, ...]:
    return tuple(f"--include-path={folder}" for folder in header_folders())


def version() -> tuple[int, int]:
    """Return NVRTC's version, such as (13, 5). It compiles for no architecture newer than itself.

    Raises:
        DriverUnavailable: NVRTC is not installed.
    """
    major, minor = _call(_nvrtc.nvrtcVersion)
    return int(major), int(minor)


def preprocess(source: str, *, name: str, arch: str, options: Sequence[str] = ()) -> bytes | None:
    """Return the text that `compile` would compile, with headers included and macros expanded.

    It differs whenever a file, a macro such as `__TIME__` or a result of `__has_include` could
    change the machine code. Blocks for 4 to 8 ms (measured), without the GIL.

    Returns:
        The text, up to the first error. None if this NVRTC does not write it or refuses the
        options.

    Raises:
        CompileFailed: The source includes a file that is in no folder of headers: neither the
            options', the folder in `name`, nor the CUDA runtime's. Compiler messages would
            quote such a file.
        DriverUnavailable: NVRTC is not installed.
    """
    with ExitStack() as stack:
        text, files = _memory_file(stack), _memory_file(stack)
        arguments = [
            *_arguments(arch, options),
            *("-Xcudafe=--preprocess", f"-Xcudafe=--output={_path(text)}"),
            *("-Xcudafe=--trace_includes", f"-Xcudafe=--error_output={_path(files)}"),
        ]
        with suppress(_Refused), _program(source, name) as program:
            _build(program, arguments)  # refused even after success: there is no machine code
        read = [line.lstrip(" ") for line in os.fsdecode(_content(files)).split("\n") if line]
        _check_files(read, name, arch, options)
        return _content(text) if read else None


def _check_files(files: Iterable[str], name: str, arch: str, options: Sequence[str]) -> None:
    """Refuse files that are in no folder of headers."""
    headers = list(_values(_HEADER_OPTIONS, options))
    folders = list(_values(_FOLDER_OPTIONS, [*options, *_header_options()]))
    allowed_folders = [Path(path) for path in (*headers, *folders) if path]
    allowed_folders += [Path(path).parent for path in (*headers, name) if "/" in path]
    allowed = {form for path in allowed_folders for form in (path.absolute(), path.resolve())}
    for file in files:
        path = Path(file)
        # Only `..` needs the real path, because links in a folder of headers belong to it.
        path = path.resolve() if ".." in path.parts else path.absolute()
        if not file.startswith(_IN_MEMORY) and allowed.isdisjoint((path, *path.parents)):
            raise CompileFailed(
                name,
                arch,
                f'{name}: error: the source includes "{file}", which is in no folder of headers: '
                "give its folder in the options, as --include-path=FOLDER",
            )


def _values(names: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Return the values of options: `--name=value`, `--name value`, or `-Ivalue`."""
    for option, following in zip_longest(options, options[1:], fillvalue=""):
        for name in names:
            if option == name:
                yield following
            elif option.startswith(f"{name}="):
                yield option[len(name) + 1 :]
            elif name == "-I" and option.startswith(name):
                yield option[len(name) :]


def _memory_file(stack: ExitStack) -> int:
    file = os.memfd_create("greensched nvrtc")
    stack.callback(os.close, file)
    return file


def _path(file: int) -> str:
    return f"/proc/self/fd/{file}"


def _content(file: int) -> bytes:
    """Read what NVRTC wrote; empty if it could not open the path, as without /proc."""
    return os.pread(file, os.fstat(file).st_size, 0)


def compile(  # noqa: A001 - used as nvrtc.compile(...)
    source: str, *, name: str, arch: str, options: Sequence[str] = ()
) -> bytes:
    """Compile CUDA source. Blocks for 10 ms to seconds, without the GIL.

    A source that may include files of the host goes through `preprocess` first.

    Args:
        source: CUDA C++. A kernel must be `extern "C"` to be found by its name.
        name: the source's name in the compiler's messages, such as `saxpy.cu`.
        arch: a real architecture, such as `sm_90` (`DeviceFacts.arch`).
        options: NVRTC's, such as `--std=c++20`; see its documentation.

    Returns:
        A cubin: machine code for exactly this architecture (and later minor revisions of it).

    Raises:
        CompileFailed: Carries the compiler's log.
        DriverUnavailable: NVRTC is not installed.
    """
    try:
        with _program(source, name) as program:
            _build(program, _arguments(arch, options))
            cubin = _read(_nvrtc.nvrtcGetCUBINSize, _nvrtc.nvrtcGetCUBIN, program)
    except _Refused as refused:
        raise CompileFailed(name, arch, str(refused)) from None
    if not cubin:
        # NVRTC returns an empty cubin for a virtual architecture.
        problem = f"{arch} has no machine code: give a real architecture, such as sm_90"
        raise CompileFailed(name, arch, problem)
    return cubin


@contextmanager
def _program(source: str, name: str) -> Iterator[Any]:
    program = _call(_nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), 0, [], [])
    try:
        yield program
    finally:
        _nvrtc.nvrtcDestroyProgram(program)


def _arguments(arch: str, options: Sequence[str]) -> list[str]:
    return [f"--gpu-architecture={arch}", *options, *_header_options()]


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
    """Return the compiler's log, or an empty one if it cannot be read."""
    try:
        raw = _read(_nvrtc.nvrtcGetProgramLogSize, _nvrtc.nvrtcGetProgramLog, program)
    except _Refused:
        return ""
    return raw.rstrip(b"\0").decode(errors="replace").strip()
