"""cuda.core beside greensched. Needs the extra `cuda-core`.

Most of it needs no help from here:

* their `Device` is taken where ours is numbered: `Device(theirs)`, `Pool(devices=[theirs])`;
* their `Buffer` is a kernel argument and one end of a copy, as so many bytes. Its library knows of
  no stream that writes it, so `p.stream.follow(their_stream)` first, where one does;
* their `Stream` is what `Stream.follow` takes; ours, and a partition, become theirs by
  `their_device.create_stream(p)`.

Their code becomes ours by `program`: its kernels are launched in partitions as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from greensched import Program
from greensched.errors import InvalidRequest
from greensched.kernels import Parameter

if TYPE_CHECKING:
    from cuda.core import ObjectCode


def program(
    code: ObjectCode, *, arch: str, parameters: Mapping[str, Sequence[Parameter]]
) -> Program:
    """A program of ours, of code that cuda.core compiled or read.

    Args:
        code: a cubin: `their_program.compile("cubin")`, or `ObjectCode.from_cubin(...)`.
        arch: what it was compiled for, such as `"sm_90"`.
        parameters: of each kernel in it that is to be launched, by its name in the code. The code
            says how many there are and how large, and not what they are.

    Raises:
        InvalidRequest: it is PTX or LTO code, which says nothing of a device; or `arch` or a
            parameter is none.
    """
    if str(code.code_type) != "cubin":
        raise InvalidRequest(
            f"this ObjectCode is {code.code_type}, and a cubin is launched: compile it to one, by "
            'their Program.compile("cubin")'
        )
    binary = code.code
    if not isinstance(binary, bytes):
        binary = Path(binary).read_bytes()
    name = code.name or "object.cubin"
    return Program.from_cubin(binary, arch=arch, parameters=parameters, name=name)
