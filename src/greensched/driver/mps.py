"""Whether CUDA's Multi-Process Service runs, which lets processes share a GPU's SMs by design."""

from __future__ import annotations

import os
from pathlib import Path

#: The default directory of MPS's control pipe. Source: MPS manual, "Environment Variables",
#: CUDA_MPS_PIPE_DIRECTORY.
PIPES = Path("/", "tmp", "nvidia-mps")


def is_running() -> bool:
    """Say whether the control pipe of MPS exists."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", PIPES), "control").exists()
