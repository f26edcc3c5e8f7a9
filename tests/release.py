"""Build a release, and check what is in it.

    python tests/release.py FOLDER [--compiled]

Builds the wheel and the source distribution of the committed files twice, in copies of them: both
builds must be the same bytes. The times in them are those of the commit (SOURCE_DATE_EPOCH).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
METADATA = {"METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE", "RECORD"}
#: What a source distribution has besides the folders of the repository.
FOLDERS = "benchmarks/", "docs/", "examples/", "src/", "tests/"
FILES = {
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt"),
    *("pyproject.toml", "PKG-INFO", ".gitignore"),
}


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def built(folder: Path) -> dict[str, bytes]:
    """Return the files of a release, by name, built in a copy of the committed files."""
    tree = folder / "tree"
    archive = folder / "tree.tar"
    output("git", "archive", "--output", str(archive), "HEAD")
    with tarfile.open(archive) as files:
        files.extractall(tree, filter="data")
    environment = os.environ | {
        "SOURCE_DATE_EPOCH": output("git", "log", "-1", "--format=%ct")[:-1]
    }
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    return {path.name: path.read_bytes() for path in (folder / "dist").iterdir()}


def check_wheel(path: Path, tracked: set[str]) -> None:
    """Check that a wheel has the package's files and metadata, and nothing else."""
    with zipfile.ZipFile(path) as wheel:
        found = set(wheel.namelist())
    (info,) = {name.split("/")[0] for name in found if ".dist-info/" in name}
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    assert found == package | {f"{info}/{name}" for name in METADATA}, (
        found ^ package ^ {f"{info}/{name}" for name in METADATA}
    )


def check_sdist(path: Path, tracked: set[str]) -> None:
    """Check that an sdist has what builds, tests and documents the package, no more."""
    with tarfile.open(path) as files:
        found = {name.split("/", 1)[1] for name in files.getnames()}
    wanted = {name for name in tracked if name.startswith(FOLDERS) or name in FILES} | {"PKG-INFO"}
    assert found == wanted, found ^ wanted


def compiled(folder: Path) -> None:
    """Build a compiled wheel for this Python, in a copy: the build writes beside the sources."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        shutil.copytree(ROOT / "src", tree / "src")
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        command += ["--build-constraint", str(ROOT / "constraints.txt"), "--wheel-dir", str(folder)]
        environment = os.environ | {"HATCH_BUILD_HOOK_ENABLE_MYPYC": "1"}
        subprocess.run([*command, str(tree)], env=environment, check=True)


def main() -> int:
    folder = Path(sys.argv[1])
    tracked = set(output("git", "ls-files").splitlines())
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first, second = built(Path(one)), built(Path(other))
    assert first == second, "two builds of one commit differ"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in sorted(first.items()):
        (folder / name).write_bytes(content)
        (check_wheel if name.endswith(".whl") else check_sdist)(folder / name, tracked)
        print(f"{hashlib.sha256(content).hexdigest()}  {name}")
    if "--compiled" in sys.argv[2:]:
        compiled(folder)
        print(*(path.name for path in folder.glob("*.whl") if "py3-none" not in path.name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
