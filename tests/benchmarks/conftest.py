"""Make the benchmarks importable: not every way to start pytest adds the root to the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
