"""The virtual clock: it passes only when no thread can run, the same for the same seed."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import trio

from greensched.driver import simulated
from greensched.driver.simulated import Slow, Span, VirtualClock, cost
from greensched.errors import CUDAError, DriverMisuse

from .machine import LAUNCH_NS, Machine, on_thread, spin

Make = Callable[..., Machine]
Backend = Literal["asyncio", "trio"]
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


async def sleep(backend: Backend, seconds: float) -> None:
    await (asyncio.sleep if backend == "asyncio" else trio.sleep)(seconds)


# -- timers -------------------------------------------------------------------------------------


@BACKENDS
def test_an_hour_takes_no_time(backend: Backend) -> None:
    """An hour of sleeping passes at once, and exactly an hour has passed."""
    clock = VirtualClock()

    async def main() -> str:
        for _ in range(3_600):
            await sleep(backend, 1.0)
        return "done"

    assert clock.run(main, backend=backend) == "done"
    assert clock.now() == pytest.approx(3_600 * 10**9, rel=1e-9)


def test_timers_fire_in_their_order() -> None:
    """The sleeps, timeouts and calls of asyncio follow the clock, whatever they were started in."""
    clock, log = VirtualClock(), []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert loop.time() == 0.0
        loop.call_later(2.5, log.append, "later")

        async def nap(seconds: float) -> None:
            await asyncio.sleep(seconds)
            log.append((seconds, loop.time()))

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.5):
                await asyncio.gather(nap(3.0), nap(1.0), nap(2.0), nap(9.0))
        log.append(loop.time())

    clock.run(main)
    assert log == [(1.0, 1.0), (2.0, 2.0), "later", (3.0, 3.0), 3.5]


def test_trios_timeouts_follow_the_clock() -> None:
    """move_on_after ends in virtual time, and trio's clock is the virtual one."""
    clock = VirtualClock()

    async def main() -> float:
        assert trio.current_time() == 0.0
        with trio.move_on_after(10.0) as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        with trio.fail_after(5.0):
            await trio.sleep(4.0)
        return trio.current_time()

    assert clock.run(main, backend="trio") == pytest.approx(14.0)


@BACKENDS
def test_time_stands_while_a_thread_runs(backend: Backend) -> None:
    """However long a task or a worker computes, no virtual time passes meanwhile."""
    clock = VirtualClock()
    driver = simulated.open(clock=clock)

    def compute() -> None:
        before = clock.now()
        for _ in range(10_000):
            assert clock.now() == before

    async def main() -> None:
        done = driver.create_mailbox()
        driver.start_thread(lambda: (compute(), done.put(None)), "computes")
        compute()
        await sleep(backend, 1.0)
        assert clock.seconds() == pytest.approx(1.0)
        assert done.get() is None

    clock.run(main, backend=backend)


def test_what_main_does_not_return_it_raises() -> None:
    """`run` passes arguments, results and exceptions as `asyncio.run` does."""
    clock = VirtualClock()

    async def main(x: int, y: int) -> int:
        if x > y:
            raise KeyError(x)
        return y - x

    assert clock.run(main, 1, 3) == 2
    for backend in ("asyncio", "trio"):
        with pytest.raises(KeyError):
            clock.run(main, 3, 1, backend=backend)
    assert clock.run(main, 1, 4, backend="trio") == 3


# -- the device ---------------------------------------------------------------------------------


def test_device_time_and_loop_time_are_one(make: Make) -> None:
    """A kernel of a second has run when a task slept for a second and its latency."""
    clock = VirtualClock()
    machine = make(clock=clock)
    stream = machine.stream()
    machine.run(stream, "k", fixed_ns=10**9)

    async def main() -> None:
        await asyncio.sleep(1.0)
        assert not machine.driver.query_stream(stream)
        await asyncio.sleep((LAUNCH_NS + 1) / 1e9)
        assert machine.driver.query_stream(stream)

    clock.run(main)
    assert machine.times()["k"] == (LAUNCH_NS, LAUNCH_NS + 10**9)


@BACKENDS
def test_a_loop_is_told_when_the_device_progressed(make: Make, backend: Backend) -> None:
    """`look` is called on the loop's thread whenever there may be something to see, until ended."""
    clock = VirtualClock()
    machine = make(clock=clock)
    word, stream = machine.word(), machine.stream()
    mark = machine.driver.bind_mark(stream, word.address)
    looks: list[tuple[int, int, int]] = []
    for ticket in (1, 2):
        machine.run(stream, f"k{ticket}", fixed_ns=10**6)
        mark(ticket)

    async def main() -> None:
        def look() -> None:
            looks.append((threading.get_ident(), word.value, clock.now()))

        end = machine.driver.subscribe(look)
        assert end is not None
        await sleep(backend, 1.0)
        seen = len(looks)
        end()
        machine.driver.record_event(machine.driver.create_event(), stream)
        await sleep(backend, 1.0)
        assert len(looks) == seen

    clock.run(main, backend=backend)
    assert {ident for ident, _, _ in looks} == {threading.get_ident()}
    for ticket in (1, 2):
        assert (ticket, LAUNCH_NS + ticket * 10**6) in {(value, now) for _, value, now in looks}


def test_a_loop_is_not_woken_for_the_phases_of_a_kernel(make: Make) -> None:
    """A kernel starts, works beside another one and ends: its loop looks when one has ended."""
    clock = VirtualClock()
    machine = make(clock=clock)
    for _ in range(2):
        machine.run(machine.stream(), "kernel", fixed_ns=10**6, sm_ns=10**8)
    looks: list[int] = []

    async def main() -> None:
        machine.driver.subscribe(lambda: looks.append(len(machine.spans)))
        await asyncio.sleep(1.0)

    clock.run(main)
    assert looks[0] >= 1
    assert len(machine.spans) == 2


def test_only_a_loop_of_the_clock_can_be_told(machine: Machine) -> None:
    """Outside of `clock.run` no loop can be woken, and the error says what to do."""
    with pytest.raises(DriverMisuse, match=r"clock\.run\(main\)"):
        machine.driver.subscribe(lambda: None)
    assert machine.driver.spin_budget == 0.0


def test_drivers_share_a_clock(make: Make) -> None:
    """Two machines on one clock are in one time; closing one leaves the other as it is."""
    clock = VirtualClock()
    one, two = make(clock=clock), make(clock=clock)
    one.run(one.stream(), "one", fixed_ns=5_000)
    two.run(two.stream(), "two", fixed_ns=9_000)
    one.finish()
    assert clock.now() >= LAUNCH_NS + 5_000
    one.run(one.stream(), "never", fixed_ns=5_000)
    one.close()
    two.finish()
    two.run(two.stream(), "again", fixed_ns=10)
    two.finish()
    assert (set(one.times()), set(two.times())) == ({"one"}, {"two", "again"})


def test_closing_ends_the_calls_that_wait(make: Make) -> None:
    """A thread in a call that waits for work that never ends gets DEINITIALIZED, and goes on."""
    machine = make(clock=VirtualClock(), faults=[simulated.Hang("stuck")])
    stream, told = machine.stream(), list[CUDAError]()
    machine.run(stream, "stuck")

    def wait() -> None:
        with pytest.raises(CUDAError) as error:
            machine.driver.synchronize_stream(stream)
        told.append(error.value)

    thread = machine.driver.start_thread(wait, "waits")
    machine.close()
    thread.join()
    assert [error.status for error in told] == [4]


# -- threads and loops --------------------------------------------------------------------------


def program(seed: int) -> tuple[list[Any], list[Span], int]:
    """Two tasks and three workers that take turns in a driver, a mailbox and a loop."""
    clock = VirtualClock(seed)
    machine = Machine(clock=clock)
    driver, log = machine.driver, []

    def worker(i: int, box: Any, loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
        driver.set_current(machine.primary)
        stream = driver.create_stream(None)
        while (item := box.get()) is not None:
            log.append(("worker", i, item, clock.now()))
            machine.run(stream, f"k{i}.{item}", fixed_ns=1_000 * (item + 1), sm_ns=5_000)
            driver.synchronize_stream(stream)
        driver.set_current(None)
        loop.call_soon_threadsafe(done.set)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        boxes, events = [driver.create_mailbox() for _ in range(3)], []
        for i, box in enumerate(boxes):
            events.append(asyncio.Event())
            driver.start_thread(functools.partial(worker, i, box, loop, events[i]), f"w{i}")

        async def feed(first: int) -> None:
            for item in range(first, first + 4):
                for box in boxes:
                    box.put(item)
                log.append(("task", first, item, clock.now()))
                await asyncio.sleep(2e-6)

        await asyncio.gather(feed(0), feed(10))
        for box in boxes:
            box.put(None)
        for event in events:
            await event.wait()

    clock.run(main)
    machine.close()
    return log, machine.spans, clock.now()


def test_the_same_seed_is_the_same_history() -> None:
    """Interleaving, spans and times are equal, run after run."""
    assert program(7) == program(7)


def test_different_seeds_are_different_histories() -> None:
    """Some seeds interleave differently, and all of them do the same work."""
    histories = [program(seed) for seed in range(6)]
    assert len({tuple(log) for log, _, _ in histories}) > 1
    for log, spans, _ in histories:
        assert sorted(entry[:3] for entry in log) == sorted(e[:3] for e in histories[0][0])
        assert len(spans) == 24


def test_workers_go_one_at_a_time() -> None:
    """A worker runs until it waits: no other thread runs meanwhile."""
    clock = VirtualClock(3)
    driver = simulated.open(clock=clock)
    inside, log = [0], []

    def worker(i: int) -> None:
        for step in range(20):
            inside[0] += 1
            log.append((i, step))
            for _ in range(200):
                assert inside == [1]
            inside[0] -= 1
            clock.sleep(1)

    async def main() -> None:
        threads = [driver.start_thread(functools.partial(worker, i), f"w{i}") for i in range(4)]
        await asyncio.sleep(1.0)
        assert not any(thread.is_alive() for thread in threads)

    clock.run(main)
    assert sorted(log) == [(i, step) for i in range(4) for step in range(20)]
    assert log != sorted(log)


def test_two_loops_share_a_clock() -> None:
    """Two asyncio loops in two threads see one time, and neither holds the other up."""
    clock, log = VirtualClock(), []
    started: list[str] = []

    async def main(name: str, step: float) -> None:
        started.append(name)
        # The clock stands while a task is ready. (An event would belong to one of the loops.)
        while len(started) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(step)
            log.append((clock.seconds(), name))

    thread = threading.Thread(target=lambda: clock.run(main, "b", 2.0), daemon=True)
    thread.start()
    clock.run(main, "a", 3.0)
    thread.join()
    assert not thread.is_alive()
    assert [at for at, _ in log] == pytest.approx(sorted([2, 4, 6, 8, 3, 6, 9, 12]))
    assert [at for at, name in log if name == "a"] == pytest.approx([3, 6, 9, 12])


@BACKENDS
def test_a_worker_wakes_its_loop(backend: Backend) -> None:
    """What a thread of the clock's leaves for a loop is seen, also where nothing else is due."""
    clock = VirtualClock()
    driver = simulated.open(clock=clock)

    async def on_asyncio() -> str:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        answer = functools.partial(loop.call_soon_threadsafe, future.set_result, "woken")
        driver.start_thread(lambda: (clock.sleep(10**9), answer()), "wakes")
        return await future

    async def on_trio() -> str:
        event, token = trio.Event(), trio.lowlevel.current_trio_token()
        answer = functools.partial(token.run_sync_soon, event.set)
        driver.start_thread(lambda: (clock.sleep(10**9), answer()), "wakes")
        await event.wait()
        return "woken"

    main = on_asyncio if backend == "asyncio" else on_trio
    assert clock.run(main, backend=backend) == "woken"
    assert clock.now() == 10**9


@BACKENDS
def test_a_foreign_thread_wakes_a_loop(backend: Backend) -> None:
    """With nothing due anywhere the loop listens: a thread the clock does not know wakes it."""
    clock = VirtualClock()

    def foreign(wake: Callable[[], object]) -> None:
        spin(lambda: clock._listened)
        wake()

    async def on_asyncio() -> str:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        wake = functools.partial(loop.call_soon_threadsafe, future.set_result, "woken")
        threading.Thread(target=foreign, args=(wake,), daemon=True).start()
        return await future

    async def on_trio() -> str:
        event, token = trio.Event(), trio.lowlevel.current_trio_token()
        wake = functools.partial(token.run_sync_soon, event.set)
        threading.Thread(target=foreign, args=(wake,), daemon=True).start()
        await event.wait()
        return "woken"

    main = on_asyncio if backend == "asyncio" else on_trio
    assert clock.run(main, backend=backend) == "woken"
    assert clock.now() == 0


@BACKENDS
def test_other_executors_work_beside_the_clock(backend: Backend) -> None:
    """`to_thread` works where nothing is due meanwhile, and its threads end without a complaint."""
    clock = VirtualClock()

    async def main() -> int:
        if backend == "asyncio":
            return await asyncio.to_thread(sum, [1, 2, 3])
        return await trio.to_thread.run_sync(sum, [1, 2, 3])

    assert clock.run(main, backend=backend) == 6
    assert clock.now() == 0, "not even for their end"


def test_every_loop_gets_to_listen() -> None:
    """With nothing due, a socket of any loop can go on, not of the first one alone."""
    clock = VirtualClock()
    near, far = socket.socketpair()
    near.setblocking(False)
    first_waits, ready, finished = threading.Event(), threading.Event(), []

    async def first() -> None:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        finished.append(functools.partial(loop.call_soon_threadsafe, future.set_result, None))
        first_waits.set()
        await future

    async def second() -> bytes:
        ready.set()
        clock._listened = 0
        data = await asyncio.get_running_loop().sock_recv(near, 10)
        finished[0]()
        return data

    thread = threading.Thread(target=lambda: clock.run(first), daemon=True)
    thread.start()
    assert first_waits.wait()

    def send() -> None:
        ready.wait()
        spin(lambda: clock._listened >= 4)
        far.send(b"hello")

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        assert clock.run(second) == b"hello"
    finally:
        sender.join()
        thread.join()
        near.close()
        far.close()
    assert not thread.is_alive()


def test_a_worker_without_a_loop(machine: Machine) -> None:
    """Threads of the clock's run, wait and end where there is no loop at all."""
    driver = machine.driver
    box, answers = driver.create_mailbox(), driver.create_mailbox()

    def double() -> None:
        while (item := box.get()) is not None:
            driver.clock.sleep(10**9)
            answers.put(2 * item)

    thread = driver.start_thread(double, "doubles")
    for i in range(3):
        box.put(i)
        assert answers.get() == 2 * i
    box.put(None)
    thread.join()
    assert not thread.is_alive()
    assert driver.time() == pytest.approx(3.0)


def test_a_foreign_thread_lets_a_foreign_thread_go_on(machine: Machine) -> None:
    """A word written by one thread the clock does not know frees another that waits for it."""
    driver, stream = machine.driver, machine.stream()
    word = machine.hold(stream)
    waiting = threading.Event()

    def write() -> None:
        waiting.wait()
        actors = driver.clock._participants  # type: ignore[attr-defined]
        spin(lambda: any(actor.name == "a foreign thread" for actor in actors))
        word.value = 1

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    waiting.set()
    driver.synchronize_stream(stream)
    writer.join()


def test_a_loop_cannot_run_inside_a_worker(machine: Machine) -> None:
    """A thread that takes turns already cannot take them for a loop too, and raises."""

    async def main() -> None:
        pass

    with pytest.raises(DriverMisuse, match="takes turns already"):
        machine.inside(lambda: machine.driver.clock.run(main))  # type: ignore[attr-defined]


# -- time that callables take -------------------------------------------------------------------


def test_takes_takes_virtual_time(machine: Machine) -> None:
    """A decorated callable lasts so long on a worker, and takes no time anywhere else."""

    @cost(2.0)
    def work(x: int) -> int:
        """Adds."""
        return x + 1

    driver = machine.driver
    assert machine.inside(lambda: (work(1), driver.time())) == (2, 2.0)
    assert work(2) == 3
    assert driver.time() == 2.0
    assert work.__doc__ == "Adds."

    @cost(2.0)
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        machine.inside(fails)


def test_a_slow_call_on_a_loops_thread_is_not_cut_short(make: Make) -> None:
    """Other threads that run meanwhile wake the loop, but its call lasts as long as it lasts."""
    clock = VirtualClock()
    machine = make(clock=clock, faults=[Slow("allocate", 1.0)])
    stream, pool = machine.stream(), machine.pool
    driver = machine.driver

    def busy() -> None:
        for _ in range(50):
            clock.sleep(10**7)

    async def main() -> float:
        driver.start_thread(busy, "busy")
        before = clock.seconds()
        driver.allocate(pool, 64, stream)
        return clock.seconds() - before

    driver.free(driver.allocate(pool, 64, stream), stream)
    assert clock.run(main) == pytest.approx(1.0)


# -- finalisers ---------------------------------------------------------------------------------


def test_a_finaliser_may_wake_a_loop_from_inside_the_clock(machine: Machine) -> None:
    """A finaliser that runs anywhere in the clock can wake it without a deadlock."""
    clock = machine.driver.clock
    asked = [0]

    def ready() -> bool:
        clock.wake(None)  # type: ignore[attr-defined]  # what call_soon_threadsafe and mailboxes do
        asked[0] += 1
        return asked[0] > 3

    on_thread(lambda: clock.wait(ready))
    assert asked[0] > 3


def test_a_finaliser_may_submit_work_from_inside_the_timeline(machine: Machine) -> None:
    """Work that is submitted while the timeline looks at what is held is done in its turn."""
    driver, word = machine.driver, machine.word()
    one, two = machine.stream(), machine.stream()
    mark = driver.bind_mark(two, word.address)
    looks = [0]

    def until() -> bool:
        looks[0] += 1
        mark(looks[0])
        return looks[0] >= 3

    machine.run(one, "latch", until=until)
    on_thread(machine.finish)
    assert word.value == 3


# -- long programs ------------------------------------------------------------------------------


def test_a_clock_does_not_grow() -> None:
    """After many loops, workers and pauses a clock has no participants."""
    clock = VirtualClock()
    driver = simulated.open(clock=clock)

    async def main() -> None:
        done = driver.create_mailbox()
        driver.start_thread(lambda: done.put(clock.sleep(1_000)), "short")
        await asyncio.sleep(0.001)  # of virtual time: the thread's 1,000 ns are over by then
        done.get()

    for _ in range(20):
        clock.run(main)
    driver.close()
    assert clock._participants == []
    assert clock._timelines == []
    assert clock._running is None


def test_a_service_of_an_hour(make: Make) -> None:
    """3,600 jobs of a worker and a device, a second apart, take what is in them, not an hour."""
    clock = VirtualClock()
    machine = make(clock=clock)
    driver = machine.driver
    driver.on_span(None)
    kernel = machine.kernel("job")
    stream = machine.stream()
    machine.launch(stream, kernel)

    async def main() -> int:
        event = driver.create_event()
        done = 0
        for _ in range(3_600):
            machine.launch(stream, kernel)
            driver.record_event(event, stream)
            await asyncio.sleep(1.0)
            done += driver.query_event(event)
        return done

    assert clock.run(main) == 3_600
