"""Untrusted source: what the sandbox refuses, cannot reach, and does not reveal."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from greensched.driver import nvrtc
from greensched.errors import CompileFailed, DriverUnavailable, InvalidRequest, NotSupported
from greensched.kernels import Program, sandbox, sandbox_worker

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = 'extern "C" __global__ void f(float *x) { x[0] = 1; }'


@pytest.mark.usefixtures("cache_directory")
def test_the_cubin_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox compiles a source to the same bytes, with CUDA's headers."""
    source = f"#include <cuda_fp16.h>\n{KERNEL}"
    program = Program(source, compile="sandbox")
    cubin = program.compile("sm_90")
    assert cubin == Program(source).compile("sm_90")
    monkeypatch.setattr(sandbox, "_run", lambda asked: pytest.fail("compiled again"))
    assert program.compile("sm_90") == cubin


@pytest.mark.fault("F3")
def test_no_file_of_the_machine_is_read(tmp_path: Path) -> None:
    """A message neither quotes a file nor says whether it exists."""
    secret = tmp_path / "secret"
    secret.write_text("planted")
    logs = []
    for path in (secret, tmp_path / "nowhere"):
        source = f'#if __has_include("{path}")\n#error it exists\n#endif\n#include "{path}"'
        with pytest.raises(CompileFailed, match="cannot open source file") as failed:
            sandbox.compile(source, name="p.cu", arch="sm_90")
        logs.append(failed.value.log.replace(str(path), "").replace(" ", ""))
    assert logs[0] == logs[1]
    assert "planted" not in logs[0]


@pytest.mark.fault("F7")
def test_a_message_has_no_folder_of_the_machine() -> None:
    """An error in a CUDA header names the header without its folder."""
    source = "#define __half 1\n#include <cuda_fp16.h>"
    with pytest.raises(CompileFailed, match=r"cuda_fp16\.h\(\d+\): error") as failed:
        sandbox.compile(source, name="p.cu", arch="sm_90")
    assert not any(folder in failed.value.log for folder in nvrtc.header_folders())
    assert "/cuda_fp16.h" not in failed.value.log


@pytest.mark.fault("F1")
def test_the_process_has_no_rights_left(tmp_path: Path) -> None:
    """It can open no other file, socket or program, and signal no process."""
    (tmp_path / "header.h").write_text("here")
    tries = f"""
        import os, socket, subprocess, signal, sys
        sys.path[:0] = {[str(tmp_path)]!r}
        from greensched.kernels import sandbox_worker
        sandbox_worker.restrict([{str(tmp_path)!r}], 5, 4 << 30)
        assert open({str(tmp_path / "header.h")!r}).read() == "here"
        for attempt in (
            lambda: open("/etc/passwd"),
            lambda: os.listdir("/"),
            lambda: open({str(tmp_path / "new")!r}, "w"),
            lambda: os.unlink({str(tmp_path / "header.h")!r}),
            lambda: socket.socket(),
            lambda: socket.socketpair(),
            lambda: os.execv(sys.executable, [sys.executable, "-c", ""]),
            lambda: os.kill(os.getppid(), 0),
        ):
            try:
                attempt()
            except PermissionError:
                continue
            sys.exit("an attempt succeeded")
        """
    command = [sys.executable, "-c", textwrap.dedent(tries)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.fault("F5")
def test_memory_is_limited() -> None:
    """A source that needs too much memory fails alone."""
    bomb = (
        "#define A(x) x x x x x x x x x x x x x x x x\n" + KERNEL + "\nint a = A(A(A(A(A(1 +)))));"
    )
    asked = {"source": bomb, "name": "p.cu", "arch": "sm_90", "options": []}
    status, answer = sandbox._run(asked, memory_bytes=600 << 20)
    assert answer[:1] != sandbox_worker.CUBIN
    assert status is not None


@pytest.mark.fault("F6")
def test_a_process_whose_time_is_over_is_killed() -> None:
    """Nothing of the process is left, and there is no answer."""
    asked = {"source": KERNEL, "name": "p.cu", "arch": "sm_90", "options": []}
    assert sandbox._run(asked, time_limit=0.0) == (None, b"")


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (0, sandbox_worker.UNAVAILABLE + b"Landlock: no", NotSupported),
        (0, sandbox_worker.NO_COMPILER + b"not found", DriverUnavailable),
        (0, sandbox_worker.FAILED + b"p.cu(1): error", CompileFailed),
        (0, sandbox_worker.CUBIN, CompileFailed),
        (None, b"", CompileFailed),
        (-9, b"", CompileFailed),
        (-11, b"", CompileFailed),
    ],
)
def test_every_end_of_the_process_is_an_error(
    status: int | None, answer: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output that is not a cubin raises a typed error."""
    monkeypatch.setattr(sandbox, "_run", lambda asked: (status, answer))
    with pytest.raises(error):
        sandbox.compile(KERNEL, name="p.cu", arch="sm_90")


@pytest.mark.fault("F4")
@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (partial(Program, KERNEL, options=["--include-path=/etc"]), "include-path"),
        (partial(Program, KERNEL, options=["-I/etc"]), "-I/etc"),
        (partial(Program, KERNEL, options=["--time=x.csv"]), "--time"),
        (partial(Program, KERNEL, options=["-DA=1\n--time=x", "--pre-include=x"]), "pre-include"),
        (partial(Program, KERNEL, name="/etc/x.cu"), "/etc/x.cu"),
        (partial(Program, " " * (sandbox.MOST_SOURCE_BYTES + 1)), "bytes"),
    ],
)
def test_what_could_name_a_file_is_refused(given: Any, wrong: str) -> None:
    """Options, names and sources that could name files are refused."""
    with pytest.raises(InvalidRequest, match=wrong):
        given(compile="sandbox")


def test_another_word_for_compile_is_refused() -> None:
    """The error has the two valid words."""
    with pytest.raises(InvalidRequest, match='"trusted" or "sandbox"'):
        Program(KERNEL, compile="safe")  # type: ignore[arg-type]


def test_an_architecture_is_checked_first() -> None:
    """An invalid architecture starts no process."""
    with pytest.raises(InvalidRequest, match="sm_90"):
        sandbox.compile(KERNEL, name="p.cu", arch="sm_90 --time=x")
