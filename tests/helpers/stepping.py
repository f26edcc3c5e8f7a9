"""Drive a coroutine step by step, to find where it waits and to cancel it there."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: A place that can wait: (file name, qualified name of the coroutine, line).
Place = tuple[str, str, int]


@dataclass
class Steps:
    """Record where a coroutine waits, and cancel it at its `cancel_at`-th wait.

    Args:
        cancel: cancels the task that runs the coroutine; called while it is about to wait.
    """

    cancel_at: int | None = None
    cancel: Callable[[], object] = lambda: None
    waits: list[list[tuple[str, int]]] = field(default_factory=list)
    is_cancelled: bool = False

    async def drive(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it; record each wait, with the lines of the waiting frames."""
        return await _Driven(self, coroutine)

    def note(self, coroutine: Any) -> None:
        self.waits.append(list(lines(coroutine)))
        if len(self.waits) - 1 == self.cancel_at:
            self.is_cancelled = True
            self.cancel()


class _Driven:
    def __init__(self, steps: Steps, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._steps = steps
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        send: Callable[[], Any] = lambda: self._coroutine.send(None)  # noqa: E731
        while True:
            try:
                waited_for = send()
            except StopIteration as end:
                return end.value
            self._steps.note(self._coroutine)
            if asyncio.isfuture(waited_for):
                waited_for._asyncio_future_blocking = True  # as `await` leaves it for the task
            try:
                answer = yield waited_for
            except BaseException as error:
                send = lambda error=error: self._coroutine.throw(error)  # noqa: E731
            else:
                send = lambda answer=answer: self._coroutine.send(answer)  # noqa: E731


def lines(waiting: Any) -> Iterator[tuple[str, int]]:
    """Yield (file, line) of every frame of a suspended coroutine, outermost first."""
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


def awaits_in(path: Path) -> list[Place]:
    """Return every place in a file where a coroutine can wait: await, async with, async for.

    Awaitable objects written as generators count by their `yield from`.
    """
    found: list[Place] = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{name}.{node.name}" if name else node.name
        if isinstance(node, (ast.Await, ast.AsyncWith, ast.AsyncFor, ast.YieldFrom)):
            found.append((path.name, name, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(ast.parse(path.read_text()), "")
    return found
