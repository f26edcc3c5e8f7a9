"""What `import greensched` costs, beside `import asyncio`, each in a new interpreter.

`python -m benchmarks.micro.import_time`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from benchmarks.lib.timing import Comparison, Row, table

#: Interpreters for each.
NUMBER = 25
#: The bar: ours as a multiple of `import asyncio`.
MOST = 4.0

#: Runs in the interpreter: the clock is around the import, without the interpreter's start.
_PROGRAM = """
from time import perf_counter
start = perf_counter()
{statement}
print(perf_counter() - start)
"""


def measure() -> list[Row]:
    """Return the time of the import, with its bar, and that of the first use of a name."""
    alone, used = Comparison("import greensched | asyncio"), Comparison("...and its Pool | asyncio")
    statements = ("import greensched", "from greensched import Pool", "import asyncio")
    for statement in statements:
        _seconds(statement)  # fills the file caches, and writes the bytecode
    for _ in range(NUMBER):
        ours, with_pool, theirs = (np.array([_seconds(s)]) for s in statements)
        alone.ours.append(ours)
        used.ours.append(with_pool)
        alone.theirs.append(theirs)
        used.theirs.append(theirs)
    return [alone.row(0.5, "ms", most=MOST), used.row(0.5, "ms")]


def _seconds(statement: str) -> float:
    command = [sys.executable, "-c", _PROGRAM.format(statement=statement)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return float(ran.stdout)


if __name__ == "__main__":
    print(table(measure()))
