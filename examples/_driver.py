"""What the examples run on: CUDA where there is a GPU, else a simulated one, and they say so.

The library never does this by itself: what was asked for and is not there must be an error.
"""

from __future__ import annotations

import os

from greensched import DriverUnavailable
from greensched import driver as drivers
from greensched.driver.base import Driver

SIMULATED = "simulated:h200"


def choose() -> Driver:
    """The driver that `GREENSCHED_DRIVER` names; without it, CUDA or a simulated GPU."""
    found = drivers.open()
    if os.environ.get(drivers.VARIABLE):  # somebody chose: not for us to choose otherwise
        return found
    try:
        found.initialise()  # the first call that touches CUDA, and tells whether there is a GPU
    except DriverUnavailable as error:
        text = f"No GPU here: {error.problem}.\nThis runs on a simulated one ({SIMULATED})."
        print(text, flush=True)  # a service prints nothing more for a long time
        return drivers.open(SIMULATED)
    return found
