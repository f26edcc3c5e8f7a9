"""Programs and kernels."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from greensched.errors import InvalidRequest, NotSupported
from greensched.kernels import Program, cache
from greensched.typing import Cost, LaunchFacts, Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCE = """
extern "C" __global__ void scale(float *x, float by, int n) { }
extern "C" __global__ void transform(Matrix m) { }
"""
MATRIX = (Parameter("m", "V24"),)


def test_a_kernel_is_read_from_the_source() -> None:
    """A kernel has its name, its program, and the parameters the source gives it."""
    program = Program(SOURCE)
    kernel = program.kernel("scale")
    assert kernel.name == "scale"
    assert kernel.program is program
    assert kernel.parameters == (
        Parameter("x", "f4", pointer=True),
        Parameter("by", "f4"),
        Parameter("n", "i4"),
    )
    assert kernel.spec.name == "scale"
    assert kernel.spec.parameters == kernel.parameters
    assert repr(kernel) == "<Kernel scale(f4 *x, f4 by, i4 n) of 'program.cu'>"


def test_a_program_says_what_it_is() -> None:
    """Its name, source, options and kernels can be read."""
    program = Program(SOURCE, name="mine.cu", options=["--std=c++20"])
    assert (program.name, program.source) == ("mine.cu", SOURCE)
    assert program.options == ("--std=c++20",)
    assert program.kernel_names == ("scale", "transform")
    assert repr(program) == "<Program 'mine.cu': scale, transform>"


def test_the_same_name_is_the_same_kernel() -> None:
    """Each look-up returns the same kernel, with its reference."""
    program = Program(SOURCE)
    assert program.kernel("scale") is program.kernel("scale")
    assert program.kernel("scale") is not Program(SOURCE).kernel("scale")


def test_parameters_can_be_given() -> None:
    """Explicit parameters are set once; other ones are refused later."""
    program = Program(SOURCE)
    with pytest.raises(InvalidRequest, match="Matrix m"):
        program.kernel("transform")
    kernel = program.kernel("transform", parameters=MATRIX)
    assert kernel.parameters == MATRIX
    assert program.kernel("transform") is kernel
    assert program.kernel("transform", parameters=list(MATRIX)) is kernel
    with pytest.raises(InvalidRequest, match="exists already"):
        program.kernel("transform", parameters=())


def test_a_kernel_outside_the_source_needs_parameters() -> None:
    """A kernel that a macro defines needs explicit parameters."""
    program = Program(SOURCE)
    with pytest.raises(InvalidRequest, match="scale, transform"):
        program.kernel("hidden")
    assert program.kernel("hidden", parameters=()).parameters == ()


@pytest.mark.parametrize(
    "wrong",
    [
        "float x",
        np.zeros(1),
        Parameter("x", "float32"),
        Parameter("x", ""),
        Parameter("x", np.float32),  # type: ignore[arg-type]  # the mistake under test
        Parameter("x", np.dtype("f4")),  # type: ignore[arg-type]  # the mistake under test
        *(Parameter("x", code) for code in ("b2", "i3", "u16", "f1", "f16", "c4", "V0")),
    ],
    ids=repr,
)
def test_wrong_parameters_are_refused(wrong: object) -> None:
    """Only numpy's type codes are parameters."""
    given: Sequence[Parameter] = [wrong]  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(InvalidRequest, match="is not a parameter"):
        Program(SOURCE).kernel("transform", parameters=given)


@pytest.mark.parametrize("kind", "biufcV")
def test_the_codes_that_are_taken_are_numpys(kind: str) -> None:
    """Of the sizes up to 32 bytes those are taken that numpy has and CUDA can have."""
    taken = {size for size in range(1, 33) if is_taken(f"{kind}{size}")}
    known = {size for size in range(1, 33) if is_numpys(f"{kind}{size}")}
    assert taken == known - ({16} if kind == "f" else {32} if kind == "c" else set())


def is_taken(code: str) -> bool:
    try:
        Program(SOURCE).kernel("transform", parameters=[Parameter("x", code)])
    except InvalidRequest:
        return False
    return True


def is_numpys(code: str) -> bool:
    try:
        np.dtype(code)
    except TypeError:
        return False
    return True


def test_options_are_no_string() -> None:
    """One string in place of a sequence of options is refused."""
    with pytest.raises(InvalidRequest, match="is a string"):
        Program(SOURCE, options="--use_fast_math")


# -- meaning ----------------------------------------------------------------------------------


def test_a_kernel_is_given_its_meaning() -> None:
    """The decorators store the functions and return them unchanged."""
    kernel = Program(SOURCE).kernel("scale")
    assert (kernel.spec.reference, kernel.spec.cost) == (None, None)

    def reference(launch: LaunchFacts, x: object, by: object, n: object) -> None: ...

    def cost(launch: LaunchFacts, x: object, by: object, n: object) -> Cost:
        return Cost(sm_ns=1)

    assert kernel.reference(reference) is reference
    assert kernel.cost(cost) is cost
    assert (kernel.spec.reference, kernel.spec.cost) == (reference, cost)


def test_a_meaning_is_given_once() -> None:
    """A second reference or cost is refused, and the first one stays."""
    kernel = Program(SOURCE).kernel("scale")

    @kernel.reference
    def first(launch: LaunchFacts, x: Any, by: Any, n: Any) -> None: ...

    @kernel.cost
    def free(*_: Any) -> Cost:
        return Cost()

    with pytest.raises(InvalidRequest, match="already has a reference"):
        kernel.reference(lambda *_: None)
    with pytest.raises(InvalidRequest, match="already has a cost"):
        kernel.cost(lambda *_: Cost())
    assert (kernel.spec.reference, kernel.spec.cost) == (first, free)


def test_a_function_with_other_parameters_is_refused() -> None:
    """A reference or cost that cannot take the kernel's arguments is refused when attached."""
    kernel = Program(SOURCE).kernel("scale")
    called = r"is called as function\(launch, x, by, n\): "
    with pytest.raises(InvalidRequest, match="the reference of kernel 'scale' " + called):
        kernel.reference(lambda launch, x: None)
    with pytest.raises(InvalidRequest, match="the cost of kernel 'scale' " + called):
        kernel.cost(lambda launch: Cost())
    kernel.reference(max)  # has no signature that Python can read: accepted


def test_the_image_is_live() -> None:
    """`load_code`'s image has all kernels, even those requested later."""
    program = Program(SOURCE, name="mine.cu")
    scale = program.kernel("scale")
    image = program.image(b"cubin")
    assert (image.name, image.binary) == ("mine.cu", b"cubin")
    assert dict(image.kernels) == {"scale": scale.spec}
    late = program.kernel("late", parameters=())
    assert image.kernels["late"] is late.spec


def test_a_kernel_that_can_be_got_can_be_loaded() -> None:
    """A kernel that another thread is making is in the image already."""
    program = Program(SOURCE)
    image = program.image(b"cubin")
    seen = []

    class Watched(dict[str, Any]):
        def setdefault(self, name: str, made: Any = None) -> Any:
            found = super().setdefault(name, made)
            seen.append(image.kernels.get(name) is found.spec)  # as another thread would here
            return found

    program._kernels = Watched()
    program.kernel("scale")
    assert seen == [True]


def test_compiling_asks_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is compiled through the cache for the requested architecture."""

    def compiled(
        source: str, *, name: str, arch: str, options: tuple[str, ...], in_sandbox: bool
    ) -> bytes:
        return repr((source, name, arch, options)).encode()

    monkeypatch.setattr(cache, "compiled", compiled)
    cubin = Program("int x;", name="x.cu", options=("-G",)).compile("sm_90")
    assert cubin == b"('int x;', 'x.cu', 'sm_90', ('-G',))"


# -- cubins -----------------------------------------------------------------------------------


def test_a_cubin_is_a_program() -> None:
    """A cubin's kernels need explicit parameters and no compiler."""
    program = Program.from_cubin(b"cubin", arch="sm_90", parameters={"_Z1fP6Matrix": MATRIX})
    assert program.kernel_names == ("_Z1fP6Matrix",)
    assert program.kernel("_Z1fP6Matrix").parameters == MATRIX
    assert program.compile("sm_90") == b"cubin"
    with pytest.raises(InvalidRequest, match=r"'g' is not in <Program 'program.cubin'"):
        program.kernel("g")


@pytest.mark.fault("C8")
@pytest.mark.parametrize(
    ("arch", "device", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_89", True),
        ("sm_89", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("sm_90a", "sm_90", True),
        ("sm_100a", "sm_103", False),
        ("sm_100f", "sm_103", True),
        ("sm_100", "sm_120", False),
    ],
)
def test_a_cubin_serves_its_architecture(arch: str, device: str, runs: bool) -> None:
    """A cubin runs on the same major architecture, as new or newer, unless it is specific."""
    program = Program.from_cubin(b"cubin", arch=arch, parameters={})
    if runs:
        assert program.compile(device) == b"cubin"
    else:
        with pytest.raises(NotSupported, match=f"needs {arch}; this is {device}"):
            program.compile(device)


def test_a_cubin_is_checked_when_made() -> None:
    """A wrong architecture or parameter is refused by the constructor."""
    with pytest.raises(InvalidRequest, match="not an architecture"):
        Program.from_cubin(b"cubin", arch="compute_90", parameters={})
    with pytest.raises(InvalidRequest, match="is not a parameter"):
        Program.from_cubin(b"cubin", arch="sm_90", parameters={"f": [Parameter("x", "float")]})


# -- imports -----------------------------------------------------------------------------------


def test_importing_is_light() -> None:
    """Importing loads neither numpy, nor the CUDA bindings, nor an event loop."""
    script = "import sys, greensched.kernels; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"numpy", "cuda", "asyncio", "anyio", "greensched.driver.nvrtc"} & set(modules)
