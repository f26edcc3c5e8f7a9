"""A cache directory of their own for the tests that compile, and the facts of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from greensched.kernels import cache
from greensched.typing import DeviceFacts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a new cache in its own directory."""
    directory = tmp_path / "cubins"
    monkeypatch.setenv("GREENSCHED_CACHE_DIR", str(directory))
    monkeypatch.setattr(cache, "_shared", None)
    return directory


@pytest.fixture(scope="session")
def facts() -> DeviceFacts:
    """Return an H200's facts."""
    return DeviceFacts(
        ordinal=0,
        name="H200",
        uuid="GPU-0",
        compute_capability=(9, 0),
        sm_count=132,
        memory_bytes=141 * 10**9,
        l2_bytes=60 * 2**20,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_sm=2048,
        max_block=(1024, 1024, 64),
        max_grid=(2**31 - 1, 65535, 65535),
        max_shared_bytes=227 * 1024,
        copy_engines=3,
    )
