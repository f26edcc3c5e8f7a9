"""Contexts that are held across an await: each is reported with both places, and no other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import random
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio

from greensched import Context, ContextFlags, Device, HeldAcrossAwait, WrongThread, context
from greensched.device import await_guard, current_context
from greensched.device import device as device_module
from greensched.driver import simulated

LEAKS = 100
SEED = 20261120
HERE = Path(__file__)
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
#: At the await itself, where Python can.
AT_THE_AWAIT = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="needs sys.monitoring, which Python has from 3.12 on"
)


@pytest.fixture
def device() -> Iterator[Device]:
    """Yield a simulated device whose primary context exists: making it would block."""
    with contextlib.closing(Device(0, driver="simulated:h200x2")) as device:
        device.primary  # noqa: B018
        yield device


def run(loop: str, main: Callable[[], Awaitable[Any]], debug: bool = False) -> Any:
    if loop == "trio":
        return trio.run(main)
    options = {"use_uvloop": loop == "uvloop", "debug": debug}
    return anyio.run(main, backend="asyncio", backend_options=options)


def line_of(function: Callable[..., Any], text: str) -> int:
    """Return the line number of a text in a function."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + index for index, line in enumerate(lines) if text in line]
    return found


async def pause() -> None:
    await anyio.lowlevel.checkpoint()


# -- what is told -----------------------------------------------------------------------------


@LOOPS
def test_a_held_context_is_told_with_both_places(device: Device, loop: str) -> None:
    """The warning is at the `with`, and names it, the task, its coroutine and the await."""

    async def holder() -> None:
        with device:  # the block
            await pause()  # the await

    async def main() -> None:
        with pytest.warns(HeldAcrossAwait) as told:
            await holder()
        (warning,) = told
        problem = warning.message
        assert isinstance(problem, HeldAcrossAwait)
        assert problem.block == f"{HERE}:{line_of(holder, '# the block')}"
        assert problem.suspended == f"{HERE}:{line_of(holder, '# the await')}"
        assert "holder" in problem.task
        assert "task '" in problem.task
        assert "<Context: primary, device 0" in problem.context
        assert (warning.filename, warning.lineno) == (
            str(HERE),
            line_of(holder, "# the block"),
        )
        assert device.driver.current() is None

    run(loop, main)


@LOOPS
def test_a_block_in_a_helper_is_told_where_it_is_written(device: Device, loop: str) -> None:
    """A block of a generator or exit stack is reported at its `with`."""

    @contextlib.contextmanager
    def helper() -> Iterator[None]:
        with device:  # the block
            yield

    async def by_generator() -> None:
        with helper():
            await pause()  # the await

    async def by_stack() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(device)  # the block
            await pause()  # the await

    @contextlib.asynccontextmanager
    async def asynchronous() -> AsyncIterator[None]:
        with device:  # the block
            yield  # the await

    async def by_asynchronous() -> None:
        async with asynchronous():
            await pause()

    async def opens(stack: contextlib.ExitStack) -> None:
        stack.enter_context(device)  # the block

    async def by_a_coroutine_that_returned() -> None:
        with contextlib.ExitStack() as stack:
            await opens(stack)
            await pause()  # the await

    async def main() -> None:
        for holder, written in (
            (by_a_coroutine_that_returned, opens),
            (by_generator, helper.__wrapped__),  # type: ignore[attr-defined]
            (by_stack, by_stack),
            (by_asynchronous, asynchronous.__wrapped__),  # type: ignore[attr-defined]
        ):
            with pytest.warns(HeldAcrossAwait) as told:
                await holder()
            problem = told[0].message
            assert isinstance(problem, HeldAcrossAwait)
            assert problem.block == f"{HERE}:{line_of(written, '# the block')}"
            waits = written if holder is by_asynchronous else holder
            assert problem.suspended == f"{HERE}:{line_of(waits, '# the await')}"

    run(loop, main)


def test_the_block_is_where_a_user_wrote_it() -> None:
    """Modules between a block and its `with` are skipped in the report."""
    between = (await_guard, current_context, context, device_module, contextlib)
    assert await_guard._skipped == {module.__name__ for module in between}


@LOOPS
def test_every_planted_leak_is_reported(device: Device, loop: str) -> None:
    """100 of 100 leaks are reported once, each with its own await."""
    rng = random.Random(SEED)
    other = Device(1, driver=device.driver)
    other.primary  # noqa: B018
    planted = 0

    async def leak(kind: int) -> None:
        await pause()
        with (device, other)[kind % 2]:
            for _ in range(1 + kind % 3):
                await pause()

    async def clean(kind: int) -> None:
        for _ in range(1 + kind % 3):
            with device, other:
                pass
            await pause()

    async def main() -> None:
        nonlocal planted
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            while planted < LEAKS:
                async with anyio.create_task_group() as tasks:
                    for _ in range(rng.randrange(1, 8)):
                        if rng.random() < 0.5 and planted < LEAKS:
                            tasks.start_soon(leak, planted)
                            planted += 1
                        else:
                            tasks.start_soon(clean, rng.randrange(9))
        found = [w.message for w in told if isinstance(w.message, HeldAcrossAwait)]
        assert len(found) == len(told) == planted == LEAKS
        assert all("leak" in problem.task for problem in found)

    run(loop, main)
    device.driver.set_current(None)  # blocks that overlap, each restoring what it saw, leave one
    other.close()


@LOOPS
def test_what_is_left_in_time_is_not_reported(device: Device, loop: str) -> None:
    """Blocks without an await, or with awaits that do not suspend, are not reported."""
    own = Context.create(device, ContextFlags.SCHED_AUTO)

    async def at_once() -> int:
        with own:
            return 1

    def elsewhere() -> None:
        with device:
            assert anyio.run(at_once) == 1

    async def main() -> None:
        for _ in range(300):
            with device, own, device:
                assert await at_once() == 1
            await pause()
            assert own.scoped(lambda: 2) == 2
        await anyio.to_thread.run_sync(elsewhere)

    with warnings.catch_warnings(
        record=True
    ) as told:  # an error would have no block to come out of
        warnings.simplefilter("always", HeldAcrossAwait)
        with device:  # the loop's whole life is inside it
            run(loop, main)
    assert not told
    own.close()


def test_a_callback_that_leaves_a_block_open_is_reported(device: Device) -> None:
    """It is reported although there is no task and no await to name."""

    async def main() -> None:
        with pytest.warns(HeldAcrossAwait, match="a callback"):
            asyncio.get_running_loop().call_soon(device.__enter__)
            for _ in range(3):
                await asyncio.sleep(0)
        device.__exit__(None, None, None)

    asyncio.run(main())


@pytest.mark.fault("D9")
@AT_THE_AWAIT
def test_eager_tasks(device: Device) -> None:
    """An eager task's first step may run inside another's block; its own block is reported."""

    async def inside() -> bool:
        return device.primary.is_current

    async def holds() -> None:
        with device:
            await asyncio.sleep(0)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        with device:
            eager = asyncio.create_task(inside())
        assert await eager
        with pytest.warns(HeldAcrossAwait, match="holds"):
            await asyncio.create_task(holds())

    asyncio.run(main())


def test_a_warning_is_given_once_for_a_place(device: Device) -> None:
    """With Python's default filter a leak in a loop is one line."""

    async def main() -> None:
        for _ in range(20):
            with device:
                await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        asyncio.run(main())
    assert len(told) == 1


# -- debug mode, and warnings that are errors -------------------------------------------------


@LOOPS
def test_where_warnings_are_errors_the_block_raises(device: Device, loop: str) -> None:
    """The error is raised by the block that was held, which restores the context."""

    async def main() -> None:
        with pytest.raises(HeldAcrossAwait):
            with device:
                await pause()
        assert device.driver.current() is None
        with pytest.raises(KeyError) as caught:
            with device:
                await pause()
                raise KeyError
        assert any("held across the await" in note for note in caught.value.__notes__)

    run(loop, main)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_debug_mode_raises(device: Device, loop: str) -> None:
    """In asyncio's debug mode it is an error under any filter, and nothing stays current."""

    async def main() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeldAcrossAwait)
            with pytest.raises(HeldAcrossAwait):
                with device:
                    await pause()
        assert device.driver.current() is None

    run(loop, main, debug=True)


@AT_THE_AWAIT
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_debug_mode_raises_at_the_await(device: Device, loop: str) -> None:
    """It raises at the await, before any other task runs, and only where a block is open."""
    ran: list[object] = []

    async def victim() -> None:
        ran.append(device.driver.current())

    async def holder(hold: bool) -> None:
        with device if hold else contextlib.nullcontext():
            with pytest.raises(HeldAcrossAwait) if hold else contextlib.nullcontext():
                await asyncio.sleep(0)  # the await
            if hold:
                assert not ran, "another task ran on it"

    async def main() -> None:
        task = asyncio.ensure_future(victim())
        await holder(hold=True)
        await task
        assert ran == [None]
        await asyncio.gather(holder(hold=False), holder(hold=False))

    run(loop, main, debug=True)


@pytest.mark.fault("D9")
@LOOPS
def test_development_mode_raises_on_every_loop(loop: str) -> None:
    """`python -X dev` is debug mode on asyncio, on uvloop and on trio."""
    program = f"""
        import anyio, anyio.lowlevel, trio
        from greensched import Device, HeldAcrossAwait

        async def main():
            try:
                with device:
                    await anyio.lowlevel.checkpoint()
            except HeldAcrossAwait:
                print("raised", device.driver.current())

        device = Device(0, driver="simulated:h200")
        device.primary
        if {loop!r} == "trio":
            trio.run(main)
        else:
            anyio.run(main, backend_options={{"use_uvloop": {loop == "uvloop"}}})
        device.close()
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "raised None", done.stderr


# -- nothing is left --------------------------------------------------------------------------


@LOOPS
def test_nothing_is_kept_of_a_block(device: Device, loop: str) -> None:
    """After a block nothing references it, its loop or its tasks."""

    async def main() -> None:
        with device:
            pass
        await pause()

    run(loop, main)
    assert await_guard._here.open == []
    assert await_guard._here.asked is None


def test_a_cancelled_holder_restores(device: Device) -> None:
    """A task cancelled inside its block restores what was current, and is cancelled."""

    async def holder() -> None:
        with device:
            await asyncio.sleep(100)

    async def main() -> None:
        with pytest.warns(HeldAcrossAwait):
            task = asyncio.create_task(holder())
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert device.driver.current() is None

    asyncio.run(main())


def test_a_block_that_ends_on_another_thread_says_so(device: Device) -> None:
    """A coroutine that is closed on another thread raises WrongThread."""
    said: list[str] = []

    async def holder() -> None:
        with device:
            await asyncio.sleep(0)

    def elsewhere(coroutine: Any) -> None:
        with pytest.raises(WrongThread):
            device.primary.__exit__(None, None, None)
        try:
            coroutine.close()
        except WrongThread as error:
            said.append(str(error))

    coroutine = holder()
    coroutine.send(None)
    thread = threading.Thread(target=elsewhere, args=(coroutine,))
    thread.start()
    thread.join()
    del coroutine
    gc.collect()
    device.primary.__exit__(None, None, None)
    assert device.driver.current() is None
    assert not said, "a body's own error, GeneratorExit, is not replaced"


def test_watching_costs_no_call_of_the_driver(device: Device) -> None:
    """A watched block makes no further driver call, and one loop call in a turn."""
    driver = device.driver
    assert isinstance(driver, simulated.SimulatedDriver)
    calls = driver.script.calls

    def counted() -> dict[str, int]:
        before = calls.copy()
        for _ in range(10):
            with device:
                pass
        return dict(calls - before)

    async def main() -> dict[str, int]:
        loop = asyncio.get_running_loop()
        asked = []
        call_soon = loop.call_soon
        loop.call_soon = lambda *a, **k: (asked.append(a), call_soon(*a, **k))[1]  # type: ignore[method-assign, assignment]
        found = counted()
        assert len(asked) == 1
        return found

    assert asyncio.run(main()) == counted()


def test_the_sentence_says_what_to_do() -> None:
    """The warning names the block, the await and the task, and says what to do."""
    problem = HeldAcrossAwait("<Context>", "a.py:1", "task 'T'", "a.py:2")
    assert re.fullmatch(
        r"<Context>, made current at a\.py:1, is held across the await at a\.py:2 by task 'T': "
        r".*Leave the block before the await, or use p\.run",
        str(problem),
    )
    assert issubclass(HeldAcrossAwait, Warning)
