"""A plugin of pytest: each driver call of a scenario fails in turn, and what follows is judged.

    python -m pytest -p tests.faults.every_call --every-call 8 tests/conformance

A scenario is a test with the fixture `backend` on a virtual clock, where each run makes the same
driver calls in the same order; or, with `--driver cuda`, on the stand-in, whose own function fails,
so that the binding reports it. It runs untouched, and then with the 1st, 2nd, 3rd ... call failing,
once and from there on, with a status of each class. `--every-call 8` runs eight of these
combinations of each scenario, spread by `--every-call-seed`; 0 runs all of them.

After each run:

- What the test got is an error of the library that tells the injected status, or the test passed.
- Nothing is alive on the device, unless what failed is what ends things, or the device is lost.
- A new pool on the same driver does a job, or says that the device is lost.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_longlong
from types import FrameType
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

import greensched
from greensched import LaunchConfig, Pool
from greensched.driver.blocking import DRIVER_CALLS
from greensched.driver.cuda.driver import CudaDriver
from greensched.driver.simulated import SimulatedDriver
from greensched.driver.simulated.faults import FaultScript
from greensched.driver.status import STATUS_NAMES, STICKY
from greensched.kernels import fill
from helpers import waiting
from helpers.backend import Backend, standin_library
from helpers.kept import destroy_kept

#: One status of each class, and DEINITIALIZED, which is sticky though its class is LIFECYCLE.
STATUSES = {
    "INVALID_VALUE": 1,
    "OUT_OF_MEMORY": 2,
    "ILLEGAL_ADDRESS": 700,
    "INVALID_CONTEXT": 201,
    "DEINITIALIZED": 4,
    "SYSTEM_NOT_READY": 802,
}
#: What a run may take: seconds of virtual time, of the processor, and in all.
VIRTUAL_S, CPU_S, REAL_S = 100_000.0, 5.0, 60.0
#: The turns of a loop that a test of a scenario waits for a condition.
TURNS = 5_000

#: Calls that end something: what they refuse to end stays alive.
ENDING = {"destroy_stream", "destroy_event", "destroy_green", "destroy_context", "release_primary",
          "free_host", "free", "destroy_memory_pool", "unload_code", "destroy_graph",
          "destroy_executable", "end_capture", "synchronize_stream", "synchronize_context",
          "unregister_host"}  # fmt: skip
#: Functions of the library that end what a pool or device has.
ENDS = {"close", "_close", "_end"}
ONE = LaunchConfig(grid=1, block=1)
#: Objects of the stand-in that earlier runs left.
LEFT = [0]


class Combination(NamedTuple):
    """The number of the call that fails, from 1; whether all later ones do, too; the status."""

    nth: int
    forever: bool
    status: str

    def __str__(self) -> str:
        return f"{self.nth}{'+' if self.forever else ''}:{self.status}"

    @classmethod
    def parse(cls, text: str) -> Combination:
        """Read what `str` made."""
        nth, status = text.split(":")
        return cls(int(nth.rstrip("+")), nth.endswith("+"), status)


class Injector:
    """Count the driver calls of all simulated drivers, and fail some of them."""

    def __init__(self, combination: Combination | None = None) -> None:
        self.combination = combination
        self.calls: list[str] = []
        self.failed: list[str] = []
        #: The functions of the library that made the failed calls, and were around them.
        self.functions: dict[str, None] = {}
        self.places: dict[int, list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    def __call__(self, name: str) -> int | None:
        """Count a call; return the status that it must return, or None."""
        with self._lock:
            self.calls.append(name)
            if self.combination is None:
                self.places[_place()].append(len(self.calls))
            fails = self.combination is not None and (
                len(self.calls) == self.combination.nth
                or (self.combination.forever and len(self.calls) > self.combination.nth)
            )
            if fails:
                self.failed.append(name)
                self.functions |= {frame.f_code.co_name: None for frame in _frames()}
        return STATUSES[self.combination.status] if fails and self.combination else None


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the library around a driver call, without the drivers'."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/greensched/" in file and "/simulated/" not in file and "/driver/cuda/" not in file:
            yield frame
        frame = frame.f_back


def _place() -> int:
    """Tell apart by a number from where in the library a driver call is made."""
    return hash(tuple((frame.f_code.co_filename, frame.f_lineno) for frame in _frames()))


class Hung(BaseException):
    """A run that did not end."""


@contextmanager
def injected_in_standin(injector: Injector) -> Iterator[None]:
    """Have functions of the stand-in fail, and note in which driver call they did."""
    standin, combination, calls = standin_library(), injector.combination, dict[str, Any]()
    assert standin is not None
    standin.stubcuda_fallible_calls.restype = standin.stubcuda_injected.restype = c_longlong
    began = standin.stubcuda_fallible_calls()

    def noted(name: str, call: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            before = standin.stubcuda_injected()
            try:
                return call(*args, **kwargs)
            finally:
                if standin.stubcuda_injected() != before:
                    injector.failed.append(name)
                    injector.functions |= {frame.f_code.co_name: None for frame in _frames()}

        return noting

    if combination is not None:
        for name in DRIVER_CALLS:
            calls[name] = getattr(CudaDriver, name)
            setattr(CudaDriver, name, noted(name, calls[name]))
        fail = standin.stubcuda_fail_from if combination.forever else standin.stubcuda_fail_nth
        fail(c_longlong(combination.nth), STATUSES[combination.status])
    try:
        yield
    finally:
        standin.stubcuda_fail_nth(c_longlong(0), 0)
        standin.stubcuda_fail_from(c_longlong(0), 0)
        for name, call in calls.items():
            setattr(CudaDriver, name, call)
        made = standin.stubcuda_fallible_calls() - began
        injector.calls = ["?"] * made
        injector.places = {nth: [nth] for nth in range(1, made + 1)}


@contextmanager
def injected(injector: Injector) -> Iterator[None]:
    """Ask an injector at each simulated driver call."""
    call = FaultScript.call

    def counted(script: FaultScript, name: str) -> tuple[int | None, float]:
        status, seconds = call(script, name)
        return (injector(name) if status is None else status), seconds

    FaultScript.call = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        FaultScript.call = call  # type: ignore[method-assign]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and contexts, and those of the members of a group."""
    seen, found = set[int](), [error]
    while found:
        e = found.pop()
        if id(e) in seen:
            continue
        seen.add(id(e))
        yield e
        found += [x for x in (e.__cause__, e.__context__, getattr(e, "cause", None))
                  if isinstance(x, BaseException)]  # fmt: skip
        found += getattr(e, "exceptions", ())


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group, of whatever depth, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


class Run(NamedTuple):
    """What came of one run of a scenario."""

    error: BaseException | None
    calls: list[str]
    failed: list[str]
    #: What was logged as a warning or worse, and what finalisers raised.
    told: str
    unraisable: list[str]
    #: The numbers of the calls from each place in the library.
    places: list[list[int]]
    #: The library's functions around the failed calls, those of the first one first.
    functions: list[str]


def judge_error(run: Run, combination: Combination, uses_pool: bool) -> str | None:
    """Say what is wrong with what the test got, or None.

    A scenario without a pool ends its objects itself: where a failure interrupts it, one of them
    may refuse to end for another.
    """
    if run.unraisable:
        return f"a finaliser raised {run.unraisable[0]}"
    if run.error is None:
        return None
    if isinstance(run.error, Hung):
        return str(run.error)
    chain = list(_chain(run.error))
    told = any(
        isinstance(e, greensched.GreenschedError) and combination.status in str(e) for e in chain
    )
    for leaf in _leaves(run.error):
        if isinstance(leaf, waiting.NeverHeld):  # it waits for what a failed job does not have
            told = True
        elif isinstance(leaf, greensched.WouldBlock):  # of an executor that the pool does without
            told = told or combination.status in run.told
        elif isinstance(leaf, (AssertionError, pytest.fail.Exception)):
            told = told or combination.status in f"{leaf} {run.told}"
        elif not isinstance(leaf, greensched.GreenschedError):
            return f"no error of the library: {_text(leaf)}"
    return None if told or not uses_pool else f"the cause is lost: {_text(run.error)}"


def _text(error: BaseException) -> str:
    lines = (str(error).splitlines() or [""])[:1]
    return f"{type(error).__name__}: {lines[0][:150]}"


def _uses_pool(source: str) -> bool:
    return re.search(r"[pP]ool\(", source) is not None


def judge_rest(run: Run, combination: Combination, backend: Backend, source: str) -> str | None:
    """Say what is alive that should not be, and whether a next pool works; or None."""
    lost = _is_lost(run)
    for driver in backend._drivers if _uses_pool(source) else ():
        alive = left_alive(driver)
        if alive and not lost and not _may_leave(run, combination, source):
            return f"alive: {alive}"
    if backend._drivers and not lost:
        error = next_job(backend)
        if error is not None and not isinstance(error, greensched.DeviceLost):
            return f"the next pool does not work: {_text(error)}"
    return None


def left_alive(driver: Any) -> object:
    """Return what is alive on a device, on the stand-in what came to be so since the last time."""
    if isinstance(driver, SimulatedDriver):
        return driver.live()
    standin = standin_library()
    assert standin is not None
    destroy_kept(driver)
    before, LEFT[0] = LEFT[0], standin.stubcuda_live(None)
    return max(0, LEFT[0] - before)


def _may_leave(run: Run, combination: Combination, source: str) -> bool:
    """Return whether what failed is what ends things, and the library has told that.

    Or the test entered a partition without a block, was interrupted, and the pool says that it was
    closed over the lease.
    """
    if "__aenter__" in source and "closed over leases or work" in run.told:
        return True
    ends = ENDS.intersection(run.functions) or ENDING.intersection(run.failed)
    told = combination.status in run.told or run.error is not None
    return told and bool(combination.forever or ends)


def _is_lost(run: Run) -> bool:
    """Return whether the library said that the device is lost."""
    faults = (greensched.DeviceLost, greensched.DeviceFault)
    if run.error is not None and any(isinstance(e, faults) for e in _chain(run.error)):
        return True
    return any(f"{STATUS_NAMES[status]} ({status})" in run.told for status in STICKY)


def next_job(backend: Backend) -> BaseException | None:
    """Open a pool on the scenario's driver, and do a job; return what prevented it."""

    async def main() -> None:
        with anyio.fail_after(VIRTUAL_S):
            async with Pool(driver=backend._drivers[0], devices=[0]) as pool:
                async with pool.partition(8) as p:
                    with await p.upload(np.full(8, 2.0, np.float32)) as b:
                        await p.launch(ONE, fill, b, 2.0, 8)  # the stand-in runs no device code
                        assert (await p.download(b)).tolist() == [2.0] * 8

    try:
        with limited():
            backend.run(main)
    except (Exception, Hung) as error:
        return error
    return None


@contextmanager
def limited() -> Iterator[None]:
    """Raise `Hung` in the block after a time of the processor that no run takes."""

    def end(*_: object) -> None:
        raise Hung("hung in " + " < ".join(f.name for f in reversed(traceback.extract_stack())))

    limits = {
        signal.ITIMER_PROF: (signal.SIGPROF, CPU_S),
        signal.ITIMER_REAL: (signal.SIGALRM, REAL_S),
    }
    before = {number: signal.signal(number, end) for number, _ in limits.values()}
    for timer, (_, seconds) in limits.items():
        signal.setitimer(timer, seconds, 1.0)  # again, where a handler took the first for its own
    try:
        yield
    finally:
        for timer in limits:
            signal.setitimer(timer, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


class Told(logging.Handler):
    """Keeps what the library logs as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def run_once(item: pytest.Function, backend: Backend, combination: Combination | None) -> Run:
    """Run a scenario on a new backend, with one combination injected."""
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    told, unraisable, injector = Told(), list[str](), Injector(combination)
    logger, error = logging.getLogger("greensched"), None
    hook, sys.unraisablehook = sys.unraisablehook, lambda u: unraisable.append(repr(u.exc_value))
    logger.addHandler(told)
    run = backend.run

    def limited_run(main: Any, *args: object) -> Any:
        async def bounded() -> Any:
            with anyio.fail_after(VIRTUAL_S):
                return await main(*args)

        return run(bounded)

    backend.run = limited_run  # type: ignore[method-assign]
    try:
        inject = injected if backend.is_simulated else injected_in_standin
        with pytest.MonkeyPatch.context() as patched, limited(), inject(injector):
            arguments |= {"backend": backend}
            if "monkeypatch" in arguments:
                arguments["monkeypatch"] = patched
            if combination is not None:  # a warning tells, also where a test looks at errors alone
                patched.setattr(logger, "isEnabledFor", lambda level: level >= logging.WARNING)
                patched.setattr(waiting, "LIMIT", TURNS)
            try:
                item.obj(**arguments)
            except (Exception, Hung, pytest.fail.Exception) as e:
                if combination is None:
                    raise
                error = e
    finally:
        logger.removeHandler(told)
        backend.run = run  # type: ignore[method-assign]
        for handler in logging.getLogger().handlers:
            if hasattr(handler, "reset"):
                handler.reset()
        del arguments
        gc.collect()
        sys.unraisablehook = hook
    return Run(
        error,
        injector.calls,
        injector.failed,
        "\n".join(told.lines),
        unraisable,
        list(injector.places.values()),
        list(injector.functions),
    )


def judge(item: pytest.Function, combination: Combination) -> str | None:
    """Run a scenario with a combination; return what is wrong, or None."""
    kind, loop, *version = item.callspec.params["backend"]
    backend = Backend(kind, loop, *version)
    source = inspect.getsource(item.obj)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = run_once(item, backend, combination)
        wrong = judge_error(run, combination, _uses_pool(source))
        if run.error is not None:
            for e in _chain(run.error):
                traceback.clear_frames(e.__traceback__)
                e.__traceback__ = None
        gc.collect()
        wrong = wrong or judge_rest(run, combination, backend, source)
        if wrong is None:
            with limited():
                backend.join_threads()
        for driver in backend._drivers:
            if isinstance(driver, SimulatedDriver):
                driver.close()
            else:  # the thread goes on to the next run
                while driver.current() is not None:
                    driver.pop_current()
        where = " < ".join([*run.failed[:1], *run.functions[:6]])
        del run, backend
        gc.collect()  # here, where what the test did not close warns of nothing
    return f"{combination} ({where}): {wrong}" if wrong else None


def combinations(places: list[list[int]], number: int, seed: int) -> list[Combination]:
    """Return every combination if the number is 0, else so many, spread over the places."""
    rest = [(forever, status) for forever in (False, True) for status in STATUSES]
    if not number:
        calls = sorted(nth for place in places for nth in place)
        return [Combination(nth, *ways) for nth in calls for ways in rest]
    chance, chosen = random.Random(seed), dict[Combination, None]()
    while len(chosen) < min(number, len(places) * len(rest)):
        for place in chance.sample(places, min(number - len(chosen), len(places))):
            chosen[Combination(chance.choice(place), *chance.choice(rest))] = None
    return list(chosen)


# -- the plugin --------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("every call", "driver calls that fail in turn")
    group.addoption("--every-call", type=int, metavar="N", help="combinations of each scenario")
    group.addoption("--every-call-seed", type=int, default=0, metavar="SEED", help="which ones")
    group.addoption("--every-call-only", metavar="NTH[+]:STATUS", help="this one: a replay")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the scenarios: tests with a backend on a virtual clock, or with a pool on the stand-in.

    A test without a pool that is interrupted may leave its contexts current, and the stand-in's
    thread goes on to the next one.
    """
    wanted = "virtual" if config.getoption("--driver") == "simulated" else "cuda"
    kept = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and getattr(item, "callspec", None) is not None
        and item.callspec.params.get("backend", ("",))[0] == wanted
        and "backend" in item._fixtureinfo.argnames  # which a fixture cannot be given anew
        and (wanted == "virtual" or _uses_pool(inspect.getsource(item.obj)))
        and "unraisablehook" not in inspect.getsource(item.obj)  # which is the plugin's
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    for item in items:
        item.add_marker(pytest.mark.timeout(0))
        # What an interrupted test did not close may be collected behind it: trio keeps a last task.
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        # A thread of a test itself gets an injected error.
        thread = "ignore::pytest.PytestUnhandledThreadExceptionWarning"
        item.add_marker(pytest.mark.filterwarnings(thread))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run a scenario untouched, and then with its combinations."""
    config, began = pyfuncitem.config, time.perf_counter()
    untouched = run_once(pyfuncitem, pyfuncitem.funcargs["backend"], None)
    seed = zlib.crc32(f"{config.getoption('--every-call-seed')}{pyfuncitem.nodeid}".encode())
    number = config.getoption("--every-call") or 0
    chosen = combinations(untouched.places, number, seed)
    if only := config.getoption("--every-call-only"):
        chosen = [Combination.parse(only)]
    wrong = [text for text in (judge(pyfuncitem, it) for it in chosen) if text]
    # A run that hung leaves its threads, which the fixture would wait for.
    pyfuncitem.funcargs["backend"]._threads_before |= set(threading.enumerate())
    pyfuncitem.user_properties.append(
        ("every_call", json.dumps([len(untouched.calls), len(chosen), wrong]))
    )
    print(f"{time.perf_counter() - began:.1f} s")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    return True


class Summary:
    """Adds up the scenarios, in the process that reports."""

    def __init__(self) -> None:
        self.scenarios = self.calls = self.runs = 0
        self.wrong: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for kind, value in report.user_properties:
            if kind == "every_call" and report.when == "call":
                calls, runs, wrong = json.loads(str(value))
                self.scenarios += 1
                self.calls += calls
                self.runs += runs
                self.wrong += [(report.nodeid, text) for text in wrong]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        write(
            f"{self.scenarios} scenarios with {self.calls} driver calls: {self.runs} combinations "
            f"of a call and a status run, {len(self.wrong)} wrong"
        )
        kinds = Counter(text.split(": ", 1)[-1] for _, text in self.wrong)
        for kind, number in kinds.most_common(10):
            write(f"{number:6} x {kind}")
        for nodeid, text in self.wrong:
            write(f"make every-call ARGS=\"--every-call-only={text.split(' ')[0]} '{nodeid}'\"")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Summary())
    if config.getoption("--driver") != "simulated":  # what runs left there has been judged
        Backend.check_nothing_left = lambda _: None  # type: ignore[method-assign]
