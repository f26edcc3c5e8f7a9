"""docs/frameworks.md, followed to the letter: its application, and its tests of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def block(kind: str) -> str:
    """The one block of a kind."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_pages_tests_pass_on_the_pages_application(tmp_path: Path) -> None:
    """Whoever copies both into a folder and runs pytest there sees three tests pass."""
    (tmp_path / "app.py").write_text(block("python"))
    (tmp_path / "test_app.py").write_text(block("py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
