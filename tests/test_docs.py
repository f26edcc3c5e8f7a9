"""README and docs are true: their programs run, their links resolve, their tables are whole.

Their programs run, and their links and references lead somewhere.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import greensched
import run_standin
from greensched.driver import simulated
from greensched.errors import GreenschedError
from helpers.backend import NEWER

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    + list(ROOT.glob("docs/**/*.md"))
)

#: Words of the site's pages together, programs and addresses included, as `wc -w` counts them.
MOST_WORDS = 20_000

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, kind: str) -> list[str]:
    """Return the fenced blocks of a page that are of one kind."""
    return [text for found, text in _FENCE.findall(page.read_text()) if found == kind]


#: The pages with programs.
WITH_PROGRAMS = [page for page in PAGES if blocks(page, "python")]

#: Runs each program of the standard input in a process and a folder of its own, forked from one
#: that has imported what takes long, and prints what went wrong.
EACH = """
import asyncio, json, os, sys, tempfile
import anyio._backends._asyncio, numpy, greensched.driver.simulated, greensched.integrations.testing

programs = json.load(sys.stdin)
for name, text in programs:
    sys.stdout.flush()
    if os.fork() == 0:
        os.chdir(tempfile.mkdtemp(dir=os.getcwd()))
        sys.stderr = sys.stdout
        exec(compile(text, name, "exec"), {"__name__": "__main__"})
        sys.exit()
    if os.wait()[1]:
        print(f"wrong: {name}")
"""


# -- programs ---------------------------------------------------------------------------------


def test_pages_have_programs() -> None:
    """A block fenced as python is a whole program, which the next test runs."""
    assert sum(len(blocks(page, "python")) for page in WITH_PROGRAMS) >= 7


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=name_of)
def test_every_program_of_a_page_runs(page: Path) -> None:
    """Each program succeeds on a simulated GPU."""
    found = [(f"{name_of(page)} {n}", text) for n, text in enumerate(blocks(page, "python"))]
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", EACH],
            input=json.dumps(found),
            cwd=folder,
            # A process with threads, as OpenBLAS starts some, is not forked without a warning.
            env=os.environ
            | {"GREENSCHED_DRIVER": "simulated:h200", "PYTHONPATH": ""}
            | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "wrong: " not in done.stdout, done.stdout


def test_the_readme_is_short() -> None:
    """It has 90 lines at most, and its program, which needs torch, 12 (test_torch.py runs it)."""
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 90
    [program] = blocks(readme, "py")
    assert len([line for line in program.splitlines() if line.strip()]) <= 12


# -- pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    """A relative link names a file that exists, and a heading in it if it names one."""
    for link in _LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        if heading:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}


def test_every_page_is_reached() -> None:
    """Links and tables of contents lead from README to every page."""
    seen: set[Path] = set()
    left = [ROOT / "README.md"]
    while left:
        page = left.pop()
        seen.add(page)
        linked = {(page.parent / link.partition("#")[0]).resolve() for link in _links(page)}
        left += [other for other in linked & set(PAGES) if other not in seen]
    assert set(PAGES) <= seen


def _links(page: Path) -> list[str]:
    text = page.read_text()
    contents = "".join(re.findall(r"^```{toctree}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    return [
        *(link for link in _LINK.findall(text) if ":" not in link),
        *(f"{line}.md" for line in contents.splitlines() if line and line[0] != ":"),
    ]


def test_the_pages_are_short() -> None:
    """Together they have 20,000 words at most; the Python API and the measurements do not count."""
    words = {
        name_of(page): len(page.read_text().split())
        for page in (ROOT / "docs").rglob("*.md")
        if not name_of(page).startswith(("docs/reference/api/", "docs/measurements/"))
    }
    assert sum(words.values()) <= MOST_WORDS, words


def test_every_public_name_is_in_the_reference() -> None:
    """Each has an entry in docs/reference/api, which its docstring fills."""
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference/api").glob("*.md"))
    entries = set(re.findall(r"^\.\. auto(?:class|function|data):: (\w+)$", pages, re.MULTILINE))
    whole = {f"greensched.{name}" for name in re.findall(r"automodule:: greensched\.(\S+)", pages)}
    missing = {
        name
        for name in greensched.__all__
        if name not in entries
        and getattr(getattr(greensched, name), "__module__", None) not in whole
    }
    assert missing == {"__version__"}


PUBLIC_MODULES = ["", ".typing", ".kernels", ".scheduling.policy", ".driver.simulated"]


@pytest.mark.parametrize("module", [*PUBLIC_MODULES, ".integrations.asgi", ".integrations.testing"])
def test_every_public_name_is_documented(module: str) -> None:
    """Classes, functions, methods and properties have docstrings."""
    found = import_module(f"greensched{module}")
    names = getattr(found, "__all__", None) or [
        name
        for name, value in vars(found).items()
        if name[0] != "_" and getattr(value, "__module__", None) == found.__name__
    ]
    things = {name: getattr(found, name) for name in names}
    parts = {
        f"{name}.{part}": value
        for name, thing in things.items()
        if isinstance(thing, type)
        for part in vars(thing)
        if part[0] != "_"
        and (inspect.isroutine(value := getattr(thing, part)) or isinstance(value, property))
    }
    bare = [
        name
        for name, thing in (things | parts).items()
        if (callable(thing) or isinstance(thing, property)) and not inspect.getdoc(thing)
    ]
    assert bare == []


def test_every_public_name_of_an_adapter_is_documented() -> None:
    """The source is read, because the library that an adapter is for may not be installed."""
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference/api").glob("*.md"))
    bare = []
    for name in re.findall(r"automodule:: greensched\.(integrations\.\w+)$", pages, re.MULTILINE):
        source = ROOT / "src/greensched" / f"{name.replace('.', '/')}.py"
        if source.exists():  # a package has the names of its modules
            bare += [f"{name}: {found}" for found in _bare(ast.parse(source.read_text()))]
    assert bare == []


def _bare(parent: ast.Module | ast.ClassDef) -> Iterator[str]:
    """The public classes, functions and methods of a module without a docstring."""
    for node in parent.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name[0] != "_" and ast.get_docstring(node) is None:
                yield node.name
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                yield from _bare(node)


def test_every_error_has_a_remedy() -> None:
    """The page of errors has each of them in one row, and no other."""
    rows = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE
    )
    found = {
        name
        for name, value in vars(import_module("greensched.errors")).items()
        if isinstance(value, type) and issubclass(value, GreenschedError)
    } - {"GreenschedError"}
    assert sorted(rows) == sorted(found)


@pytest.mark.parametrize("target", ["demo", "test", "check", "test-standin", "test-gpu", "bench"])
def test_a_command_that_is_named_exists(target: str) -> None:
    """README and CONTRIBUTING name the commands of the Makefile, and no others."""
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"make ([a-z]+(?:-[a-z]+)*)", _code(ROOT / name)))
        assert target in named
        for other in named:
            assert re.search(rf"^{other}:", makefile, re.MULTILINE), f"{name}: make {other}"


def _code(page: Path) -> str:
    """Return the code of a page: text in backquotes, and indented lines."""
    text = page.read_text()
    return "\n".join(
        re.findall(r"`([^`\n]+)`", text) + re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)
    )


# -- behaviours -------------------------------------------------------------------------------


def names_in(path: Path) -> set[str]:
    """Return the names of the tests of a module."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def behaviours() -> list[str]:
    """Return the lines of the tables of behaviours, without the header lines."""
    page = (ROOT / "tests/behaviours.md").read_text()
    _, *rows = re.split(r"^## ", page, flags=re.MULTILINE)
    tables = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", "\n".join(rows), re.MULTILINE)
    return [line for table in tables for line in table.splitlines()]


def test_every_behaviour_has_a_test() -> None:
    """Each line of tests/behaviours.md names tests in its last column, and they exist."""
    lines = behaviours()
    assert len(lines) > 150
    for line in lines:
        what, *_, tests = line.strip("|").split(" | ")
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named, what
        assert len(named) == tests.count("::"), what
        for path, name in named:
            assert name in names_in(ROOT / path), f"{what}: {path}::{name}"


def test_the_versions_are_those_that_are_promised() -> None:
    """The suite runs on simulated drivers of each version, on the stand-in from 13.0 on."""
    assert simulated.open().version == (13, 0)  # the default, as measured
    assert [version for _, _, version in NEWER] == ["13.1", "13.4"]
    assert simulated.VERSIONS[-1] == (13, 4)
    assert run_standin.VERSIONS == (13000, 13010)


# -- the sources ----------------------------------------------------------------------------


def test_places_the_sources_refer_to_exist() -> None:
    """Where a source names a page or a measurement in docs, it is there."""
    for source in [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        for named in re.findall(r"docs/[\w./-]+\.\w+", source.read_text()):
            assert (ROOT / named).exists(), f"{name_of(source)}: {named}"


def test_every_package_is_in_the_architecture() -> None:
    """The drawing and the table of the architecture have each package and module once."""
    page = ROOT / "docs/internals/architecture.md"
    (drawing,) = blocks(page, "text")
    rows = re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)
    found = {
        path.stem
        for path in (ROOT / "src/greensched").iterdir()
        if path.is_dir() or path.suffix == ".py"
    } - {"__init__", "__main__", "__pycache__"}
    assert set(rows) >= found, "the table"
    assert set(re.findall(r"\w+", drawing)) >= found, "the drawing"
    assert len(rows) == len(set(rows))
