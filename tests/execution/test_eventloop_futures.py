"""What asyncio tasks await for device work: a future that resumes its task at once."""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from greensched.driver import simulated
from greensched.execution.completion_poller import CompletionPoller
from greensched.execution.eventloop import current_adapter
from helpers.devices import DEVICE

VARIABLE = ContextVar[Any]("VARIABLE")
LOOPS = ["asyncio", "uvloop"] if sys.platform != "win32" else ["asyncio"]


def python_tasks(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **kwargs: Any
) -> asyncio.Task[Any]:
    """Use asyncio's Python tasks, which check what they await more strictly than those in C."""
    return asyncio.tasks._PyTask(coroutine, loop=loop, **kwargs)  # type: ignore[attr-defined]


@pytest.fixture(params=[f"{loop}, tasks in {kind}" for loop in LOOPS for kind in ("C", "Python")])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    loop, in_python = request.param.split(",")[0], request.param.endswith("Python")

    def run(main: Callable[[], Awaitable[Any]], *, debug: bool = False) -> Any:
        async def within() -> Any:
            if in_python:
                asyncio.get_running_loop().set_task_factory(python_tasks)  # type: ignore[arg-type]
            return await asyncio.create_task(main())  # type: ignore[arg-type]

        return anyio.run(within, backend_options={"use_uvloop": loop == "uvloop", "debug": debug})

    return run


def looking() -> CompletionPoller:
    """Return the running loop's poller, of no pool."""
    return CompletionPoller(current_adapter(), simulated.open([DEVICE]), lambda: 0.0)


async def waiting(waiter: Awaitable[None], log: list[str], name: str = "it") -> None:
    log.append(f"{name} waits")
    try:
        await waiter
    except asyncio.CancelledError as error:
        log.append(f"{name} is cancelled {error.args}")
        raise
    log.append(f"{name} goes on")


@pytest.mark.parametrize("debug", [False, True])
def test_a_task_goes_on_where_it_is_found(run: Callable[..., Any], debug: bool) -> None:
    """The task runs within the poll; in debug mode in a turn of its own."""

    async def main() -> list[str]:
        completion, log = looking(), list[str]()
        adapter, waiter = completion.loop, completion.loop.create_inline_waiter()
        task = asyncio.create_task(waiting(waiter, log))

        def look() -> None:
            assert adapter.is_waiting(waiter)
            completion._reached.append(waiter)
            completion._resume()
            log.append("found")
            adapter.resume(waiter)
            adapter.wake(waiter)
            assert not adapter.is_waiting(waiter)

        asyncio.get_running_loop().call_soon(look)
        await task
        return log

    there = ["it goes on", "found"]
    assert run(main, debug=debug) == ["it waits", *(reversed(there) if debug else there)]


def test_it_goes_on_as_the_task_it_is(run: Callable[..., Any]) -> None:
    """`current_task()` and context variables are the resumed task's."""
    variable: ContextVar[str] = ContextVar("variable", default="unset")

    async def main() -> None:
        adapter = current_adapter()
        waiter = adapter.create_inline_waiter()

        async def one() -> tuple[object, str]:
            variable.set("the task's")
            await waiter
            seen = asyncio.current_task(), variable.get()
            variable.set("the task's, later")
            return seen

        def resume() -> None:
            variable.set("the resumer")
            adapter.resume(waiter)
            assert asyncio.current_task() is None
            assert variable.get() == "the resumer"

        task = asyncio.create_task(one())
        asyncio.get_running_loop().call_soon(resume)
        assert await task == (task, "the task's")

    run(main)


@pytest.mark.parametrize("how", ["wake", "resume"])
def test_a_task_woken_before_it_waits_does_not_wait(run: Callable[..., Any], how: str) -> None:
    """A wake-up before the wait is not lost."""

    async def main() -> list[str]:
        adapter, log = current_adapter(), list[str]()
        waiter = adapter.create_inline_waiter()
        getattr(adapter, how)(waiter)
        await waiting(waiter, log)
        return log

    assert run(main) == ["it waits", "it goes on"]


@pytest.mark.parametrize("messages", [(), ("enough",)])
def test_a_cancelled_task_goes_on_cancelled(run: Callable[..., Any], messages: Any) -> None:
    """It is cancelled in the next turn with its message; a later wake-up has no effect."""

    async def main() -> list[str]:
        adapter, log = current_adapter(), list[str]()
        waiter = adapter.create_inline_waiter()
        task = asyncio.create_task(waiting(waiter, log))
        await asyncio.sleep(0)
        task.cancel(*messages)
        assert not adapter.is_waiting(waiter)
        asyncio.get_running_loop().call_soon(adapter.resume, waiter)
        with pytest.raises(asyncio.CancelledError):
            await task
        return log

    assert run(main) == ["it waits", f"it is cancelled {messages}"]


def test_a_cancelled_task_leaves_nothing_with_its_waiter(run: Callable[..., Any]) -> None:
    """The waiter may stay until the work is done, without the task's context."""

    class Thing:
        """Of a request, say."""

    async def main() -> bool:
        waiter, thing = current_adapter().create_inline_waiter(), Thing()
        left = weakref.ref(thing)
        token = VARIABLE.set(thing)
        task = asyncio.create_task(waiting(waiter, []))
        VARIABLE.reset(token)
        del thing, token
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        del task
        await asyncio.sleep(0)
        gc.collect()
        return left() is None

    assert run(main)


def test_a_callback_needs_no_context(run: Callable[..., Any]) -> None:
    """A callback runs in a copy of the context in which it was added, as with a future."""

    async def main() -> list[Any]:
        adapter, found = current_adapter(), list[Any]()
        waiter: Any = adapter.create_inline_waiter()
        token = VARIABLE.set(3)
        waiter.add_done_callback(lambda _: found.append(VARIABLE.get()))
        VARIABLE.reset(token)
        adapter.resume(waiter)
        return found

    assert run(main) == [3]


def test_a_cancellation_before_the_first_wait_arrives_there(run: Callable[..., Any]) -> None:
    """A task that cancelled itself does not wait."""

    async def main() -> list[str]:
        adapter, log = current_adapter(), list[str]()

        async def one() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await waiting(adapter.create_inline_waiter(), log)

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(one())
        return log

    assert run(main) == ["it waits", "it is cancelled ()"]


def test_a_cancellation_behind_a_wake_is_not_lost(run: Callable[..., Any]) -> None:
    """A task that is woken and then cancelled before its turn is cancelled."""

    async def main() -> list[str]:
        adapter, log = current_adapter(), list[str]()
        waiter = adapter.create_inline_waiter()
        task = asyncio.create_task(waiting(waiter, log))
        await asyncio.sleep(0)
        adapter.wake(waiter)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return log

    assert run(main) == ["it waits", "it is cancelled ()"]


@pytest.mark.fault("A6")
def test_scopes_and_timeouts_end_the_wait(run: Callable[..., Any]) -> None:
    """`asyncio.timeout`, `wait_for` and anyio's scopes end a wait without a wake-up."""

    async def main() -> None:
        adapter = current_adapter()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await adapter.create_inline_waiter()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting(adapter.create_inline_waiter(), []), 0)
        with anyio.move_on_after(0) as scope:
            await adapter.create_inline_waiter()
        assert scope.cancelled_caught

    run(main)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_task_that_ends_the_loop_keeps_no_other_waiting(kind: str) -> None:
    """After SystemExit of one task, the next woken task still goes on."""
    log: list[str] = []

    async def leave(waiter: Awaitable[None]) -> None:
        await waiter
        raise SystemExit("enough")

    async def main() -> None:
        completion = looking()
        first, second = (completion.loop.create_inline_waiter() for _ in range(2))
        tasks = [asyncio.create_task(task) for task in (leave(first), waiting(second, log))]
        await asyncio.sleep(0)
        completion._reached.extend((first, second))
        asyncio.get_running_loop().call_soon(completion._resume)
        await asyncio.gather(*tasks, return_exceptions=True)

    with closing(importlib.import_module(kind).new_event_loop()) as loop:
        task = loop.create_task(main())
        with pytest.raises(SystemExit, match="enough"):
            loop.run_until_complete(task)
        loop.run_until_complete(asyncio.wait_for(task, 20))
    assert log == ["it waits", "it goes on"]
