"""The fast path of a launch's values: it stores what `fill` stores, or leaves all to `fill`."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched import ArgumentMismatch, Program
from greensched.device.arguments import FORMATS, KernelArguments
from greensched.device.buffers import Buffer
from greensched.kernels import Parameter

SIGNATURE = (
    Parameter("a", "f4"),
    Parameter("x", "f4", pointer=True, const=True),
    Parameter("y", "V1", pointer=True),
    Parameter("n", "u8"),
)
STREAM: Any = object()
TICKET = 7


def buffer(**other: Any) -> Any:
    """Return a buffer that only `STREAM` has used."""
    health = SimpleNamespace(is_over=False)
    memory = SimpleNamespace(is_closed=other.pop("is_gone", False), health=health, device_id=0)
    memory.give_back = lambda *_: None
    made = Buffer(memory, 4096, (1,), np.dtype("f4"))  # type: ignore[arg-type]
    usual = {"only_user": STREAM, "is_closed": False}
    for name, value in (usual | other).items():
        setattr(made, name, value)
    return made


def arguments(*parameters: Parameter) -> KernelArguments:
    return KernelArguments(Program("").kernel("f", parameters=parameters), 0)


def stored(arguments: KernelArguments, count: int) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * count).from_buffer(arguments._slots)


def test_the_usual_case_is_stored_and_recorded() -> None:
    """Numbers and addresses are stored, and buffers record their streams."""
    packed, x, y = arguments(*SIGNATURE), buffer(address=16), buffer(address=32)
    y.dtype = np.dtype("i8")
    assert packed.pack((1.5, x, y, 2**63), STREAM, TICKET)
    assert np.frombuffer(stored(packed, 1), np.float32)[0] == 1.5
    assert stored(packed, 4)[1:] == [16, 32, 2**63]
    assert (x.readers, x.writers) == ({STREAM: TICKET}, {})
    assert (y.readers, y.writers) == ({}, {STREAM: TICKET})


@pytest.mark.parametrize("dtype", FORMATS)
def test_each_number_has_its_own_width(dtype: str) -> None:
    """The largest value of each type is stored whole, and nothing beside it."""
    kind = np.dtype(dtype)
    most = kind.type(np.finfo(kind).max if kind.kind == "f" else np.iinfo(kind).max)
    packed = arguments(Parameter("x", dtype), Parameter("next", "u8"))
    assert packed.pack((most.item(), 1), STREAM, TICKET)
    memory = stored(packed, 2)
    assert np.frombuffer(memory, kind)[0] == most
    assert bytes(memory)[kind.itemsize : 8] == bytes(8 - kind.itemsize)
    assert memory[1] == 1


@pytest.mark.parametrize(
    "values",
    [
        (1.0, buffer(), buffer()),
        (1.0,),
        (1.0, buffer(), buffer(), 1, 2),
        ("1", buffer(), buffer(), 1),
        (1.0, buffer(), buffer(), 2**64),
        (1.0, buffer(), buffer(), 1.5),
        (1.0, buffer(), None, 1),
        (1.0, buffer(), np.zeros(1, np.float32), 1),
        (1.0, buffer(), buffer(only_user=None), 1),
        (1.0, buffer(), buffer(is_closed=True), 1),
        (1.0, buffer(), buffer(is_gone=True), 1),
        (1.0, buffer(dtype=np.dtype("i4")), buffer(), 1),
    ],
)
def test_what_is_unusual_is_left_alone(values: tuple[Any, ...]) -> None:
    """With other values nothing is stored, and no buffer records a use."""
    assert not arguments(*SIGNATURE).pack(values, STREAM, TICKET)
    for value in values:
        if isinstance(value, Buffer):
            assert not value.readers
            assert not value.writers


def test_a_dtype_that_is_equal_is_usual() -> None:
    """An equal dtype is accepted, whether or not it is the same object."""
    same = np.dtype("f4").newbyteorder("<")
    assert arguments(*SIGNATURE).pack((1.0, buffer(dtype=same), buffer(), 1), STREAM, TICKET)


def test_a_signature_beyond_it_is_never_usual() -> None:
    """Half floats and structures are left to `fill`."""
    for dtype in ("f2", "V16"):
        assert not arguments(Parameter("x", dtype)).pack((1.0,), STREAM, TICKET)


def test_without_parameters_nothing_is_stored() -> None:
    """A kernel without parameters takes the fast path."""
    assert arguments().pack((), STREAM, TICKET)
    assert not arguments().pack((1,), STREAM, TICKET)


VALUES = st.one_of(
    st.integers(-(2**65), 2**65),
    st.integers(-300, 300),
    st.floats(),
    st.booleans(),
    st.sampled_from(
        ["1", None, b"1", 1j, np.float32(1.5), np.int8(-1), np.uint64(2**63), np.True_]
    ),
)


@given(st.lists(st.tuples(st.sampled_from([*FORMATS, "f2", "b1"]), VALUES), max_size=6))
def test_what_is_stored_is_what_fill_stores(pairs: list[tuple[str, Any]]) -> None:
    """For any numbers both store the same, or `fill` does it."""
    parameters = tuple(Parameter(f"p{i}", dtype) for i, (dtype, _) in enumerate(pairs))
    values = [value for _, value in pairs]
    packed, filled = arguments(*parameters), arguments(*parameters)
    with np.errstate(all="ignore"):
        is_packed = packed.pack(values, STREAM, TICKET)
        try:
            filled.fill(values)
        except ArgumentMismatch:
            assert not is_packed
            return
    if is_packed:
        assert bytes(stored(filled, len(pairs))) == bytes(stored(packed, len(pairs)))
