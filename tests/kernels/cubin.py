"""Reads a cubin's ELF: which parameters each kernel in it really has.

Sources: the ELF-64 header and section header; the CUDA binary utilities print the same attribute as
EIATTR_KPARAM_INFO (`cuobjdump -elf`).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_KPARAM_INFO = 0x17


def layout(cubin: bytes, kernel: str) -> tuple[tuple[int, int], ...]:
    """Return (offset, size) of each parameter, like `Driver.kernel_layout`."""
    info = dict(_sections(cubin))[f".nv.info.{kernel}"]
    found = {}
    for attribute, body in _attributes(info):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack("<IHHI", body)
            found[ordinal] = (offset, flags >> 18)
    return tuple(found[ordinal] for ordinal in sorted(found))


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names_index = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + 64 * i) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        start = names + name
        yield elf[start : elf.index(b"\0", start)].decode(), elf[offset : offset + size]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Format 4 has a body of the size in its head; the others have their value there instead."""
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        body = info[at + 4 : at + 4 + size] if kind == 4 else b""
        yield attribute, body
        at += 4 + len(body)
