"""cuda.core beside greensched. Needs the extra `cuda-core`.

Most of it works without this module:

* a `cuda.core.Device` is accepted in place of an ordinal: `Device(core_device)`,
  `Pool(devices=[core_device])`;
* a `cuda.core.Buffer` can be a kernel argument and one end of a copy, as bytes. It does not record
  which streams write it, so first call `p.stream.follow(core_stream)` with each of these streams;
* `Stream.follow` accepts a `cuda.core.Stream`; `core_device.create_stream(p)` makes one from a
  stream of greensched or a partition.

`program` converts code of cuda.core, whose kernels partitions then launch like any others.
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
    """Make a `Program` from code that cuda.core compiled or read.

    Args:
        code: a cubin: `core_program.compile("cubin")`, or `ObjectCode.from_cubin(...)`.
        arch: the architecture it was compiled for, such as `"sm_90"`.
        parameters: the parameters of each kernel to be launched, by the kernel's name in the code.
            The code itself has their number and sizes, but not their types.

    Raises:
        InvalidRequest: the code is PTX or LTO, which is for no particular device; or `arch` or a
            parameter is invalid.
    """
    if str(code.code_type) != "cubin":
        raise InvalidRequest(
            f"this ObjectCode is {code.code_type}, but a cubin is needed: compile it with "
            'cuda.core\'s Program.compile("cubin")'
        )
    binary = code.code
    if not isinstance(binary, bytes):
        binary = Path(binary).read_bytes()
    name = code.name or "object.cubin"
    return Program.from_cubin(binary, arch=arch, parameters=parameters, name=name)
