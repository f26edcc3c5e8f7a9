"""The socket of a pool: a thread answers each connection with a snapshot.

Only this user can connect: the socket has mode 0600, in a folder of mode 0700 unless its path was
given, and each client's user id is checked. A client can only read.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from greensched.errors import InvalidRequest, SocketUnavailable
from greensched.leasing.process import own_folder
from greensched.observability.snapshot import Snapshot
from greensched.observability.snapshot_client import (
    MOST_BYTES,
    SUFFIX,
    VERSION,
    folders,
    is_served,
)

logger = logging.getLogger("greensched")

#: Connections that may wait in the kernel.
BACKLOG: Final = 8
#: The most bytes of a question, and the seconds in which it must arrive.
MOST_QUESTION, QUESTION_S = 256, 1.0
#: Seconds until the next attempt if the process has no free file descriptor.
AGAIN_S: Final = 0.1

_numbers = itertools.count(1)


class SnapshotServer:
    """Listens at a Unix socket from `start` to `close`. Does not keep its pool alive.

    Args:
        path: The path of the socket. None: a path in the user's folder, named by process and pool.
        take: Returns a snapshot, on any thread.
    """

    def __init__(self, path: Path | None, take: Callable[[], Snapshot]) -> None:
        self._given = path
        self._take = take
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.path: Path | None = None

    def start(self) -> None:
        """Start a thread that listens. Idempotent. A socket file without a listener is replaced.

        Raises:
            SocketUnavailable: The path exists, cannot be created, or is too long; no thread can be
                started; or this system does not report the user of a client.
        """
        if self._listener is not None:
            return
        path = self._given or Path("no folder")
        try:
            path = self._given or _default_folder() / f"{os.getpid()}-{next(_numbers)}{SUFFIX}"
            listener = _listen(path)
        except (OSError, AttributeError) as error:
            raise SocketUnavailable(path, getattr(error, "strerror", None) or str(error)) from error
        self.path, self._listener = path, listener
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="greensched socket", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self.stop()
            listener.close()
            raise SocketUnavailable(path, str(error)) from error
        logger.info("greensched top %s shows the pool", path)

    def close(self) -> None:
        """Remove the socket and end the thread. Idempotent. Waits for an answer in progress."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Remove the socket, and let the thread end. Idempotent. Never waits.

        Runs also when the pool is collected.
        """
        listener, self._listener = self._listener, None
        if listener is None or self.path is None:
            return
        with suppress(OSError):
            self.path.unlink()
        for sock in (listener, self._connection):
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # ends the thread's wait

    def forked(self) -> None:
        """Close a forked child's copies. The socket file stays the parent's."""
        for sock in (self._listener, self._connection):
            if sock is not None:
                sock.close()
        self._listener = self._connection = None

    # -- on its thread ---------------------------------------------------------------------------

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            while self._listener is listener:
                try:
                    self._connection, _ = listener.accept()
                except OSError:  # it was shut down, or no file descriptor is left for a connection
                    if self._listener is listener:
                        time.sleep(AGAIN_S)
                    continue
                with self._connection, suppress(OSError):  # the client may disconnect at any time
                    self._answer(self._connection)
                self._connection = None

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(QUESTION_S)
        with connection.makefile("rb") as questions:
            line = questions.readline(MOST_QUESTION)
        if _user_of(connection) in (0, os.geteuid()):
            answer = self._answer_to(line)
        else:
            answer = {"version": VERSION, "error": "the pool is another user's"}
        connection.sendall(json.dumps(answer).encode() + b"\n")

    def _answer_to(self, line: bytes) -> dict[str, Any]:
        try:
            version = json.loads(line)["version"]
        except (ValueError, KeyError, TypeError):
            return {"version": VERSION, "error": 'ask with a line such as {"version": 1}'}
        if version != VERSION:
            return {"version": VERSION, "error": f"it was asked for version {version!r}"}
        try:
            return {"version": VERSION, "snapshot": self._take().as_dict()}
        except Exception as error:  # the thread continues, and the client reports the error
            logger.exception("a snapshot failed")
            return {"version": VERSION, "error": f"the snapshot failed: {error}"}


def _default_folder() -> Path:
    """Return the first folder for sockets that exists or can be made, and is private."""
    *before, last = folders()
    for folder in before:
        with suppress(OSError):
            _remove_dead(own_folder(folder))
            return folder
    _remove_dead(own_folder(last))
    return last


def _remove_dead(folder: Path) -> None:
    """Remove the sockets of processes that ended without closing their pools."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError):
            try:
                os.kill(int(path.name.partition("-")[0]), 0)
            except ProcessLookupError:
                if not is_served(path):  # the process may be in another process namespace
                    path.unlink()


def _listen(path: Path) -> socket.socket:
    """Return a socket that listens at a path, for this user only.

    Raises:
        OSError: It cannot listen; nothing is left.
        AttributeError: The system does not report the user of a client.
    """
    _ = socket.SO_PEERCRED
    listener = socket.socket(socket.AF_UNIX)
    try:
        try:
            listener.bind(os.fspath(path))
        except OSError:
            if not stat.S_ISSOCK(path.lstat().st_mode) or is_served(path):
                raise
            path.unlink()
            listener.bind(os.fspath(path))
        path.chmod(0o600)  # no client can connect before `listen`
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the connected process."""
    form = struct.Struct("iII")  # struct ucred: pid, uid, gid
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    return int(form.unpack(credentials)[1])


def checked_socket(value: object) -> Path | None:
    """Return the path for `Pool(socket=...)`, or None to choose one when the pool opens.

    Raises:
        InvalidRequest: It is neither a path nor True, or too long for a socket.
    """
    if value is True:
        return None
    if not isinstance(value, (str, os.PathLike)) or not (socket_path := os.fspath(value)):
        raise InvalidRequest(f"socket={value!r}: give True, or the path of a Unix socket")
    path = Path(os.fsdecode(socket_path)).absolute()
    size = len(os.fsencode(path))
    if size > MOST_BYTES:
        raise InvalidRequest(
            f"socket={value!r}: the path has {size} bytes, but a Unix socket takes {MOST_BYTES}: "
            "give a shorter one, or True"
        )
    return path
