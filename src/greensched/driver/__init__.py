"""Access to CUDA; `open` chooses the driver."""

from __future__ import annotations

import os
from functools import lru_cache

from greensched.driver.interface import Driver
from greensched.errors import InvalidRequest

#: The environment variable that names the driver if the program does not.
VARIABLE = "GREENSCHED_DRIVER"


def open(spec: str | Driver | None = None) -> Driver:  # noqa: A001  used as driver.open(...)
    """Return a driver that is not initialised yet, without loading CUDA.

    Args:
        spec: A driver, `"cuda"`, or `"simulated:h200"` (`simulated.parse` has the grammar). None:
            the value of the environment variable `GREENSCHED_DRIVER`, or else CUDA. A simulation is
            used only on request.

    Raises:
        InvalidRequest: There is no such driver; the message names the choices.
    """
    if isinstance(spec, Driver):
        return spec
    chosen: object = spec if spec is not None else os.environ.get(VARIABLE) or "cuda"
    kind, _, rest = chosen.partition(":") if isinstance(chosen, str) else ("", "", "")
    if kind == "cuda" and not rest:
        return _cuda()
    if kind == "simulated" and rest:
        from greensched.driver import simulated

        return simulated.open(rest)
    raise InvalidRequest(f'there is no driver {chosen!r}: give "cuda" or "simulated:h200"')


@lru_cache(maxsize=1)
def _cuda() -> Driver:
    """Return the process's one CUDA driver."""
    from greensched.driver import cuda

    return cuda.open()
