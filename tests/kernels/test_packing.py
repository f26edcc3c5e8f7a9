"""The usual case of a launch's values: stored as `fill` stores them, or left to it untouched."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched import ArgumentMismatch, Program
from greensched.device.launch import KernelArguments
from greensched.device.packing import FORMATS, packer
from greensched.kernels import Parameter

SIGNATURE = (
    Parameter("a", "f4"),
    Parameter("x", "f4", pointer=True, const=True),
    Parameter("y", "V1", pointer=True),
    Parameter("n", "u8"),
)
TRACK: Any = object()
TICKET = 7


def buffer(**other: Any) -> Any:
    """What `packer` needs to know of a buffer that only `TRACK` has used."""
    memory = SimpleNamespace(is_closed=other.pop("is_gone", False), fault=other.pop("fault", None))
    usual = {"sole": TRACK, "is_closed": False, "dtype": np.dtype("f4"), "address": 4096}
    return SimpleNamespace(**(usual | other), memory=memory, readers={}, writers={})


def slots(number: int) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * number)()


def test_the_usual_case_is_stored_and_noted() -> None:
    """Numbers and addresses are each in a slot; buffers know who reads and who writes them."""
    memory, x, y = slots(4), buffer(address=16), buffer(address=32, dtype=np.dtype("i8"))
    assert packer(SIGNATURE, memory)((1.5, x, y, 2**63), TRACK, TICKET)
    assert np.frombuffer(memory, np.float32)[0] == 1.5
    assert memory[1:] == [16, 32, 2**63]
    assert (x.readers, x.writers) == ({TRACK: TICKET}, {})
    assert (y.readers, y.writers) == ({}, {TRACK: TICKET})


@pytest.mark.parametrize("dtype", FORMATS)
def test_each_number_has_its_own_width(dtype: str) -> None:
    """Of each type the largest value is stored whole, and nothing beside it."""
    kind = np.dtype(dtype)
    most = kind.type(np.finfo(kind).max if kind.kind == "f" else np.iinfo(kind).max)
    memory = slots(2)
    memory[1] = 1
    assert packer((Parameter("x", dtype),), memory)((most.item(),), TRACK, TICKET)
    assert np.frombuffer(memory, kind)[0] == most
    assert bytes(memory)[kind.itemsize : 8] == bytes(8 - kind.itemsize)
    assert memory[1] == 1


@pytest.mark.parametrize(
    "values",
    [
        (1.0, buffer(), buffer()),
        (1.0, buffer(), buffer(), 1, 2),
        ("1", buffer(), buffer(), 1),
        (1.0, buffer(), buffer(), 2**64),
        (1.0, buffer(), buffer(), 1.5),
        (1.0, buffer(), None, 1),
        (1.0, buffer(), np.zeros(1, np.float32), 1),
        (1.0, buffer(), buffer(sole=None), 1),
        (1.0, buffer(), buffer(is_closed=True), 1),
        (1.0, buffer(), buffer(is_gone=True), 1),
        (1.0, buffer(), buffer(fault=OSError()), 1),
        (1.0, buffer(dtype=np.dtype("i4")), buffer(), 1),
    ],
)
def test_what_is_unusual_is_left_alone(values: tuple[Any, ...]) -> None:
    """Another number of values, or one of another kind: no buffer is noted as used."""
    assert not packer(SIGNATURE, slots(4))(values, TRACK, TICKET)
    for value in values:
        if isinstance(value, SimpleNamespace):
            assert not value.readers
            assert not value.writers


def test_a_signature_beyond_it_is_never_usual() -> None:
    """Half floats and structures have no format: `fill` knows them."""
    for dtype in ("f2", "V16"):
        assert not packer((Parameter("x", dtype),), slots(2))((1.0,), TRACK, TICKET)


def test_without_parameters_nothing_is_stored() -> None:
    """A kernel that takes nothing is the usual case, given nothing."""
    assert packer((), slots(1))((), TRACK, TICKET)
    assert not packer((), slots(1))((1,), TRACK, TICKET)


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
    """Whatever the numbers are: both store the same, or `fill` has the word."""
    parameters = tuple(Parameter(f"p{i}", dtype) for i, (dtype, _) in enumerate(pairs))
    values = [value for _, value in pairs]
    arguments = KernelArguments(Program("").kernel("f", parameters=parameters), 0)
    memory = slots(len(pairs) + 1)
    with np.errstate(all="ignore"):
        is_stored = packer(parameters, memory)(values, TRACK, TICKET)
        try:
            arguments.fill(values)
        except ArgumentMismatch:
            assert not is_stored
            return
    if is_stored:
        filled = (ctypes.c_uint64 * len(pairs)).from_buffer(arguments._slots)
        assert bytes(filled) == bytes(memory)[: 8 * len(pairs)]
