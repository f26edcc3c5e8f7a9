"""A pool's socket: which users can read it, when it exists, and what it answers."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from greensched import DeviceNotFound, InvalidRequest, Pool, SocketUnavailable
from greensched.integrations.testing import SimGPU
from greensched.observability import snapshot_client, snapshot_server
from greensched.observability.snapshot_client import find_sockets, read_snapshot

THREAD = "greensched socket"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a test's sockets."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "greensched"


def opened(given: Any = True, *, times: int = 1) -> list[dict[str, Any]]:
    """Open and close a pool; return what is read while the loop is blocked."""
    gpu, read = SimGPU(), []

    async def main() -> None:
        async with gpu.pool(socket=given):
            for _ in range(times):
                (path,) = find_sockets() if given is True else [Path(given)]
                read.append(read_snapshot(path))

    gpu.run(main)
    return read


def end_of(*program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", *program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == THREAD]


# -- what it answers ---------------------------------------------------------------------------


def test_a_blocked_loop_does_not_keep_the_answer(folder: Path) -> None:
    """It answers twice during a block; then the file and thread end."""
    first, second = opened(times=2)
    assert first["state"] == second["state"] == "open"
    assert first["pid"] == os.getpid()
    assert first["is_timed"]
    assert first["services"][0]["use_p99"] is None
    assert list(folder.iterdir()) == []
    assert threads() == []


def test_two_pools_of_a_process_have_two_sockets() -> None:
    """Both are found; a pool without `socket` has none."""
    gpu = SimGPU()

    async def main() -> None:
        async with gpu.pool(socket=True), gpu.pool(socket=True), gpu.pool():
            assert len(find_sockets()) == 2
            assert find_sockets(os.getpid()) == find_sockets()
            assert find_sockets(os.getpid() + 1) == []
        assert find_sockets() == []

    gpu.run(main)


def test_a_pool_that_opens_answers_already() -> None:
    """The socket exists first, so that a slow opening can be watched."""
    gpu = SimGPU()
    states = []

    async def main() -> None:
        driver = gpu.open()
        initialise = driver.initialise

        def looked_at() -> None:
            states.append(read_snapshot(*find_sockets())["state"])
            initialise()

        driver.initialise = looked_at  # type: ignore[method-assign]
        async with Pool(driver=driver, socket=True):
            pass

    gpu.run(main)
    assert set(states) == {"opening"}


@pytest.mark.parametrize(
    ("question", "said"),
    [(b"nonsense\n", "ask with a line"), (b"[]\n", "ask with"), (b'{"version": 2}\n', "version 2")],
)
def test_a_wrong_question_gets_an_error(question: bytes, said: str) -> None:
    """One line says what to send, and the next client is answered."""
    gpu = SimGPU()

    async def main() -> None:
        async with gpu.pool(socket=True):
            (path,) = find_sockets()
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(os.fspath(path))
                connection.sendall(question)
                with connection.makefile("rb") as answers:
                    answer = json.loads(answers.readline())
            assert said in answer["error"]
            assert read_snapshot(path)["state"] == "open"

    gpu.run(main)


def test_a_client_that_goes_harms_no_other() -> None:
    """A connection that closes without a question is no error."""
    gpu = SimGPU()

    async def main() -> None:
        async with gpu.pool(socket=True):
            (path,) = find_sockets()
            for _ in range(3):
                assert snapshot_client.is_served(path)
            assert read_snapshot(path)["state"] == "open"

    gpu.run(main)


def test_a_snapshot_that_fails_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The thread goes on, and the client raises the error."""
    taken = iter([ZeroDivisionError("division by zero")])

    def take() -> Any:
        for error in taken:
            raise error
        raise AssertionError

    server = snapshot_server.SnapshotServer(None, take)
    server.start()
    assert server.path is not None
    with pytest.raises(SocketUnavailable, match="the snapshot failed: division by zero"):
        read_snapshot(server.path)
    with pytest.raises(SocketUnavailable, match="the snapshot failed"):
        read_snapshot(server.path)
    server.close()
    assert [record.levelno for record in caplog.records] == 2 * [logging.ERROR]


# -- permissions -------------------------------------------------------------------------------


def test_only_the_user_can_connect(folder: Path) -> None:
    """Folder and socket have modes for the user alone."""
    gpu = SimGPU()

    async def main() -> None:
        async with gpu.pool(socket=True):
            (path,) = find_sockets()
            assert mode_of(folder) == 0o700
            assert mode_of(path) == 0o600

    gpu.run(main)


def test_another_users_process_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket checks the user even if the modes do not."""
    monkeypatch.setattr(snapshot_server, "_user_of", lambda connection: os.geteuid() + 1)
    with pytest.raises(SocketUnavailable, match="another user's"):
        opened()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_another_user_is_refused(folder: Path) -> None:
    """Another user's process cannot connect, even if it reaches the file."""
    gpu = SimGPU()
    program = (
        "import os, socket, sys\n"
        "os.chdir(sys.argv[1]); os.setuid(65534)\n"
        "socket.socket(socket.AF_UNIX).connect(sys.argv[2])"
    )

    async def main() -> None:
        async with gpu.pool(socket=True):
            (path,) = find_sockets()
            assert "PermissionError" in end_of(program, str(folder), path.name).stderr

    gpu.run(main)


# -- where it is -------------------------------------------------------------------------------


def test_a_path_can_be_given(tmp_path: Path) -> None:
    """The socket exists while the pool is open, at the constructor's path."""
    path = tmp_path / "pool.sock"
    (seen,) = opened(str(path))
    assert seen["state"] == "open"
    assert not path.exists()


@pytest.mark.parametrize("wrong", ["", None, 7, b"", "x" * 108])
def test_a_wrong_path_is_refused_at_once(wrong: Any) -> None:
    """The constructor raises, before anything is opened."""
    with pytest.raises(InvalidRequest, match=r"^socket="):
        Pool(driver="simulated:h200", socket=wrong)


def test_a_dead_processes_socket_is_replaced(tmp_path: Path) -> None:
    """A file without a listener is replaced."""
    path = tmp_path / "pool.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    assert not snapshot_client.is_served(path)
    (seen,) = opened(str(path))
    assert seen["state"] == "open"


def test_sockets_of_dead_processes_are_removed(folder: Path) -> None:
    """The next pool removes them; those of live processes stay."""
    folder.mkdir(mode=0o700)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, other = folder / f"{ended.pid}-1.sock", folder / f"{os.getppid()}-1.sock"
    for path in (left, other):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(os.fspath(path))
    opened()
    assert list(folder.iterdir()) == [other]


@pytest.mark.parametrize("what", ["file", "pool", "folder"])
def test_an_opening_without_its_socket_fails(what: str, tmp_path: Path) -> None:
    """The error names the path, and the pool can be opened later."""
    gpu = SimGPU()
    path = tmp_path / ("no/pool.sock" if what == "folder" else "pool.sock")

    async def main() -> None:
        other = gpu.pool(socket=path)
        if what == "pool":
            await other.open()
        elif what == "file":
            path.write_text("kept")
        pool = gpu.pool(socket=path)
        with pytest.raises(SocketUnavailable, match=str(path)) as raised:
            await pool.open()
        assert raised.value.path == str(path)
        if what == "pool":
            assert read_snapshot(path)["state"] == "open"
            await other.aclose()
        elif what == "file":
            assert path.read_text() == "kept"
            path.unlink()
        else:
            path.parent.mkdir()
        async with pool:
            assert read_snapshot(path)["state"] == "open"

    gpu.run(main)


def test_without_a_thread_there_is_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening fails without a file, and can be tried again."""
    gpu, path, start = SimGPU(), tmp_path / "pool.sock", threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "greensched socket":
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main() -> None:
        pool = gpu.pool(socket=path)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(SocketUnavailable, match="can't start new thread"):
            await pool.open()
        assert not path.exists()
        monkeypatch.undo()
        async with pool:
            assert read_snapshot(path)["state"] == "open"

    gpu.run(main)


def test_a_folder_of_another_user_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets are then in a private temporary folder."""
    folder.write_text("no folder")
    monkeypatch.setattr(snapshot_client.tempfile, "gettempdir", lambda: str(tmp_path))
    (seen,) = opened()
    assert seen["state"] == "open"
    assert (tmp_path / f"greensched-{os.geteuid()}").is_dir()


# -- its end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_pool_that_could_not_open_says_why(is_closed: bool, folder: Path) -> None:
    """Its socket answers until it is closed, collected or opened again."""
    gpu = SimGPU()

    async def main() -> None:
        pool = Pool([7], driver=gpu.driver, socket=True)  # `gpu.pool` keeps its pools
        for _ in range(2):
            with pytest.raises(DeviceNotFound):
                await pool.open()
            (path,) = find_sockets()
            found = read_snapshot(path)
            assert found["state"] == "not open"
            assert found["opening_error"].startswith("device 7 does not exist")
        if is_closed:
            await pool.aclose()

    gpu.run(main)
    gc.collect()
    for each in [one for one in threading.enumerate() if one.name == THREAD]:
        each.join(10)
    assert list(folder.iterdir()) == []


def test_a_collected_pool_has_no_socket(folder: Path) -> None:
    """The server keeps no pool alive and closes with it."""

    async def main() -> None:
        pool = Pool(driver="simulated:h200", socket=True)
        await pool.open()
        assert find_sockets()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del pool
            gc.collect()

    asyncio.run(main())
    for each in [one for one in threading.enumerate() if one.name == THREAD]:
        each.join()
    assert list(folder.iterdir()) == []


FORKING = """
import asyncio, os, warnings
from contextlib import suppress
from greensched import Pool
from greensched.observability.snapshot_client import find_sockets, read_snapshot

warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads

async def main():
    async with Pool(driver="simulated:h200", socket=True) as pool:
        (path,) = find_sockets()
        child = os.fork()
        if not child:
            held = set()
            for number in range(3, 256):
                with suppress(OSError):
                    held.add(os.readlink(f"/proc/self/fd/{number}"))
            sockets = [line.split() for line in open("/proc/net/unix") if str(path) in line]
            (inode,) = [one[6] for one in sockets if one[3] == "00010000"]  # __SO_ACCEPTCON
            os._exit(f"socket:[{inode}]" in held)
        assert os.waitpid(child, 0)[1] == 0
        assert read_snapshot(path)["state"] == "open"
    assert not path.exists()

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="needs Linux")
def test_a_forked_child_does_not_have_it() -> None:
    """The child has no listening descriptor and removes nothing."""
    done = end_of(FORKING)
    assert (done.returncode, done.stderr) == (0, "")


# -- the client --------------------------------------------------------------------------------


def test_nothing_listens(tmp_path: Path) -> None:
    """The client's error names the path."""
    with pytest.raises(SocketUnavailable, match="no pool listens there"):
        read_snapshot(tmp_path / "pool.sock")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "closed without an answer"),
        (b"hello\n", "not a pool"),
        (b'{"version": 7}\n', "speaks version 7"),
    ],
)
def test_something_else_listens(answer: bytes, said: str, tmp_path: Path) -> None:
    """The client's error says that it is another program or version."""
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                lines.readline()
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(SocketUnavailable, match=said):
            read_snapshot(path)
        thread.join()


def test_a_program_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some seconds the client raises."""
    monkeypatch.setattr(snapshot_client, "ANSWER_S", 0.01)
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        with pytest.raises(SocketUnavailable, match=r"no answer within 0\.01 s"):
            read_snapshot(path)
