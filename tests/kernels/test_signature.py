"""Parsing kernel signatures."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.errors import InvalidRequest
from greensched.kernels import signature
from greensched.kernels.signature import Signatures
from greensched.typing import Parameter

if TYPE_CHECKING:
    from types import FrameType


def parameters(text: str) -> tuple[Parameter, ...]:
    return Signatures(f'extern "C" __global__ void f({text}) {{ }}').parameters("f")


# -- parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("float x", Parameter("x", "f4")),
        ("double x", Parameter("x", "f8")),
        ("bool x", Parameter("x", "b1")),
        ("char x", Parameter("x", "i1")),
        ("unsigned char x", Parameter("x", "u1")),
        ("signed char x", Parameter("x", "i1")),
        ("short int x", Parameter("x", "i2")),
        ("unsigned short x", Parameter("x", "u2")),
        ("int x", Parameter("x", "i4")),
        ("signed x", Parameter("x", "i4")),
        ("unsigned x", Parameter("x", "u4")),
        ("unsigned int x", Parameter("x", "u4")),
        ("long x", Parameter("x", "i8")),
        ("long long x", Parameter("x", "i8")),
        ("long unsigned int long x", Parameter("x", "u8")),
        ("size_t x", Parameter("x", "u8")),
        ("std::size_t x", Parameter("x", "u8")),
        ("cuda::std::int16_t x", Parameter("x", "i2")),
        ("uint8_t x", Parameter("x", "u1")),
        ("int32_t x", Parameter("x", "i4")),
        ("uint64_t x", Parameter("x", "u8")),
        ("half x", Parameter("x", "f2")),
        ("const int x", Parameter("x", "i4")),
        ("const __grid_constant__ int x", Parameter("x", "i4")),
        ("float *x", Parameter("x", "f4", pointer=True)),
        ("float* x", Parameter("x", "f4", pointer=True)),
        ("const float *x", Parameter("x", "f4", pointer=True, const=True)),
        ("float const *x", Parameter("x", "f4", pointer=True, const=True)),
        ("float *const x", Parameter("x", "f4", pointer=True)),
        ("const float *__restrict__ const x", Parameter("x", "f4", pointer=True, const=True)),
        ("volatile unsigned *x", Parameter("x", "u4", pointer=True)),
        ("const __half * x", Parameter("x", "f2", pointer=True, const=True)),
        ("void *x", Parameter("x", "V1", pointer=True)),
        ("const void *x", Parameter("x", "V1", pointer=True, const=True)),
        ("float x[]", Parameter("x", "f4", pointer=True)),
        ("const float x[16]", Parameter("x", "f4", pointer=True, const=True)),
        ("unsigned /* how many */ x // items\n", Parameter("x", "u4")),
    ],
)
def test_a_parameter_is_read(text: str, expected: Parameter) -> None:
    """Every spelling of a known type gives numpy's code, pointer and const as CUDA means them."""
    assert parameters(text) == (expected,)


@pytest.mark.parametrize("text", ["", "void", " \n ", "/* none */"])
def test_no_parameters(text: str) -> None:
    """A kernel without parameters has none."""
    assert parameters(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        *("Matrix m", "Matrix *m", "float4 *x", "vec<float, 3> v", "T *x", "struct point p"),
        *("float **x", "float &x", "int", "unsigned int", "float *", "int n = 5", "long double x"),
        *("void x", "int x[2][2]", "float *x[4]", "dim3 size", "void (*f)(int)", "...", "int x,"),
        *("PARAMETERS", "float x y", "int (x)", "auto x", "short short x"),
    ],
)
def test_what_is_not_known_is_refused(text: str) -> None:
    """A parameter of an unknown type is refused, not guessed."""
    with pytest.raises(InvalidRequest, match=r"parameters=\(\.\.\.\)"):
        parameters(text)


def test_a_refusal_shows_the_line() -> None:
    """The message names the kernel and the parameter, and shows the line with its number."""
    source = '// first\nextern "C" __global__ void f(float *x,\n    Matrix m) { }'
    with pytest.raises(InvalidRequest, match=r"'f': cannot read .*'Matrix m'.* Line 3: Matrix m"):
        Signatures(source).parameters("f")


# -- kernels ----------------------------------------------------------------------------------


def test_kernels_are_found_in_their_order() -> None:
    """Only kernels with C linkage are found, not functions, declarations or comments."""
    source = """
    #include <cuda_fp16.h>
    #define MAKE(name) extern "C" __global__ void name() { \\
        }
    // extern "C" __global__ void in_a_comment() {}
    /* extern "C" __global__ void in_another() {} */
    const char *text = "extern \\"C\\" __global__ void in_a_string() {}";
    const char *raw = R"x(extern "C" __global__ void in_a_raw_string() {} )" )x";
    const char quote = '"', other = '\\'';
    extern "C" __global__ void declared(int);
    template <class T> __global__ void templated(T *x) { }
    __global__ void mangled(int x) { }
    static __device__ int helper(int x) { if (x > 1'000) { return 1; } return 0; }
    extern "C" __global__ void second(int n) { if (n) { helper(n); } }
    extern "C" __global__ void first() {}
    """
    assert Signatures(source).names == ("second", "first")


@pytest.mark.parametrize(
    "head",
    [
        'extern "C" __global__ void f',
        'extern "C" __global__ void __launch_bounds__(256) f',
        'extern "C" __global__ __launch_bounds__(N * (2 + 2), 2) void f',
        'extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32)\nf ',
        'extern "C" __attribute__((used)) __global__ void f',
        'extern  "C"\n__global__\nvoid BOUNDS(128)\nf\n',
    ],
)
def test_attributes_are_passed_over(head: str) -> None:
    """Attributes before the name are not taken for the name."""
    signatures = Signatures(head + "(float a, int b)\n{ }")
    assert signatures.names == ("f",)
    assert [p.name for p in signatures.parameters("f")] == ["a", "b"]


def test_linkage_blocks() -> None:
    """Kernels in an `extern "C"` block have C linkage, and later ones do not."""
    source = """
    namespace n { __global__ void before() { } }
    extern "C" {
        static __device__ void helper() { { } }
        __global__ void inside(int x) { helper(); }
    }
    __global__ void behind() { }
    """
    assert Signatures(source).names == ("inside",)


def test_a_declaration_is_not_a_definition() -> None:
    """A prototype without names does not hide the definition."""
    source = 'extern "C" __global__ void f(T, int);\nextern "C" __global__ void f(int a) { }'
    assert Signatures(source).parameters("f") == (Parameter("a", "i4"),)


def test_all_branches_are_read() -> None:
    """Equal kernels in two branches of an `#if` are one; different ones are refused."""
    both = "#if A\n{0} void f(int x) {{ }}\n#else\n{0} void f({1}) {{ }}\n#endif\n"
    head = 'extern "C" __global__'
    assert Signatures(both.format(head, "const int x")).parameters("f") == (Parameter("x", "i4"),)
    with pytest.raises(InvalidRequest, match="different parameters"):
        Signatures(both.format(head, "float x")).parameters("f")


def test_a_mangled_kernel_is_refused() -> None:
    """A kernel without C linkage is not found, and the error says why."""
    with pytest.raises(InvalidRequest, match="mangled"):
        Signatures("__global__ void f(int x) { }").parameters("f")


def test_a_missing_kernel_is_refused() -> None:
    """The error for an unknown name lists the kernels."""
    with pytest.raises(InvalidRequest, match=r"'g' is not in the source \(kernels there: f\)"):
        Signatures('extern "C" __global__ void f() { }').parameters("g")


@given(st.text(alphabet="(){}[]<>,;*\"'/\\#\n fx1:") | st.text())
def test_any_text_is_survived(text: str) -> None:
    """Any text gives kernels or a refusal."""
    signatures = Signatures('extern "C" __global__ void f(' + text)
    for name in signatures.names:
        try:
            signatures.parameters(name)
        except InvalidRequest as refusal:
            assert "parameters=(...)" in str(refusal)  # noqa: PT017 - most texts are no kernels


# -- printed in random styles and read back -----------------------------------------------------

SPELLINGS = {
    "f4": ["float"],
    "f8": ["double"],
    "f2": ["half", "__half"],
    "b1": ["bool"],
    "i1": ["char", "signed char", "int8_t"],
    "u1": ["unsigned char", "char unsigned", "uint8_t"],
    "i2": ["short", "short int", "signed short", "int16_t"],
    "u2": ["unsigned short", "short unsigned int", "std::uint16_t"],
    "i4": ["int", "signed", "signed int", "int32_t"],
    "u4": ["unsigned", "unsigned int", "int unsigned", "uint32_t"],
    "i8": ["long", "long long", "long long int", "int64_t", "ptrdiff_t"],
    "u8": ["unsigned long", "unsigned long long", "long unsigned long", "size_t", "uint64_t"],
}
NAMES = st.text("abcxyz0189_", max_size=6).map(lambda text: f"p{text}")
GAPS = st.sampled_from([" ", "  ", "\n    ", "\t", " /* a, b) */ ", " // c(\n", "\\\n "])
KNOWN = st.builds(Parameter, NAMES, st.sampled_from(sorted(SPELLINGS))) | st.builds(
    Parameter, NAMES, st.sampled_from([*sorted(SPELLINGS), "V1"]), st.just(True), st.booleans()
)


def printed(parameter: Parameter, draw: st.DrawFn) -> str:
    words = draw(st.sampled_from(SPELLINGS.get(parameter.dtype, ["void"]))).split(" ")
    qualifiers = draw(st.lists(st.sampled_from(["volatile"]), max_size=1))
    if parameter.const or (not parameter.pointer and draw(st.booleans())):
        qualifiers.append("const")
    for qualifier in qualifiers:
        words.insert(draw(st.integers(0, len(words))), qualifier)
    if parameter.pointer:
        own = draw(st.lists(st.sampled_from(["__restrict__", "const"]), max_size=2, unique=True))
        words += ["*", *own]
    gaps = [draw(GAPS) for _ in words]
    return "".join(word + gap for word, gap in zip(words, gaps, strict=True)) + parameter.name


@st.composite
def kernels(draw: st.DrawFn) -> tuple[str, str, tuple[Parameter, ...]]:
    name = draw(NAMES)
    wanted = tuple(draw(st.lists(KNOWN, max_size=6)))
    gap = [draw(GAPS) for _ in range(6)]
    text = f",{gap[0]}".join(printed(parameter, draw) for parameter in wanted)
    bounds = draw(
        st.sampled_from(["", "__launch_bounds__(256)", "__launch_bounds__( N*(1+1) , 2)"])
    )
    source = (
        f'extern{gap[1]}"C"{gap[2]}__global__{gap[3]}void{gap[4]}{bounds}{gap[4]}{name}{gap[5]}'
        f"({gap[0]}{text}{gap[5]}){gap[1]}{{ }}{gap[2]}"
    )
    return source, name, wanted


@given(kernels())
def test_a_printed_signature_is_read_back(kernel: tuple[str, str, tuple[Parameter, ...]]) -> None:
    """Any spelling of a signature gives the same parameters."""
    source, name, wanted = kernel
    assert Signatures(source).parameters(name) == wanted


@given(st.lists(kernels(), max_size=4, unique_by=lambda kernel: kernel[1]))
def test_kernels_stand_side_by_side(
    several: list[tuple[str, str, tuple[Parameter, ...]]],
) -> None:
    """Several kernels in one source are all found."""
    signatures = Signatures(
        "\n__device__ int helper(int x) { return x; }\n".join(source for source, _, _ in several)
    )
    assert signatures.names == tuple(name for _, name, _ in several)
    for _, name, wanted in several:
        assert signatures.parameters(name) == wanted


# -- work -------------------------------------------------------------------------------------


def lines_run(source: str) -> int:
    """Return how many lines the parser runs for a source."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        if frame.f_code.co_filename != signature.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        Signatures(source)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.fault("I5")
@pytest.mark.parametrize(
    "part",
    [
        "__global__ ",
        "__global__ f(",
        'extern "C" __global__ void f(int n) ',
        "int x ",
        "{ __global__ f",
        "__global__ f(int x){",
        "(",
        "__global__ f(int x) {} ",
    ],
)
def test_reading_takes_work_in_proportion_to_the_source(part: str) -> None:
    """Twice the source takes at most twice the work, whatever is repeated or left open in it."""
    assert lines_run(part * 800) < 2.2 * lines_run(part * 400)


@pytest.mark.fault("I5")
@pytest.mark.parametrize("opening", ["/* ", 'R"( ', "#/* ", '"\\', "'\\", '# " /*'])
def test_what_is_left_open_is_read_once(opening: str) -> None:
    """An open comment or literal takes its line, or the rest, once."""
    assert len(list(signature._tokens(opening * 100))) <= 2


@pytest.mark.fault("I5")
def test_what_is_left_open_hides_no_later_line() -> None:
    """An apostrophe in skipped text ends with its line."""
    source = '#if 0\nit doesn\'t matter\n#endif\nextern "C" __global__ void f(int n) {}'
    assert Signatures(source).names == ("f",)
