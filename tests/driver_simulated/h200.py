"""A real H200's answers, as they were recorded: driver 580, CUDA 13.0.

They are the judge: where they and the simulated driver disagree, the simulated driver is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[2] / "docs/measurements/h200-580"

PROBE: dict[str, Any] = json.loads((_FOLDER / "probe.json").read_text())
FIRST_USE_HOLDS: dict[str, Any] = json.loads((_FOLDER / "first-use-holds.json").read_text())
STUCK_AND_LOST: dict[str, Any] = json.loads((_FOLDER / "stuck-and-lost.json").read_text())

_major, _minor = divmod(PROBE["device"]["driver"], 1000)
#: The same machine, simulated.
SPEC = f"h200@{_major}.{_minor // 10}"
