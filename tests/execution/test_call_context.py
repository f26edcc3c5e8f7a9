"""The context of a call of `p.run`: other libraries' state, its SMs, its cost."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest
import sniffio

import greensched
from greensched import CallContext, LaunchConfig, Pool, current_call, register_call_hook
from greensched.driver import simulated
from greensched.driver.simulated import Crash, Span, cost
from greensched.execution import call_context
from greensched.kernels import spin
from greensched.typing import Cost

CONFIG = LaunchConfig(grid=16, block=1024)


@pytest.fixture
def hooks() -> Iterator[list[Any]]:
    """Provide an empty list of hooks, and restore the previous one."""
    before = call_context.hooks.copy()
    call_context.hooks.clear()
    yield call_context.hooks
    call_context.hooks[:] = before


def run(main: Callable[..., Any], spec: str = "h200@13.0") -> list[Span]:
    """Run on virtual time, and return what happened on the device."""
    clock = simulated.VirtualClock(seed=1)
    driver = simulated.open(spec, clock=clock)
    spans: list[Span] = []
    driver.on_span(spans.append)
    clock.run(main, driver)
    assert not driver.live()
    return [span for span in spans if span.kind == "kernel"]


def test_a_call_knows_the_sms_it_has(hooks: list[Any]) -> None:
    """Only in a call can code ask for its SMs, and two calls differ."""
    seen: dict[str, CallContext | None] = {}

    def look(name: str) -> None:
        seen[name] = current_call()

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool, pool.partitions(16, 32) as (p, q):
            jobs = [p.run(look, "p"), q.run(look, "q")]
            for job in jobs:
                await job
            look("outside")
            with p.call.entered():
                look("block")
            of_p, of_q, block = seen["p"], seen["q"], seen["block"]
            assert of_p is not None
            assert of_q is not None
            assert block is not None
            assert (of_p.sm_count, of_q.sm_count) == (16, 32)
            assert of_p.device_id == p.device_id
            assert of_p.is_simulated
            assert of_p.stream is not p.stream
            assert block.stream is p.stream
            assert seen["outside"] is None
            assert current_call() is None

    run(main)


def test_a_library_stands_around_every_call(hooks: list[Any]) -> None:
    """A hook runs on the caller's thread, and its result wraps the call."""
    steps: list[tuple[str, int]] = []

    def hook(call: CallContext, given: Sequence[object]) -> Any:
        steps.append((f"asked {given}", threading.get_ident()))

        def around(function: Callable[[], Any]) -> Any:
            steps.append((f"around {call.sm_count}", threading.get_ident()))
            return function() + 1

        return around if given else None

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool, pool.partition(16) as p:
            register_call_hook(hook)
            register_call_hook(hook)
            assert await p.run(max, 3, 4) == 5
            assert await p.run(dict) == {}
            with pytest.raises(greensched.InvalidRequest):
                register_call_hook(None)  # type: ignore[arg-type]

    run(main)
    assert [what for what, _ in steps] == ["asked (3, 4)", "around 16", "asked ()"]
    assert steps[0][1] == threading.get_ident() != steps[1][1]


def test_what_a_call_leaves_current_is_not_the_next_ones(hooks: list[Any]) -> None:
    """Each call sees its own SMs, whatever the previous one left current."""

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool, pool.partitions(16, 32) as (p, q):
            began = threading.Event()

            def leave() -> None:
                call_context.running_call.set(q.call)
                began.wait()

            def sms() -> int | None:
                call = current_call()
                return None if call is None else call.sm_count

            jobs = [p.run(leave), p.run(sms)]  # in one block of the executor's context
            began.set()
            await jobs[0]
            assert [await jobs[1], await p.run(sms)] == [16, 16]

    run(main)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_call_may_run_a_loop_of_its_own(backend: str) -> None:
    """On its own thread no loop runs, so a call may start one."""

    async def answer() -> int:
        await anyio.sleep(0)
        return 5

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(16) as p:
            assert await p.run(anyio.run, answer) == 5
        assert sniffio.current_async_library() == backend

    anyio.run(main, backend=backend)


def test_a_fault_that_a_call_meets_poisons_it() -> None:
    """The pool knows of a fault at once, even if the call ignores it."""

    async def main() -> None:
        async with Pool(driver=driver) as pool:
            with pytest.raises(greensched.DeviceLost):
                async with pool.partition(16) as p:
                    await p.prepare(CONFIG, spin)
                    context = p.context

                    def call() -> None:
                        stream = context.create_stream()
                        with suppress(greensched.DeviceFault):
                            greensched.launch(stream, CONFIG, spin, 1)
                            stream.sync()
                        stream.is_closed = True  # its context is dead, and closes nothing

                    await p.run(call)
            assert pool.fault is not None

    clock = simulated.VirtualClock(seed=1)
    driver = simulated.open("h200", clock=clock, faults=[Crash("spin")])
    clock.run(main)


def test_what_a_hook_is_concerned_with_lives_until_the_stream_is_done(hooks: list[Any]) -> None:
    """With a hook, the call's arguments are kept until its stream is done."""

    class Thing:
        pass

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool, pool.partition(16) as p:
            register_call_hook(lambda call, given: lambda function: function())
            stream = p._open_lease().executor.call_stream.stream
            word = await p.empty_pinned(1, "u4")
            gone = weakref.ref(thing := Thing())

            def call(thing: Thing) -> None:
                stream.context.driver.wait_value(stream.handle, word.address, 1)

            job = p.run(call, thing)
            del thing
            await anyio.sleep(1)
            gc.collect()
            assert not job.done()
            assert gone() is not None
            word.array[0] = 1
            await job
            word.close()
            gc.collect()
            assert gone() is None

    run(main)


def test_a_hook_that_fails_refuses_the_call(hooks: list[Any]) -> None:
    """`p.run` raises the hook's error, and nothing is submitted."""

    def hook(call: CallContext, given: Sequence[object]) -> Any:
        raise KeyError(given)

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool, pool.partition(16) as p:
            register_call_hook(hook)
            before = p._open_lease().executor.call_stream.issued
            with pytest.raises(KeyError):
                p.run(len, "abc")
            assert p._open_lease().executor.call_stream.issued == before
            hooks.clear()
            assert await p.run(len, "abc") == 3

    run(main)


def test_a_calls_cost_takes_its_sms() -> None:
    """A call with a cost takes time on its partition's SMs, like a kernel."""
    work = Cost(sm_ns=16e6)
    took: dict[int, float] = {}

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool:
            for sms in (8, 16):
                async with pool.partition(sms) as p:
                    began = driver.time()
                    assert await p.run(cost(work)(abs), -1) == 1
                    took[sms] = driver.time() - began

    spans = run(main)
    assert took[8] == pytest.approx(2e-3, rel=0.01)
    assert took[16] == pytest.approx(1e-3, rel=0.01)
    assert [(s.name, s.sms.bit_count()) for s in spans] == [("abs", 8), ("abs", 16)]


def test_a_calls_cost_comes_behind_what_was_submitted() -> None:
    """It begins after earlier kernels, and depends on the call's arguments."""

    @cost(lambda tokens: Cost(sm_ns=8e6 * tokens))
    def model(tokens: int) -> int:
        return tokens

    async def main(driver: Any) -> None:
        async with Pool(driver=driver) as pool, pool.partitions(8, 8) as (p, q):
            await p.prepare(CONFIG, spin)
            began = driver.time()
            p.launch(CONFIG, spin, 1_000_000)
            beside = q.run(model, 1)
            assert await p.run(model, 3) == 3
            assert driver.time() - began == pytest.approx(4e-3, rel=0.01)
            await beside
            with pytest.raises(greensched.InvalidRequest, match="return a Cost"):
                await p.run(cost(lambda: 3)(dict))  # type: ignore[arg-type,return-value]

    spans = run(main)
    ends = {(s.name, s.green): s.end for s in spans}
    assert len(ends) == 3


def test_a_cost_is_nothing_elsewhere() -> None:
    """Outside of a simulated driver's threads, a callable with a cost is simply called."""
    assert cost(Cost(sm_ns=1e18))(abs)(-2) == 2
