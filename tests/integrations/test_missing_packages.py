"""An integration without its library says how to install it."""

from __future__ import annotations

import re
import sys
from importlib import import_module

import pytest

from greensched.errors import MissingPackage, install_command


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("asgi", "starlette"),
        ("cupy", "cupy"),
        ("numba", "numba"),
        ("nvtx", "nvtx"),
        ("opentelemetry", "opentelemetry"),
        ("prometheus", "prometheus_client"),
        ("ray", "ray"),
        ("torch", "torch"),
        ("warp", "warp"),
    ],
)
def test_an_integration_names_its_extra(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import raises one error with the command; an extra has the name of its integration."""
    module = f"greensched.integrations.{name}"
    for loaded in [each for each in sys.modules if f"{each}.".startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingPackage, match=f"{module} needs .*{re.escape(install_command(name))}"
    ):
        import_module(module)
