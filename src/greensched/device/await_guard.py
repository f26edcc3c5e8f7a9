"""Detects `with context:` held across an `await`, and reports the block and the await.

A current context belongs to its thread, not to its task. If a task is suspended inside the block,
every other task of the loop runs with that context. The only sign is that a later turn of the loop
finds the block open. So the first block of a turn requests a check at the end of the turn. This
adds no cost to launches, or to blocks on threads without a loop.

* asyncio, uvloop: the check is a `call_soon`, once a turn. It runs before anything that can wake an
  await of this turn. This is reliable but late, since other tasks have run on the leaked context by
  then. A check for each block, scheduled at its start and cancelled at its end, would be too slow:
  a block then takes 993 ns, with one check a turn 222 ns, and without checks 183 ns (cuda-bindings
  13.5 on a stand-in driver).
* trio: the check is an instrument of the run, from the block to the end of the task's step, so it
  comes at the await. A callback could come too late, because trio shuffles them. A permanent
  instrument would make every checkpoint of the program a third slower.
* In asyncio's debug mode, or Python's (`-X dev`), an error replaces the warning. On Python 3.12 and
  newer `sys.monitoring` raises it at the await itself, before any other task runs. Where that is
  not possible (3.11, a block inside a generator, a coroutine that returned with its block open) it
  is raised when the block ends.

Not detected: the first step of an eager task (3.12) that another task starts inside a block. The
step is synchronous and runs on that context; a later step that holds the block is detected.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections import Counter
from dis import opname
from types import CodeType, FrameType
from typing import Any

from greensched._asynclib import running_asyncio, running_trio
from greensched.errors import HeldAcrossAwait

#: Modules with frames between a block and the code with the `with`; see `skip_frames_of`.
_skipped = {__name__, contextlib.__name__}
#: Flags of frames that can await: coroutines (also generator-based) and asynchronous generators.
#: Source: inspect, CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_ASYNC_GENERATOR.
_COROUTINE, _AWAITS = 0x80, 0x80 | 0x100 | 0x200

#: `sys.monitoring`, from Python 3.12 on.
_monitoring: Any = getattr(sys, "monitoring", None)


class _Here(threading.local):
    """The thread's open blocks, and the loop that will call `_check` at the end of the turn."""

    def __init__(self) -> None:
        self.open: list[OpenScope] = []
        self.asked: object = None


_here = _Here()


class OpenScope:
    """One open block on a loop's thread."""

    __slots__ = (
        "awaiters",
        "block",
        "context",
        "debug",
        "frame",
        "module",
        "problem",
        "runner",
        "task",
    )

    def __init__(self, context: object, runner: object, task: Any, debug: bool) -> None:
        written = _written_in(sys._getframe(2))
        self.context = context
        self.runner = runner
        #: Weak, because a task that only its own block refers to would never be collected.
        self.task = None if task is None else weakref.ref(task)
        self.debug = debug
        self.block = written.f_code.co_filename, written.f_lineno
        self.module = written.f_globals
        #: The innermost frame that can await, or None in a plain callback.
        self.frame = _awaiting(written)
        #: The frames that await that frame, nearest first; it may return with the block open.
        self.awaiters = _awaiters(self.frame)
        #: Raised when the block ends.
        self.problem: HeldAcrossAwait | None = None


def begin(context: object) -> OpenScope | None:
    """Record the start of a block on this thread; return None if no loop runs here."""
    loop = running_asyncio()
    if loop is not None:
        task = sys.modules["asyncio"].current_task(loop)
        watch = OpenScope(context, loop, task, loop.get_debug())
        if _here.asked is not loop:
            _here.asked = loop
            loop.call_soon(_check, loop)
    else:
        trio = running_trio()
        if trio is None:
            return None
        runner = trio.lowlevel.current_root_task()
        task = trio.lowlevel.current_task() if trio.lowlevel.in_trio_task() else None
        watch = OpenScope(context, runner, task, sys.flags.dev_mode)
        if _here.asked is not runner:
            _here.asked = runner
            trio.lowlevel.add_instrument(_Instrument(trio, runner))
    if watch.debug and watch.frame is not None and _monitoring is not None:
        _monitor.begin(watch.frame.f_code)
    _here.open.append(watch)
    return watch


def end(watch: OpenScope) -> HeldAcrossAwait | None:
    """Record the end of a block on the thread where it began; return the error to raise."""
    _here.open.remove(watch)
    if watch.debug and watch.frame is not None and _monitoring is not None:
        _monitor.end(watch.frame.f_code)
    return watch.problem


def awaiting() -> FrameType | None:
    """Return the innermost frame of this thread that an await can suspend."""
    return _awaiting(sys._getframe(1))


def skip_frames_of(module: str) -> None:
    """Report a block at its caller instead of in this module (given as its `__name__`)."""
    _skipped.add(module)


# -- checking -------------------------------------------------------------------------------------


def _check(runner: object) -> None:
    """Report each open block of a loop, because its turn or its task's step is over."""
    if _here.asked is runner:
        _here.asked = None
    for watch in tuple(_here.open):
        if watch.runner is runner and watch.problem is None:
            _report(watch)


class _Instrument:
    """Checks at the end of the task's step in which it was added. Trio accepts any class."""

    def __init__(self, trio: Any, runner: object) -> None:
        self._trio = trio
        self._runner = runner

    def after_task_step(self, task: object) -> None:  # noqa: ARG002  the signature of trio's Instrument
        self._trio.lowlevel.remove_instrument(self)
        _check(self._runner)


def _report(watch: OpenScope) -> None:
    """Warn at the place of the block; an error waits for the block's end."""
    problem = _problem(watch)
    if watch.debug:
        watch.problem = problem
        return
    try:
        warnings.warn_explicit(
            problem,
            HeldAcrossAwait,
            *watch.block,
            module=watch.module.get("__name__"),
            registry=watch.module.setdefault("__warningregistry__", {}),
        )
    except HeldAcrossAwait:  # warnings are errors: the block must raise it, not the callback
        watch.problem = problem
    else:
        watch.runner = None  # so that it is reported only once


def _problem(watch: OpenScope) -> HeldAcrossAwait:
    task = None if watch.task is None else watch.task()
    frame = watch.frame
    while frame is not None and _has_returned(frame):
        frame = watch.awaiters.pop(0) if watch.awaiters else None
    suspended = "an unknown place" if frame is None else _place(frame)
    holder = "a callback" if frame is None else f"coroutine {frame.f_code.co_qualname!r}"
    name = getattr(task, "get_name", lambda: getattr(task, "name", None))()
    if name is not None:
        holder = f"task {name!r}, {holder}"
    file, line = watch.block
    return HeldAcrossAwait(repr(watch.context), f"{file}:{line}", holder, suspended)


def _has_returned(frame: FrameType) -> bool:
    """Say whether a coroutine has returned, such as a helper that opens a block for its caller."""
    code = frame.f_code
    is_coroutine = bool(code.co_flags & _COROUTINE)
    return is_coroutine and opname[code.co_code[frame.f_lasti]].startswith("RETURN")


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _written_in(frame: FrameType) -> FrameType:
    """Return the frame of the code that has the `with`."""
    while frame.f_globals.get("__name__") in _skipped and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _awaiting(frame: FrameType | None) -> FrameType | None:
    """Return the frame, or else its nearest caller, that an await can suspend."""
    while frame is not None and not frame.f_code.co_flags & _AWAITS:
        frame = frame.f_back
    return frame


def _awaiters(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None and (frame := frame.f_back) and frame.f_code.co_flags & _AWAITS:
        frames.append(frame)
    return frames


# -- at the await itself ---------------------------------------------------------------------------


class _YieldMonitor:
    """Calls `_suspending` when a coroutine inside a block is suspended (PEP 669, PY_YIELD).

    Only the coroutine's own code is instrumented, and only while such a block is open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Counter[CodeType] = Counter()
        self._tool: int | None = None

    def begin(self, code: CodeType) -> None:
        if not code.co_flags & _COROUTINE:
            return  # an asynchronous generator yields values as well, without an await
        with self._lock:
            if self._tool is None and not self._claim():
                return  # debuggers and profilers have all tool ids: report at the block's end
            self._open[code] += 1
            _monitoring.set_local_events(self._tool, code, _monitoring.events.PY_YIELD)

    def end(self, code: CodeType) -> None:
        with self._lock:
            if self._open[code] > 0:
                self._open[code] -= 1
            if not self._open[code]:
                del self._open[code]
                if self._tool is not None:
                    _monitoring.set_local_events(self._tool, code, 0)

    def _claim(self) -> bool:
        """Take a tool id. 3 and 4 are unassigned. Source: sys.monitoring, "Tool identifiers"."""
        for tool in (4, 3):
            try:
                _monitoring.use_tool_id(tool, "greensched")
            except ValueError:
                continue
            _monitoring.register_callback(tool, _monitoring.events.PY_YIELD, _suspending)
            self._tool = tool
            return True
        return False


_monitor = _YieldMonitor()


def _suspending(code: CodeType, offset: int, value: object) -> None:  # noqa: ARG001  the signature of a callback of PEP 669
    """Raise at the await if the suspended coroutine has a block open."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    for watch in _here.open:
        if frame is not None and watch.frame is frame and watch.debug and watch.runner is not None:
            watch.runner = None  # reported here, and not again at the block's end
            raise _problem(watch)
