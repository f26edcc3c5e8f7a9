"""Compilation by NVRTC for every architecture, without a GPU."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, cast

import pytest

from greensched.driver import nvrtc
from greensched.driver.types import KernelHandle, KernelLimits, LibraryHandle
from greensched.errors import ArgumentMismatch, CompileFailed
from greensched.kernels import Kernel, Loader, Program
from greensched.typing import Limit, Parameter

from .builtin import BUILTIN
from .cubin import layout

if TYPE_CHECKING:
    from pathlib import Path

    from greensched.driver.interface import Driver
    from greensched.driver.types import CodeImage
    from greensched.typing import DeviceFacts

ARCHITECTURES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}


class CubinDriver:
    """A driver that loads a cubin only to return its parameters."""

    needs_binary = True

    def load_code(self, image: CodeImage) -> LibraryHandle:
        return LibraryHandle(image.binary)

    def get_kernel(self, library: LibraryHandle, name: str) -> KernelHandle:
        return KernelHandle((library, name))

    def kernel_layout(self, kernel: KernelHandle) -> tuple[tuple[int, int], ...]:
        binary, name = cast("tuple[bytes, str]", kernel)
        return layout(binary, name)

    def load_kernel(self, kernel: KernelHandle) -> None: ...

    def kernel_limits(self, kernel: KernelHandle, device: int) -> KernelLimits:
        return KernelLimits(1024, 0, 0)

    def limit(self, limit: Limit) -> int:
        return 1024


def loader_for(facts: DeviceFacts, arch: str = "sm_90") -> Loader:
    device = dataclasses.replace(facts, compute_capability=ARCHITECTURES[arch])
    return Loader(cast("Driver", CubinDriver()), device)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", BUILTIN, ids=lambda kernel: kernel.name)
@pytest.mark.usefixtures("cache_directory")
def test_a_built_in_kernel_compiles(facts: DeviceFacts, kernel: Kernel, arch: str) -> None:
    """Its source compiles for the architecture, and the code has the parameters it says."""
    loader = loader_for(facts, arch)
    assert loader.load(kernel) is loader.loaded(kernel)


@pytest.mark.usefixtures("cache_directory")
def test_the_compiler_agrees_with_the_parser(facts: DeviceFacts) -> None:
    """Every fundamental type has the same size in the code and in the signature."""
    types = [
        *("bool", "char", "signed char", "unsigned char", "short", "unsigned short", "int"),
        *("signed", "unsigned", "long", "unsigned long int", "long long", "unsigned long long"),
        *("float", "double", "size_t", "const void *", "volatile char *"),
    ]
    # A byte before each, so that a wrong alignment shows as well as a wrong size.
    several = ", ".join(f"char gap{i}, {kind} x{i}" for i, kind in enumerate(types))
    kernel = Program(f'extern "C" __global__ void f({several}) {{ }}').kernel("f")
    assert len(kernel.parameters) == 2 * len(types)
    loader_for(facts).load(kernel)


@pytest.mark.usefixtures("cache_directory")
def test_parameters_that_contradict_the_code_are_caught(facts: DeviceFacts) -> None:
    """Explicit parameters are compared with the compiled code."""
    program = Program('struct S { int a, b, c; }; extern "C" __global__ void f(char x, S s) { }')
    right = [Parameter("x", "i1"), Parameter("s", "V12")]
    loader_for(facts).load(program.kernel("f", parameters=right))
    wrong = [Parameter("x", "i1"), Parameter("s", "V16")]
    with pytest.raises(ArgumentMismatch, match=r"'s' has 16 bytes at offset 4 .* 12 bytes"):
        loader_for(facts).load(Program(program.source).kernel("f", parameters=wrong))


def test_compiled_once_and_kept(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cubin of a source is on disk afterwards, and the compiler is not asked again."""
    first = Program('extern "C" __global__ void f() { }').compile("sm_90")
    monkeypatch.setattr(nvrtc, "compile", None)
    assert Program('extern "C" __global__ void f() { }').compile("sm_90") == first
    (kept,) = cache_directory.iterdir()
    assert kept.read_bytes().endswith(first)


def test_a_failure_shows_the_compilers_log(cache_directory: Path) -> None:
    """The error names the source and the line, and nothing is cached."""
    with pytest.raises(CompileFailed, match=r"mine\.cu\(2\): error"):
        Program("\nint x = y;", name="mine.cu").compile("sm_90")
    assert list(cache_directory.iterdir()) == []


# -- what a source reads -----------------------------------------------------------------------

BODY = 'extern "C" __global__ void f(int *x) { *x = VALUE; }'


@pytest.mark.fault("I6")
@pytest.mark.parametrize(
    "include",
    [
        '/**/#include "h.h"',
        '#/**/include "h.h"',
        '%:include "h.h"',
        '??=include "h.h"',
        "#include_next <h.h>",
        '#inc\\\nlude "h.h"',
        '\f#include "h.h"',
        '\v#include "h.h"',
        "#include <h.h>",
        '#include "{folder}/h.h"',
        '#include "{folder}/../{folder.name}/h.h"',
        "#define H <h.h>\n#include H",
        '#include "outer.h"',
    ],
)
def test_a_changed_header_is_compiled_anew(
    cache_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, include: str
) -> None:
    """A changed header changes the cubin, however it is included."""
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "outer.h").write_text('#include "h.h"')
    options = ["-I", str(headers), "--std=c++14", "-Xcudafe=--trigraphs"]
    program = Program(f"{include.format(folder=headers)}\n{BODY}", options=options)
    (headers / "h.h").write_text("#define VALUE 1\n")
    first = program.compile("sm_90")
    (headers / "h.h").write_text("#define VALUE 2\n")
    assert program.compile("sm_90") != first
    (headers / "h.h").write_text("#define VALUE 1\n")
    monkeypatch.setattr(nvrtc, "compile", None)
    assert program.compile("sm_90") == first
    assert len(list(cache_directory.iterdir())) == 2


@pytest.mark.fault("I6")
@pytest.mark.usefixtures("cache_directory")
def test_a_header_that_appears_is_seen(tmp_path: Path) -> None:
    """The result of `__has_include` is part of the key."""
    source = f"#if __has_include(<late.h>)\n#define VALUE 2\n#else\n#define VALUE 1\n#endif\n{BODY}"
    program = Program(source, options=[f"-I{tmp_path}"])
    first = program.compile("sm_90")
    (tmp_path / "late.h").write_text("")
    assert program.compile("sm_90") != first


@pytest.mark.fault("I6")
def test_the_time_is_part_of_the_text() -> None:
    """A source with `__TIME__` has another key each second."""
    text = nvrtc.preprocess("const char *at = __TIME__;", name="x.cu", arch="sm_90")
    assert text is not None
    assert re.search(rb'at ?= ?"\d\d:\d\d:\d\d"', text)


SECRET = "token = hunter2;"


@pytest.mark.fault("F1", "F2", "I11")
@pytest.mark.parametrize(
    "source",
    [
        '#include "{path}"',
        "#include <{path}>",
        '#include "{folder}/headers/../secret"',
        "#include <../secret>",
        '%:include "{path}"',
        '#include/**/"{path}"',
        "#include_next <../secret>",
        '#define H "{path}"\n#include H',
        "#define S(x) #x\n#define T(x) S(x)\n#define P {path}\n#include T(P)",
        '#inc\\\nlude "{path}"',
        '#include "outer.h"',
    ],
)
def test_a_file_outside_the_headers_is_not_quoted(
    cache_directory: Path, tmp_path: Path, source: str
) -> None:
    """A source that includes another file is refused, without a word of that file."""
    (tmp_path / "headers").mkdir()
    path = tmp_path / "secret"
    path.write_text(SECRET)
    (tmp_path / "headers" / "outer.h").write_text(f'#include "{path}"')
    text = source.format(path=path, folder=tmp_path)
    with pytest.raises(
        CompileFailed, match="is in no folder of headers: give its folder"
    ) as raised:
        Program(text, options=["-I", str(tmp_path / "headers")]).compile("sm_90")
    assert not {"token", "hunter2"} & set(re.split(r"\W+", str(raised.value)))
    assert not cache_directory.exists()


@pytest.mark.fault("I11")
@pytest.mark.usefixtures("cache_directory")
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("x.cu", "--include-path={folder}"),
        ("x.cu", "-I{folder}/sub/.."),
        ("x.cu", "--pre-include={folder}/first.h"),
        ("{folder}/x.cu", "--use_fast_math"),
    ],
)
def test_files_in_folders_of_headers_are_read(tmp_path: Path, name: str, option: str) -> None:
    """Include folders are those of the options, the headers and the source."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "first.h").write_text("")
    (tmp_path / "h.h").write_text("#define VALUE 1\n")
    source = f'#include "{tmp_path}/h.h"\n{BODY}'
    program = Program(
        source, name=name.format(folder=tmp_path), options=[option.format(folder=tmp_path)]
    )
    assert program.compile("sm_90")


@pytest.mark.fault("I11")
def test_the_working_directory_is_no_folder_of_headers(
    cache_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that NVRTC finds in the working directory is refused."""
    (tmp_path / ".env").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileFailed, match=r'includes "\.env", which is in no folder of headers'):
        Program('#include ".env"').compile("sm_90")
    assert not cache_directory.exists()
