"""Hosts that greensched is embedded in, as programs of their own: LitServe, BentoML, Triton."""

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
#: A host, its imports and its workers take so many seconds at most.
MOST_S = 60
IMPORT = "from greensched.kernels import reduce_sum\n"
#: Each kernel takes so long on the simulated GPU: requests of one moment are there at once.
SLOW = f"""{IMPORT}from greensched.typing import Cost

reduce_sum.spec.cost = lambda *_: Cost(fixed_ns=400_000_000)
"""


def slowed(recipe: Path, folder: Path) -> Path:
    """The same program in another folder, with a kernel that takes its time."""
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
    """All that a host prints, as it comes."""

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
        """Until it has said so; fails where it ends before that."""
        with self._more:
            assert self._more.wait_for(lambda: word in self.text or self._is_over, MOST_S)
            assert word in self.text, self.text

    @property
    def _is_over(self) -> bool:
        return self.text.endswith("[it has ended]")


@contextmanager
def hosted(command: Sequence[str], ready: str, folder: Path, **variables: str) -> Iterator[Said]:
    """A host from when it says that it is ready; behind the block it is told to end, and ends."""
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
            with suppress(ProcessLookupError):  # what it has left behind, on the way or at last
                os.killpg(process.pid, signal.SIGKILL)
            reader.join()
