"""Run hosts that embed greensched as processes of their own: LitServe, BentoML, Triton."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "examples" / "embedding"
ENVIRONMENT = os.environ | {
    "GREENSCHED_DRIVER": "simulated:h200",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
#: The most seconds that a host, its imports and its workers take to start.
MOST_S = 60
IMPORT = "from greensched.kernels import reduce_sum\n"
#: Makes kernels slow on the simulated GPU, so that concurrent requests overlap.
SLOW = f"""{IMPORT}from greensched.typing import Cost

reduce_sum.spec.cost = lambda *_: Cost(fixed_ns=400_000_000)
"""


def slowed(recipe: Path, folder: Path) -> Path:
    """Copy a program to another folder, with slow kernels."""
    source = recipe.read_text()
    assert IMPORT in source
    made = folder / recipe.name
    made.write_text(source.replace(IMPORT, SLOW))
    return made


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Said:
    """The output of a host, line by line."""

    def __init__(self) -> None:
        self.text = ""
        self._more = threading.Condition()

    def read(self, lines: Iterator[str]) -> None:
        for line in lines:
            with self._more:
                self.text += line
                self._more.notify_all()
        with self._more:
            self.text += "[it has ended]"
            self._more.notify_all()

    def wait_for(self, word: str) -> None:
        """Wait until the output has a word; fail if the host ends before."""
        with self._more:
            assert self._more.wait_for(lambda: word in self.text or self._is_over, MOST_S)
            assert word in self.text, self.text

    @property
    def _is_over(self) -> bool:
        return self.text.endswith("[it has ended]")


@contextmanager
def hosted(command: Sequence[str], ready: str, folder: Path, **variables: str) -> Iterator[Said]:
    """Run a host: enter the block when it says that it is ready, and end it after the block."""
    said = Said()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=ENVIRONMENT | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=said.read, args=(process.stdout,))
        reader.start()
        try:
            said.wait_for(ready)
            yield said
            process.send_signal(signal.SIGTERM)
            process.wait(MOST_S)
        finally:
            with suppress(ProcessLookupError):  # also processes that it left behind
                os.killpg(process.pid, signal.SIGKILL)
            reader.join()
