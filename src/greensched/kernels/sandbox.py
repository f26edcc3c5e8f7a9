"""Compile untrusted source, each in a separate process that can read only CUDA's headers.

A process (`sandbox_worker`) is started for each source, gives up its rights before it reads the
source, and is killed at a time limit. It answers with a cubin or a message. If the Linux kernel
cannot restrict it, nothing is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greensched.errors import CompileFailed, DriverUnavailable, InvalidRequest, NotSupported
from greensched.kernels import sandbox_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Limits of one compilation: seconds, seconds of processor time, bytes of address space. Starting
#: the process and compiling a small kernel takes 0.3 to 0.5 s in all (measured, NVRTC 13.4).
TIME_LIMIT_S, CPU_SECONDS, MEMORY_BYTES = 15.0, 10, 2 << 30
#: The longest source that is compiled.
MOST_SOURCE_BYTES = 4 << 20
#: Characters of a log that are kept.
MOST_LOG = 64 * 1024
#: Compilations at a time; further ones wait.
AT_ONCE = min(4, os.cpu_count() or 1)

#: Options of NVRTC that read and write no file and name no folder. Source: NVRTC user guide,
#: "Supported Compile Options".
ALLOWED = re.compile(
    r"--?std=c\+\+(?:11|14|17|20)"
    r"|--?use_fast_math"
    r"|--?(?:fmad|ftz|prec-div|prec-sqrt)=(?:true|false)"
    r"|--?maxrregcount=\d{1,3}"
    r"|-[DU][A-Za-z_]\w*(?:=.*)?"
    r"|--(?:define|undefine)-macro=[A-Za-z_]\w*(?:=.*)?"
    r"|--?(?:extra-device-vectorization|restrict|device-int128|lineinfo|generate-line-info)"
    r"|-w|--disable-warnings|--display-error-number|--no-display-error-number"
    r"|--diag-(?:suppress|warn|error)=\d+(?:,\d+)*",
    re.DOTALL,
)
_NAME = re.compile(r"[\w.+-]{1,128}")
_ARCH = re.compile(r"sm_\d{2,3}[af]?")

_slots = threading.BoundedSemaphore(AT_ONCE)


def check(source: str, name: str, options: Sequence[str]) -> None:
    """Refuse options, names and sources that a sandbox does not accept.

    Raises:
        InvalidRequest: An option is not allowed, the name has a folder, or the source is too long.
    """
    for option in options:
        if not ALLOWED.fullmatch(option):
            raise InvalidRequest(
                f"options: {option!r} is not allowed in a sandbox, where options may name no files "
                'or folders: leave it out, or pass compile="trusted" for source of your own'
            )
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"name={name!r}: for a sandbox give 1 to 128 letters, digits or ._+- without folders"
        )
    if len(source.encode()) > MOST_SOURCE_BYTES:
        raise InvalidRequest(
            f"the source has {len(source.encode())} bytes: a sandbox takes at most "
            f"{MOST_SOURCE_BYTES}"
        )


def compile(  # noqa: A001 - used as sandbox.compile(...)
    source: str, *, name: str, arch: str, options: Sequence[str] = ()
) -> bytes:
    """Compile CUDA source in a separate process. Blocks for 0.3 s to `TIME_LIMIT_S`.

    Returns:
        A cubin, as from `nvrtc.compile`.

    Raises:
        CompileFailed: Carries the compiler's log, without paths of this machine, or names the
            exceeded limit on time, memory or size.
        DriverUnavailable: NVRTC is not installed.
        InvalidRequest: As for `check`, or `arch` is not a real architecture.
        NotSupported: The Linux kernel cannot restrict a process (Landlock, seccomp).
    """
    check(source, name, options)
    if not _ARCH.fullmatch(arch):
        raise InvalidRequest(f"arch={arch!r} is not an architecture: give one such as 'sm_90'")
    request = {"source": source, "name": name, "arch": arch, "options": list(options)}
    with _slots:
        status, answer = _run(request)
    outcome, content = answer[:1], answer[1:]
    if outcome == sandbox_worker.CUBIN and content:
        return content
    text = content.decode(errors="replace")
    if outcome == sandbox_worker.UNAVAILABLE:
        needed = "Landlock and seccomp of Linux"
        raise NotSupported('compile="sandbox"', needed, f"a kernel that answers: {text}")
    if outcome == sandbox_worker.NO_COMPILER:
        raise DriverUnavailable(text)
    raise CompileFailed(
        name, arch, _redacted(text) if outcome == sandbox_worker.FAILED else _ended(status)
    )


def _run(
    request: dict[str, Any],
    time_limit: float = TIME_LIMIT_S,
    cpu_seconds: int = CPU_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> tuple[int | None, bytes]:
    """Run the process; return its exit status (None after the time limit) and its answer."""
    limits = str(cpu_seconds), str(memory_bytes)
    with subprocess.Popen(
        [sys.executable, "-I", sandbox_worker.__file__, json.dumps(sys.path), *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=_environment(),
        start_new_session=True,
    ) as process:
        try:
            answer, _ = process.communicate(json.dumps(request).encode(), timeout=time_limit)
        except subprocess.TimeoutExpired:
            return None, b""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, answer


@functools.cache
def headers() -> str:
    """Return a digest of the files that a source can include; read once per process.

    A file is identified by its name, size and time of change.
    """
    from greensched.driver import nvrtc

    digest = hashlib.sha256()
    for folder in nvrtc.header_folders():
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                status = path.stat()
                digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _environment() -> dict[str, str]:
    """Return only what the library loader and cuda-pathfinder need."""
    kept = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
    return {name: os.environ[name] for name in kept if name in os.environ}


def _redacted(log: str) -> str:
    """Return a log cut to size, without the headers' folders and hints at which files exist."""
    from greensched.driver import nvrtc

    for folder in sorted(nvrtc.header_folders(), key=len, reverse=True):
        log = log.replace(f"{folder}/", "")
    log = log.replace(": Permission denied", "")
    return log if len(log) <= MOST_LOG else log[:MOST_LOG] + "\n..."


def _ended(status: int | None) -> str:
    """Say why a process ended without an answer."""
    if status is None:
        return f"it takes longer than the {TIME_LIMIT_S:g} s of a compilation"
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than the {CPU_SECONDS} s of processor time of a compilation"
    return (
        f"the compiler ended with status {status}, without an answer: perhaps it needs more than "
        f"the {MEMORY_BYTES >> 30} GiB of a compilation"
    )
