"""The pytest plugin: a simulated GPU for each test that asks for one, on virtual time.

It is imported in every pytest run of an environment that has greensched, so it imports pytest
alone; what it needs is loaded by the first test that asks for `sim_gpu` or `sim_pool`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from greensched.integrations.testing import SimGPU, SimPool


@pytest.fixture
def sim_gpu(request: pytest.FixtureRequest) -> Generator[SimGPU]:
    """A simulated GPU on virtual time, and what ran on it.

    An async test that asks for it runs on its clock. When the test has passed, nothing may be
    leased or alive on the GPU: else the test fails, and is told what is left.
    """
    from greensched.integrations.testing import SimGPU

    gpu, verdict = SimGPU(), _Verdict(request.node)
    manager = request.config.pluginmanager
    manager.register(verdict)
    try:
        yield gpu
    finally:
        manager.unregister(verdict)
        left = gpu.end()
    if left and verdict.has_passed:  # else the failure's own traceback may hold what is left
        pytest.fail(f"the test left something behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture
def sim_pool(sim_gpu: SimGPU) -> SimPool:
    """Makes pools, each over a simulated GPU of its own and not open yet; options as of `Pool`.

    `async with sim_pool(sms=132, faults=[Fail("allocate")]) as pool: ...`
    """
    return sim_gpu.pool


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Has an async test that asks for `sim_gpu` run on its clock, whoever else would run it."""
    if "sim_gpu" in pyfuncitem.fixturenames:
        _take_over(pyfuncitem)
    return (yield)


def _take_over(item: pytest.Function) -> None:
    """Replaces an async function by one that runs it on the virtual clock.

    In the place where pytest-asyncio and anyio look: they see a plain function then.
    """
    main = item.obj
    if type(item).__module__.startswith("pytest_asyncio"):  # which has wrapped it by now
        main = getattr(main, "__wrapped__", main)
    if not inspect.iscoroutinefunction(main):
        return
    arguments: dict[str, Any] = item.funcargs
    backend = arguments.get("anyio_backend", "asyncio")
    if isinstance(backend, tuple):
        backend, options = backend
        if "loop_factory" in options:  # anyio's, on our clock: its async fixtures are there, too
            return
    item.obj = _on_clock(arguments["sim_gpu"], main, backend)


def _on_clock(gpu: SimGPU, main: Callable[..., Any], backend: Any) -> Callable[..., None]:
    """A plain function in place of an async one."""

    def test(**arguments: Any) -> None:
        gpu.run(partial(main, **arguments), backend=backend)

    return test


class _Verdict:
    """Whether a test has passed, for its fixtures. Registered only while they are in use."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self.has_passed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if item is self._item and call.when == "call":
            self.has_passed = report.passed
        return report
