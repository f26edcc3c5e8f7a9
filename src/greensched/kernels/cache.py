"""Compiled cubins, kept in memory and on disk, so that a source is compiled once.

1. The key is the SHA-256 of everything that decides the machine code: source, name (it is in the
   line information), options in their order, architecture, NVRTC's version, and the version of
   this file format. NVRTC's output is the same bytes each time (measured, 13.5), so a cubin read
   back is as good as one just made.
2. What a key cannot see is not cached: a source with an `#include` of anything but `<...>`, or any
   source compiled with include paths of its own. It is compiled each time. Headers in `<...>` are
   taken for the toolkit's, which change when NVRTC's version does.
3. The disk is a convenience and never fails a compile: no home, no space, no permission mean memory
   only. A directory that somebody else could write to is refused, for a cubin is code.
4. A file carries the SHA-256 of its key and content. One that does not match is replaced. Files are
   written beside their name and moved onto it, so no reader sees half of one.

The directory is `$GREENSCHED_CACHE_DIR`, else `$XDG_CACHE_HOME/greensched`, else
`~/.cache/greensched`. Nothing is ever removed from it; it may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Of the files; part of every key, so older files are simply not found.
FORMAT = 1

_MAGIC = b"greensched cubin\n"
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
#: Cubins in memory, the least recently used leaving first. A small kernel's cubin is 4 kB
#: (measured), so this is a few MB of programs made by the thousand.
_MOST_IN_MEMORY = 256

_OUTSIDE_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b(?![ \t]*<)", re.MULTILINE)
#: Options that bring in files. Source: NVRTC user guide, "Supported Compile Options".
_INCLUDE_OPTIONS = ("-I", "--include-path", "-include", "--pre-include")


def compiled(source: str, *, name: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """The cubin of a CUDA source, compiled at most once. Blocks: disk, NVRTC (25 ms and more).

    Raises:
        CompileFailed: NVRTC refused the source; nothing is cached.
        DriverUnavailable: there is no NVRTC (also where a cubin is on disk: its key needs the
            version).
    """
    # Lazily: `import greensched` loads neither cuda.bindings nor NVRTC.
    from greensched.driver import nvrtc

    def make() -> bytes:
        return nvrtc.compile(source, name=name, arch=arch, options=options)

    if not is_self_contained(source, options):
        return make()
    key = key_of(source, name=name, arch=arch, options=options, nvrtc=nvrtc.version())
    return shared().get(key, make)


def key_of(
    source: str, *, name: str, arch: str, options: Sequence[str], nvrtc: tuple[int, int]
) -> str:
    """The key of a compilation: hexadecimal, different wherever the cubin could be."""
    # JSON because it cannot be read in two ways: the parts may contain anything.
    parts = [FORMAT, *nvrtc, arch, name, list(options), source]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def is_self_contained(source: str, options: Sequence[str] = ()) -> bool:
    """Whether a key sees all that is compiled: no headers but those of NVRTC and the toolkit."""
    if any(option.startswith(_INCLUDE_OPTIONS) for option in options):
        return False
    return _OUTSIDE_INCLUDE.search(source) is None


class Cache:
    """Cubins by key. Thread-safe; what two threads want at once is made once.

    Args:
        directory: where files are kept; made (0700) if missing. None, or a directory that cannot
            be used: memory only.

    Warns:
        RuntimeWarning: the directory belongs to somebody else, or others may write to it.
    """

    def __init__(self, directory: Path | None) -> None:
        self._mutex = threading.Lock()
        self._binaries: dict[str, bytes] = {}
        # Weak: a key's lock lives as long as somebody holds it or waits for it.
        self._making: weakref.WeakValueDictionary[str, threading.Lock] = (
            weakref.WeakValueDictionary()
        )
        self.directory = _usable(directory)

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """What is cached under the key, or what `make` returns, cached from now on.

        Blocks: on disk, in `make`, and while another thread makes the same. An exception of `make`
        goes to its caller; the next one tries again.
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
                self._binaries[key] = binary  # at the end: the most recently used
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
            content = (self.directory / f"{key}.cubin").read_bytes()
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
                temporary.write_bytes(_header(key, binary) + binary)
                temporary.replace(self.directory / f"{key}.cubin")
            except OSError:
                temporary.unlink(missing_ok=True)
                raise


# -- the process's cache ----------------------------------------------------------------------

# One per process, made at the first compilation: importing touches no disk.
_shared: Cache | None = None
_shared_lock = threading.Lock()


def shared() -> Cache:
    """The process's cache. Its directory is that of the environment at the first call."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Cache(default_directory())
        return _shared


def default_directory() -> Path | None:
    """Where cubins are kept on disk; None where there is no home."""
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
    """The directory, made if missing; None where it cannot or must not be used."""
    if directory is None:
        return None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError:
        return None
    problem = _danger(status)
    if problem:
        warnings.warn(
            f"{directory} {problem}, so compiled kernels are not cached on disk: "
            "make it yours alone (chmod 700), or set GREENSCHED_CACHE_DIR",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return directory


def _danger(status: os.stat_result) -> str:
    if status.st_uid != os.geteuid():
        return "belongs to somebody else"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by others"
    return ""


def _header(key: str, binary: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + binary).digest()
