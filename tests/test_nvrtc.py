"""The binding of NVRTC: source in, cubin or a log out."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from greensched import errors
from greensched.driver import nvrtc

SAXPY = """
extern "C" __global__ void saxpy(float a, const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


@pytest.fixture(scope="module")
def compiler() -> Any:
    """Return the binding; skip the test if NVRTC is not installed."""
    try:
        nvrtc.version()
    except errors.DriverUnavailable as error:
        pytest.skip(str(error))
    return nvrtc


def test_source_becomes_a_cubin(compiler: Any) -> None:
    """Good source becomes an ELF image that holds the kernel under its name."""
    cubin = compiler.compile(SAXPY, name="saxpy.cu", arch="sm_90")
    assert cubin[:4] == b"\x7fELF"
    assert b".text.saxpy\0" in cubin


def test_the_architecture_is_the_one_asked(compiler: Any) -> None:
    """The same source gives different machine code for different architectures."""
    images = {compiler.compile(SAXPY, name="saxpy.cu", arch=arch) for arch in ("sm_80", "sm_90")}
    assert len(images) == 2


def test_a_mistake_is_told_with_its_line(compiler: Any) -> None:
    """Source that does not compile raises the compiler's log, with name and line."""
    with pytest.raises(errors.CompileFailed) as raised:
        compiler.compile("\n\n__global__ void k() { x = 1; }", name="bad.cu", arch="sm_90")
    assert (raised.value.name, raised.value.arch) == ("bad.cu", "sm_90")
    assert 'bad.cu(3): error: identifier "x" is undefined' in raised.value.log
    assert "\0" not in raised.value.log


def test_the_preprocessors_text_is_reported(compiler: Any) -> None:
    """The text has expanded macros; with refused options there is no text."""
    text = compiler.preprocess("int x = A;", name="a.cu", arch="sm_90", options=["-DA=41"])
    assert re.search(rb"int x ?= ?41;", text)
    assert compiler.preprocess("", name="a.cu", arch="sm_90", options=["--no-such"]) is None


@pytest.mark.fault("I6")
def test_without_proc_the_text_is_not_known(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If NVRTC cannot write its files, there is no text and no error."""
    monkeypatch.setattr(nvrtc, "_path", lambda file: f"/nowhere/{file}")
    assert compiler.preprocess("int x;", name="a.cu", arch="sm_90") is None


@pytest.mark.parametrize("arch", ["sm_1", "compute_90", "no such thing"])
def test_an_architecture_without_machine_code_is_reported(compiler: Any, arch: str) -> None:
    """An architecture that the compiler lacks raises CompileFailed, which names it."""
    with pytest.raises(errors.CompileFailed, match=r"arch|real architecture"):
        compiler.compile(SAXPY, name="saxpy.cu", arch=arch)


def test_options_reach_the_compiler(compiler: Any) -> None:
    """Options are passed on, and a folder given there is searched for headers."""
    cubin = compiler.compile(
        '#ifdef KERNEL\nextern "C" __global__ void KERNEL() {}\n#endif',
        name="named.cu",
        arch="sm_90",
        options=["-DKERNEL=given"],
    )
    assert b".text.given\0" in cubin


def test_a_folder_of_headers_may_be_given(compiler: Any, tmp_path: Path) -> None:
    """A header in a folder of the options is found before the runtime's own."""
    (tmp_path / "cuda_fp16.h").write_text('extern "C" __global__ void mine() {}\n')
    cubin = compiler.compile(
        "#include <cuda_fp16.h>",
        name="mine.cu",
        arch="sm_90",
        options=[f"--include-path={tmp_path}"],
    )
    assert b".text.mine\0" in cubin


def test_the_runtimes_headers_are_found(compiler: Any) -> None:
    """A source may include cuda_fp16.h without a folder."""
    if not compiler.header_folders():
        pytest.skip("no headers of the CUDA runtime: they come with greensched[nvrtc]")
    source = """
    #include <cuda_fp16.h>
    extern "C" __global__ void one(__half *x) { x[0] = __float2half(1.0f); }
    """
    assert compiler.compile(source, name="half.cu", arch="sm_90")


def test_no_headers_are_no_error(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without headers, or with an old cuda-pathfinder, no folder is given to the compiler."""
    find = compiler.header_folders.__wrapped__
    monkeypatch.setattr(nvrtc.pathfinder, "find_nvidia_header_directory", lambda name: None)
    assert find() == ()
    monkeypatch.delattr(nvrtc.pathfinder, "find_nvidia_header_directory")
    assert find() == ()


def test_the_version_is_a_pair(compiler: Any) -> None:
    """The compiler's version is two numbers."""
    major, minor = compiler.version()
    assert major >= 12
    assert minor >= 0


def test_an_unknown_status_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status without a name is a CompileFailed, not a KeyError."""

    class Newer:
        @staticmethod
        def nvrtcCreateProgram(*arguments: Any) -> Any:  # noqa: N802
            raise KeyError(99)

    monkeypatch.setattr(nvrtc, "_nvrtc", Newer)
    with pytest.raises(errors.CompileFailed, match="99"):
        nvrtc.compile(SAXPY, name="saxpy.cu", arch="sm_90")


def test_a_missing_compiler_is_reported() -> None:
    """Without NVRTC every call says what to install; the import succeeds."""
    code = """
        import cuda.pathfinder

        def find(name):
            raise cuda.pathfinder.DynamicLibNotFoundError(name)

        cuda.pathfinder.load_nvidia_dynamic_lib = find
        from greensched import errors
        from greensched.driver import nvrtc

        for call in nvrtc.preprocess, nvrtc.compile:
            try:
                call("", name="a.cu", arch="sm_90")
            except errors.DriverUnavailable as error:
                print(error.problem)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 2
    assert all(errors.install_command("nvrtc") in answer for answer in answers)
