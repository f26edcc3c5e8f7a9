"""Statuses become our errors, whichever call returns them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from greensched import errors
from greensched.driver.cuda import errors as cuda_errors
from greensched.driver.interface import Driver
from greensched.driver.types import CodeImage, StreamHandle
from greensched.typing import CaptureMode

if TYPE_CHECKING:
    from driver_cuda.conftest import Arguments, Standin

pytestmark = pytest.mark.standin

UNKNOWN = 12345
STREAM_DETACHED = 917
#: A handle for calls that fail before anything looks at it.
NEVER_LOOKED_AT: Any = 64


# -- statuses --------------------------------------------------------------------------------------

#: Every driver call with its own path around the wheel, and one that goes through `call`.
HOT: dict[str, Callable[[Driver, StreamHandle, Any, Any], object]] = {
    "cuCtxSetCurrent": lambda d, s, e, g: d.set_current(None),
    "cuStreamQuery": lambda d, s, e, g: d.query_stream(s),
    "cuStreamWaitEvent": lambda d, s, e, g: d.wait_event(s, e),
    "cuStreamWriteValue32": lambda d, s, e, g: d.bind_mark(s, 64)(1),
    "cuStreamWaitValue32": lambda d, s, e, g: d.wait_value(s, 64, 1),
    "cuStreamIsCapturing": lambda d, s, e, g: d.is_capturing(s),
    "cuGraphLaunch": lambda d, s, e, g: d.launch_graph(g, s),
    "cuEventRecord": lambda d, s, e, g: d.record_event(e, s),
    "cuEventQuery": lambda d, s, e, g: d.query_event(e),
    "cuMemAllocFromPoolAsync": lambda d, s, e, g: d.allocate(g, 64, s),
    "cuMemFreeAsync": lambda d, s, e, g: d.free(64, s),
    "cuMemHostRegister": lambda d, s, e, g: d.allocate_host(64),
    "cuMemcpyHtoDAsync": lambda d, s, e, g: d.copy_to_device(64, 64, 1, s),
    "cuMemcpyDtoHAsync": lambda d, s, e, g: d.copy_to_host(64, 64, 1, s),
    "cuMemcpyDtoDAsync": lambda d, s, e, g: d.copy(64, 64, 1, s),
    "cuMemsetD8Async": lambda d, s, e, g: d.set_bytes(64, 1, 1, s),
    "cuStreamSynchronize": lambda d, s, e, g: d.synchronize_stream(s),
    "cuGreenCtxRecordEvent": lambda d, s, e, g: d.record_green(g, e),
    "cuThreadExchangeStreamCaptureMode": lambda d, s, e, g: d.exchange_capture_mode(
        CaptureMode.GLOBAL
    ),
}


@pytest.mark.parametrize("call", HOT)
def test_every_status_becomes_our_error(
    driver: Driver, standin: Standin, stream: StreamHandle, call: str
) -> None:
    """The error has the status, its name and the call, even if the wheel has no name."""
    event = driver.create_event()
    wanted = {
        2: (errors.OutOfMemory, "OUT_OF_MEMORY"),
        719: (errors.DeviceFault, "LAUNCH_FAILED"),
        STREAM_DETACHED: (errors.CUDAError, "STREAM_DETACHED"),
        UNKNOWN: (errors.CUDAError, f"UNKNOWN_STATUS_{UNKNOWN}"),
    }
    fallible = standin.injected()
    for code, (kind, name) in wanted.items():
        standin.fail(f"{call}$:1:{code}")
        with pytest.raises(errors.CUDAError) as raised:
            HOT[call](driver, stream, event, NEVER_LOOKED_AT)
        assert type(raised.value) is kind
        assert (raised.value.status, raised.value.name) == (code, name)
        assert raised.value.call == call
        assert raised.value.__cause__ is None
    assert standin.injected() == fallible + len(wanted)
    standin.fail(None)
    driver.destroy_event(event)


@pytest.mark.parametrize("error", [KeyError("name"), KeyError(600), ValueError("no"), KeyError()])
def test_other_errors_of_the_wheel_are_not_hidden(error: Exception) -> None:
    """Other errors of the wheel are raised unchanged."""
    assert cuda_errors.error_for_unknown_status(error, "cuInit") is error


def test_a_missing_symbol_is_not_supported(driver: Driver) -> None:
    """A function that the driver lacks is NotSupported."""
    for text in ('Function "cuFoo" not found', "function cuFoo is not found"):
        error = cuda_errors.error_for_missing_library(RuntimeError(text), "cuFoo")
        assert isinstance(error, errors.NotSupported)
        assert error.what == "cuFoo"
    other = RuntimeError("List is too small: 1 < 2")
    assert cuda_errors.error_for_missing_library(other, "cuFoo") is other


def test_a_device_fault_is_told_by_every_question(python: Callable[..., str]) -> None:
    """After a fault, queries and waits raise the same DeviceFault."""
    answer = python(
        """
        import greensched.driver.cuda, greensched.errors
        from greensched.driver.types import CodeImage
        driver = greensched.driver.cuda.open()
        driver.initialise()
        driver.set_current(driver.retain_primary(0))
        stream, event = driver.create_stream(None), driver.create_event()
        code = driver.load_code(CodeImage("test", {}, b"STUBCUDA 1\\nkernel trap params=\\n\\0"))
        kernel = driver.get_kernel(code, "trap")
        driver.record_event(event, stream)  # before the fault, which may come at any time
        driver.bind_launch(stream, kernel, (1, 1, 1), (1, 1, 1), 0, 0)()
        for call in (driver.synchronize_stream, driver.query_stream) * 2:
            try:
                call(stream)
            except greensched.errors.DeviceFault as error:
                print(error.status, error.name)
        for call in (driver.query_event, driver.synchronize_event):
            try:
                call(event)
            except greensched.errors.DeviceFault as error:
                print(error.status, error.name)
        """
    )
    assert answer.splitlines() == ["700 ILLEGAL_ADDRESS"] * 6


# -- every call failing in turn --------------------------------------------------------------------


class Life:
    """A scenario with all it made, so that it can be ended from wherever it broke off.

    `errors` are those of the scenario and of its ending. A call that was made to fail did nothing,
    so what ends something is simply called again.
    """

    def __init__(self, driver: Driver, code: CodeImage, arguments: type[Arguments]) -> None:
        self.driver = driver
        self.code = code
        self.arguments = arguments
        self.errors: list[BaseException] = []
        self._ends: list[Callable[[], None]] = []

    def run(self) -> None:
        """Run the scenario, then end its objects."""
        try:
            self._live()
        except Exception as error:
            self.errors.append(error)
        for end in reversed(self._ends):
            try:
                end()
            except Exception as error:
                self.errors.append(error)
                end()

    def _later(self, call: Callable[..., None], *handles: object) -> None:
        self._ends.append(functools.partial(call, *handles))

    def _live(self) -> None:
        driver = self.driver
        context = driver.retain_primary(0)
        self._later(driver.release_primary, 0)
        self._later(driver.set_current, None)
        driver.set_current(context)
        host = driver.allocate_host(256)
        self._later(driver.free_host, host)
        pool = driver.create_memory_pool(0)
        self._later(driver.destroy_memory_pool, pool)
        driver.reserved_bytes(pool)
        driver.memory_info()
        library = driver.load_code(self.code)
        self._later(driver.unload_code, library)
        groups, _ = driver.split_by_count(driver.device_resource(0), None, 8)
        for part in (groups[:4], groups[4:]):
            green = driver.create_green(driver.describe(part), 0)
            self._later(driver.destroy_green, green)
            view = driver.green_context(green)
            driver.context_resource(view)
            driver.set_current(view)
            # Not while it is current: the view goes with the green context.
            self._later(driver.set_current, context)
            self._streams_and_copies(green, library, pool, host)
            driver.set_current(context)
            driver.synchronize_context(view)

    def _streams_and_copies(self, green: Any, library: Any, pool: Any, host: Any) -> None:
        driver = self.driver
        stream = driver.create_stream(green)
        self._later(driver.destroy_stream, stream)
        event = driver.create_event(timing=True)
        self._later(driver.destroy_event, event)
        self._later(driver.synchronize_stream, stream)
        self._work(stream, event, library, pool, host)
        driver.record_green(green, event)
        driver.synchronize_event(event)
        self._capture(stream)

    def _work(self, stream: StreamHandle, event: Any, library: Any, pool: Any, host: Any) -> None:
        driver = self.driver
        kernel = driver.get_kernel(library, "store")
        driver.load_kernel(kernel)
        driver.kernel_layout(kernel)
        driver.kernel_limits(kernel, 0)
        driver.allow_shared(kernel, 0, 1024)
        address = driver.allocate(pool, 128, stream)
        self._later(driver.free, address, stream)
        driver.set_bytes(address, 1, 128, stream)
        driver.copy_to_device(address, host.address, 64, stream)
        driver.copy(address + 64, address, 64, stream)
        # Into pinned memory: the stand-in faults a queued store whose target is freed behind it.
        arguments = self.arguments(host.device_address + 64, 1)
        driver.bind_launch(stream, kernel, (1, 1, 1), (32, 1, 1), 0, arguments.pointers)()
        driver.copy_to_host(host.address, address, 64, stream)
        driver.bind_mark(stream, host.device_address)(1)
        driver.record_event(event, stream)
        driver.wait_event(stream, event)
        driver.query_event(event)
        driver.query_stream(stream)
        driver.synchronize_stream(stream)

    def _capture(self, stream: StreamHandle) -> None:
        driver = self.driver
        graphs: list[Any] = []
        executables: list[Any] = []

        def destroy() -> None:
            for made, end in (
                (graphs, driver.destroy_graph),
                (executables, driver.destroy_executable),
            ):
                while made:
                    end(made[-1])
                    made.pop()

        def finish() -> None:
            if driver.is_capturing(stream):
                graphs.append(driver.end_capture(stream))

        self._later(destroy)
        self._later(finish)
        driver.exchange_capture_mode(driver.exchange_capture_mode(CaptureMode.RELAXED))
        driver.begin_capture(stream, CaptureMode.THREAD_LOCAL)
        finish()
        driver.node_count(graphs[-1])
        executables.append(driver.instantiate_graph(graphs[-1], stream))
        driver.launch_graph(executables[-1], stream)
        driver.synchronize_stream(stream)
        destroy()


@pytest.mark.parametrize("failure", [2, 719, STREAM_DETACHED, UNKNOWN])
def test_every_call_failing_in_turn(
    driver: Driver, standin: Standin, code: CodeImage, arguments: type[Arguments], failure: int
) -> None:
    """Whichever call fails, the error is typed, and all objects can be ended."""
    kinds = {2: errors.OutOfMemory, 719: errors.DeviceFault}
    nth = 0
    while True:
        nth += 1
        before = standin.injected()
        standin.fail_nth(nth, failure)
        life = Life(driver, code, arguments)
        life.run()
        if standin.injected() == before:
            break
        assert [type(error) for error in life.errors] == [kinds.get(failure, errors.CUDAError)]
        (error,) = life.errors
        assert isinstance(error, errors.CUDAError)
        assert error.status == failure
        assert standin.live() == 0, f"{error} left something alive"
        assert standin.misuse() == 0, f"after {error}"
    assert life.errors == []
    assert nth > 70
