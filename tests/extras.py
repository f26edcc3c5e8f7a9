"""Check that every extra can be installed beside the newest torch.

    python tests/extras.py

Asks pip what it would install, and installs nothing. The newest torch is named by its version:
left to itself the resolver, which has looked at the newest CUDA components first, would sooner take
an older torch than older components, without a word (docs/how-to/arrays.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def resolved(*wanted: str) -> dict[str, str]:
    """Return the packages that pip would install, by name, with their versions."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--disable-pip-version-check", "--report", "-", *wanted]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    found = (entry["metadata"] for entry in json.loads(done.stdout)["install"])
    return {one["name"].lower(): one["version"] for one in found}


def main() -> int:
    project = tomllib.loads(Path(ROOT, "pyproject.toml").read_text())["project"]
    extras = sorted(project["optional-dependencies"])
    newest = resolved("torch")["torch"]
    found = resolved(f".[{','.join(extras)}]", f"torch=={newest}")
    for name in sorted(NAMED & found.keys()):
        print(f"  {name} {found[name]}")
    print(f"{len(found)} packages: every extra ({', '.join(extras)}) beside torch {newest}")
    return 0


#: The packages that pull at each other.
NAMED = {
    "torch",
    "cuda-bindings",
    "cuda-core",
    "cuda-toolkit",
    "cupy-cuda13x",
    "numba-cuda",
    "numpy",
}


if __name__ == "__main__":
    raise SystemExit(main())
