"""What our pytest plugin adds to a suite that does not use it, in new interpreters.

`python -m benchmarks.micro.pytest_plugin`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.lib.timing import Comparison, Row, name_of, table

#: Interpreters for each.
NUMBER = 40
#: Tests of the suite, all empty: what a plugin costs for each test counts.
TESTS = 100
#: The bar: seconds that it may add.
MOST_S = 5e-3
#: A low percentile: other processes can only lengthen a run.
PART = 0.25

#: Runs in the interpreter: the clock is around the whole run, with the import of the plugins and
#: without that of pytest. The run waits for nothing, so its processor time is measured, which other
#: processes lengthen least.
_PROGRAM = """
import sys
from time import process_time
import pytest
start = process_time()
code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]])
print(process_time() - start)
sys.exit(code)
"""
_SUITE = "import pytest\n\n@pytest.mark.parametrize('n', range({}))\ndef test(n):\n    pass\n"


def measure() -> list[Row]:
    """Return a suite's time with our plugin and with an empty one; the bar is on the difference."""
    found = Comparison("a suite with the plugin | with an empty one")
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder, "test_unrelated.py")
        suite.write_text(_SUITE.format(TESTS))
        Path(folder, "empty.py").write_text("")
        sides = [("greensched", found.ours), ("empty", found.theirs)]
        for number in range(NUMBER + 1):
            for plugin, rounds in sides[:: 1 if number % 2 else -1]:
                seconds = _seconds(suite, plugin)
                if number:  # the first fills the file caches, and writes the bytecode
                    rounds.append(np.array([seconds]))
    ours, theirs = found.at(PART)
    low, high = found.interval(PART, lambda a, b: 1e3 * (a - b))
    return [
        Row(
            f"{found.what}, {name_of(PART)}",
            1e3 * ours,
            1e3 * theirs,
            "ms",
            found.interval(PART, lambda a, b: a / b),
            f"<= empty + {1e3 * MOST_S:g} ms: + {1e3 * (ours - theirs):.2f} [{low:.2f} {high:.2f}]",
            ours - theirs <= MOST_S,
        )
    ]


def _seconds(suite: Path, plugin: str) -> float:
    """Return the processor seconds of one run, without any other plugin."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "-p", plugin, str(suite)],
        env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=suite.parent,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return float(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(table(measure()))
