"""The sources: what an import loads, what is public, and rules for every file."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import greensched
from greensched import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "greensched"
MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: What there are integrations with.
NEIGHBOURS = {
    *("pytest", "_pytest", "starlette", "fastapi", "uvicorn"),
    *("nvtx", "opentelemetry", "prometheus_client"),
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

ERRORS = sorted(
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and value.__module__ == errors.__name__
)


# -- what is compiled, where it is asked for -----------------------------------------------------


def compiled() -> list[Path]:
    """Return the modules that mypyc compiles."""
    rules = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
    left = {path for name in rules["exclude"] for path in ROOT.glob(name[1:])}
    return [path for name in rules["include"] for path in sorted(ROOT.glob(name[1:]))
            if path not in left]  # fmt: skip


@pytest.mark.parametrize("path", compiled(), ids=lambda path: path.name)
def test_what_is_compiled_awaits_nothing(path: Path) -> None:
    """No coroutine is compiled: those of mypyc throw in a way that Python 3.12 warns of."""
    waits = ast.AsyncFunctionDef | ast.Await | ast.YieldFrom | ast.AsyncWith | ast.AsyncFor
    assert not [node.lineno for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, waits)]  # fmt: skip


# -- importing --------------------------------------------------------------------------------


def loaded_by(program: str) -> set[str]:
    """Return the modules that a fresh interpreter has after a program."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport json, sys; print(json.dumps([*sys.modules]))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout))


def test_importing_loads_neither_cuda_nor_numpy() -> None:
    """`import greensched` loads no binding of CUDA, no numpy, no event loop and no integration."""
    heavy = {"cuda", "numpy", "anyio", "trio", "asyncio", "uvloop"}
    extra = loaded_by("import greensched") - loaded_by("")
    assert not {name for name in extra if name.split(".")[0] in heavy | NEIGHBOURS}
    assert not {name for name in extra if name.startswith("greensched.driver")}
    assert not {name for name in extra if name.startswith("greensched.integrations")}


def test_looking_around_loads_no_more() -> None:
    """`dir`, the errors and the sizes of partitions load neither CUDA nor numpy."""
    program = "import greensched; dir(greensched); greensched.QueueFull; greensched.ALL"
    assert not {name.split(".")[0] for name in loaded_by(program)} & {"cuda", "numpy", "anyio"}


def test_simulating_loads_no_cuda() -> None:
    """A pool of simulated devices works without the bindings and the compiler."""
    program = """
import asyncio, greensched
from greensched.kernels import spin

async def main():
    async with greensched.Pool(driver="simulated:h200") as pool, pool.partition(16) as p:
        await p.launch(greensched.LaunchConfig(grid=1, block=1), spin, 1000)

asyncio.run(main())
"""
    loaded = loaded_by(program)
    assert not {name for name in loaded if name.split(".")[0] == "cuda"}
    assert "greensched.driver.cuda" not in loaded
    assert "trio" not in loaded
    assert "greensched.leasing.sync" not in loaded
    assert not {name.split(".")[0] for name in loaded} & NEIGHBOURS
    assert not {name for name in loaded if name.startswith("greensched.integrations")}


# -- what is public ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", greensched.__all__)
def test_what_is_public_exists_and_is_explained(name: str) -> None:
    """Every public name can be imported, is listed by `dir`, and has a docstring."""
    value = getattr(greensched, name)
    assert name in dir(greensched)
    if isinstance(value, type) or callable(value):
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}(")  # what dataclasses write by themselves
        assert value.__module__.startswith("greensched.")


def test_all_is_what_can_be_imported() -> None:
    """`from greensched import *` gives what `__all__` lists, each name once, in order."""
    assert len(set(greensched.__all__)) == len(greensched.__all__)
    given: dict[str, Any] = {}
    exec("from greensched import *", given)
    assert set(greensched.__all__) <= set(given)


def test_type_checkers_see_what_is_public() -> None:
    """A type checker sees the names that can be imported at run time."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    seen = {
        (alias.asname, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }
    starred = {"__version__", *ERRORS}  # `from greensched.errors import *`
    assert {name for name, _ in seen} | starred == set(greensched.__all__)
    for name, module in seen:
        assert getattr(importlib.import_module(str(module)), str(name)) is getattr(greensched, name)


def test_a_source_tree_that_is_not_installed_has_no_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The version is that of the installed package; without one the attribute is missing."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(vars(greensched), "__version__", raising=False)
    assert not hasattr(greensched, "__version__")
    with pytest.raises(AttributeError, match="not installed"):
        _ = greensched.__version__


@pytest.mark.parametrize("name", ["Tenant", "pools", "__nothing__", "", "open"])
def test_an_unknown_name_is_no_attribute(name: str) -> None:
    """A name that is not public raises AttributeError, which has the name."""
    with pytest.raises(AttributeError, match=re.escape(repr(name))):
        getattr(greensched, name)
    assert not hasattr(greensched, name)


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_of_one_tree(name: str) -> None:
    """Every error that greensched raises on purpose is a GreenschedError."""
    assert issubclass(getattr(errors, name), greensched.GreenschedError)


# -- what depends on what ---------------------------------------------------------------------


def imports() -> Any:
    """Return the imports between modules, also under TYPE_CHECKING and in functions.

    Those of the package itself are left out: `greensched/__init__.py` names modules of all layers.
    """
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("greensched", cache_dir=None)
    for module in graph.find_modules_directly_imported_by("greensched"):
        graph.remove_import(importer="greensched", imported=module)
    return graph


def test_no_import_cycle() -> None:
    """No module imports itself through others, not even for a type or inside a function."""
    graph = imports()
    cycles = {
        tuple(sorted(graph.find_shortest_chain(importer=imported, imported=module)))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if graph.chain_exists(importer=imported, imported=module)
    }
    assert not cycles


#: What `Any` may stand for in `device` and `execution`: values of users and of other libraries.
VALUES = {
    *("value", "_value", "args", "kwargs", "options", "key", "source"),
    *("loop", "trio", "task", "_task", "waiter", "_monitoring"),
}


def untyped(source: str) -> list[str]:
    """Return the attributes, variables and parameters annotated `Any` that are not values."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign):
            name = node.target.attr if isinstance(node.target, ast.Attribute) else None
            name = node.target.id if isinstance(node.target, ast.Name) else name
        elif isinstance(node, ast.arg) and node.annotation is not None:
            name = node.arg
        else:
            continue
        kinds = {part.strip() for part in ast.unparse(node.annotation).split("|")}
        if kinds & {"Any", "typing.Any"} and name not in VALUES:
            found.append(f"{node.lineno}: {name}")
    return found


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.startswith(("context", "device/", "execution/"))]
)
def test_nothing_reaches_upward_untyped(path: str) -> None:
    """`device` and `execution` hold no object typed `Any` through which to call a higher layer."""
    assert not untyped((SOURCE / path).read_text())


@pytest.mark.parametrize(
    "source",
    [
        "class Track:\n    def __init__(self):\n        self.owner: Any = None",
        "class Track:\n    executor: Any | None",
        "class Owner(Protocol):\n    loader: Any",
        "def hand_over(self, channel: Any) -> None: ...",
    ],
)
def test_an_untyped_reference_is_found(source: str) -> None:
    """The check above fails on a reference to a higher layer that is typed `Any`."""
    assert untyped(source)


# -- every file -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES)
def test_every_module_begins_with_a_docstring(path: str) -> None:
    """A module begins with a docstring that says what it holds."""
    assert ast.get_docstring(ast.parse((SOURCE / path).read_text()))


def test_the_package_says_that_it_is_typed() -> None:
    """py.typed is in the package, so that type checkers use its annotations."""
    assert (SOURCE / "py.typed").is_file()


def test_the_project_runs_where_it_says() -> None:
    """The package is for Python 3.11 to 3.14; NVRTC is an extra."""
    project = PROJECT["project"]
    assert project["requires-python"] == ">=3.11"
    said = {c.rsplit(" ", 1)[1] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert said == set(PYTHONS)
    needed = {re.split(r"[<>=!~ \[]", line, maxsplit=1)[0] for line in project["dependencies"]}
    assert needed == {"cuda-bindings", "anyio", "numpy", "click", "rich"}
    assert "cuda-bindings>=13,<14" in project["dependencies"]
    assert "nvrtc" in project["optional-dependencies"]
    assert project["license"] == "Apache-2.0"
    assert PROJECT["build-system"]["build-backend"] == "hatchling.build"


def tracked() -> list[Path]:
    """Return the files of the repository, as git lists them."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout: which files are the repository's is not known")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


#: Places that are of one machine: homes, scratch and working folders, and package indexes.
PLACES = re.compile(
    r"(?<![\w.)}\]/-])/(?:work|tmp|root|Users|mnt|home/(?!user\b))/?\w"
    r"|\bfile:///"
    r"|https?://(?:\d+\.\d+\.\d+\.\d+|[\w.-]+\.(?:internal|local|corp|lan))\b(?<!//127\.0\.0\.1)"
    r"|https?://\S+/simple\b"
    r"|--(?:extra-)?index-url\b"
)


def test_no_file_names_a_machine() -> None:
    """No file of the repository names a path that only one machine has."""
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), 1)
        name = path.relative_to(ROOT).as_posix()
        found += [f"{name}:{number}: {line}" for number, line in lines if PLACES.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", ["see /{}/main/src", 'open("/{}/x")', "x=/{}/y", "(/{}/a.py)"])
@pytest.mark.parametrize("place", ["work", "tmp", "home", "root"])
def test_a_machines_place_is_recognised(line: str, place: str) -> None:
    """The check above finds paths of machines."""
    assert PLACES.search(line.format(place))


@pytest.mark.parametrize("host", ["pypi.example.org/simple", "index.internal/x", "10.0.0.7:80"])
def test_a_package_index_is_recognised(host: str) -> None:
    """The check above finds hosts of one network, and none that every network has."""
    assert PLACES.search(f"from http://{host}")
    assert not PLACES.search("from http://127.0.0.1:80 or https://docs.python.org/3")
