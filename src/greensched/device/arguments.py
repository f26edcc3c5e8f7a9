"""Kernel arguments: checked, and packed into the slots that the driver reads.

Parameters live in one buffer of slots, followed by an array of pointers to them, which the driver
reads at each launch. So arguments are packed once, and changing a value is one store.
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

#: For each pointer parameter: its index, its dtype (None for void), whether the kernel writes it.
_Pointers = tuple[tuple[int, np.dtype[Any] | None, bool], ...]

#: Sets values for a launch on a stream with a ticket; see `_packer`.
Pack = Callable[[Sequence[Any], TicketedStream, int], bool]

#: Raised while packing if the number or kind of values is wrong; `fill` then reports which.
_UNUSUAL = AttributeError, IndexError, TypeError, ValueError, OverflowError, struct.error


class _Layout(NamedTuple):
    """What all launches of one signature share."""

    #: Byte offset of each parameter, then of the end.
    offsets: tuple[int, ...]
    #: Stores all values at once; None if a parameter has no format.
    store: Callable[..., None] | None
    pointers: _Pointers


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


def _packer(store: Callable[..., None], pointers: _Pointers, slots: object) -> Pack:
    """Return a function that sets all values in the usual case, and records the buffers' uses.

    The usual case is numbers, and buffers that only the launch's stream has ever used. The caller
    has checked the stream's device (`Lease.check_ready`), which is also theirs. In other cases the
    function returns False and has recorded nothing; then `fill` sets every value, or reports what
    is wrong.
    """
    if len(pointers) == 2:
        return _packer_of_two(store, pointers, slots)

    def pack(values: Sequence[Any], stream: TicketedStream, ticket: int) -> bool:
        packed = [*values]
        try:
            for index, dtype, _ in pointers:
                x = packed[index]
                if x.only_user is not stream or x.is_closed or x.memory.is_closed:
                    return False
                if x.dtype is not dtype and dtype is not None and x.dtype != dtype:
                    return False
                packed[index] = x.address
            store(slots, 0, *packed)
        except _UNUSUAL:
            return False
        for index, _, write in pointers:
            (values[index].writers if write else values[index].readers)[stream] = ticket
        return True

    return pack


def _packer_of_two(store: Callable[..., None], pointers: _Pointers, slots: object) -> Pack:
    """Return the same for two pointers, without loops: these would take a tenth of a launch.

    Most kernels have two pointers.
    """
    (i, x_dtype, writes_x), (j, y_dtype, writes_y) = pointers

    def pack(values: Sequence[Any], stream: TicketedStream, ticket: int) -> bool:
        packed = [*values]
        try:
            x, y = packed[i], packed[j]
            if x.only_user is not stream or x.is_closed or x.memory.is_closed:
                return False
            if y.only_user is not stream or y.is_closed or y.memory.is_closed:
                return False
            if x.dtype is not x_dtype and x_dtype is not None and x.dtype != x_dtype:
                return False
            if y.dtype is not y_dtype and y_dtype is not None and y.dtype != y_dtype:
                return False
            packed[i], packed[j] = x.address, y.address
            store(slots, 0, *packed)
        except _UNUSUAL:
            return False
        (x.writers if writes_x else x.readers)[stream] = ticket
        (y.writers if writes_y else y.readers)[stream] = ticket
        return True

    return pack


def _refuse(_: Sequence[Any], __: TicketedStream, ___: int) -> bool:
    """Return False, so that `fill` sets every value: a parameter has no format."""
    return False


class KernelArguments:
    """The arguments of one kernel, packed for the driver.

    Args:
        kernel: The kernel that has the parameters.
        device_id: The ordinal of the device that buffers must belong to.
    """

    __slots__ = (
        "_device_id",
        "_kernel",
        "_setters",
        "_slots",
        "address",
        "buffers",
        "pack",
    )

    def __init__(self, kernel: Kernel, device_id: int) -> None:
        self._kernel = kernel
        self._device_id = device_id
        parameters = kernel.parameters
        (*offsets, end), store, pointers = _layout(parameters)
        self._slots = (ctypes.c_uint64 * (end // 8 + len(parameters) + 1))()
        #: Sets all values in the usual case, and records the buffers' uses.
        self.pack: Pack = _refuse if store is None else _packer(store, pointers, self._slots)
        base = ctypes.addressof(self._slots)
        for i, offset in enumerate(offsets):
            self._slots[end // 8 + i] = base + offset
        #: Host address of the array of pointers to the values.
        self.address = base + end
        #: For each pointer parameter, by index: (buffer, whether the kernel writes it).
        self.buffers: dict[int, tuple[Buffer | PinnedBuffer | ForeignArray, bool]] = {}
        memory = memoryview(self._slots).cast("B")
        self._setters = tuple(
            self._setter(i, parameter, memory[offset : offset + parameter.size])
            for i, (parameter, offset) in enumerate(zip(parameters, offsets, strict=True))
        )

    def fill(self, values: Sequence[object]) -> None:
        """Set all values.

        Raises:
            ArgumentMismatch: A value has the wrong kind, or the number of values is wrong; says
                what is needed.
            BufferClosed, WrongDevice: A buffer cannot be used here.
        """
        setters = self._setters
        if len(values) != len(setters):
            wanted = ", ".join(_described(p) for p in self._kernel.parameters) or "none"
            raise ArgumentMismatch(
                self._kernel.name,
                f"takes {len(setters)} arguments ({wanted}), but got {len(values)}",
            )
        index = 0
        try:
            for index, setter in enumerate(setters):
                setter(values[index])
        except (TypeError, ValueError, OverflowError) as error:
            self.buffers.clear()  # so that a launch kept for reuse keeps no memory alive
            raise self._refused(index, values[index], error) from None

    def copy(self) -> KernelArguments:
        """Return a copy with the same values, at another address."""
        twin = KernelArguments(self._kernel, self._device_id)
        values = ctypes.sizeof(self._slots) - 8 * (len(self._setters) + 1)
        ctypes.memmove(twin._slots, self._slots, values)
        twin.buffers.update(self.buffers)  # in place, because its setters refer to this dict
        return twin

    def set(self, index: int, value: object) -> None:
        """Set one value.

        Raises:
            IndexError: There is no such argument.
            ArgumentMismatch, BufferClosed, WrongDevice: As for `fill`.
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
            return error  # an error of greensched is more precise
        parameter = self._kernel.parameters[index]
        problem = str(error)
        if not parameter.pointer and parameter.dtype in FORMATS:  # memoryview's errors are unclear
            dtype = np.dtype(parameter.dtype)
            problem = f"must be a number, of {dtype}"
            if dtype.kind in "iu":
                limits = np.iinfo(dtype)
                problem = f"must be a whole number from {limits.min} to {limits.max}"
        return ArgumentMismatch(
            self._kernel.name,
            f"argument {index} ({_described(parameter)}) got {type(value).__name__}: {problem}",
        )

    def _setter(
        self, index: int, parameter: Parameter, place: memoryview[int]
    ) -> Callable[[Any], None]:
        if parameter.pointer:
            return self._pointer_setter(index, parameter, place.cast("Q"))
        if parameter.dtype in FORMATS:
            slot = place.cast(FORMATS[parameter.dtype])  # type: ignore[call-overload]  # typed for literal formats only

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
                raise TypeError(f"holds {value.dtype}, but must hold {dtype}")
            slot[0] = value.address
            buffers[index] = (value, write)

        return pointer


def _foreign(value: Any, dtype: np.dtype[Any] | None, *, write: bool) -> ForeignArray:
    """Return another library's array for a pointer. Raises TypeError if it is not usable."""
    try:
        array = as_foreign_array(value)
    except InvalidArray as error:
        raise TypeError(str(error)) from None
    if array is None:
        hint = "did you forget `await`?" if hasattr(value, "__await__") else "see p.upload"
        raise TypeError(f"must be a Buffer or an array of a device ({hint})")
    if dtype is not None and not array.holds(dtype):
        raise TypeError(f"holds {array.kind}, but must hold {dtype}")
    if write and array.is_read_only:
        raise TypeError("is read-only, but the kernel may write it: is its parameter const?")
    return array


def _structure_setter(place: memoryview[int]) -> Callable[[Any], None]:
    """Return a setter that checks the length, because numpy would cut or pad a value."""

    def structure(value: Any) -> None:
        raw = memoryview(value)
        if raw.nbytes != len(place):
            raise TypeError(f"has {raw.nbytes} bytes, but must have {len(place)}")
        place[:] = raw.tobytes()

    return structure


def _number_setter(parameter: Parameter, place: memoryview[int]) -> Callable[[Any], None]:
    """Return a setter for bool, half float or complex. numpy would also accept text and None."""
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
