"""The cache of compiled cubins, in memory and on disk: a source is compiled once.

1. The key is the SHA-256 of everything that decides the machine code: source, name (it is in the
   line information), the text that the compiler's preprocessor makes of them, options in their
   order, architecture, NVRTC's version, and the version of this file format. NVRTC's output is
   deterministic (measured, 13.5), so a cached cubin equals a new one.
2. The preprocessed text includes the headers, so a changed header changes the key. A cubin is kept
   only if that text is the same before and after compiling, and not at all if NVRTC lacks it.
3. An unusable disk never fails a compilation: without a home, space or permission the cache is in
   memory only. A directory that other users can write to or replace is refused, because a cubin
   is code. Directories and files are private to the user, whatever the umask.
4. A file carries the SHA-256 of its key and content. A file that does not match, is not a plain
   file or may be written by others is replaced. Files are written under a temporary name and
   renamed, so that no reader sees a partial one.

The directory is `$GREENSCHED_CACHE_DIR`, else `$XDG_CACHE_HOME/greensched`, else
`~/.cache/greensched`. Nothing is ever removed from it; users may delete it at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import warnings
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from greensched.kernels import sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The version of the file format; part of every key, so that older files are not found.
FORMAT = 2

_MAGIC = b"greensched cubin\n"
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
#: Cubins in memory; the least recently used are dropped first. The cubin of a small kernel has 4 kB
#: (measured), so this is about 1 MB.
_MOST_IN_MEMORY = 256


def compiled(
    source: str, *, name: str, arch: str, options: Sequence[str] = (), in_sandbox: bool = False
) -> bytes:
    """Return the cubin of a CUDA source, compiled at most once.

    Blocks: NVRTC takes 5 ms to preprocess and 25 ms or more to compile, and the disk is read. A
    sandbox takes 0.3 s or more (`sandbox.compile`), once for a source and the installed headers.

    Raises:
        CompileFailed: NVRTC refused the source, or the source includes files from outside its
            folders of headers; nothing is cached.
        DriverUnavailable: There is no NVRTC. It is needed even if the cubin is on disk, because its
            version is part of the key.
        InvalidRequest, NotSupported: As for `sandbox.compile`.
    """
    # Imported here because `import greensched` must not load cuda.bindings or NVRTC.
    from greensched.driver import nvrtc

    if in_sandbox:
        key_text = "sandbox" + sandbox.headers()
        key = key_of(
            source, key_text.encode(), name=name, arch=arch, options=options, nvrtc=nvrtc.version()
        )
        compile_source = partial(sandbox.compile, source, name=name, arch=arch, options=options)
        return shared().get(key, compile_source)

    def read() -> bytes | None:
        return nvrtc.preprocess(source, name=name, arch=arch, options=options)

    text = read()

    def make() -> bytes:
        binary = nvrtc.compile(source, name=name, arch=arch, options=options)
        if text is None or read() != text:
            raise _NotKept(binary)
        return binary

    try:
        key = key_of(
            source, text or b"", name=name, arch=arch, options=options, nvrtc=nvrtc.version()
        )
        return shared().get(key, make)
    except _NotKept as not_kept:
        return not_kept.binary


class _NotKept(Exception):
    """Carries a cubin that must not be cached, because its preprocessed text is unknown."""

    def __init__(self, binary: bytes) -> None:
        super().__init__()
        self.binary = binary


def key_of(
    source: str,
    text: bytes,
    *,
    name: str,
    arch: str,
    options: Sequence[str],
    nvrtc: tuple[int, int],
) -> str:
    """Return the key of a compilation, which differs if the cubin could differ.

    `text` is what the preprocessor makes of the source.
    """
    # JSON is unambiguous, whatever the parts contain.
    parts = [FORMAT, *nvrtc, arch, name, list(options), source, hashlib.sha256(text).hexdigest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Cache:
    """Cubins by key. Thread-safe; threads that need the same cubin compile it once.

    Args:
        directory: the directory of the files, created (0700) if missing. None, or a directory that
            cannot be used: memory only.

    Warns:
        RuntimeWarning: the directory belongs to another user, or others can write to it.
    """

    def __init__(self, directory: Path | None) -> None:
        self._mutex = threading.Lock()
        self._binaries: dict[str, bytes] = {}
        # Weak: the lock of a key lives only while a thread holds it or waits for it.
        self._making: weakref.WeakValueDictionary[str, threading.Lock] = (
            weakref.WeakValueDictionary()
        )
        self.directory = _usable(directory)

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """Return the cubin of a key, from the cache or from `make`, whose result is cached.

        Blocks: on disk, in `make`, and while another thread makes the same cubin. If `make` raises,
        the next call tries again.
        """
        binary = self._recall(key)
        if binary is not None:
            return binary
        with self._lock_of(key):
            binary = self._recall(key) or self._read(key)
            if binary is None:
                binary = make()
                self._write(key, binary)
            self._remember(key, binary)
            return binary

    # -- memory -----------------------------------------------------------------------------------

    def _lock_of(self, key: str) -> threading.Lock:
        with self._mutex:
            return self._making.setdefault(key, threading.Lock())

    def _recall(self, key: str) -> bytes | None:
        with self._mutex:
            binary = self._binaries.pop(key, None)
            if binary is not None:
                self._binaries[key] = binary  # moved to the end, as the most recently used
            return binary

    def _remember(self, key: str, binary: bytes) -> None:
        with self._mutex:
            self._binaries[key] = binary
            while len(self._binaries) > _MOST_IN_MEMORY:
                del self._binaries[next(iter(self._binaries))]

    # -- disk -------------------------------------------------------------------------------------

    def _read(self, key: str) -> bytes | None:
        if self.directory is None:
            return None
        try:
            content = _read_own(self.directory / f"{key}.cubin")
        except OSError:
            return None
        binary = content[_HEADER_BYTES:]
        return binary if content[:_HEADER_BYTES] == _header(key, binary) else None

    def _write(self, key: str, binary: bytes) -> None:
        if self.directory is None:
            return
        temporary = self.directory / f".{key}.{os.urandom(8).hex()}"
        with suppress(OSError):  # rule 3
            try:
                with open(temporary, "xb", opener=_open_private) as file:
                    file.write(_header(key, binary) + binary)
                temporary.replace(self.directory / f"{key}.cubin")
            except OSError:
                temporary.unlink(missing_ok=True)
                raise


# -- the process's cache ----------------------------------------------------------------------

# Created at the first compilation, so that importing touches no disk.
_shared: Cache | None = None
_shared_lock = threading.Lock()


def shared() -> Cache:
    """Return the cache of the process, whose directory the environment names at the first call."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Cache(default_directory())
        return _shared


def default_directory() -> Path | None:
    """Return the directory for cubins; None if there is no home directory."""
    own = os.environ.get("GREENSCHED_CACHE_DIR")
    if own:
        return Path(own)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG base directory specification: ignore a relative one
        return base / "greensched"
    try:
        return Path.home() / ".cache" / "greensched"
    except RuntimeError:
        return None


def _usable(directory: Path | None) -> Path | None:
    """Return the directory, created if missing; None if it cannot or must not be used."""
    if directory is None:
        return None
    directory = directory.absolute()
    try:
        missing = [path for path in (directory, *directory.parents) if not path.is_dir()]
        for path in reversed(missing):
            # `parents=True` would create parents with the umask alone.
            path.mkdir(mode=0o700, exist_ok=True)
        problem = _danger(directory.stat()) or _danger_above(directory.resolve())
    except OSError:
        return None
    if problem:
        warnings.warn(
            f"{directory} {problem}, so compiled kernels are not cached on disk: "
            "make it private (chmod 700), or set GREENSCHED_CACHE_DIR",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return directory


def _danger(status: os.stat_result) -> str:
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "is writable by other users"
    return ""


def _danger_above(directory: Path) -> str:
    """Say which parent lets every user replace this directory; the sticky bit prevents that."""
    for path in directory.parents:
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"can be replaced by other users, because {path} is writable by all"
    return ""


def _read_own(path: Path) -> bytes:
    """Return the content of a plain file that only this user can write.

    Raises:
        OSError: It is not such a file. A FIFO is not waited for, and a link is not followed.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or _danger(status):
            raise OSError(f"{path} is not a plain file that this user owns")
        return opened.read()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _header(key: str, binary: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + binary).digest()
