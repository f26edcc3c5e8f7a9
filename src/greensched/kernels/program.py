"""`Program` and `Kernel`: CUDA source or a cubin, and the kernels in it.

A program is compiled when a device first needs it (`loader`), through the cache. A kernel is a
name and its parameters; where it is also to run on the simulated driver it is given its meaning
beside its code: a reference in numpy, and a cost.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from greensched.driver.types import CodeImage, KernelSpec
from greensched.errors import InvalidRequest, NotSupported
from greensched.kernels import cache
from greensched.kernels.signature import Signatures
from greensched.typing import CostModel, Parameter, Reference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

R = TypeVar("R", bound=Reference)
C = TypeVar("C", bound=CostModel)

#: The codes that numpy has a dtype for: it is not asked, for it is not loaded yet.
_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c(?:8|16)|V[1-9]\d*")
_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")


class Program:
    """CUDA source, and the kernels it defines. Immutable; making one compiles nothing.

    Args:
        source: CUDA C++; its kernels are `extern "C" __global__ void name(...)`.
        name: what the compiler calls the source in its messages.
        options: NVRTC's options, such as `("--use_fast_math",)`. The architecture is not one of
            them: it is the device's.

    Raises:
        InvalidRequest: `options` is a single string.
    """

    def __init__(
        self, source: str, *, name: str = "program.cu", options: Sequence[str] = ()
    ) -> None:
        if isinstance(options, str):
            raise InvalidRequest(f"options={options!r} is one string: give a sequence of them")
        self._name = name
        self._source = source
        self._options = tuple(options)
        self._signatures = Signatures(source)
        self._kernels: dict[str, Kernel] = {}
        self._specs: dict[str, KernelSpec] = {}

    @staticmethod
    def from_cubin(
        binary: bytes,
        *,
        arch: str,
        parameters: Mapping[str, Sequence[Parameter]],
        name: str = "program.cubin",
    ) -> Program:
        """A program that is compiled already, by nvcc say, for one architecture.

        Args:
            binary: the cubin's bytes.
            arch: what it was compiled for, such as `"sm_90"`. It serves the devices a cubin of
                that name runs on; others get `NotSupported` when they need it.
            parameters: of each kernel in it, by name (a C++ kernel's name is mangled).
            name: what messages call it.

        Raises:
            InvalidRequest: `arch` or a parameter is not one.
        """
        return _Cubin(binary, arch, parameters, name)

    def __repr__(self) -> str:
        return f"<Program {self._name!r}: {', '.join(self.kernel_names) or 'no kernels'}>"

    def kernel(self, name: str, *, parameters: Sequence[Parameter] | None = None) -> Kernel:
        """A kernel of the program, the same object for the same name. Never blocks.

        Args:
            name: as the code has it: C linkage, or the mangled name.
            parameters: None: as the source says. Needed where it cannot be read there (macros,
                templates, parameters that are structs).

        Raises:
            InvalidRequest: the source has no such kernel or its parameters cannot be read, or
                `parameters` are not those the kernel was first asked for with.
        """
        known = self._kernels.get(name)
        if known is None:
            read = self._read(name) if parameters is None else _checked(name, parameters)
            known = self._kernels.setdefault(name, Kernel(self, KernelSpec(name, read)))
            self._specs[name] = known.spec
        if parameters is not None and tuple(parameters) != known.parameters:
            raise InvalidRequest(f"{known!r} exists, and has these parameters, not {parameters!r}")
        return known

    def compile(self, arch: str) -> bytes:
        """Machine code for an architecture such as `"sm_90"`, from the cache if it can be.

        Blocks: NVRTC takes tens of milliseconds and more (25 ms for a small kernel; measured).

        Raises:
            CompileFailed: the source does not compile.
            DriverUnavailable: there is no NVRTC.
        """
        return cache.compiled(self._source, name=self._name, arch=arch, options=self._options)

    def image(self, binary: bytes) -> CodeImage:
        """What `Driver.load_code` takes.

        Its kernels are a live view: one that is asked for after loading is in it, too.
        """
        return CodeImage(self._name, MappingProxyType(self._specs), binary)

    @property
    def name(self) -> str:
        """What the compiler calls it."""
        return self._name

    @property
    def source(self) -> str:
        """The CUDA source; empty for a cubin."""
        return self._source

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options."""
        return self._options

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """The kernels the source defines with C linkage, whether or not they can be read."""
        return self._signatures.names

    def _read(self, kernel: str) -> tuple[Parameter, ...]:
        return self._signatures.parameters(kernel)


class Kernel:
    """One kernel of a program; `Program.kernel` makes it.

    `@kernel.reference` and `@kernel.cost` give it its meaning for the simulated driver, each once.
    """

    def __init__(self, program: Program, spec: KernelSpec) -> None:
        self._program = program
        self._spec = spec
        #: Its name in the code.
        self.name = spec.name

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{p.dtype} {'*' if p.pointer else ''}{p.name}" for p in self._spec.parameters
        )
        return f"<Kernel {self.name}({shown}) of {self._program.name!r}>"

    def reference(self, function: R) -> R:
        """Decorates what the kernel does, in numpy: `function(launch, *arguments)`.

        Pointers arrive as 1-D arrays to the end of their allocation, scalars as numpy scalars; it
        writes into the arrays. `launch` is a `LaunchFacts`. Returns the function unchanged.

        Raises:
            InvalidRequest: the kernel has a reference.
        """
        if self._spec.reference is not None:
            raise InvalidRequest(f"{self!r} already has a reference")
        self._spec.reference = function
        return function

    def cost(self, function: C) -> C:
        """Decorates what the kernel costs: `function(launch, *arguments) -> Cost`.

        It gets the reference's arguments, before they are touched, and leaves them so. Returns the
        function unchanged.

        Raises:
            InvalidRequest: the kernel has a cost.
        """
        if self._spec.cost is not None:
            raise InvalidRequest(f"{self!r} already has a cost")
        self._spec.cost = function
        return function

    @property
    def program(self) -> Program:
        """The program it belongs to, and keeps alive."""
        return self._program

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, in order."""
        return self._spec.parameters

    @property
    def spec(self) -> KernelSpec:
        """What a driver is told of it."""
        return self._spec


class _Cubin(Program):
    """A program without source."""

    def __init__(
        self,
        binary: bytes,
        arch: str,
        parameters: Mapping[str, Sequence[Parameter]],
        name: str,
    ) -> None:
        super().__init__("", name=name)
        self._binary = bytes(binary)
        self._arch = arch
        self._parameters = {kernel: _checked(kernel, given) for kernel, given in parameters.items()}
        _split_arch(arch)

    def compile(self, arch: str) -> bytes:
        if not _runs_on(self._arch, arch):
            raise NotSupported(f"{self._name} (a cubin)", self._arch, arch)
        return self._binary

    @property
    def kernel_names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def _read(self, kernel: str) -> tuple[Parameter, ...]:
        if kernel not in self._parameters:
            raise InvalidRequest(f"kernel {kernel!r} is not in {self!r}")
        return self._parameters[kernel]


def _checked(kernel: str, parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    for parameter in parameters:
        code: object = getattr(parameter, "dtype", None)
        if not isinstance(code, str) or not _DTYPE.fullmatch(code):
            raise InvalidRequest(
                f"kernel {kernel!r}: {parameter!r} is no parameter: give Parameter(name, dtype, "
                'pointer=..., const=...) with a numpy code such as "f4"'
            )
    return tuple(parameters)


def _runs_on(cubin: str, device: str) -> bool:
    """Whether a cubin for one architecture runs on another.

    Source: CUDA C++ programming guide, "Binary compatibility": the same major revision and a minor
    one at least as new, unless it is architecture-specific (`sm_90a`).
    """
    major, minor, feature = _split_arch(cubin)
    device_major, device_minor, _ = _split_arch(device)
    if feature == "a":
        return (major, minor) == (device_major, device_minor)
    return major == device_major and minor <= device_minor


def _split_arch(arch: str) -> tuple[int, int, str]:
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise InvalidRequest(f"arch={arch!r} is no architecture: give one such as 'sm_90'")
    return int(match[1]), int(match[2]), match[3]
