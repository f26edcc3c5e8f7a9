"""The one door to CUDA, and the only place that chooses which driver stands behind it."""

from __future__ import annotations

import os
from functools import lru_cache

from greensched.driver.interface import Driver
from greensched.errors import InvalidRequest

#: The environment variable read where no driver is named in the program.
VARIABLE = "GREENSCHED_DRIVER"


def open(spec: str | Driver | None = None) -> Driver:  # noqa: A001  used as driver.open(...)
    """The driver to use; it is not initialised, and CUDA is not touched.

    Args:
        spec: a driver, `"cuda"`, or `"simulated:h200"` (`simulated.parse` has the grammar). None:
            what the environment variable `GREENSCHED_DRIVER` says, else CUDA. A simulation is
            never chosen by itself.

    Raises:
        InvalidRequest: no such driver; the message names those there are.
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
    raise InvalidRequest(f'no driver {chosen!r}: write "cuda", or "simulated:h200"')


@lru_cache(maxsize=1)
def _cuda() -> Driver:
    """The process has one CUDA driver."""
    from greensched.driver import cuda

    return cuda.open()
