"""The process that compiles one source for `kernels.sandbox` and can do nothing else.

It is run by its path; the module search path and the limits are arguments. It loads NVRTC,
gives up every right except to read CUDA's headers, and only then reads the source from standard
input. It writes to standard output one byte for the outcome, then the cubin or a message.

On Linux it gives up:

- files, except reading below the headers: Landlock (kernel 5.13);
- the network, other programs, signals to other processes and tracing them: seccomp. The filter also
  refuses `io_uring`, which would bypass it;
- unlimited time, memory, written files and dumps: resource limits.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys

#: The first byte of the answer.
CUBIN, FAILED, UNAVAILABLE, NO_COMPILER = (bytes([code]) for code in b"CFUN")

#: Source: linux/landlock.h. These system calls have the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = _PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
#: How many rights over files and TCP each version of Landlock knows. All of them are denied.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP_RIGHTS, _TCP_VERSION = 2, 4

#: Numbers of the denied system calls. Source: asm/unistd_64.h, asm-generic/unistd.h.
_DENIED = {
    "x86_64": {
        "socket": 41, "connect": 42, "bind": 49, "socketpair": 53, "fork": 57, "vfork": 58,
        "execve": 59, "kill": 62, "ptrace": 101, "mount": 165, "tkill": 200, "tgkill": 234,
        "add_key": 248, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "execveat": 322,
        "userfaultfd": 323, "pidfd_send_signal": 424, "io_uring_setup": 425, "clone3": 435,
    },
    "aarch64": {
        "mount": 40, "unshare": 97, "ptrace": 117, "kill": 129, "tkill": 130, "tgkill": 131,
        "socket": 198, "socketpair": 199, "bind": 200, "connect": 203, "add_key": 217,
        "keyctl": 219, "execve": 221, "perf_event_open": 241, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "execveat": 281,
        "userfaultfd": 282, "pidfd_send_signal": 424, "io_uring_setup": 425, "clone3": 435,
    },
}  # fmt: skip
#: Source: linux/audit.h.
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2

_libc = ctypes.CDLL(None, use_errno=True)


def limit_resources(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit processor time, address space, open files, and the size of written files."""
    for what, most in {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }.items():
        hard = resource.getrlimit(what)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (limit, limit))


def restrict_files(readable: list[str]) -> None:
    """Deny all files except for reading below some folders.

    Raises:
        OSError: The kernel has no Landlock.
    """
    version = _syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    files = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    tcp = (1 << _TCP_RIGHTS) - 1 if version >= _TCP_VERSION else 0
    rules = struct.pack("=QQ", files, tcp)[: 16 if tcp else 8]
    ruleset = _syscall(_CREATE_RULESET, rules, len(rules), 0)
    for folder in readable:
        opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _READ_FILE | _READ_DIR, opened)
        _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        os.close(opened)
    _syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def restrict_calls() -> None:
    """Make the denied system calls fail.

    Raises:
        OSError: The kernel has no seccomp, or this architecture's numbers are unknown.
    """
    machine = platform.machine()
    if machine not in _DENIED:
        raise OSError(errno.ENOTSUP, f"no list of system calls for {machine}")
    # Statements of classic BPF: (code, jump if true, jump if false, operand); linux/filter.h.
    load, jump_equal, jump_at_least, end = 0x20, 0x15, 0x35, 0x06
    fail, allow, kill = 0x00050000 | errno.EPERM, 0x7FFF0000, 0x80000000
    numbers = sorted(_DENIED[machine].values())
    program = [
        (load, 0, 0, 4),  # the architecture of the call
        (jump_equal, 1, 0, _AUDIT_ARCH[machine]),
        (end, 0, 0, kill),
        (load, 0, 0, 0),  # its number
        (jump_at_least, len(numbers) + 1, 0, 0x40000000),  # x32's numbers
        *((jump_equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
        (end, 0, 0, allow),
        (end, 0, 0, fail),
    ]
    packed = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *statement) for statement in program)
    )
    described = struct.pack("@HP", len(program), ctypes.addressof(packed))
    if _libc.prctl(_SET_SECCOMP, _FILTER, described, 0, 0):
        raise _error("seccomp")


def _syscall(*arguments: object) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_libc.syscall(*converted))
    if result < 0:
        raise _error("Landlock")
    return result


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def restrict(readable: list[str], cpu_seconds: int, memory_bytes: int) -> None:
    """Give up every right except to read below some folders, within limits.

    Raises:
        OSError: The kernel cannot restrict the process.
    """
    limit_resources(cpu_seconds, memory_bytes)
    if _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise _error("no_new_privs")
    restrict_files(readable)
    restrict_calls()


def main(path: str, cpu_seconds: str, memory_bytes: str) -> None:
    """Compile the source from standard input."""
    sys.path[:] = json.loads(path)
    from greensched.driver import nvrtc
    from greensched.errors import CompileFailed, DriverUnavailable

    answer = sys.stdout.buffer
    try:
        # This loads the parts of NVRTC and Python that an answer or an error needs.
        folders = list(nvrtc.header_folders())
        warm_up(nvrtc, CompileFailed)
    except DriverUnavailable as missing:
        answer.write(NO_COMPILER + str(missing).encode())
        return
    try:
        restrict(folders, int(cpu_seconds), int(memory_bytes))
    except (OSError, ValueError) as error:
        answer.write(UNAVAILABLE + str(error).encode())
        return
    request = json.loads(sys.stdin.buffer.read())
    try:
        cubin = nvrtc.compile(
            request["source"],
            name=request["name"],
            arch=request["arch"],
            options=request["options"],
        )
    except CompileFailed as failed:
        answer.write(FAILED + failed.log.encode(errors="replace"))
    except MemoryError:
        answer.write(FAILED + b"it needs more memory than a compilation may take")
    else:
        answer.write(CUBIN + cubin)


def warm_up(nvrtc: object, failed: type[Exception]) -> None:
    """Compile a valid source and a wrong one, so that NVRTC loads all its files while it may."""
    for source in ("", "error"):
        try:
            nvrtc.compile(source, name="empty.cu", arch="sm_90")  # type: ignore[attr-defined]  # an untyped module
        except failed:
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
