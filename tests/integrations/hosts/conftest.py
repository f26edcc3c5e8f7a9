"""The recipes of embedding.md and processes.md, each in its real host; skipped without that host.

`make test-embedding` installs them.
"""

from __future__ import annotations

import pytest

from helpers.hosts import free_port


@pytest.fixture
def port() -> int:
    return free_port()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests more time: hosts import large libraries and start processes."""
    for item in items:
        if "hosts" in item.path.parts:
            item.add_marker(pytest.mark.timeout(180))
