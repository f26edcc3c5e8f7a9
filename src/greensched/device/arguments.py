"""Kernel arguments: checked, and packed into the slots that the driver reads.

Parameters live in one buffer of slots, followed by an array of pointers to them, which the driver
reads during each launch: so packing is paid once, and a changed value is one store.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Number
from typing import Any, NamedTuple

import numpy as np

from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.foreign_arrays import ForeignArray, as_foreign_array
from greensched.device.tickets import TicketedStream
from greensched.errors import ArgumentMismatch, InvalidArray
from greensched.kernels import Kernel
from greensched.typing import Parameter

#: struct and memoryview formats of numpy's scalar codes. Half floats and structures have none.
FORMATS = {
    "f4": "f", "f8": "d", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I",
    "i8": "q", "u8": "Q",
}  # fmt: skip

#: Raised by `KernelArguments.pack` for a wrong number or kind of values, which `fill` then names.
_UNUSUAL = AttributeError, IndexError, TypeError, ValueError, OverflowError, struct.error


class _Layout(NamedTuple):
    """What all launches of one signature have in common."""

    #: Byte offset of each parameter, and behind the last.
    offsets: tuple[int, ...]
    #: Stores all values at once; None where a parameter has no format.
    store: Callable[..., None] | None
    #: Of each pointer parameter: its index, its dtype (None: void), whether the kernel writes it.
    pointers: tuple[tuple[int, np.dtype[Any] | None, bool], ...]


@lru_cache(maxsize=1024)  # a bound: a program may create kernels without end
def _layout(parameters: tuple[Parameter, ...]) -> _Layout:
    offsets = [0]
    for parameter in parameters:
        offsets.append(offsets[-1] + -(-parameter.size // 8) * 8)
    codes = ["Q" if p.pointer else FORMATS.get(p.dtype) for p in parameters]
    store = None
    if None not in codes:
        padded = (f"{code}{8 - struct.calcsize(f'={code}')}x" for code in codes)
        store = struct.Struct("=" + "".join(padded)).pack_into
    pointers = tuple(
        (i, None if p.dtype == "V1" else np.dtype(p.dtype), not p.const)
        for i, p in enumerate(parameters)
        if p.pointer
    )
    return _Layout(tuple(offsets), store, pointers)


class KernelArguments:
    """The arguments of one kernel, packed for the driver.

    Args:
        kernel: whose parameters.
        device_id: the ordinal that the buffers must belong to.
    """

    __slots__ = (
        "_device_id",
        "_kernel",
        "_pointers",
        "_setters",
        "_slots",
        "_store",
        "address",
        "buffers",
    )

    def __init__(self, kernel: Kernel, device_id: int) -> None:
        self._kernel = kernel
        self._device_id = device_id
        parameters = kernel.parameters
        (*offsets, end), self._store, self._pointers = _layout(parameters)
        self._slots = (ctypes.c_uint64 * (end // 8 + len(parameters) + 1))()
        base = ctypes.addressof(self._slots)
        for i, offset in enumerate(offsets):
            self._slots[end // 8 + i] = base + offset
        #: Host address of the array of pointers to the values.
        self.address = base + end
        #: By index, of each pointer parameter: (buffer, whether the kernel writes it).
        self.buffers: dict[int, tuple[Buffer | PinnedBuffer | ForeignArray, bool]] = {}
        memory = memoryview(self._slots).cast("B")
        self._setters = tuple(
            self._setter(i, parameter, memory[offset : offset + parameter.size])
            for i, (parameter, offset) in enumerate(zip(parameters, offsets, strict=True))
        )

    def pack(self, values: Sequence[Any], stream: TicketedStream, ticket: int) -> bool:
        """Set all values at once in the usual case, and record the buffers' uses.

        The usual case is numbers, and buffers that only this stream has ever used. Otherwise it
        returns False and has recorded nothing: `fill` takes every value, or says what is wrong.
        """
        store = self._store
        if store is None:
            return False
        packed = [*values]
        try:
            for index, dtype, _ in self._pointers:
                buffer = packed[index]
                if buffer.only_user is not stream or buffer.is_closed:
                    return False
                if buffer.dtype is not dtype and dtype is not None and buffer.dtype != dtype:
                    return False
                memory = buffer.memory
                if memory.is_closed or memory.health.is_over:
                    return False
                packed[index] = buffer.address
            store(self._slots, 0, *packed)
        except _UNUSUAL:
            return False
        for index, _, write in self._pointers:
            buffer = values[index]
            (buffer.writers if write else buffer.readers)[stream] = ticket
        return True

    def fill(self, values: Sequence[object]) -> None:
        """Set all values.

        Raises:
            ArgumentMismatch: a wrong number of values, or a wrong kind; says which and what is
                needed.
            BufferClosed, WrongDevice: a buffer that cannot be used here.
        """
        setters = self._setters
        if len(values) != len(setters):
            wanted = ", ".join(_described(p) for p in self._kernel.parameters) or "none"
            raise ArgumentMismatch(
                self._kernel.name,
                f"takes {len(setters)} arguments ({wanted}), and got {len(values)}",
            )
        index = 0
        try:
            for index, setter in enumerate(setters):
                setter(values[index])
        except (TypeError, ValueError, OverflowError) as error:
            self.buffers.clear()  # a launch kept for the next use keeps no memory alive
            raise self._refused(index, values[index], error) from None

    def copy(self) -> KernelArguments:
        """Return the same values, at another address."""
        twin = KernelArguments(self._kernel, self._device_id)
        values = ctypes.sizeof(self._slots) - 8 * (len(self._setters) + 1)
        ctypes.memmove(twin._slots, self._slots, values)
        twin.buffers.update(self.buffers)  # its setters write to its own dict
        return twin

    def set(self, index: int, value: object) -> None:
        """Set one value.

        Raises:
            IndexError: there is no such argument.
            ArgumentMismatch, BufferClosed, WrongDevice: as for `fill`.
        """
        try:
            setter = self._setters[index if index >= 0 else len(self._setters)]
        except IndexError:
            raise IndexError(
                f"kernel {self._kernel.name!r} has no argument {index}: it takes "
                f"{len(self._setters)}, counted from 0"
            ) from None
        try:
            setter(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._refused(index, value, error) from None

    def _refused(self, index: int, value: object, error: Exception) -> Exception:
        if type(error) not in (TypeError, ValueError, OverflowError):
            return error  # an error of greensched's, which says more
        parameter = self._kernel.parameters[index]
        problem = str(error)
        if not parameter.pointer and parameter.dtype in FORMATS:  # memoryview speaks of formats
            dtype = np.dtype(parameter.dtype)
            problem = f"must be a number, of {dtype}"
            if dtype.kind in "iu":
                limits = np.iinfo(dtype)
                problem = f"must be a whole number from {limits.min} to {limits.max}"
        return ArgumentMismatch(
            self._kernel.name,
            f"argument {index} ({_described(parameter)}) got {shown(value)}: {problem}",
        )

    def _setter(
        self, index: int, parameter: Parameter, place: memoryview[int]
    ) -> Callable[[Any], None]:
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
        buffers, device_id, write = self.buffers, self._device_id, not parameter.const
        dtype = None if parameter.dtype == "V1" else np.dtype(parameter.dtype)

        def pointer(value: Any) -> None:
            if not isinstance(value, (Buffer, PinnedBuffer)):
                value = _foreign(value, dtype, write=write)
            value.check(device_id)
            if dtype is not None and value.dtype != dtype and not isinstance(value, ForeignArray):
                raise TypeError(f"holds {value.dtype}, and must hold {dtype}")
            slot[0] = value.address
            buffers[index] = (value, write)

        return pointer


def shown(value: object) -> str:
    """Return a value's type for a message, and never the contents of an array."""
    return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__


def _foreign(value: Any, dtype: np.dtype[Any] | None, *, write: bool) -> ForeignArray:
    """Return another library's array for a pointer. Raises TypeError where it cannot be one."""
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
    """Return a setter that checks the length: numpy would cut a longer value, or fill it up."""

    def structure(value: Any) -> None:
        raw = memoryview(value)
        if raw.nbytes != len(place):
            raise TypeError(f"has {raw.nbytes} bytes, and must have {len(place)}")
        place[:] = raw.tobytes()

    return structure


def _number_setter(parameter: Parameter, place: memoryview[int]) -> Callable[[Any], None]:
    """Return a setter of a bool, half float or complex: numpy would also take text, and None."""
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


def _described(parameter: Parameter) -> str:
    kind = "void" if parameter.dtype == "V1" else np.dtype(parameter.dtype).name
    star = "const " * parameter.const + kind + " *" if parameter.pointer else kind + " "
    return f"{star}{parameter.name}"
