"""Through NVRTC, for every architecture, without a GPU: the built-in kernels, and the cache."""

from __future__ import annotations

import dataclasses
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
    """Loads cubins no further than to say which parameters they have."""

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
        return KernelLimits(1024, 0, 32, 0)

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
    """Every fundamental type is as large in the code as the signature's reading makes it."""
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
    """Parameters given by hand are compared with what the compiler made of the source."""
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
