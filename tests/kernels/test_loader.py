"""Loading kernels on a device."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, cast

import pytest

from greensched.driver.host import HostServices
from greensched.driver.status import from_status
from greensched.driver.types import KernelHandle, KernelLimits, LibraryHandle
from greensched.errors import (
    ArgumentMismatch,
    Closed,
    CompileFailed,
    CUDAError,
    NotSupported,
    PartitionClosed,
)
from greensched.kernels import Abandonment, Loader, Program, cache
from greensched.typing import DeviceFacts, Limit, Parameter

if TYPE_CHECKING:
    from greensched.driver.interface import Driver
    from greensched.driver.types import CodeImage

SOURCE = """
extern "C" __global__ void f(float *x, int n, double by) { }
extern "C" __global__ void g() { }
"""
LAYOUTS = {"f": ((0, 8), (8, 4), (16, 8)), "g": ()}


class FakeDriver(HostServices):
    """A loader's driver calls, and a list of those that were made."""

    def __init__(self, *, needs_binary: bool = True) -> None:
        self.needs_binary = needs_binary
        self.calls: list[tuple[str, object]] = []
        self.images: list[CodeImage] = []
        self.layouts: dict[str, tuple[tuple[int, int], ...] | None] = dict(LAYOUTS)
        self.failing: set[object] = set()
        self.local_bytes = {"f": 0, "g": 5000}
        self.stack = 1024

    def _call(self, name: str, what: object) -> None:
        self.calls.append((name, what))
        if name in self.failing or what in self.failing:
            raise from_status(200, f"{name} {what}")

    def load_code(self, image: CodeImage) -> LibraryHandle:
        self._call("load_code", image.name)
        self.images.append(image)
        return LibraryHandle(image.name)

    def unload_code(self, library: LibraryHandle) -> None:
        self._call("unload_code", library)

    def get_kernel(self, library: LibraryHandle, name: str) -> KernelHandle:
        self._call("get_kernel", name)
        return KernelHandle(name)

    def kernel_layout(self, kernel: KernelHandle) -> tuple[tuple[int, int], ...] | None:
        return self.layouts[str(kernel)]

    def load_kernel(self, kernel: KernelHandle) -> None:
        self._call("load_kernel", kernel)

    def kernel_limits(self, kernel: KernelHandle, device: int) -> KernelLimits:
        assert device == 0
        return KernelLimits(1024, 0, self.local_bytes.get(str(kernel), 0))

    def limit(self, limit: Limit) -> int:
        assert limit is Limit.STACK
        return self.stack

    def set_limit(self, limit: Limit, nbytes: int) -> None:
        assert limit is Limit.STACK
        self._call("set_limit", nbytes)
        self.stack = nbytes


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the compiler, and record what is compiled for which architecture."""
    names: list[str] = []

    def compiled(source: str, *, name: str, arch: str, options: object, in_sandbox: bool) -> bytes:
        names.append(f"{name} {arch}")
        return name.encode()

    monkeypatch.setattr(cache, "compiled", compiled)
    monkeypatch.setattr("greensched.kernels.loader.ANNOUNCE_S", 0.0)
    return names


def loader_of(driver: FakeDriver, facts: DeviceFacts) -> Loader:
    return Loader(cast("Driver", driver), facts)


def test_a_kernel_is_compiled_and_loaded(facts: DeviceFacts, compiled: list[str]) -> None:
    """The first load compiles for the device, loads the code and the kernel, in this order."""
    driver = FakeDriver()
    loader = loader_of(driver, facts)
    assert loader.load(Program(SOURCE, name="p").kernel("f")) == KernelHandle("f")
    assert compiled == ["p sm_90"]
    assert driver.images[0].binary == b"p"
    assert driver.calls == [("load_code", "p"), ("get_kernel", "f"), ("load_kernel", "f")]


def test_loaded_never_loads(facts: DeviceFacts) -> None:
    """`loaded` makes no driver call, before and after."""
    driver = FakeDriver()
    loader = loader_of(driver, facts)
    kernel = Program(SOURCE).kernel("f")
    assert loader.loaded(kernel) is None
    assert driver.calls == []
    handle = loader.load(kernel)
    calls = list(driver.calls)
    assert loader.loaded(kernel) is handle
    assert driver.calls == calls


def test_each_load_is_for_the_current_context(facts: DeviceFacts, compiled: list[str]) -> None:
    """A second load in another context loads the kernel there and does nothing else."""
    driver = FakeDriver()
    loader = loader_of(driver, facts)
    kernel = Program(SOURCE).kernel("f")
    handle = loader.load(kernel)
    driver.calls.clear()
    assert loader.load(kernel) is handle
    assert driver.calls == [("load_kernel", "f")]
    assert len(compiled) == 1


def test_local_memory_is_sized_when_a_kernel_is_loaded(facts: DeviceFacts) -> None:
    """It is set once, to the most that any kernel needs, and never lowered."""
    driver = FakeDriver()
    loader = loader_of(driver, facts)
    program = Program(SOURCE)
    loader.load(program.kernel("f"))
    assert driver.stack == 1024
    loader.load(program.kernel("g"))
    assert driver.stack == 5000
    driver.calls.clear()
    driver.local_bytes["f"] = 4000
    loader.load(program.kernel("f"))
    loader.load(program.kernel("g"))
    assert driver.calls == [("load_kernel", "f"), ("load_kernel", "g")]


def test_a_driver_may_give_less_local_memory(facts: DeviceFacts) -> None:
    """The driver is asked once, and the kernel is loaded in any case."""

    class Clamping(FakeDriver):
        def set_limit(self, limit: Limit, nbytes: int) -> None:
            super().set_limit(limit, min(nbytes, 2048))

    driver = Clamping()
    loader_of(driver, facts).load(Program(SOURCE).kernel("g"))
    assert [what for name, what in driver.calls if name == "set_limit"] == [2048]


def test_a_program_is_loaded_once(facts: DeviceFacts, compiled: list[str]) -> None:
    """Kernels of one program share a library."""
    driver = FakeDriver()
    loader = loader_of(driver, facts)
    program = Program(SOURCE)
    loader.load(program.kernel("f"))
    loader.load(program.kernel("g"))
    loader.load(Program(SOURCE).kernel("f"))
    assert [name for name, _ in driver.calls].count("load_code") == 2
    assert len(compiled) == 2


def test_a_driver_that_needs_no_binary_gets_none(facts: DeviceFacts, compiled: list[str]) -> None:
    """A simulated device needs neither a compiler nor a cubin."""
    driver = FakeDriver(needs_binary=False)
    loader = loader_of(driver, facts)
    loader.load(Program(SOURCE).kernel("f"))
    loader.load(Program.from_cubin(b"c", arch="sm_120", parameters={"g": ()}).kernel("g"))
    assert compiled == []
    assert [image.binary for image in driver.images] == [b"", b""]
    assert list(driver.images[0].kernels) == ["f"]


def test_a_cubin_for_another_device_is_refused(facts: DeviceFacts) -> None:
    """A cubin for another architecture is refused before a driver call."""
    driver = FakeDriver()
    kernel = Program.from_cubin(b"c", arch="sm_120", parameters={"g": ()}).kernel("g")
    with pytest.raises(NotSupported):
        loader_of(driver, facts).load(kernel)
    assert driver.calls == []


# -- parameters against the code ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (((0, 8), (8, 4)), "the code has 2 parameters, but 3 are declared"),
        (
            ((0, 8), (8, 8), (16, 8)),
            "'n' has 4 bytes at offset 8 as declared .i4.*8 bytes at offset 8",
        ),
        (((0, 8), (8, 4), (12, 4)), "'by' has 8 bytes at offset 16 as declared .f8.*4 bytes .* 12"),
        (((0, 4), (4, 4), (8, 8)), r"'x' has 8 bytes at offset 0 as declared \(f4 \*\)"),
        (((0, 8), (12, 4), (16, 8)), "'n' has 4 bytes at offset 8 .* at offset 12"),
    ],
)
def test_parameters_unlike_the_code_are_refused(
    facts: DeviceFacts, layout: tuple[tuple[int, int], ...], problem: str
) -> None:
    """A parameter that differs from the code is named, and nothing is loaded."""
    driver = FakeDriver()
    driver.layouts["f"] = layout
    loader = loader_of(driver, facts)
    kernel = Program(SOURCE).kernel("f")
    with pytest.raises(ArgumentMismatch, match=problem):
        loader.load(kernel)
    assert loader.loaded(kernel) is None
    assert "load_kernel" not in dict(driver.calls)


@pytest.mark.parametrize(
    ("dtypes", "layout"),
    [
        (["u1", "u2", "u1", "f8", "b1"], ((0, 1), (2, 2), (4, 1), (8, 8), (16, 1))),
        (["u1", "V24", "u1", "c16"], ((0, 1), (8, 24), (32, 1), (48, 16))),
        (["i4", "V6", "i2"], ((0, 4), (4, 6), (10, 2))),
    ],
)
def test_cudas_alignment_is_accepted(
    facts: DeviceFacts, dtypes: list[str], layout: tuple[tuple[int, int], ...]
) -> None:
    """Scalars are aligned to their size; the code decides where a structure begins."""
    driver = FakeDriver()
    driver.layouts["h"] = layout
    given = [Parameter(f"p{index}", dtype) for index, dtype in enumerate(dtypes)]
    assert loader_of(driver, facts).load(Program("").kernel("h", parameters=given)) == KernelHandle(
        "h"
    )


def test_a_driver_that_cannot_tell_is_trusted(facts: DeviceFacts) -> None:
    """If the code has no layout, the given parameters are used."""
    driver = FakeDriver()
    driver.layouts["f"] = None
    assert loader_of(driver, facts).load(Program(SOURCE).kernel("f")) == KernelHandle("f")


# -- failures, threads, the end -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["load_code", "get_kernel"])
def test_a_failed_load_can_be_tried_again(facts: DeviceFacts, name: str) -> None:
    """After a failure in any step there is no handle, and the next try completes."""
    driver = FakeDriver()
    driver.failing = {name}
    loader = loader_of(driver, facts)
    kernel = Program(SOURCE).kernel("f")
    with pytest.raises(CUDAError):
        loader.load(kernel)
    assert loader.loaded(kernel) is None
    driver.failing = set()
    assert loader.load(kernel) == KernelHandle("f")
    assert len(driver.images) == 1


def test_a_context_that_cannot_load_is_reported(facts: DeviceFacts) -> None:
    """A failed load in one context fails that caller, and others can load."""
    driver = FakeDriver()
    driver.failing = {"load_kernel"}
    loader = loader_of(driver, facts)
    kernel = Program(SOURCE).kernel("f")
    with pytest.raises(CUDAError):
        loader.load(kernel)
    driver.failing = set()
    assert loader.load(kernel) == KernelHandle("f")
    assert len(driver.images) == 1


def test_threads_load_once(facts: DeviceFacts) -> None:
    """Threads that load the same kernel get one handle, loaded in each context."""
    driver = FakeDriver()
    loader = loader_of(driver, facts)
    kernel = Program(SOURCE).kernel("f")
    start = threading.Barrier(8)
    handles: list[KernelHandle] = []

    def load() -> None:
        start.wait()
        handles.append(loader.load(kernel))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handles == [KernelHandle("f")] * 8
    calls = Counter(name for name, _ in driver.calls)
    assert 1 <= calls.pop("get_kernel") <= 8  # which gives the same one each time
    assert calls == {"load_code": 1, "load_kernel": 8}


def test_a_compilation_blocks_no_other_load(
    facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one program is compiled, a kernel of another can be loaded."""
    loader = loader_of(FakeDriver(), facts)
    other = Program.from_cubin(b"c", arch="sm_90", parameters={"g": ()}).kernel("g")

    def compiled(source: str, *, name: str, arch: str, options: object, in_sandbox: bool) -> bytes:
        thread = threading.Thread(target=loader.load, args=[other])
        thread.start()
        thread.join()
        return b""

    monkeypatch.setattr(cache, "compiled", compiled)
    loader.load(Program(SOURCE).kernel("f"))
    assert loader.loaded(other) == KernelHandle("g")


def test_closing_unloads_in_reverse(facts: DeviceFacts) -> None:
    """Libraries are unloaded in reverse order, once; later loads are refused."""
    driver = FakeDriver()
    loader = loader_of(driver, facts)
    first = Program(SOURCE, name="first").kernel("f")
    loader.load(first)
    loader.load(Program(SOURCE, name="second").kernel("f"))
    loader.close()
    loader.close()
    assert driver.calls[-2:] == [("unload_code", "second"), ("unload_code", "first")]
    assert [name for name, _ in driver.calls].count("unload_code") == 2
    assert loader.loaded(first) is None
    with pytest.raises(Closed):
        loader.load(first)


def test_a_kernel_is_refused_whose_loader_is_closed_meanwhile(
    facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout is queried without the lock, so a close may come between."""
    driver = FakeDriver()
    loader = loader_of(driver, facts)
    monkeypatch.setattr(driver, "kernel_layout", lambda _: loader.close())
    kernel = Program(SOURCE).kernel("f")
    with pytest.raises(Closed, match="the loader of kernels"):
        loader.load(kernel)
    assert loader.loaded(kernel) is None


def test_closing_tries_every_library(facts: DeviceFacts) -> None:
    """All libraries are unloaded, and the first error is raised."""
    driver = FakeDriver()
    loader = loader_of(driver, facts)
    for name in "abc":
        loader.load(Program(SOURCE, name=name).kernel("f"))
    driver.failing = {"a", "c"}
    with pytest.raises(CUDAError, match="unload_code c") as caught:
        loader.close()
    assert caught.value.__notes__ == ["and then: unload_code a: INVALID_IMAGE (200)"]
    assert [what for name, what in driver.calls if name == "unload_code"] == ["c", "b", "a"]
    loader.close()


# -- abandoning --------------------------------------------------------------------------------


@pytest.mark.fault("I11")
def test_an_abandoned_load_does_not_wait_for_the_compiler(
    facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait raises PartitionClosed, and the compiler goes on."""
    compiling, finish, compiled = threading.Event(), threading.Event(), threading.Event()

    def compile_slowly(self: Program, arch: str) -> bytes:
        compiling.set()
        finish.wait()
        compiled.set()
        return b"cubin"

    monkeypatch.setattr(Program, "compile", compile_slowly)
    loader, abandonment = loader_of(FakeDriver(), facts), Abandonment()
    kernel = Program(SOURCE).kernel("f")
    failures: list[BaseException] = []

    def load() -> None:
        try:
            loader.load(kernel, abandonment)
        except PartitionClosed as error:
            failures.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    compiling.wait()
    abandonment.set()
    thread.join()
    load()
    assert len(failures) == 2
    assert not compiled.is_set()
    finish.set()
    compiled.wait()
    assert loader.load(kernel, Abandonment()) == KernelHandle("f")


def test_a_failure_of_the_compiler_passes_the_abandonment(
    facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's error is raised where its result is awaited."""

    def fail(self: Program, arch: str) -> bytes:
        raise CompileFailed("x.cu", arch, "no")

    monkeypatch.setattr(Program, "compile", fail)
    with pytest.raises(CompileFailed):
        loader_of(FakeDriver(), facts).load(Program(SOURCE).kernel("f"), Abandonment())
