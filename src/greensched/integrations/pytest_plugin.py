"""The pytest plugin: a simulated GPU on virtual time for each test that uses its fixtures.

Every pytest run in an environment with greensched imports it, so it imports only pytest. The first
test that uses `sim_gpu` or `sim_pool` loads the rest.
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
    """Simulate a GPU in virtual time, with assertions on what ran on it.

    An async test that uses it runs on its clock. If a test passed but something is still leased or
    alive on the GPU, the test fails and lists it. The report of a failed test shows which SMs
    the leases of the pools of `sim_pool`, and the kernels of other pools, had at which time.
    """
    from greensched.integrations.testing import SimGPU

    gpu = SimGPU()
    outcome = _Outcome(request.node, gpu)
    manager = request.config.pluginmanager
    manager.register(outcome)
    try:
        yield gpu
    finally:
        manager.unregister(outcome)
        leftovers = gpu.close()
    if leftovers and outcome.has_passed:  # a failure's traceback may keep objects alive
        pytest.fail(f"the test left something behind: {'; '.join(leftovers)}", pytrace=False)


@pytest.fixture
def sim_pool(sim_gpu: SimGPU) -> SimPool:
    """Make pools, each over its own simulated GPU, and close them. Options are those of `Pool`.

    `async with sim_pool(sms=132, faults=[Fail("allocate")]) as pool: ...`
    """
    return sim_gpu.pool


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Run an async test that uses `sim_gpu` on its clock, before other plugins can run it."""
    if "sim_gpu" in pyfuncitem.fixturenames:
        _run_on_clock(pyfuncitem)
    return (yield)


def _run_on_clock(item: pytest.Function) -> None:
    """Replace an async test by a plain function that runs it on the virtual clock.

    Sets the attribute that pytest-asyncio and anyio read, so that they see a plain function.
    """
    main = item.obj
    if type(item).__module__.startswith("pytest_asyncio"):  # which has wrapped the function
        main = getattr(main, "__wrapped__", main)
    if not inspect.iscoroutinefunction(main):
        return
    arguments: dict[str, Any] = item.funcargs
    backend = arguments.get("anyio_backend", "asyncio")
    if isinstance(backend, tuple):
        backend, options = backend
        if "loop_factory" in options:  # anyio runs it on this clock, together with its fixtures
            return
    item.obj = _on_clock(arguments["sim_gpu"], main, backend)


def _on_clock(gpu: SimGPU, main: Callable[..., Any], backend: Any) -> Callable[..., None]:
    """Return a plain function that runs an async function on the clock."""

    def test(**arguments: Any) -> None:
        gpu.run(partial(main, **arguments), backend=backend)

    return test


class _Outcome:
    """Tells the fixtures of a test whether it passed. Registered while they are in use."""

    def __init__(self, item: pytest.Item, gpu: SimGPU) -> None:
        self._item = item
        self._gpu = gpu
        self.has_passed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if item is self._item and call.when == "call":
            self.has_passed = report.passed
            if report.failed and (held := self._gpu.map()):
                report.sections.append(("what held which SMs", held))
        return report
