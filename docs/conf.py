"""The documentation's build: `make docs`. Nothing is fetched from the network."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.highlighting import lexers

import greensched

project = "greensched"
author = copyright = "The greensched developers"  # noqa: A001  the name is Sphinx's
version = release = version_of("greensched")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
]
exclude_patterns = ["_build", "inventories"]
nitpicky = True
nitpick_ignore = [
    ("py:class", "npt.NDArray"),
    ("py:exc", "Others"),  # "as `Pool.partition`"
    ("py:exc", "ClientDisconnect"),  # Starlette's pages name no class
    ("py:exc", "WebSocketDisconnect"),
]

html_theme = "furo"
html_title = f"greensched {version}"
html_show_sphinx = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autosummary_generate = False  # the pages of reference/api list the names in their order
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# The extras; a page describes their adapters without them.
autodoc_mock_imports = [
    *("cuda.core", "cupy", "numba", "nvtx", "opentelemetry", "prometheus_client"),
    *("ray", "torch", "warp"),
]
default_role = "literal"
highlight_language = "text"

#: Kept copies of what these pages link to, so that a machine without a network builds the same.
intersphinx_mapping = {
    name: (address, f"inventories/{name}.txt")
    for name, address in {
        "python": "https://docs.python.org/3",
        "anyio": "https://anyio.readthedocs.io/en/stable",
        "cuda": "https://nvidia.github.io/cuda-python",
        "numpy": "https://numpy.org/doc/stable",
        "torch": "https://docs.pytorch.org/docs/stable",
    }.items()
}

#: The public name of what a signature names by its module.
_PUBLIC = {
    f"{getattr(greensched, name).__module__}.{name}": f"greensched.{name}"
    for name in greensched.__all__
    if hasattr(getattr(greensched, name), "__module__")
}
#: What the inventories resolve.
_EXTERNAL = {
    line.split()[0]
    for file in (Path(__file__).parent / "inventories").iterdir()
    for line in file.read_text().splitlines()[3:]
}


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Link a type of a signature to its public name; show one that has none as text."""
    target = str(node["reftarget"])
    if node.get("refdomain") != "py":
        return None
    is_prose = "refexplicit" in node
    found = env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", _PUBLIC.get(target, target), node, content
    )
    return found or (None if is_prose or target in _EXTERNAL else content)


def _convert(
    app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Convert a docstring of Google's style; that of an attribute is plain text."""
    if what in ("attribute", "data", "property"):
        return
    text = "\n".join(lines)
    # `a, b: text` of a section would be read as a type and a name.
    names = r"^( +[a-z\d_]+), ((?:[a-z\d_]+, )*[a-z\d_]+: )"
    text = re.sub(names, _joined, text, flags=re.MULTILINE)
    text = re.sub(r"(`\w+`)(?=\w)", r"\1\\ ", text)  # the end of "`Job`s"
    text = re.sub(r"(^\S.*\n\n)(?= {4})", r"\1::\n\n", text, flags=re.MULTILINE)  # a program
    config = Config(napoleon_use_ivar=True)
    lines[:] = GoogleDocstring(text.splitlines(), config, app, what, name, obj, options).lines()


def _joined(found: re.Match[str]) -> str:
    return f"{found[1]}/{found[2].replace(', ', '/')}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the hooks."""
    lexers["csv"] = TextLexer()
    app.connect("missing-reference", _resolve, priority=400)
    app.connect("autodoc-process-docstring", _convert)
    return {"parallel_read_safe": True}
