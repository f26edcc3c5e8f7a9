"""The entry point of the command `greensched`.

It needs only the standard library until the command line itself is loaded, so that `greensched
doctor` runs even in a broken installation.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: success. 1: the answer is no: a result was wrong, no device can be split as requested, or no
    pool can be opened here. 2: the command could not run; one line on standard error says why.
    130: interrupted.
    """
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from greensched.cli import commands
    except Exception as error:  # a broken installation can raise anything
        return _without_click(args, error)
    return commands.run(args)


def _without_click(arguments: list[str], error: Exception) -> int:
    """Run `doctor`, which needs no package; for other commands say why they cannot run."""
    if arguments[:1] == ["doctor"]:
        from greensched.cli import doctor

        words = " ".join(arguments).replace("--driver=", "--driver ").split()
        chosen = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--driver"]
        return doctor.main(chosen[-1] if chosen else None, as_json="--json" in words)
    print(
        f"greensched: the command line cannot be loaded ({error}): "
        "greensched doctor says what is missing",
        file=sys.stderr,
    )
    return 2
