"""The client of a pool's socket: finds sockets of running pools, and reads snapshots.

Each connection carries one question, a line of JSON with the protocol's version, and one answer, a
line of JSON with the snapshot or an error. It needs only the standard library.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from greensched.errors import SocketUnavailable

#: The version of the protocol and of snapshots. Raise it when a field changes or is removed.
VERSION: Final = 1
#: The most bytes of a Unix socket's path. Source: `sun_path` of unix(7), minus the final zero.
MOST_BYTES: Final = 107
#: Seconds that a client waits for an answer. A snapshot takes far less than a millisecond, but the
#: server waits for the pool's lock.
ANSWER_S: Final = 5.0
SUFFIX: Final = ".sock"


def folders() -> list[Path]:
    """Return possible folders of this user's sockets. The first that exists is used.

    A service may run without the variables of a login shell.
    """
    own = Path(tempfile.gettempdir(), f"greensched-{os.geteuid()}")
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    return [Path(runtime_dir, "greensched"), own] if runtime_dir else [own]


def find_sockets(pid: int | None = None) -> list[Path]:
    """Return the sockets of running pools: of all processes, or of one process."""
    sockets = []
    for folder in folders():
        with suppress(OSError):
            sockets += sorted(folder.glob(f"{'*' if pid is None else pid}-*{SUFFIX}"))
    return [path for path in sockets if is_served(path)]


def is_served(path: Path) -> bool:
    """Say whether a server listens at a socket."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(os.fspath(path))
        return True
    return False


def read_snapshot(path: Path) -> dict[str, Any]:
    """Return the snapshot of the pool at a socket, as `Snapshot.as_dict`. Blocks, at most 5 s.

    Raises:
        SocketUnavailable: No server listens there, this user may not connect, there is no answer,
            or the pool speaks another version.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(os.fspath(path))
            connection.sendall(json.dumps({"version": VERSION}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
    except TimeoutError:
        raise SocketUnavailable(path, f"no answer within {ANSWER_S:g} s") from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise SocketUnavailable(path, "no pool listens there") from None
    except OSError as error:
        raise SocketUnavailable(path, error.strerror or str(error)) from error
    if not line.endswith(b"\n"):
        raise SocketUnavailable(path, "the connection was closed without an answer")
    try:
        answer = json.loads(line)
        version = answer["version"]
    except (ValueError, KeyError, TypeError):
        raise SocketUnavailable(path, "another program listens there, not a pool") from None
    if version != VERSION:
        problem = f"the pool speaks version {version}, but this process speaks {VERSION}"
        raise SocketUnavailable(path, f"{problem}: use the same greensched for both")
    if "error" in answer:
        raise SocketUnavailable(path, answer["error"])
    snapshot: dict[str, Any] = answer["snapshot"]
    return snapshot
