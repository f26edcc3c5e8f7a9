"""`Program` and `Kernel`: CUDA source or a cubin, and the kernels in it.

A program is compiled when a device first needs it (`loader`), and cached. A kernel has a name
and parameters. On the simulated driver it also needs a numpy reference and a cost.
"""

from __future__ import annotations

import inspect
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeVar

from greensched.driver.types import CodeImage, KernelSpec
from greensched.errors import InvalidRequest, NotSupported
from greensched.kernels import cache, sandbox
from greensched.kernels.signature import Signatures
from greensched.typing import CostModel, Parameter, Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

R = TypeVar("R", bound=Reference)
C = TypeVar("C", bound=CostModel)

#: numpy's dtype codes; numpy is not loaded yet.
_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c(?:8|16)|V[1-9]\d*")
_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")


class Program:
    """CUDA source, and the kernels that it defines. Immutable.

    Only `Program.compile`, or a GPU that first needs a kernel, compiles the source. The simulated
    driver never compiles it, so it finds no error in it.

    Args:
        source: CUDA C++; its kernels are `extern "C" __global__ void name(...)`.
        name: the name of the source in compiler messages.
        options: options of NVRTC, such as `("--use_fast_math",)`. The device decides the
            architecture.
        compile: `"trusted"` compiles in this process. `"sandbox"` is for untrusted source: a
            separate process with limits, which can read only CUDA's headers (`kernels.sandbox`). It
            needs Linux's Landlock and seccomp.

    Raises:
        InvalidRequest: `options` is a string, `compile` is invalid, or a sandbox refuses the
            source, the name or an option.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "program.cu",
        options: Sequence[str] = (),
        compile: Literal["trusted", "sandbox"] = "trusted",  # noqa: A002  a keyword argument of the public API
    ) -> None:
        if isinstance(options, str):
            raise InvalidRequest(
                f"options={options!r} is a string: pass a sequence, such as [{options!r}]"
            )
        if compile not in ("trusted", "sandbox"):
            raise InvalidRequest(f'compile={compile!r}: give "trusted" or "sandbox"')
        self._in_sandbox = compile == "sandbox"
        if self._in_sandbox:
            sandbox.check(source, name, options)
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
        """Create a program from a cubin, compiled by nvcc, for example, for one architecture.

        Args:
            binary: the bytes of the cubin.
            arch: its architecture, such as `"sm_90"`. Devices that cannot run it raise
                `NotSupported` when they need it.
            parameters: the parameters of each kernel, by name (C++ names are mangled).
            name: its name in messages.

        Raises:
            InvalidRequest: `arch` or a parameter is invalid.
        """
        return _Cubin(binary, arch, parameters, name)

    def __repr__(self) -> str:
        return f"<Program {self._name!r}: {', '.join(self.kernel_names) or 'no kernels'}>"

    def kernel(self, name: str, *, parameters: Sequence[Parameter] | None = None) -> Kernel:
        """Return a kernel of the program, always the same object for a name. Never blocks.

        Args:
            name: its name in the code: with C linkage, or mangled.
            parameters: None: read them from the source. Required if they cannot be read there
                (macros, templates, structs as parameters).

        Raises:
            InvalidRequest: The source has no such kernel, its parameters cannot be read, or an
                earlier call gave other `parameters`.
        """
        known = self._kernels.get(name)
        if known is None:
            read = self._read(name) if parameters is None else _checked(name, parameters)
            # First, because another thread may load a kernel as soon as it can get it.
            spec = self._specs.setdefault(name, KernelSpec(name, read))
            known = self._kernels.setdefault(name, Kernel(self, spec))
        if parameters is not None and tuple(parameters) != known.parameters:
            raise InvalidRequest(
                f"{known!r} exists already with other parameters than {parameters!r}: leave "
                "parameters= out, or make another Program"
            )
        return known

    def compile(self, arch: str) -> bytes:
        """Compile for an architecture such as `"sm_90"`, or return the cubin from the cache.

        Needs NVRTC, but no GPU. Blocks for tens of milliseconds or more (25 ms for a small kernel;
        measured; in a sandbox 0.3 s or more).

        Raises:
            CompileFailed: The source does not compile, or exceeds a sandbox's limits.
            DriverUnavailable: There is no NVRTC.
            NotSupported: The Linux kernel cannot restrict a process.
        """
        return cache.compiled(
            self._source,
            name=self._name,
            arch=arch,
            options=self._options,
            in_sandbox=self._in_sandbox,
        )

    def image(self, binary: bytes) -> CodeImage:
        """Return the argument of `Driver.load_code`.

        Its kernels are a live view, which includes kernels that are created after loading.
        """
        return CodeImage(self._name, MappingProxyType(self._specs), binary)

    @property
    def name(self) -> str:
        """Its name in compiler messages."""
        return self._name

    @property
    def source(self) -> str:
        """The CUDA source; empty for a cubin."""
        return self._source

    @property
    def options(self) -> tuple[str, ...]:
        """The options of NVRTC."""
        return self._options

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """The kernels with C linkage, whether or not their parameters can be read."""
        return self._signatures.names

    def _read(self, kernel: str) -> tuple[Parameter, ...]:
        return self._signatures.parameters(kernel)


class Kernel:
    """A kernel of a program; `Program.kernel` creates it.

    `@kernel.reference` and `@kernel.cost` attach what the simulated driver needs, each once.
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
        """Attach what computes the result in numpy: `function(launch, *arguments)`.

        It gets pointers as 1-D arrays to the end of their allocation and scalars as numpy scalars,
        and writes into the arrays. `launch` is a `LaunchFacts`. Returns the function unchanged.

        Raises:
            InvalidRequest: The kernel has a reference, or the function takes other parameters.
        """
        self._check_callable(function, "reference")
        self._spec.reference = function
        return function

    def cost(self, function: C) -> C:
        """Attach a function that returns the kernel's cost: `function(launch, *arguments) -> Cost`.

        It is called before the reference with the same arguments, and must not change them. Returns
        the function unchanged.

        Raises:
            InvalidRequest: The kernel has a cost, or the function takes other parameters.
        """
        self._check_callable(function, "cost")
        self._spec.cost = function
        return function

    def _check_callable(self, function: Callable[..., object], what: str) -> None:
        if getattr(self._spec, what) is not None:
            raise InvalidRequest(f"{self!r} already has a {what}: remove one of the two")
        try:
            inspect.signature(function).bind(None, *self.parameters)
        except ValueError:  # a function of an extension module may have no signature
            return
        except TypeError as error:
            names = ", ".join(["launch", *(parameter.name for parameter in self.parameters)])
            raise InvalidRequest(
                f"the {what} of kernel {self.name!r} is called as function({names}): {error}"
            ) from None

    @property
    def program(self) -> Program:
        """The program of the kernel, which the kernel keeps alive."""
        return self._program

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, in order."""
        return self._spec.parameters

    @property
    def spec(self) -> KernelSpec:
        """Its description for a driver."""
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
        self._parameters = {
            kernel: _checked(kernel, declared) for kernel, declared in parameters.items()
        }
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
                f"kernel {kernel!r}: {parameter!r} is not a parameter: give Parameter(name, dtype, "
                'pointer=..., const=...) with a numpy code such as "f4"'
            )
    return tuple(parameters)


def _runs_on(cubin: str, device: str) -> bool:
    """Return whether a cubin for one architecture runs on another.

    Source: CUDA C++ programming guide, "Binary compatibility". The major revisions must be equal
    and the device's minor revision no older, unless the cubin is architecture-specific (`sm_90a`).
    """
    major, minor, feature = _split_arch(cubin)
    device_major, device_minor, _ = _split_arch(device)
    if feature == "a":
        return (major, minor) == (device_major, device_minor)
    return major == device_major and minor <= device_minor


def _split_arch(arch: str) -> tuple[int, int, str]:
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise InvalidRequest(f"arch={arch!r} is not an architecture: give one such as 'sm_90'")
    return int(match[1]), int(match[2]), match[3]
