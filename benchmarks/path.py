"""Print the files of greensched that a launch, a call and a queued lease pass through.

`python -m benchmarks.path [--check]` runs each operation once, warm, on the simulated driver with
the real clock under asyncio, and records every Python call on every thread (`sys.setprofile`).
For each operation it prints the files in the order in which they are first entered, counts them,
and lists the calls from a lower package into a higher one. With `--check` the exit code is 1 if an
operation passes more files than `MOST_FILES` allows, or if a lower package calls a higher one
directly.

**What counts as a file.** Each file under `src/greensched` whose code runs between the call and its
result, on any thread. Two packages count as one file each: `driver/`, because the simulated
driver's files stand for the GPU and are no part of the path on a real one, and `scheduling/`, which
is pure and answers in one call. Before the packages had their present form this program counted 12,
13 and 15 files; a walk through the source by hand, cold branches included, 19, 14 and 16.

**The layers** are those of the import contract "Packages import downwards" in `pyproject.toml`.

**Which upward calls are allowed.** The expression at the call site decides:

* a *callback*: the callable is a value that the higher package handed over. It is held in a
  parameter, in a local variable, in a container or in an instance attribute, or it reaches the
  caller through a function written in C (`Context.run`, a `weakref` callback);
* an *interface*: a method that a base class or a `Protocol` of the lower package declares, on an
  object that the higher package handed over;
* anything else is *direct*: a method of a higher class that no lower class declares, an imported
  function, a hook in a module.

Callbacks and interfaces are printed and allowed. What this method cannot see: which package stored
a callable in an attribute (a lower module could import a higher function and store it itself, which
the import contract forbids), and calls from C code into C code.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import inspect
import sys
import threading
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import greensched
from greensched import LaunchConfig, Pool, Program
from greensched import driver as drivers
from greensched.typing import Cost, LaunchFacts

ROOT = Path(__file__).parents[1]
#: Files that an operation passes at most.
MOST_FILES = {"p.launch, await": 9, "p.run, await": 9, "a queued lease, granted": 9}
#: Runs before the one that is traced.
WARM_UP = 5
SMS = 16

#: A kernel that is long enough for its task to wait, and whose reference is outside of the package.
kernel = Program('extern "C" __global__ void wait_for() {}', name="path.cu").kernel("wait_for")
_COST = Cost(fixed_ns=300_000.0)


@kernel.reference
def _do_nothing(_: LaunchFacts) -> None: ...


@kernel.cost
def _take_300_us(_: LaunchFacts) -> Cost:
    return _COST


# -- layers -----------------------------------------------------------------------------------


def layers() -> dict[str, int]:
    """Return each package with its layer's number, the lowest first, as the contract has them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    (rows,) = (each["layers"] for each in contracts if each["type"] == "layers")
    return {
        name.strip(): number
        for number, row in enumerate(reversed(rows))
        for name in row.replace(":", "|").split("|")
    }


# -- tracing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpwardCall:
    """A call from a lower package into a higher one: both ends, and how it was made."""

    caller: str
    callee: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind:9}  {self.caller} -> {self.callee}"


@dataclass(slots=True)
class Trace:
    """What ran: the files in order, each with its threads, and the upward calls."""

    files: dict[str, dict[str, None]] = field(default_factory=dict)
    upward: dict[UpwardCall, None] = field(default_factory=dict)

    @property
    def direct(self) -> list[UpwardCall]:
        """The upward calls that are neither callbacks nor declared by the lower package."""
        return [call for call in self.upward if call.kind == "direct"]


class Tracer:
    """Records calls on every thread that starts after `install`, while `recording` is entered.

    Args:
        package: the package's folder.
        layers: its subpackages and modules, each with the number of its layer.
        once: subpackages whose files count as one.
    """

    def __init__(
        self, package: Path, layers: Mapping[str, int], once: tuple[str, ...] = ()
    ) -> None:
        self._folder = str(package) + "/"
        self._layers = layers
        self._once = once
        self._trace: Trace | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Profile this thread, and every thread that starts meanwhile."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # accepted, as sys.setprofile does

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Record what runs meanwhile. The garbage collector is off: it calls from anywhere."""
        gc.collect()
        gc.disable()
        trace = self._trace = Trace()
        try:
            yield trace
        finally:
            self._trace = None
            gc.enable()

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        trace = self._trace
        if trace is None or event != "call":
            return
        name = self._file_of(frame.f_code)
        if name is None:
            return
        threads = trace.files.setdefault(self._counted_as(name), {})
        threads[threading.current_thread().name] = None
        caller = self._caller_of(frame)
        if caller is None:
            return
        site = self._file_of(caller.f_code)
        assert site is not None
        if self._layer(site) < self._layer(name):
            call = UpwardCall(
                f"{site}:{caller.f_lineno} {caller.f_code.co_qualname}",
                f"{name} {frame.f_code.co_qualname}",
                self._kind(caller, frame, self._layer(site)),
            )
            trace.upward[call] = None

    def _file_of(self, code: CodeType) -> str | None:
        """Return the file of a function, from the package on; None if it is another package's."""
        file = code.co_filename
        return file.removeprefix(self._folder) if file.startswith(self._folder) else None

    def _counted_as(self, name: str) -> str:
        part = name.split("/", 1)[0]
        return f"{part}/" if part in self._once else name

    def _caller_of(self, frame: FrameType) -> FrameType | None:
        """Return the nearest frame of the package: the standard library in between is skipped.

        A coroutine that the event loop resumes has none; the caller's own code ends the search.
        """
        at = frame.f_back
        while at is not None:
            if self._file_of(at.f_code) is not None:
                return at
            if at.f_code.co_filename == __file__:
                return None
            at = at.f_back
        return None

    def _layer(self, name: str) -> int:
        part = name.split("/", 1)[0].removesuffix(".py")
        return self._layers.get(part, len(self._layers))  # __init__ and __main__ are above all

    # -- how a call was made ------------------------------------------------------------------

    def _kind(self, caller: FrameType, callee: FrameType, layer: int) -> str:
        if _is_value(caller, callee):
            return "callback"
        return "interface" if self._is_declared(callee, layer) else "direct"

    def _is_declared(self, callee: FrameType, layer: int) -> bool:
        """Return whether a class at this layer or below declares the method that is called."""
        code = callee.f_code
        if not code.co_argcount or code.co_varnames[0] != "self":
            return False
        kind, name = type(callee.f_locals["self"]), code.co_name
        bases = [base for base in kind.__mro__[1:] if name in vars(base)]
        protocols = [one for one in self._protocols(layer) if _satisfies(kind, one, name)]
        return bool(protocols) or any(self._class_layer(base) <= layer for base in bases)

    def _protocols(self, layer: int) -> list[type]:
        return [
            each
            for module in list(sys.modules.values())
            if (getattr(module, "__file__", None) or "").startswith(self._folder)
            for each in vars(module).values()
            if isinstance(each, type)
            and getattr(each, "_is_protocol", False)
            and self._class_layer(each) <= layer
        ]

    def _class_layer(self, kind: type) -> int:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if not file.startswith(self._folder):
            return len(self._layers)
        return self._layer(file.removeprefix(self._folder))


def _satisfies(kind: type, protocol: type, name: str) -> bool:
    """Return whether a class has all that a protocol asks for, this name among it."""
    members = {
        each
        for base in protocol.__mro__
        if getattr(base, "_is_protocol", False)
        for each in [*vars(base), *inspect.get_annotations(base)]
        if not each.startswith("_")
    }
    instance = {*dir(kind), *(n for base in kind.__mro__ for n in inspect.get_annotations(base))}
    return name in members and all(each in instance or each in _set_in(kind) for each in members)


@cache
def _set_in(kind: type) -> frozenset[str]:
    """Return the attributes that the class's `__init__` sets."""
    code = getattr(kind.__init__, "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def _is_value(caller: FrameType, callee: FrameType) -> bool:
    """Return whether what was called is a value that the caller holds, by the call's expression."""
    node = _expression(caller)
    if isinstance(node, ast.Call):
        return _held_value(node.func, caller, callee)
    if isinstance(node, ast.Attribute):  # a property
        return node.attr != callee.f_code.co_name
    # `with`, `await`, `for`, an operator: a method of an object, unless it is no such
    # method at all: a destructor, a weak reference's callback.
    name = callee.f_code.co_name
    return not (name.startswith("__") and name.endswith("__")) or name == "__del__"


def _held_value(called: ast.expr, caller: FrameType, callee: FrameType) -> bool:
    if isinstance(called, ast.Name):
        code = caller.f_code
        is_local = called.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        value = caller.f_locals.get(called.id)
        return is_local and not isinstance(value, type) and not _is_imported(called.id, caller)
    if isinstance(called, ast.Attribute):
        return _held_attribute(called, caller, callee)
    return True  # an element of a container, or what another call returned


def _held_attribute(called: ast.Attribute, caller: FrameType, callee: FrameType) -> bool:
    try:
        holder = _value_of(called.value, caller)
    except LookupError:
        return called.attr != callee.f_code.co_name
    if isinstance(holder, ModuleType):
        return False
    found = inspect.getattr_static(type(holder), called.attr, None)
    if found is None or inspect.ismemberdescriptor(found):
        return True  # an attribute of the instance
    # A method written in C, such as `Context.run`, passes on what it was given.
    return not (inspect.isroutine(found) and hasattr(found, "__code__")) and not isinstance(
        found, property | classmethod | staticmethod
    )


def _value_of(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a dotted name in a frame.

    Raises:
        LookupError: the expression is anything else, or the name is bound no more.
    """
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals):
            if node.id in names:
                return names[node.id]
    if isinstance(node, ast.Attribute):
        try:
            return getattr(_value_of(node.value, frame), node.attr)
        except AttributeError as error:
            raise LookupError(node.attr) from error
    raise LookupError(ast.dump(node))


def _expression(frame: FrameType) -> ast.AST | None:
    """Return the expression that a frame is evaluating."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return _expressions(frame.f_code.co_filename).get(positions)


def _is_imported(name: str, frame: FrameType) -> bool:
    """Return whether the frame's function imports this name itself."""
    first = frame.f_code.co_firstlineno
    for node in ast.walk(_tree(frame.f_code.co_filename)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            begin = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if begin == first:
                imports = (n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom))
                return any((a.asname or a.name) == name for each in imports for a in each.names)
    return False


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


@cache
def _expressions(file: str) -> dict[tuple[int | None, ...], ast.AST]:
    """Return a file's expressions by where they stand; of several at a place, the outermost."""
    found: dict[tuple[int | None, ...], ast.AST] = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.expr):
            place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            found.setdefault(place, node)
    return found


# -- the operations ---------------------------------------------------------------------------

Operation = Callable[[Pool], Awaitable[None]]


def _nothing() -> None:
    """Be called by `p.run`."""


@asynccontextmanager
async def _launched(pool: Pool, tracer: Tracer) -> AsyncIterator[Trace]:
    config = LaunchConfig(grid=1, block=32)
    async with pool.partition(SMS) as p:
        for _ in range(WARM_UP):
            await p.launch(config, kernel)
        with tracer.recording() as trace:
            await p.launch(config, kernel)
        yield trace


@asynccontextmanager
async def _called(pool: Pool, tracer: Tracer) -> AsyncIterator[Trace]:
    async with pool.partition(SMS) as p:
        for _ in range(WARM_UP):
            await p.run(_nothing)
        with tracer.recording() as trace:
            await p.run(_nothing)
        yield trace


@asynccontextmanager
async def _queued(pool: Pool, tracer: Tracer) -> AsyncIterator[Trace]:
    """Trace from the request until it is granted: the return of the lease before it is in it."""

    async def once(recording: AbstractContextManager[Any]) -> Any:
        over, granted = asyncio.Event(), asyncio.Event()

        async def request() -> None:
            async with pool.partition(SMS):
                granted.set()
                await over.wait()

        everything = await pool.partition(pool.devices[0].sm_count).__aenter__()
        with recording as trace:
            waiting = asyncio.create_task(request())
            await asyncio.sleep(0)
            await everything.__aexit__(None, None, None)
            await granted.wait()
        over.set()
        await waiting
        return trace

    for _ in range(WARM_UP):
        await once(nullcontext())
    yield await once(tracer.recording())


OPERATIONS = dict(zip(MOST_FILES, (_launched, _called, _queued), strict=True))


def trace_all() -> dict[str, Trace]:
    """Trace each operation, in a pool of its own."""
    package = Path(greensched.__file__).parent
    tracer = Tracer(package, layers(), once=("driver", "scheduling"))

    async def one(operation: Callable[..., Any]) -> Trace:
        driver = drivers.open("simulated:h200")
        async with (
            Pool([0], driver=driver, prepare=[kernel]) as pool,
            operation(pool, tracer) as it,
        ):
            trace: Trace = it
        driver.close()
        return trace

    with tracer.installed():
        return {name: asyncio.run(one(operation)) for name, operation in OPERATIONS.items()}


def report(name: str, trace: Trace) -> str:
    """Return an operation's files in order, and its upward calls."""
    most = MOST_FILES[name]
    verdict = "PASS" if len(trace.files) <= most else "FAIL"
    lines = [f"{name}: {len(trace.files)} files (at most {most}: {verdict})"]
    for number, (file, threads) in enumerate(trace.files.items(), 1):
        package = file.split("/", 1)[0] if "/" in file else "(top)"
        lines.append(f"  {number:2}  {package:12} {file:36} {', '.join(threads)}")
    lines.append(f"  calls from a lower package into a higher one: {len(trace.upward)}")
    lines += [f"      {call}" for call in trace.upward]
    if trace.direct:
        lines.append(f"  {len(trace.direct)} of them direct: FAIL")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.path",
        description="Print the files that a launch, a call and a queued lease pass through.",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 beyond the bars")
    options = parser.parse_args()
    traces = trace_all()
    print("\n\n".join(report(name, trace) for name, trace in traces.items()))
    is_good = all(
        len(trace.files) <= MOST_FILES[name] and not trace.direct for name, trace in traces.items()
    )
    return int(options.check and not is_good)


if __name__ == "__main__":
    raise SystemExit(main())
