"""How calls of `pool.sync` reach its loop."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from greensched import InvalidRequest, Pool
from greensched.leasing import sync


def test_calls_that_come_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten calls for a busy loop share one wake-up, which costs more than a lease."""
    pool = Pool(driver="simulated:h200")
    busy, go = threading.Event(), threading.Event()

    async def block() -> None:
        busy.set()
        go.wait()

    with pool.sync:
        loop, woken = pool.sync._loop.loop, list[Any]()
        real = loop.call_soon_threadsafe

        def wake(*args: Any, **options: Any) -> Any:
            woken.append(args)
            return real(*args, **options)

        threads = [threading.Thread(target=pool.sync.call, args=(block,))]
        threads[0].start()
        busy.wait()
        monkeypatch.setattr(loop, "call_soon_threadsafe", wake)
        for _ in range(10):
            threads.append(threading.Thread(target=pool.sync.call, args=(anyio.sleep, 0)))
            threads[-1].start()
        while len(pool.sync._loop._calls) < 10:
            threading.Event().wait(0.001)
        assert len(woken) == 1
        go.set()
        for thread in threads:
            thread.join()


def test_a_loop_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block raises the reason, and the next one works."""
    pool = Pool(driver="simulated:h200")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no file descriptor is left")

    monkeypatch.setattr(sync.anyio, "run", fail)
    with pytest.raises(OSError, match="no file descriptor is left"), pool.sync:
        pass
    monkeypatch.undo()
    with pool.sync, pool.sync.partition(8) as p:
        assert p.run(int) == 0


def test_a_call_of_a_blocking_function_says_what_runs_one() -> None:
    """`pool.sync.call` takes functions that return an awaitable, and refuses others."""
    pool = Pool(driver="simulated:h20")
    with pool.sync, pytest.raises(InvalidRequest, match=r"returned 7: .*`p\.run`"):
        pool.sync.call(lambda: 7)  # type: ignore[arg-type,return-value]
