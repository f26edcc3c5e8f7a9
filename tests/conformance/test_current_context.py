"""The current context of a thread: inside and outside of blocks, and across threads."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

import greensched
from greensched import (
    CacheConfig,
    Context,
    ContextFlags,
    ContextOptions,
    Device,
    SMResourceOptions,
)
from greensched.device.current_context import here
from greensched.driver.interface import Driver
from helpers.backend import Backend, opened
from helpers.kept import release_primary

THREADS = 4
TURNS = 50


def green_of(device: Device) -> Context:
    group = device.resources.sm.split(SMResourceOptions(count=8))[0][0]
    return device.create_context(ContextOptions(resources=[group]))


def on_thread(function: Callable[[], Any], name: str | None = None) -> Any:
    """What a function returns on a thread of its own; what it raises is raised here.

    What waits for the device goes there: the main thread's calls are judged as a loop's.
    """
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join()
    ((result, error),) = outcome
    if error is not None:
        raise error
    return result


# -- a device as a block ----------------------------------------------------------------------


def test_a_device_is_current_inside_its_block(backend: Backend) -> None:
    """`with Device(0) as d` gives the device, current inside, and nothing is current after."""
    with opened(backend) as (device,):
        with device as d:
            assert d is device
            assert device.driver.current() == device.primary.handle
            assert device.primary.is_current
        assert device.driver.current() is None


def test_a_device_never_used_is_initialised_by_its_block(backend: Backend) -> None:
    """The block retains the primary context, and `close` releases it."""
    with opened(backend) as (device,):
        driver = device.driver
        release_primary(driver)
        with device:
            assert driver.primary_state(0)[1]
            assert driver.memory_info()[0] > 0
        device.close()
        assert not driver.primary_state(0)[1]


def test_a_block_of_a_device_swallows_nothing(backend: Backend) -> None:
    """An exception leaves the block unchanged, and the previous context is restored."""
    with opened(backend) as (device,):
        with pytest.raises(ZeroDivisionError) as caught, device:
            1 / 0  # noqa: B018
        assert not hasattr(caught.value, "__notes__")
        assert device.driver.current() is None


def test_a_block_of_a_device_nests_in_itself_and_is_used_again(backend: Backend) -> None:
    """A nested device stays current until its outermost block ends; then it can begin again."""
    with opened(backend) as (device,):
        for _ in range(3):
            with device, device:
                with device:
                    pass
                assert device.primary.is_current
            assert not device.primary.is_current
        with closing(device.create_stream()) as stream:
            on_thread(stream.sync)


def test_a_block_always_sets(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entering and leaving always call the driver, even if the context is current already."""
    with opened(backend) as (device,):
        driver, told = device.driver, []
        device.primary  # noqa: B018
        set_current = driver.set_current

        def listen(context: Any) -> None:
            told.append(context)
            set_current(context)

        monkeypatch.setattr(driver, "set_current", listen)
        with device, device:
            pass
        primary = device.primary.handle
        assert told == [primary, primary, primary, None]


def test_set_current_stays(backend: Backend) -> None:
    """`Device.set_current` lasts until another context is set, and blocks restore it."""
    with opened(backend) as (device,):
        own = Context.create(device)
        device.set_current()
        assert Context.current(device.driver) is device.primary
        with own:
            assert own.is_current
        assert device.primary.is_current
        own.set_current()
        assert not device.primary.is_current
        own.pop()
        assert Context.current(device.driver) is None
        own.close()


def test_two_devices_nest_four_deep(backend: Backend) -> None:
    """Alternating between two devices, each level restores the one around it."""
    with opened(backend, "h200x2", devices=2) as (one, two):
        driver = one.driver

        def now() -> int | None:
            current = Context.current(driver)
            return None if current is None else current.device_id

        with one:
            with two:
                with one:
                    with two:
                        assert now() == 1
                    assert now() == 0
                assert now() == 1
            assert now() == 0
        assert now() is None


def test_a_context_set_by_other_code_inside_a_block_is_undone(backend: Backend) -> None:
    """The block's end restores the previous context, whatever other code set."""
    with opened(backend) as (device,):
        driver, own = device.driver, Context.create(device)
        device.primary  # noqa: B018
        foreign: list[Callable[[], object]] = [
            lambda: driver.set_current(own.handle),
            lambda: driver.set_current(None),
            lambda: driver.push_current(own.handle),
            lambda: (driver.push_current(own.handle), driver.push_current(own.handle)),
            driver.pop_current,
        ]
        for call in foreign:
            with device:
                call()
            assert driver.current() is None
            driver.set_current(own.handle)
            with device:
                call()
            assert driver.current() == own.handle
            while driver.current() is not None:
                driver.pop_current()
        own.close()


def test_threads_side_by_side(backend: Backend) -> None:
    """Each thread has its own current context, in any interleaving."""
    with opened(backend) as (device,):
        own = Context.create(device)
        device.primary  # noqa: B018
        barrier = threading.Barrier(THREADS)
        failed: list[int] = []

        def body(number: int) -> None:
            outer, inner = (device.primary, own) if number % 2 else (own, device.primary)
            for _ in range(TURNS):
                with outer:
                    barrier.wait()
                    with inner:
                        barrier.wait()
                        if not inner.is_current:
                            failed.append(number)
                    if not outer.is_current:
                        failed.append(number)
                if device.driver.current() is not None:
                    failed.append(number)

        threads = [threading.Thread(target=body, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert not any(thread.is_alive() for thread in threads)
        own.close()


# -- contexts ---------------------------------------------------------------------------------


def test_current_finds_each_context_as_the_object_it_is(backend: Backend) -> None:
    """`current` returns our object for our contexts, and adopts a foreign one."""
    with opened(backend) as (device,):
        driver = device.driver
        assert Context.current(driver) is None
        contexts = [device.primary, green_of(device), Context.create(device)]
        for context in contexts:
            with context as entered:
                assert entered is context
                assert Context.current(driver) is context
                assert context.is_current
            assert context.device is device
        raw = driver.create_context(0, ContextFlags.SCHED_AUTO)
        driver.push_current(raw)
        adopted = Context.current(driver)
        assert adopted is not None
        assert (adopted.kind, adopted.handle, adopted.device.ordinal) == ("adopted", raw, 0)
        assert Context.current(driver) is adopted
        with closing(adopted.create_stream()) as stream:
            on_thread(stream.sync)
        adopted.close()
        assert driver.current() == raw, "closing an adopted one ends nothing foreign"
        driver.pop_current()
        driver.destroy_context(raw)
        for context in contexts[1:]:
            context.close()


def test_flags_of_a_context_of_its_own(backend: Backend) -> None:
    """A context waits as its flags say; no flags, or two ways to wait, are refused."""
    with opened(backend) as (device,):
        for flags in (
            ContextFlags.SCHED_AUTO,
            ContextFlags.SCHED_SPIN,
            ContextFlags.SCHED_YIELD | ContextFlags.MAP_HOST,
            ContextFlags.SCHED_BLOCKING_SYNC | ContextFlags.LMEM_RESIZE_TO_MAX,
        ):
            with closing(Context.create(device, flags)) as own:
                assert own.flags & ~ContextFlags.MAP_HOST == flags & ~ContextFlags.MAP_HOST
                assert own.kind == "own"
                assert not own.is_green
                assert own.resources.sm.sm_count == device.sm_count
        for wrong in (4, "spin", ContextFlags(3), ContextFlags(1 << 5)):
            with pytest.raises(greensched.InvalidRequest, match="flags="):
                Context.create(device, wrong)  # type: ignore[arg-type]


def test_flags_of_the_primary_are_set_before_it_is_active(backend: Backend) -> None:
    """Flags apply before the first use; for an active primary they are refused."""
    with opened(backend) as (device,):
        release_primary(device.driver)
        device.set_flags(ContextFlags.SCHED_BLOCKING_SYNC)
        assert device.primary.flags & ContextFlags.SCHED_BLOCKING_SYNC
        device.set_flags(ContextFlags.SCHED_BLOCKING_SYNC)
        with pytest.raises(greensched.InvalidRequest, match="active with flags 0x4"):
            device.set_flags(ContextFlags.SCHED_SPIN)
        assert device.primary.flags & ContextFlags.SCHED_BLOCKING_SYNC
        with pytest.raises(greensched.InvalidRequest, match="only one SCHED_ flag"):
            device.set_flags(ContextFlags(5))
        device.close()
        again = Device(0, driver=device.driver)
        again.set_flags(ContextFlags.SCHED_AUTO)
        again.close()


def test_scoped_gives_what_the_function_gives(backend: Backend) -> None:
    """The context is current only during the call, even if the call raises."""
    with opened(backend) as (device,), closing(Context.create(device)) as own:
        assert own.scoped(lambda: own.is_current)
        assert not own.is_current
        with pytest.raises(KeyError):
            own.scoped(lambda: {}[1])
        assert not own.is_current

        async def later() -> None: ...

        with pytest.raises(greensched.InvalidRequest, match="asynchronous"):
            own.scoped(later)


def test_synchronize_is_of_this_context(backend: Backend) -> None:
    """`synchronize` waits for its own context and leaves the current one as it is."""
    with opened(backend) as (device,), closing(Context.create(device)) as own:
        own.synchronize()
        assert device.driver.current() is None
        with device:
            own.synchronize()
            assert device.primary.is_current
        with closing(own.create_stream()) as stream:
            config = greensched.LaunchConfig(grid=1, block=1)
            greensched.launch(stream, config, greensched.kernels.spin, 5_000_000)
            on_thread(lambda: device.primary.scoped(own.synchronize))
            assert stream.is_done
        own.close()
        with pytest.raises(greensched.Closed, match="own"):
            own.synchronize()


def test_closing_a_context_that_is_in_use_is_refused(backend: Backend) -> None:
    """A context that is current here, below another, or on another thread stays open."""
    with opened(backend) as (device,):
        own, green = Context.create(device), green_of(device)
        for context in (own, green):
            with context:
                with pytest.raises(greensched.InvalidRequest, match="current on this thread"):
                    context.close()
                with device, pytest.raises(greensched.InvalidRequest, match="will be again"):
                    context.close()
                with pytest.raises(greensched.InvalidRequest, match="thread 'MainThread'"):
                    on_thread(context.close)
            context.push()
            with device, pytest.raises(greensched.InvalidRequest, match="will be again"):
                context.close()
            context.pop()
            context.set_current()
            device.primary.push()
            with pytest.raises(greensched.InvalidRequest, match="will be again"):
                context.close()
            device.primary.pop()
            context.pop()
            on_thread(context.close)
            context.close()
            assert "closed" in repr(context)


def test_closing_a_device_that_is_in_use_is_refused(backend: Backend) -> None:
    """Nothing is closed; the device works on, and closes when its block has ended."""
    with opened(backend) as (device,):
        with device, pytest.raises(greensched.InvalidRequest, match="current"):
            device.close()
        with closing(device.create_stream()) as stream:
            on_thread(stream.sync)
        device.set_current()
        with pytest.raises(greensched.InvalidRequest, match="current"):
            device.close()
        device.primary.pop()
        device.close()


def test_what_others_replaced_is_not_in_use(backend: Backend) -> None:
    """A context that other code replaced is free to be closed or used by another thread."""
    with opened(backend) as (device,):
        driver, green = device.driver, green_of(device)
        device.primary  # noqa: B018
        for _ in range(5):
            green.set_current()
            driver.set_current(device.primary.handle)  # bypassing the library
            device.set_current()
            assert on_thread(lambda: green.scoped(lambda: green.is_current))
        assert len(here.unscoped) == 1
        green.set_current()
        driver.set_current(None)
        green.close()
        assert here.unscoped == []


def test_a_repr_tells(backend: Backend) -> None:
    """It has the kind, the device and the handle; streams and events name their context."""
    with opened(backend) as (device,), closing(Context.create(device)) as own:
        assert repr(own).startswith("<Context: own, device 0, ")
        assert repr(own.handle) in repr(own)
        with closing(own.create_stream()) as stream, closing(own.create_event()) as event:
            assert repr(own) in repr(stream)
            assert repr(own) in repr(event)


def test_a_forgotten_context_warns(backend: Backend) -> None:
    """Its finaliser warns, calls no driver and raises nothing; the primary is not affected."""
    with opened(backend) as (device,):
        own, green = Context.create(device), green_of(device)
        rescued = [
            (own.handle, own.driver.destroy_context),
            (green.green, own.driver.destroy_green),
        ]
        with pytest.warns(ResourceWarning, match="own, device 0.*never closed"):
            del own
            gc.collect()
        with pytest.warns(ResourceWarning, match="green, device 0.*never closed"):
            del green
            gc.collect()
        for handle, destroy in rescued:
            destroy(handle)


def refusing(driver: Driver, refused: Context) -> Callable[[Any], None]:
    """Return a `set_current` of the driver that fails for one context."""
    set_current = driver.set_current

    def refuse(context: Any) -> None:
        if context == refused.handle:
            raise greensched.CUDAError(201, "INVALID_CONTEXT", "cuCtxSetCurrent")
        set_current(context)

    return refuse


def test_a_failed_restore_never_hides_the_bodys_error(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is a note on the body's error and logged, or raised if there is none."""
    with opened(backend) as (device,):
        driver, own = device.driver, Context.create(device)
        driver.push_current(own.handle)
        refuse = refusing(driver, own)
        with pytest.raises(KeyError, match="body") as hidden, device:
            monkeypatch.setattr(driver, "set_current", refuse)
            raise KeyError("the body's")
        assert any("INVALID_CONTEXT" in note for note in hidden.value.__notes__)
        assert len(caplog.records) == 1
        assert driver.current() is None
        monkeypatch.undo()
        driver.push_current(own.handle)
        with pytest.raises(greensched.CUDAError, match="INVALID_CONTEXT"), device:
            monkeypatch.setattr(driver, "set_current", refuse)
        assert len(caplog.records) == 2
        assert driver.current() is None
        monkeypatch.undo()
        own.close()


def test_a_context_is_removed_though_the_driver_does_not_say_which_is_current(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block's context does not stay current if the previous one cannot be restored."""
    with opened(backend) as (device,):
        driver, own = device.driver, Context.create(device)
        driver.push_current(own.handle)
        refuse = refusing(driver, own)

        def say_nothing() -> None:
            raise greensched.CUDAError(1, "INVALID_VALUE", "cuCtxGetCurrent")

        with pytest.raises(greensched.CUDAError, match="INVALID_CONTEXT"), device:
            monkeypatch.setattr(driver, "set_current", refuse)
            monkeypatch.setattr(driver, "current", say_nothing)
        monkeypatch.undo()
        assert driver.current() is None
        own.close()


# -- the stack, and moving between threads ------------------------------------------------------


def test_a_context_floats_between_threads(backend: Backend) -> None:
    """A context can be pushed on one thread, popped, and pushed on another."""
    with opened(backend) as (device,):
        for context in (Context.create(device), green_of(device)):

            def use(context: Context = context) -> bool:
                context.push()
                context.push()
                context.pop()
                found = context.is_current
                context.pop()
                return found and device.driver.current() is None

            with device:
                context.push()
                context.pop()
                assert device.primary.is_current, "below it is what was"
            assert on_thread(use)
            assert use()
            context.close()


def test_popping_what_is_not_on_top_is_refused(backend: Backend) -> None:
    """A context that is not on top, or that a block pushed, cannot be popped."""
    with opened(backend) as (device,), closing(Context.create(device)) as own:
        with pytest.raises(greensched.InvalidRequest, match="not the current context"):
            own.pop()
        own.push()
        with device:
            with pytest.raises(greensched.InvalidRequest, match="not the current context"):
                own.pop()
            with pytest.raises(greensched.InvalidRequest, match="`with` block"):
                device.primary.pop()
            own.set_current()  # in the block's place
            with pytest.raises(greensched.InvalidRequest, match="`with` block"):
                own.pop()
        own.pop()
        assert device.driver.current() is None


def test_what_is_pushed_in_a_block_ends_with_it(backend: Backend) -> None:
    """If a library forgets to pop, the block restores, and the context is free."""
    with opened(backend) as (device,):
        green = green_of(device)
        for leave_behind in (green.push, green.set_current):
            with device:
                leave_behind()
                assert green.is_current
            assert device.driver.current() is None
            assert on_thread(lambda: green.scoped(lambda: green.is_current))
        own = Context.create(device)
        for leave_behind in (green.push, lambda: (own.push(), green.set_current())):
            own.push()
            with device:
                leave_behind()
            assert own.is_current
            own.pop()
            assert device.driver.current() is None, "below the block is what was"
        own.close()
        green.close()


def test_a_green_context_on_a_second_thread_is_refused_with_both_named(backend: Backend) -> None:
    """The error names both threads; launches on its stream from there are allowed."""
    with opened(backend) as (device,):
        green = green_of(device)
        stream = green.create_stream()

        def take() -> None:
            for enter in (green.__enter__, green.push, green.set_current):
                with pytest.raises(greensched.CurrentElsewhere) as caught:
                    enter()
                assert (caught.value.holder, caught.value.asker) == ("MainThread", "second")
                assert "'MainThread'" in str(caught.value)
                assert "'second'" in str(caught.value)
            assert device.driver.current() is None
            config = greensched.LaunchConfig(grid=1, block=1)
            greensched.launch(stream, config, greensched.kernels.spin, 1000)
            stream.sync()

        with green:
            on_thread(take, "second")
        for stand in (green.push, green.set_current):
            stand()
            on_thread(take, "second")
            green.pop()
        green.set_current()
        device.set_current()  # in its place
        on_thread(lambda: green.scoped(lambda: None), "second")
        device.primary.pop()
        stream.close()
        green.close()


def test_a_thread_that_ends_gives_its_green_context_up(backend: Backend) -> None:
    """A context that an ended thread left current may be entered by others, or closed."""
    with opened(backend) as (device,):
        green = green_of(device)
        if not backend.is_simulated:  # the stand-in would call it a thread that left one behind
            on_thread(lambda: (green.push(), device.driver.pop_current()))
        else:
            on_thread(green.push)
        assert green.scoped(lambda: green.is_current)
        green.close()


# -- what belongs to a context ------------------------------------------------------------------


def test_streams_and_events_of_a_context_of_its_own_do_not_mix(backend: Backend) -> None:
    """Mixed with green ones they are refused, both named, before any driver call."""
    with opened(backend) as (device,), ExitStack() as stack:
        own, other = (stack.enter_context(closing(Context.create(device))) for _ in range(2))
        green = stack.enter_context(closing(green_of(device)))
        mine, theirs = own.create_stream(), green.create_stream()
        event, foreign = own.create_event(), green.create_event()
        mine.record(event)
        theirs.record(foreign)
        mine.wait(event)
        for refused in (
            lambda: mine.record(foreign),
            lambda: theirs.record(event),
            lambda: mine.wait(foreign),
            lambda: theirs.wait(event),
            lambda: other.create_stream().record(event),
        ):
            with pytest.raises(greensched.WrongContext, match="own") as caught:
                refused()
            assert repr(caught.value.what) in str(caught.value)
            assert repr(caught.value.other) in str(caught.value)
        on_thread(mine.sync)
        stack.callback(gc.collect)


def test_what_outlives_its_context_says_so_and_names_both(backend: Backend) -> None:
    """Using a stream or event of a closed context raises an error that names both."""
    with opened(backend) as (device,):
        for context in (Context.create(device), green_of(device)):
            stream, event = context.create_stream(), context.create_event()
            context.close()
            for use, what in (
                (stream.sync, stream),
                (stream.record, stream),
                (lambda stream=stream: stream.__cuda_stream__(), stream),
                (event.sync, event),
                (lambda event=event: event.is_done, event),
            ):
                with pytest.raises(greensched.Closed, match="context is gone") as caught:
                    use()
                assert repr(context) in str(caught.value)
                assert repr(what) in str(caught.value)


def test_what_a_context_is_set_to(backend: Backend) -> None:
    """Limits and cache configuration can be read back, and green contexts share them."""
    with opened(backend) as (device,), ExitStack() as stack:
        own = stack.enter_context(closing(Context.create(device)))
        green = stack.enter_context(closing(green_of(device)))
        for name in ("stack_bytes", "printf_fifo_bytes", "malloc_heap_bytes"):
            default = getattr(own, name)
            assert default > 0
            setattr(device.primary, name, 4 * default)
            assert getattr(device.primary, name) >= 4 * default
            assert getattr(green, name) == getattr(device.primary, name)
            assert getattr(own, name) == default
            setattr(green, name, default)
            assert getattr(device.primary, name) == default
            for wrong in (-1, 1.5, True, None, 2**64):
                with pytest.raises(greensched.InvalidRequest, match=f"{name}="):
                    setattr(own, name, wrong)
        before = green.persisting_l2_bytes
        own.persisting_l2_bytes = 1 << 20
        assert own.persisting_l2_bytes >= 1 << 20
        assert green.persisting_l2_bytes == before
        own.cache_config = CacheConfig.PREFER_SHARED
        assert own.cache_config is CacheConfig.PREFER_SHARED
        with pytest.raises(greensched.InvalidRequest, match="cache_config="):
            own.cache_config = 1  # type: ignore[assignment]
        assert device.driver.current() is None
        own.close()
        with pytest.raises(greensched.Closed):
            own.stack_bytes  # noqa: B018


def test_a_kernel_runs_in_a_context_of_its_own(backend: Backend) -> None:
    """`launch` on such a context's stream works and never makes the primary."""
    with opened(backend) as (device,):
        driver: Driver = device.driver
        release_primary(driver)
        with closing(Context.create(device)) as own, closing(own.create_stream()) as stream:
            config = greensched.LaunchConfig(grid=1, block=1)
            greensched.launch(stream, config, greensched.kernels.spin, 1000)
            on_thread(stream.sync)
            assert not driver.primary_state(0)[1]


def test_pools_use_no_context_of_its_own(backend: Backend) -> None:
    """A pool used inside another context's block has green contexts of the primary."""
    with opened(backend) as (device,), closing(Context.create(device)) as own:
        pool = greensched.Pool([0], driver=device.driver)

        def inside(context: Context) -> tuple[bool, bool]:
            return context.is_current, own.is_current

        async def main() -> None:
            async with pool, pool.partition(8) as p:
                assert p.context.kind == "green"
                assert p.context.primary.kind == "primary"
                assert await p.run(inside, p.context) == (True, False)
                assert own.is_current

        with own:  # the whole life of the loop
            backend.run(main)
            assert own.is_current
        assert not own.streams
        assert not own.events


def test_what_is_current_can_be_asked_on_a_loop(backend: Backend) -> None:
    """Asking, entering and leaving never block, even for a foreign context."""
    with opened(backend) as (device,):
        driver, primary = device.driver, device.primary
        raw = driver.create_context(0, ContextFlags.SCHED_AUTO)

        async def main() -> None:
            assert Context.current(driver) is None
            with device:
                assert Context.current(driver) is primary
                driver.push_current(raw)
                adopted = Context.current(driver)
                assert adopted is not None
                with adopted:
                    assert adopted.is_current
                driver.pop_current()

        backend.run(main)
        driver.destroy_context(raw)


def test_nothing_is_logged_where_nothing_is_wrong(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the block's body is not in our log."""
    with opened(backend) as (device,), caplog.at_level(logging.DEBUG, "greensched"):
        with pytest.raises(KeyError), device:
            raise KeyError
    assert not caplog.records
