"""A test that hangs is ended, even if its cleanup hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Its limit raises, and then its cleanup hangs as well.
HANGING = """
import threading

def test_hangs():
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()
"""


@pytest.mark.fault("I14")
def test_a_test_that_hangs_in_its_cleanup_is_ended(tmp_path: Path) -> None:
    """The process of a hanging test ends with the stacks of its threads, under our settings."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    limits = ("-o", "timeout=0.2", "-o", "faulthandler_timeout=2")
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly")
    config = ROOT / "pyproject.toml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", config, *plugins, *limits, tmp_path],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr
    assert "in test_hangs" in done.stderr


@pytest.mark.fault("I14")
def test_a_process_ends_after_the_limit_of_its_test(pytestconfig: pytest.Config) -> None:
    """The limit of the process exceeds a test's, so that the failure is reported."""
    of_test, of_process = (
        float(pytestconfig.getini(name)) for name in ("timeout", "faulthandler_timeout")
    )
    assert of_process > of_test
