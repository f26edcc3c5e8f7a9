"""The benchmarks stand at the root, which not every way to start pytest makes importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
