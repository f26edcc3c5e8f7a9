"""Run examples that serve, as processes of their own."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


class Program:
    """A serving process: its address, and its output once it has ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process, self._output = process, process.stdout
        self.said = ""
        while (address := re.search(r"running on (http://127.0.0.1:\d+)", self.said)) is None:
            line = self._output.readline()
            assert line, self.said
            self.said += line
        self.address = address[1]

    def end(self) -> None:
        """End it by SIGTERM, as a supervisor does, and read its output."""
        self._process.send_signal(signal.SIGTERM)
        self.said += self._output.read()


@contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Program]:
    """Run a program while it serves; it must end without a traceback."""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        program = Program(process)
        try:
            yield program
        finally:
            program.end()
    assert process.returncode in (0, -signal.SIGTERM)  # uvicorn ends by the signal it was sent
    assert "Finished server process" in program.said
    assert "Traceback" not in program.said
