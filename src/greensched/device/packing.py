"""Values into a launch's slots, at once: the usual case, by code made for each signature.

A launch that is awaited takes a few microseconds, and a loop over its arguments was a quarter of
that: this is the loop written out, as `dataclasses` write out `__init__`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from greensched.device.streams import TicketedStream
    from greensched.typing import Parameter

#: memoryview formats of numpy's scalar codes. Half floats and structures have none.
FORMATS = {
    "f4": "f", "f8": "d", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I",
    "i8": "q", "u8": "Q",
}  # fmt: skip

#: Packs values for a launch on a track with a ticket; see `packer`.
Pack = Callable[[Sequence[Any], "TicketedStream", int], bool]

#: Of what is no buffer, or no number, or too large for its slot: `Arguments.fill` says which.
_UNUSUAL = AttributeError, TypeError, ValueError, OverflowError, struct.error

_CODE = """
def bind(slots):
    def pack(values, track, ticket):
        try:
            [{names}] = values
            if {refused}:
                return False
            store({stored})
        except unusual:
            return False
        {noted}
        return True
    return pack
"""
#: Of a pointer: anything but an open buffer, of the right type, that only this track has ever used.
_REFUSED = (
    "v{i}.sole is not track or v{i}.is_closed or v{i}.memory.is_closed "
    "or v{i}.memory.fault is not None"
)


def packer(parameters: tuple[Parameter, ...], slots: object) -> Pack:
    """What stores all values of a launch, each in its slot of 8 bytes, in the usual case.

    That is numbers, and buffers that only the launch's track has ever used; they are noted as used
    up to its ticket. Else it returns False, and what is unusual, or wrong, `Arguments.fill` says.
    """
    pack: Pack = _bind(parameters)(slots)
    return pack


@lru_cache(maxsize=1024)  # who makes kernels without end keeps no more than these
def _bind(parameters: tuple[Parameter, ...]) -> Callable[[object], Pack]:
    form = "="
    for parameter in parameters:
        code = "Q" if parameter.pointer else FORMATS.get(parameter.dtype)
        if code is None:
            return lambda _: _never
        form += f"{code}{8 - struct.calcsize('=' + code)}x"
    pointers = [(i, p) for i, p in enumerate(parameters) if p.pointer]
    typed = {f"d{i}": np.dtype(p.dtype) for i, p in pointers if p.dtype != "V1"}
    refused = [_REFUSED.format(i=i) for i, _ in pointers]
    refused += [f"v{name[1:]}.dtype is not {name}" for name in typed]
    stored = [f"v{i}.address" if p.pointer else f"v{i}" for i, p in enumerate(parameters)]
    noted = [f"v{i}.{'readers' if p.const else 'writers'}[track] = ticket" for i, p in pointers]
    code = _CODE.format(
        names=", ".join(f"v{i}" for i in range(len(parameters))),
        refused=" or ".join(refused) or "False",
        stored=", ".join(["slots", "0", *stored]),
        noted="; ".join(noted),
    )
    made: dict[str, Any] = {"store": struct.Struct(form).pack_into, "unusual": _UNUSUAL, **typed}
    exec(code, made)
    bind: Callable[[object], Pack] = made["bind"]
    return bind


def _never(_: Sequence[Any], __: TicketedStream, ___: int) -> bool:
    """Of a signature with a value that `struct` does not know."""
    return False
