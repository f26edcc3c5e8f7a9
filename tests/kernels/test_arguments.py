"""Arguments of a launch: packed as the code reads them, or refused."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import numpy as np
import pytest

from greensched import ArgumentMismatch, Pool, Program
from greensched.device.arguments import KernelArguments
from greensched.kernels import Parameter, fill

PAIR = np.array([(1, 2.5)], [("n", "i4"), ("x", "f4")])


def packed(dtype: str, value: Any) -> bytes:
    """Return what the code would read of one argument."""
    parameter = Parameter("x", dtype)
    arguments = KernelArguments(Program("").kernel("f", parameters=(parameter,)), 0)
    arguments.fill([value])
    return ctypes.string_at(ctypes.c_uint64.from_address(arguments.address).value, parameter.size)


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("f2", 1.5, np.float16(1.5).tobytes()),
        ("f2", 3, np.float16(3).tobytes()),
        ("f2", np.float64(0.25), np.float16(0.25).tobytes()),
        ("c8", 1 + 2j, np.complex64(1 + 2j).tobytes()),
        ("c16", 2.0, np.complex128(2).tobytes()),
        ("b1", np.True_, b"\1"),
        ("V3", b"abc", b"abc"),
        ("V8", PAIR, PAIR.tobytes()),
        ("V8", PAIR[0], PAIR.tobytes()),
        ("V8", np.arange(4, dtype=np.int32)[::2], np.array([0, 2], np.int32).tobytes()),
    ],
)
def test_an_argument_is_packed_as_the_code_reads_it(
    dtype: str, value: Any, expected: bytes
) -> None:
    """Half floats, complex numbers, bools and structures arrive byte for byte."""
    assert packed(dtype, value) == expected


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        ("f2", None, "must be a number"),
        ("f2", "1.5", "must be a number"),
        ("f2", 1j, "float"),
        ("c8", "1", "must be a number"),
        ("b1", 1, "True or False"),
        ("V8", b"abc", "has 3 bytes, but must have 8"),
        ("V8", bytes(9), "has 9 bytes, but must have 8"),
        ("V8", PAIR[["n"]].astype([("n", "i4")]), "has 4 bytes, but must have 8"),
        ("V8", 8, "bytes-like"),
    ],
)
def test_an_argument_that_would_be_bent_is_refused(dtype: str, value: Any, said: str) -> None:
    """Values that numpy would truncate, extend or parse from text are refused."""
    with pytest.raises(ArgumentMismatch, match=said):
        packed(dtype, value)


def test_a_copy_keeps_its_own_account_of_buffers() -> None:
    """A buffer that is set in a copy does not change the original."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            with await p.empty(8) as one, await p.empty(8) as other:
                first = KernelArguments(fill, 0)
                first.fill([one, 1.0, 8])
                copy = first.copy()
                copy.set(0, other)
                assert first.buffers == {0: (one, True)}
                assert copy.buffers == {0: (other, True)}

    asyncio.run(main())


@pytest.mark.fault("I15")
def test_what_was_refused_keeps_no_buffer() -> None:
    """A reusable launch keeps no buffer of a refused one."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            with await p.empty(8) as buffer:
                arguments = KernelArguments(fill, 0)
                with pytest.raises(ArgumentMismatch):
                    arguments.fill([buffer, "no number", 8])
                assert arguments.buffers == {}

    asyncio.run(main())
