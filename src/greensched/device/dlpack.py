"""DLPack: reading and making capsules of device arrays, with the structs of dlpack.h.

A capsule is read, not consumed: an object that keeps the capsule keeps the memory, which the
capsule's destructor releases.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from greensched.errors import InvalidArray

#: Source: dlpack.h 1.1, DLDeviceType.
CUDA, CUDA_MANAGED = 2, 13
#: The stream that None stands for. Source: the array API's `__dlpack__`.
LEGACY = 1
#: The newest layout that can be read; a producer may return an older one.
VERSION: Final = (1, 1)
#: DLPACK_FLAG_BITMASK_READ_ONLY
_READ_ONLY: Final = 1
#: DLDataTypeCode, as numpy's kinds.
_KINDS: Final = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
#: Names of dtypes that numpy lacks.
_OTHERS: Final = {4: "bfloat16"}


class _Tensor(ctypes.Structure):
    """DLTensor, with its DLDevice and DLDataType as plain fields."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor, from before version 1.0, without a read-only flag."""

    _fields_ = (
        ("tensor", _Tensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


#: The layout for each name of an unconsumed capsule.
_LAYOUTS: Final = {b"dltensor": _Managed, b"dltensor_versioned": _Versioned}
#: Source: numpy 2.1's release notes.
_GIVES_VERSIONED: Final = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1)

# Not attributes of the shared `ctypes.pythonapi`, which other code may declare differently.
_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass(frozen=True, slots=True)
class View:
    """An array as described by a capsule or a `__cuda_array_interface__`.

    `strides` count bytes; None means C order. `kind` names the dtype, even if numpy lacks it.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    kind: str
    is_read_only: bool


def read(capsule: object) -> View:
    """Read a capsule, which must be kept while the memory is used.

    Raises:
        InvalidArray: Not a capsule, a consumed one, or elements that are not whole bytes.
    """
    if type(capsule).__name__ != "PyCapsule":
        raise InvalidArray(f"__dlpack__ returned a {type(capsule).__name__}, not a capsule")
    name = _name(capsule)
    layout = _LAYOUTS.get(name)
    if layout is None:
        if name.startswith(b"used_"):
            raise InvalidArray("its DLPack capsule was consumed already: give the array itself")
        raise InvalidArray(f"a capsule named {name!r} is not one of DLPack's")
    managed = layout.from_address(_pointer(capsule, name))
    if layout is _Versioned and managed.major != VERSION[0]:
        raise InvalidArray(
            f"its DLPack has version {managed.major}, but only version {VERSION[0]} is supported"
        )
    tensor = managed.tensor
    dtype, kind = _dtype(tensor)
    strides = tensor.strides[: tensor.ndim] if tensor.strides else None
    return View(
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[: tensor.ndim]),
        None if strides is None else tuple(step * dtype.itemsize for step in strides),
        dtype,
        kind,
        layout is _Versioned and bool(managed.flags & _READ_ONLY),
    )


def _dtype(tensor: _Tensor) -> tuple[np.dtype[Any], str]:
    size, part = divmod(tensor.bits * tensor.lanes, 8)
    if part or not size:
        raise InvalidArray(
            f"its elements have {tensor.bits * tensor.lanes} bits: whole bytes are needed"
        )
    code = _KINDS.get(tensor.code)
    if code is None or tensor.lanes != 1:
        name = _OTHERS.get(tensor.code, f"of DLPack's kind {tensor.code}")
        return np.dtype(f"V{size}"), name if tensor.lanes == 1 else f"{tensor.lanes} x {name}"
    try:
        dtype = np.dtype(f"{code}{size}")
    except TypeError:
        raise InvalidArray(f"numpy has no dtype of kind {code!r} with {size} bytes") from None
    return dtype, dtype.name


# -- out ------------------------------------------------------------------------------------------


class _Exported:
    """Device memory that numpy wraps as an array, but never reads."""

    def __init__(self, interface: dict[str, Any], released: Callable[[], None]) -> None:
        self.__array_interface__ = interface
        self._released = released

    def __del__(self) -> None:
        self._released()


def make(
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device_id: int,
    *,
    newest: tuple[int, int] | None,
    released: Callable[[], None],
) -> object:
    """Make a capsule for device memory in C order.

    It is numpy's capsule with another device. A capsule may end while an exception propagates, or
    on a thread without Python, which only C code can handle.

    Args:
        address: The address of the first element.
        device_id: The ordinal of the device.
        newest: The newest layout that the consumer knows. None: the layout from before 1.0.
        released: Called once, on any thread, when the consumer releases the capsule, or if it never
            consumes it.

    Raises:
        InvalidArray: DLPack has no such elements.
    """
    interface = {"data": (address, False), "shape": shape, "typestr": dtype.str, "version": 3}
    array = np.asarray(_Exported(interface, released))
    options: Any = {"max_version": newest} if newest is not None and _GIVES_VERSIONED else {}
    try:
        capsule = array.__dlpack__(**options)
    except BufferError as error:
        raise InvalidArray(f"DLPack has no elements of dtype {dtype}: {error}") from None
    name = _name(capsule)
    tensor = _LAYOUTS[name].from_address(_pointer(capsule, name)).tensor
    tensor.device_type, tensor.device_id = CUDA, device_id
    return capsule
