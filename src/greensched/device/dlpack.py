"""DLPack: device arrays in and out of Python's capsules, as the struct of dlpack.h.

A capsule is read and never taken: it stays its own, and whoever keeps it keeps the memory, which
its destructor gives back.
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
#: What None stands for as a taker's stream. Source: the array API's `__dlpack__`.
LEGACY = 1
#: The newest layout that is read here; a producer may give an older one.
VERSION: Final = (1, 1)
#: DLPACK_FLAG_BITMASK_READ_ONLY
_READ_ONLY: Final = 1
#: DLDataTypeCode, as numpy's kinds.
_KINDS: Final = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
#: What numpy has no number for.
_OTHERS: Final = {4: "bfloat16"}


class _Tensor(ctypes.Structure):
    """DLTensor, its DLDevice and DLDataType laid flat."""

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
    """DLManagedTensor, of before 1.0: says nothing of reading and writing."""

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


#: By the name of a capsule that nobody took yet.
_LAYOUTS: Final = {b"dltensor": _Managed, b"dltensor_versioned": _Versioned}
#: Source: numpy 2.1's release notes.
_GIVES_VERSIONED: Final = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1)

# Functions of our own: those that are attributes of `ctypes.pythonapi` are everybody's, and other
# libraries declare them otherwise.
_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass(frozen=True, slots=True)
class View:
    """An array as a capsule, or somebody's `__cuda_array_interface__`, describes it.

    `strides` count bytes; None: C order. `kind` says of the dtype what numpy may have no word for.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    kind: str
    is_read_only: bool


def read(capsule: object) -> View:
    """What a capsule describes. It must be kept as long as the memory is used.

    Raises:
        InvalidArray: it is none, it was taken already, or its elements are none of whole bytes.
    """
    if type(capsule).__name__ != "PyCapsule":
        raise InvalidArray(f"__dlpack__ gave a {type(capsule).__name__}, and no capsule")
    name = _name(capsule)
    layout = _LAYOUTS.get(name)
    if layout is None:
        if name.startswith(b"used_"):
            raise InvalidArray("its DLPack capsule was consumed already: give the array itself")
        raise InvalidArray(f"a capsule named {name!r} is none of DLPack's")
    managed = layout.from_address(_pointer(capsule, name))
    if layout is _Versioned and managed.major != VERSION[0]:
        raise InvalidArray(f"its DLPack is of version {managed.major}, and 1 is known here")
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
        raise InvalidArray(f"its elements are of {tensor.bits * tensor.lanes} bits: whole bytes go")
    code = _KINDS.get(tensor.code)
    if code is None or tensor.lanes != 1:
        name = _OTHERS.get(tensor.code, f"of DLPack's kind {tensor.code}")
        return np.dtype(f"V{size}"), name if tensor.lanes == 1 else f"{tensor.lanes} x {name}"
    try:
        found = np.dtype(f"{code}{size}")
    except TypeError:
        raise InvalidArray(f"numpy has no number of kind {code!r} and {size} bytes") from None
    return found, found.name


# -- out ------------------------------------------------------------------------------------------


class _Lent:
    """Memory that numpy takes for an array of its own, and never looks at."""

    def __init__(self, interface: dict[str, Any], returned: Callable[[], None]) -> None:
        self.__array_interface__ = interface
        self._returned = returned

    def __del__(self) -> None:
        self._returned()


def make(
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: int,
    *,
    newest: tuple[int, int] | None,
    returned: Callable[[], None],
) -> object:
    """A capsule for device memory in C order.

    It is numpy's, told where the memory lies: a capsule may end while an exception is on its way,
    or on a thread that has never seen Python, and only C can go about that.

    Args:
        address: of the first element.
        device: its ordinal.
        newest: the version of the layout that the taker knows; None: that of before 1.0.
        returned: called once, when whoever took it lets go, or nobody did; on any thread.

    Raises:
        InvalidArray: DLPack has no such elements.
    """
    interface = {"data": (address, False), "shape": shape, "typestr": dtype.str, "version": 3}
    array = np.asarray(_Lent(interface, returned))
    options: Any = {"max_version": newest} if newest is not None and _GIVES_VERSIONED else {}
    try:
        capsule = array.__dlpack__(**options)
    except BufferError as error:
        raise InvalidArray(f"DLPack has no elements of dtype {dtype}: {error}") from None
    name = _name(capsule)
    tensor = _LAYOUTS[name].from_address(_pointer(capsule, name)).tensor
    tensor.device_type, tensor.device_id = CUDA, device
    return capsule
