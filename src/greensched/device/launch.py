"""Launching: the geometry, the arguments checked and packed once, and the launch itself.

A kernel is launched on a stream, and the stream's context decides the SMs; the calling thread's
current context plays no part. Parameters live in one buffer of slots with an array of pointers
to them, which the driver reads during each call: so packing is paid once, and a changed value is
one store.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np

from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.foreign_arrays import ForeignArray, as_foreign_array
from greensched.device.packing import FORMATS, packer
from greensched.device.streams import Stream
from greensched.driver.interface import Driver
from greensched.driver.types import DEFAULT_MAX_SHARED_BYTES, KernelHandle
from greensched.errors import (
    ArgumentMismatch,
    InvalidArray,
    InvalidLaunch,
    InvalidRequest,
    NotSimulable,
)
from greensched.kernels import Kernel
from greensched.typing import DeviceFacts, Dim3, Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How many threads a kernel is launched with.

    Attributes:
        grid: blocks in x, y, z; an int, or fewer numbers, leave the rest 1.
        block: threads of a block, likewise.
        shmem_size: bytes of dynamic shared memory of each block.

    Raises:
        InvalidLaunch: a number that is not a positive int (`shmem_size`: not >= 0). What is too
            much for a device is refused where the kernel is launched.
    """

    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    shmem_size: int = 0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", _dim3("grid", self.grid))
        object.__setattr__(self, "block", _dim3("block", self.block))
        size: object = self.shmem_size
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 0:
            raise InvalidLaunch("shmem_size", size, "a whole number of bytes, >= 0")
        object.__setattr__(self, "shmem_size", int(size))
        object.__setattr__(self, "_hash", hash((self.grid, self.block, self.shmem_size)))

    def __hash__(self) -> int:  # each launch looks its plan up
        return self._hash

    @property
    def grid3(self) -> Dim3:
        """Blocks in x, y, z."""
        return self.grid  # type: ignore[return-value]  # made so in __post_init__

    @property
    def block3(self) -> Dim3:
        """Threads of a block in x, y, z."""
        return self.block  # type: ignore[return-value]  # made so in __post_init__

    def check(self, facts: DeviceFacts) -> None:
        """Refuses what is beyond a device; the message says which number and its limit.

        Raises:
            InvalidLaunch: grid, block or shared memory beyond the device.
        """
        for what, sizes, limits in (
            ("grid", self.grid3, facts.max_grid),
            ("block", self.block3, facts.max_block),
        ):
            for axis, size, limit in zip("xyz", sizes, limits, strict=True):
                if size > limit:
                    raise InvalidLaunch(f"{what}.{axis}", size, limit)
        self.check_threads(facts.max_threads_per_block)
        if self.shmem_size > facts.max_shared_bytes:
            raise InvalidLaunch("shmem_size", self.shmem_size, facts.max_shared_bytes)

    def check_threads(self, limit: int, whose: str = "the device") -> None:
        """Refuses more threads to a block than the device or the kernel can have."""
        x, y, z = self.block3
        if x * y * z > limit:
            raise InvalidLaunch(
                f"threads of a block ({x} x {y} x {z}, for {whose})", x * y * z, limit
            )


class KernelArguments:
    """The parameters of one kernel, packed for the driver.

    Args:
        kernel: whose parameters.
        device: the ordinal the buffers must belong to.
    """

    __slots__ = (
        "_device",
        "_kernel",
        "_setters",
        "_slots",
        "address",
        "buffers",
        "pack",
    )

    def __init__(self, kernel: Kernel, device: int) -> None:
        self._kernel = kernel
        self._device = device
        parameters = kernel.parameters
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.size // 8) * 8
        self._slots = (ctypes.c_uint64 * (end // 8 + len(parameters) + 1))()
        base = ctypes.addressof(self._slots)
        for i, offset in enumerate(offsets):
            self._slots[end // 8 + i] = base + offset
        #: Host address of the array of pointers to the values.
        self.address = base + end
        #: What stands for each pointer parameter: (buffer, does the kernel write it).
        self.buffers: dict[int, tuple[Buffer | PinnedBuffer | ForeignArray, bool]] = {}
        memory = memoryview(self._slots).cast("B")
        self._setters = tuple(
            self._setter(i, parameter, memory, offset)
            for i, (parameter, offset) in enumerate(zip(parameters, offsets, strict=True))
        )
        #: The usual case at once; see `packer`.
        self.pack = packer(parameters, self._slots)

    def fill(self, values: Sequence[object]) -> None:
        """Sets all of them.

        Raises:
            ArgumentMismatch: their number, or the kind of one; says which and what it should be.
            BufferClosed, WrongDevice: a buffer that cannot be used here.
        """
        setters = self._setters
        if len(values) != len(setters):
            wanted = ", ".join(_said(p) for p in self._kernel.parameters) or "none"
            raise ArgumentMismatch(
                self._kernel.name,
                f"takes {len(setters)} arguments ({wanted}), and got {len(values)}",
            )
        index = 0
        try:
            for index, setter in enumerate(setters):
                setter(values[index])
        except (TypeError, ValueError, OverflowError) as error:
            self.buffers.clear()  # a plan kept for the next launch keeps nobody's memory
            raise self._refused(index, values[index], error) from None

    def copy(self) -> KernelArguments:
        """The same values, at another address."""
        twin = KernelArguments(self._kernel, self._device)
        values = ctypes.sizeof(self._slots) - 8 * (len(self._setters) + 1)
        ctypes.memmove(twin._slots, self._slots, values)
        twin.buffers.update(self.buffers)  # its own setters know this one
        return twin

    def set(self, index: int, value: object) -> None:
        """Sets one.

        Raises:
            IndexError: there is no such argument.
            ArgumentMismatch, BufferClosed, WrongDevice: as for `fill`.
        """
        try:
            setter = self._setters[index if index >= 0 else len(self._setters)]
        except IndexError:
            raise IndexError(
                f"kernel {self._kernel.name!r} has no argument {index}: it takes "
                f"{len(self._setters)}, from 0 on"
            ) from None
        try:
            setter(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._refused(index, value, error) from None

    def _refused(self, index: int, value: object, error: Exception) -> Exception:
        if type(error) not in (TypeError, ValueError, OverflowError):
            return error  # one of ours, which says more
        parameter = self._kernel.parameters[index]
        problem = str(error)
        if not parameter.pointer and parameter.dtype in FORMATS:  # memoryview speaks of formats
            kind = np.dtype(parameter.dtype).name
            problem = f"must be a {'' if kind.startswith('float') else 'whole '}number, of {kind}"
        return ArgumentMismatch(
            self._kernel.name,
            f"argument {index} ({_said(parameter)}) got {_shown(value)}: {problem}",
        )

    def _setter(
        self, index: int, parameter: Parameter, memory: memoryview[int], offset: int
    ) -> Callable[[Any], None]:
        place = memory[offset : offset + parameter.size]
        if parameter.pointer:
            return self._pointer_setter(index, parameter, place.cast("Q"))
        if parameter.dtype in FORMATS:
            slot = place.cast(FORMATS[parameter.dtype])  # type: ignore[call-overload]  # any format

            def scalar(value: Any) -> None:
                slot[0] = value

            return scalar
        if parameter.dtype.startswith("V"):
            return _structure_setter(place)
        return _number_setter(parameter, place)

    def _pointer_setter(
        self, index: int, parameter: Parameter, slot: memoryview[int]
    ) -> Callable[[Any], None]:
        buffers, device, write = self.buffers, self._device, not parameter.const
        dtype = None if parameter.dtype == "V1" else np.dtype(parameter.dtype)

        def pointer(value: Any) -> None:
            if not isinstance(value, (Buffer, PinnedBuffer)):
                value = _borrowed(value, dtype, write=write)
            value.check(device)
            if dtype is not None and value.dtype != dtype and not isinstance(value, ForeignArray):
                raise TypeError(f"holds {value.dtype}, and must hold {dtype}")
            slot[0] = value.address
            buffers[index] = (value, write)

        return pointer


def _borrowed(value: Any, dtype: np.dtype[Any] | None, *, write: bool) -> ForeignArray:
    """An array of another library, for a pointer. Raises TypeError where it cannot be one."""
    try:
        array = as_foreign_array(value)
    except InvalidArray as error:
        raise TypeError(str(error)) from None
    if array is None:
        hint = "did you forget `await`?" if hasattr(value, "__await__") else "see p.upload"
        raise TypeError(f"must be a Buffer or an array of a device ({hint})")
    if dtype is not None and not array.holds(dtype):
        raise TypeError(f"holds {array.kind}, and must hold {dtype}")
    if write and array.is_read_only:
        raise TypeError("is read-only, and the kernel may write it: is its parameter const?")
    return array


def _structure_setter(place: memoryview[int]) -> Callable[[Any], None]:
    """Of a structure: numpy would cut a longer value off, and fill a shorter one up."""

    def structure(value: Any) -> None:
        raw = memoryview(value)
        if raw.nbytes != len(place):
            raise TypeError(f"has {raw.nbytes} bytes, and must have {len(place)}")
        place[:] = raw.tobytes()

    return structure


def _number_setter(parameter: Parameter, place: memoryview[int]) -> Callable[[Any], None]:
    """Of a bool, a half float or a complex number: numpy would take text for one, and None."""
    array = np.frombuffer(place, parameter.dtype)
    kinds: tuple[type, ...] = (Number,)
    problem = "must be a number"
    if parameter.dtype == "b1":
        kinds, problem = (bool, np.bool_), "must be True or False"

    def number(value: Any) -> None:
        if not isinstance(value, kinds):
            raise TypeError(problem)
        array[0] = value

    return number


class PreparedLaunch:
    """A launch made ready: `fire()` launches with what the arguments then hold; never blocks.

    Args:
        stream: where it goes.
        handle: the kernel, loaded, of which `check_limits` was asked.
        arguments: filled by the caller, before each `fire` or once.
    """

    __slots__ = ("_how", "arguments", "fire")

    def __init__(
        self,
        stream: Stream,
        config: LaunchConfig,
        kernel: Kernel,
        handle: KernelHandle,
        arguments: KernelArguments,
    ) -> None:
        self._how = (stream, config, kernel, handle)
        self.arguments = arguments
        self.fire = stream.context.driver.bind_launch(
            stream.handle, handle, config.grid3, config.block3, config.shmem_size, arguments.address
        )

    @property
    def kernel(self) -> Kernel:
        """What it launches."""
        return self._how[2]

    @property
    def kind(self) -> tuple[Kernel, LaunchConfig]:
        """What it has in common with others that can take its place."""
        return self._how[2], self._how[1]

    def on(self, stream: Stream) -> PreparedLaunch:
        """The same launch, with the same arguments, on another stream of the device."""
        return PreparedLaunch(stream, *self._how[1:], self.arguments)

    def copy(self) -> PreparedLaunch:
        """The same launch with the values of now, whatever is set here later."""
        return self.having(self.arguments.copy())

    def having(self, arguments: KernelArguments) -> PreparedLaunch:
        """The same launch with other arguments."""
        return PreparedLaunch(*self._how, arguments)


def check_limits(
    kernel: Kernel, handle: KernelHandle, config: LaunchConfig, facts: DeviceFacts, driver: Driver
) -> None:
    """Asks the driver whether a loaded kernel can be launched so: once, for each answer is a call.

    Raises:
        InvalidLaunch: more threads or shared memory than the kernel may have.
    """
    limits = driver.kernel_limits(handle, facts.ordinal)
    config.check_threads(limits.max_threads_per_block, f"kernel {kernel.name!r}")
    if config.shmem_size + limits.static_shared_bytes > DEFAULT_MAX_SHARED_BYTES:
        most = facts.max_shared_bytes - limits.static_shared_bytes
        if config.shmem_size > most:
            raise InvalidLaunch("shmem_size", config.shmem_size, most)
        # All there is: what is allowed is the kernel's, and an earlier plan may need more.
        driver.allow_shared(handle, facts.ordinal, most)


def check_launch(config: object, kernel: object, facts: DeviceFacts, driver: Driver) -> None:
    """Refuses what can be seen to be wrong before anything is loaded or queued.

    Raises:
        InvalidRequest: no kernel, or no launch configuration.
        InvalidLaunch: a geometry beyond the device.
        NotSimulable: the driver runs references, and the kernel lacks one, or its cost.
    """
    if not isinstance(config, LaunchConfig) or not isinstance(kernel, Kernel):
        raise InvalidRequest(
            "launch() takes a LaunchConfig first and a Kernel second; "
            f"got {type(config).__name__}, {type(kernel).__name__}"
        )
    config.check(facts)
    check_runnable(kernel, driver)


def check_runnable(kernel: Kernel, driver: Driver) -> None:
    """Refuses, on a driver that runs references, a kernel that lacks one.

    Raises:
        NotSimulable: it has no reference or no cost; says how to give it one.
    """
    if driver.needs_binary:
        return
    if kernel.spec.reference is None:
        raise NotSimulable(kernel.name)
    if kernel.spec.cost is None:
        raise NotSimulable(kernel.name, "cost")


def launch(stream: Stream, config: LaunchConfig, kernel: Kernel, *args: object) -> None:
    """Launches a kernel on a stream, in cuda.core's order of arguments, and does not wait for it.

    Nothing here orders the launch behind work of other streams on the same buffers, tells when it
    is done, or keeps anything until then: that is what partitions are for. It does come behind the
    producers of other libraries' arrays. The first launch of a kernel on a device
    compiles and loads it, which blocks: not on an event-loop thread.

    Raises:
        Closed: the stream is, or its context.
        InvalidRequest: no `Stream`, no kernel, or no launch configuration.
        InvalidLaunch: a geometry beyond the device or the kernel.
        ArgumentMismatch: wrong number or kind of arguments.
        InvalidArray, WrongDevice: an array that cannot be used here.
        NotSimulable: simulated, and the kernel has no reference or no cost.
        CompileFailed: its source does not compile.
        CUDAError: the driver refused it.
    """
    if not isinstance(stream, Stream):
        raise InvalidRequest(
            f"a Stream is launched on, and {_shown(stream)} is none: "
            "launch(stream, config, kernel, *args)"
        )
    stream.check()
    owner = stream.context
    check_launch(config, kernel, owner.facts, owner.driver)
    arguments = KernelArguments(kernel, owner.device_ordinal)
    arguments.fill(args)
    handle = owner.loader.loaded(kernel)
    if handle is None:
        with owner.primary.entered():  # a green context may be current on another thread
            handle = owner.loader.load(kernel)
    check_limits(kernel, handle, config, owner.facts, owner.driver)
    plan = PreparedLaunch(stream, config, kernel, handle, arguments)
    for used in arguments.buffers.values():
        if stream.recorded is not None:  # ordered when what is captured is launched
            stream.recorded.append(used)
        elif isinstance(used[0], ForeignArray):
            used[0].order(stream)
    plan.fire()


def _dim3(what: str, value: object) -> Dim3:
    numbers = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(numbers) <= 3:
        raise InvalidLaunch(what, value, "one to three numbers")
    for axis, number in zip("xyz", numbers, strict=False):
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 1:
            raise InvalidLaunch(f"{what}.{axis}", repr(number), "a whole number, at least 1")
    x, y, z = (*(int(n) for n in numbers), 1, 1)[:3]
    return x, y, z


def _said(parameter: Parameter) -> str:
    kind = "void" if parameter.dtype == "V1" else np.dtype(parameter.dtype).name
    star = "const " * parameter.const + kind + " *" if parameter.pointer else kind + " "
    return f"{star}{parameter.name}"


def _shown(value: object) -> str:
    """A value's type, and never the contents of an array."""
    return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__
