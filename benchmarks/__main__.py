"""Run a suite: `python -m benchmarks host`, or `python -m benchmarks gpu`.

Exit code 1 if a part failed or a bar was missed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import suites
from benchmarks.lib import plot
from benchmarks.lib.report import smi
from benchmarks.lib.timing import MachineLoad


def main() -> int:
    options = _parser().parse_args()
    load = MachineLoad()
    more = {}
    if options.suite == "gpu":
        found, contexts = suites.gpu(options.compiled)
        machine = f"{smi('name,driver_version')}; {load}"
        more = {"green contexts": contexts}
    else:
        found = suites.host(options.standin)
        if options.compiled is not None:
            compiled = suites.host_compiled(options.compiled, options.standin)
            found = {name: suites.interleave(rows, compiled[name]) for name, rows in found.items()}
        machine = str(load)
    print(suites.text(found, machine))
    for name, value in more.items():
        print(f"\n{name}: {value}")
    if options.json is not None:
        suites.save(options.json, found, machine, **more)
    if options.plot is not None:
        plot.save(found, machine, options.plot)
    return int(not suites.passed(found) or None in more.values())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run a suite.")
    parser.add_argument(
        "suite", choices=("host", "gpu"), help="host: what needs no GPU; gpu: on this machine's GPU"
    )
    parser.add_argument(
        "--standin", type=_standin, metavar="FOLDER",
        help="host: run on the stand-in libcuda.so.1 in this folder, too",
    )  # fmt: skip
    parser.add_argument(
        "--compiled", type=_compiled, metavar="FOLDER",
        help="measure the compiled build in this folder, too",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    parser.add_argument("--plot", type=plot.picture, metavar="FILE", help="draw them")
    return parser


def _standin(name: str) -> str:
    return _folder_with(name, "libcuda.so.1")


def _compiled(name: str) -> str:
    return _folder_with(name, "greensched")


def _folder_with(name: str, entry: str) -> str:
    folder = Path(name).resolve()
    if not (folder / entry).exists():
        raise argparse.ArgumentTypeError(f"{folder} has no {entry}")
    return str(folder)


if __name__ == "__main__":
    raise SystemExit(main())
