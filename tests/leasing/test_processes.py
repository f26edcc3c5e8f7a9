"""Forks, exits and other ends of processes: each is reported or quiet, and soon over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

import greensched
from faults.cases import rounds
from greensched.leasing import process, sync

#: Python 3.12 and newer warn of every fork beside threads; here it is done on purpose.
FLAGS = ("-W", "ignore:This process:DeprecationWarning")

PRELUDE = """
import asyncio, contextlib, os, sys, threading
import numpy as np
import greensched
from greensched import ALL, LaunchConfig, Pool
from greensched.kernels import fill, spin

ONE = LaunchConfig(grid=1, block=1)
pool = Pool(driver="simulated:h200")
going = threading.Event()
"""


def run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter; one that does not end fails at the time limit."""
    return subprocess.run(
        [sys.executable, *FLAGS, *flags, "-c", PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONWARNINGS", "PYTHONDEVMODE")},
    )


def quiet(program: str, *flags: str) -> str:
    """Run a program that must succeed with an empty stderr; return its output."""
    done = run(program, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# -- the end of the interpreter ---------------------------------------------------------------

#: Something is submitted in a block that an error ends: it is still at work when the loop is not.
AT_WORK = """
    async def main():
        await pool.open()
        async with pool.partition(16) as p:
            {submit}
            raise LookupError

    with contextlib.suppress(LookupError):
        {run}
"""
KERNEL = "p.launch(ONE, spin, 10**12)"
#: It has begun when the block ends.
CALL = "p.run(lambda: (going.set(), threading.Event().wait())); assert going.wait()"

ENDS = {
    "an open pool": """
        asyncio.run(pool.open())
    """,
    "an open pool and its loop still there": """
        loop = asyncio.new_event_loop()
        loop.run_until_complete(pool.open())
    """,
    "an open lease": """
        async def main():
            await pool.open()
            return await pool.partition(16).__aenter__()

        p = asyncio.run(main())
    """,
    "a kernel in flight": AT_WORK.format(submit=KERNEL, run="asyncio.run(main())"),
    "a callable that does not return": AT_WORK.format(submit=CALL, run="asyncio.run(main())"),
    "work given up by aclose": """
        async def main():
            await pool.open()
            with contextlib.suppress(LookupError):
                async with pool.partition(16) as p:
                    p.launch(ONE, spin, 10**12)
                    p.run(threading.Event().wait)
                    raise LookupError
            assert (await pool.aclose(grace=0.01)).abandoned

        import logging
        logging.getLogger("greensched").setLevel(logging.CRITICAL)
        asyncio.run(main())
    """,
    "sys.exit in a block": """
        async def main():
            async with pool, pool.partition(16) as p:
                await p.launch(ONE, spin, 1000)
                sys.exit(0)

        asyncio.run(main())
    """,
    "a loop in a daemon thread": """
        async def main():
            async with pool:
                while True:
                    async with pool.partition(16) as p:
                        await p.launch(ONE, spin, 100_000)
                        await p.run(going.set)  # the process ends while this loop goes on

        threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
        assert going.wait()
    """,
    "a pool whose opening is not awaited": """
        async def main():
            asyncio.ensure_future(pool.open())
            await asyncio.sleep(0)

        asyncio.run(main())
    """,
    "a pool never opened": "",
    "a closed pool": """
        async def main():
            async with pool, pool.partition(16) as p:
                await p.launch(ONE, spin, 1000)

        asyncio.run(main())
    """,
    "a pool and a buffer in a cycle": """
        async def main():
            await pool.open()
            async with pool.partition(16) as p:
                pool.buffer = await p.upload(np.ones(8))
            pool.me = pool

        asyncio.run(main())
        del pool
    """,
    "trio": AT_WORK.format(submit=KERNEL, run="import trio; trio.run(main)"),
}


@pytest.mark.fault("D3", "D4", "C12")
@pytest.mark.parametrize("left", ENDS)
def test_the_interpreter_ends_soon_and_quietly(left: str) -> None:
    """Whatever is open or running, the exit is short and silent, with code 0."""
    assert quiet(ENDS[left]) == ""


@pytest.mark.fault("D3", "D4")
def test_the_exit_joins_no_thread() -> None:
    """Every thread of a pool is a daemon, because Python joins all others at exit."""
    said = quiet(
        """
        async def main():
            await pool.open()
            await asyncio.to_thread(pool.sync.open)
            async with pool.trace(os.devnull):
                async with pool.partition(16) as p:
                    p.launch(ONE, spin, 1000)
                    await p.run(going.set)
                    with await p.upload(np.zeros(1 << 20, np.uint8)) as big:
                        await p.download(big)
                    ours = [t for t in threading.enumerate() if "greensched" in t.name]
                    print(*sorted(t.name.rpartition(" ")[2] for t in ours if t.daemon))
                    print([t.name for t in ours if not t.daemon])
            await asyncio.to_thread(pool.sync.close)
            await pool.aclose()

        asyncio.run(main())
        """
    )
    daemons, others = said.splitlines()
    assert {"builder", "submit", "sync", "trace", "worker"} <= {*daemons.split()}
    assert others == "[]"


@pytest.mark.fault("D3", "D4")
def test_the_exit_waits_once_for_less_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """All open pools share one wait, which their work may end earlier."""
    waits: list[tuple[int, float]] = []

    def note(futures: Collection[Future[Any]], limit: float) -> None:
        waits.append((len(futures), limit))
        wait(futures)

    monkeypatch.setattr(sync, "wait", note)
    pools = [greensched.Pool(driver="simulated:h20") for _ in range(3)]
    for pool in pools:
        pool.sync.open()
    with pytest.warns(ResourceWarning, match="was never closed") as warned:
        sync._close_at_exit()
    assert len(warned) == 3
    assert waits == [(3, sync.EXIT_LIMIT)]
    assert sync.EXIT_GRACE < sync.EXIT_LIMIT < 1
    for pool in pools:
        assert pool.state is greensched.PoolState.CLOSED
        pool.sync.close()


@pytest.mark.parametrize("left", ["an open pool", "an open lease", "a kernel in flight"])
def test_what_was_forgotten_is_only_warned_of(left: str) -> None:
    """With resource warnings on, the exit prints those and nothing else."""
    done = run(ENDS[left], "-W", "always::ResourceWarning")
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
    assert all("ResourceWarning" in line or "enable tracemalloc" in line for line in said), said


def test_a_failure_at_the_end_is_shown() -> None:
    """The program's own failure is shown, and nothing else."""
    done = run(
        """
        async def main():
            async with pool, pool.partition(16) as p:
                p.launch(ONE, spin, 1000)
                raise LookupError("its own")

        asyncio.run(main())
        """
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "LookupError: its own"
    assert "During handling" not in done.stderr


# -- loops ------------------------------------------------------------------------------------


@pytest.mark.fault("D5")
def test_a_loop_may_close_with_a_pool_open() -> None:
    """A loop that closes with an open pool, lease and work prints nothing."""
    said = quiet(
        """
        import logging

        async def main():
            await pool.open()
            p = await pool.partition(16).__aenter__()
            p.launch(ONE, spin, 10**6)
            return p

        async def again():
            async with pool.partition(ALL) as p:
                print(p.sm_count)
            await pool.aclose()

        logging.getLogger("greensched").setLevel(logging.ERROR)  # it does tell of the lease
        loop = asyncio.new_event_loop()
        held = loop.run_until_complete(main())
        loop.close()
        asyncio.run(again())
        """
    )
    assert said == "132\n"


# -- fork and spawn ---------------------------------------------------------------------------

IN_A_CHILD = """
def in_a_child(use):
    # What a use of something raises in a forked child: its name, or what it gave.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        import faulthandler
        faulthandler.dump_traceback_later(4, exit=True)
        try:
            said = use()
            if hasattr(said, "__await__"):
                async def main():
                    return await said
                said = asyncio.run(main())
            said = f"nothing: {said!r}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said or "it hung"
"""

#: What a child may try, where it must be told: with `p` a partition and `b` a buffer.
USES = {
    "launch": "lambda: p.launch(ONE, spin, 1)",
    "upload": "lambda: p.upload(np.ones(3))",
    "upload a lot": "lambda: p.upload(np.ones(10**6))",
    "download": "lambda: p.download(b)",
    "copy": "lambda: p.copy(b, np.ones(10))",
    "empty": "lambda: p.empty(3)",
    "empty_pinned": "lambda: p.empty_pinned(3)",
    "run": "lambda: p.run(int)",
    "prepare": "lambda: p.prepare(ONE, spin)",
    "bind": "lambda: p.bind(ONE, spin, 1)",
    "ready": "lambda: p.drain()",
    "partition": "lambda: pool.partition(16).__aenter__()",
    "partitions": "lambda: pool.partitions(16, 16).__aenter__()",
    "pool.launch": "lambda: pool.launch(ONE, spin, 1, sms=8)",
    "pool.run": "lambda: pool.run(int, sms=8)",
    "verify": "lambda: pool.verify()",
}


@pytest.mark.fault("D1")
def test_a_forked_child_is_reported() -> None:
    """In a forked child every use of the parent's pool raises ForkedPool; the parent goes on."""
    uses = ", ".join(f"{name!r}: {use}" for name, use in USES.items())
    said = quiet(
        IN_A_CHILD
        + textwrap.dedent(
            f"""
            async def main():
                async with pool, pool.partition(16) as p:
                    b = await p.upload(np.ones(10))
                    await p.prepare(ONE, spin)
                    for name, use in {{{uses}}}.items():
                        print(name, "->", in_a_child(use))
                    print("state", "->", in_a_child(lambda: pool.state))
                    print("is_ready", "->", in_a_child(lambda: pool.is_ready))
                    print("aclose", "->", in_a_child(lambda: pool.aclose()))
                    print(await p.download(b))
                    with b:
                        await p.launch(ONE, fill, await p.empty(4), 1.0, 4)

            import warnings
            warnings.simplefilter("ignore", ResourceWarning)
            asyncio.run(main())
            """
        )
    )
    *lines, alive = said.splitlines()
    told = dict(line.split(" -> ", 1) for line in lines)
    assert set(told) == {*USES, "state", "is_ready", "aclose"}
    for name in USES:
        assert told[name].startswith("ForkedPool: this pool is of the parent process"), told
    assert "FORKED" in told["state"]
    assert told["is_ready"] == "nothing: False"
    assert told["aclose"] == "nothing: CloseReport(abandoned=())"
    assert alive == "[1. 1. 1. 1. 1. 1. 1. 1. 1. 1.]"


def test_a_forked_child_that_leaves_the_block_is_reported() -> None:
    """The block's end raises ForkedPool in a child and does not affect the parent."""
    said = quiet(
        """
        async def main():
            async with pool:
                told = 0
                try:
                    async with pool.partition(16) as p:
                        child = os.fork()
                        if child:
                            print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                            with await p.upload(np.ones(4)) as b:
                                print(await p.download(b))
                except greensched.ForkedPool:
                    told = 7
                finally:
                    if not child:
                        os._exit(told)
                print(pool.statistics().granted)

        asyncio.run(main())
        """
    )
    assert said == "child: 7\n[1. 1. 1. 1.]\n1\n"


def test_a_forked_child_ends_quietly() -> None:
    """A child that is forked with an open pool exits soon and silently, with code 0."""
    said = quiet(
        """
        asyncio.run(pool.open())
        child = os.fork()
        if child:
            print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            asyncio.run(pool.aclose())
            print(pool.state.value)
        """
    )
    assert said == "child: 0\nclosed\n"


@pytest.mark.fault("D2")
def test_a_forked_child_may_have_a_pool_of_its_own() -> None:
    """A pool that the child opens works there."""
    said = quiet(
        IN_A_CHILD
        + textwrap.dedent(
            """
            async def own():
                async with Pool(driver="simulated:h200") as mine, mine.partition(16) as p:
                    with await p.upload(np.arange(4)) as b:
                        return (await p.download(b)).tolist()

            async def later():
                async with never_opened as mine, mine.partition(ALL) as p:
                    return p.sm_count

            never_opened = Pool(driver="simulated:h200")

            async def main():
                async with pool, pool.partition(16):
                    print(in_a_child(own))
                    print(in_a_child(later))

            asyncio.run(main())
            """
        )
    )
    assert said == "nothing: [0, 1, 2, 3]\nnothing: 132\n"


@pytest.mark.fault("D2")
def test_a_spawned_process_opens_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process that is spawned while the parent's pool is open opens its own."""
    program = tmp_path_factory.mktemp("spawn") / "program.py"
    program.write_text(
        PRELUDE
        + textwrap.dedent(
            """
            import multiprocessing

            async def work(number):
                async with Pool(driver="simulated:h200") as mine, mine.partition(16) as p:
                    with await p.upload(np.full(4, number, np.float32)) as b:
                        await p.launch(ONE, fill, b, number + 1.0, 4)
                        return float((await p.download(b)).sum())

            def child(number):
                return asyncio.run(work(number))

            async def main():
                async with pool, pool.partition(ALL) as p:
                    with multiprocessing.get_context("spawn").Pool(2) as processes:
                        print(*processes.map(child, [1, 2]))

            if __name__ == "__main__":
                asyncio.run(main())
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "8.0 12.0\n")


MORE_USES = {
    "buffer": "lambda: b.__cuda_array_interface__",
    "buffer.check": "lambda: b.check(0)",
    "pinned.check": "lambda: pinned.check(0)",
    "open": "lambda: pool.open()",
    "stream": "lambda: p.stream",
    "context": "lambda: p.context",
    "__cuda_stream__": "lambda: p.__cuda_stream__()",
    "nowait": "lambda: nowait()",
    "graph": "lambda: graph.launch(p)",
    "capture": "lambda: p.capture(captured)",
}


@pytest.mark.fault("D1")
def test_a_forked_child_is_told_of_everything() -> None:
    """The parent's buffers, streams, contexts and `open` raise ForkedPool in a child."""
    uses = "\n        ".join(f"print(in_a_child({use}))" for use in MORE_USES.values())
    said = quiet(
        IN_A_CHILD
        + textwrap.dedent(
            """
            async def nowait():
                pool.partition_nowait(8)

            def captured():
                greensched.launch(greensched.current_call().stream, ONE, spin, 1)

            async def main():
                async with pool, pool.partition(16) as p:
                    b, pinned = await p.upload(np.ones(10)), await p.empty_pinned(4)
                    await p.prepare(ONE, spin)
                    graph = await p.capture(captured)
                    USES
                    await graph.launch(p)
                    graph.close()
                    b.close()
                    pinned.close()

            asyncio.run(main())
            """
        ).replace("USES", uses)
    )
    for use, told in zip(MORE_USES, said.splitlines(), strict=True):
        assert told.startswith("ForkedPool:"), (use, told)


@pytest.mark.fault("D1", "I13")
def test_a_cached_lease_is_not_granted_in_a_child() -> None:
    """`partition_nowait` finds no cached lease in a child."""
    said = quiet(
        IN_A_CHILD
        + textwrap.dedent(
            """
            async def main():
                async with pool:
                    async with pool.partition(8):
                        pass
                    print(in_a_child(lambda: pool.partition_nowait(8)))
                    async with pool.partition_nowait(8):
                        pass

            asyncio.run(main())
            """
        )
    )
    assert said.startswith("ForkedPool:"), said


@pytest.mark.fault("D1")
@pytest.mark.parametrize(
    "use",
    ["pool.partition(8).__aenter__()", "pool.open()", "pool.statistics()", "repr(pool)",
     "pool.aclose()", "greensched.Pool(driver='simulated:h200').open()"],
)  # fmt: skip
def test_a_lock_held_while_forking_hangs_no_child(use: str) -> None:
    """If another thread held any lock at the fork, the child raises and does not hang."""
    said = quiet(
        IN_A_CHILD
        + textwrap.dedent(
            f"""
            from greensched.leasing import process
            held, go = threading.Event(), threading.Event()

            def hold():
                with pool._manager.lock, process._lock:
                    held.set()
                    go.wait()

            async def main():
                async with pool:
                    thread = threading.Thread(target=hold)
                    thread.start()
                    held.wait()
                    print(in_a_child(lambda: {use}))
                    go.set()
                    thread.join()

            asyncio.run(main())
            """
        )
    )
    assert "it hung" not in said, said


@pytest.mark.fault("D1")
def test_forks_beside_busy_threads_are_answered(
    record_property: Callable[[str, object], None],
) -> None:
    """A child that is forked while pool threads work raises at once."""
    number = rounds(20)
    said = quiet(
        IN_A_CHILD
        + textwrap.dedent(
            f"""
            async def work():
                while True:
                    async with pool.partition(16) as p:
                        with await p.upload(np.ones(10**5)) as b:
                            await p.run(sum, (1, 2))
                            await p.download(b)

            async def main():
                async with pool:
                    tasks = [asyncio.create_task(work()) for _ in range(3)]
                    for _ in range({number}):
                        for _ in range(7):
                            await asyncio.sleep(0)
                        said = await asyncio.to_thread(
                            in_a_child, lambda: pool.partition(8).__aenter__())
                        print(said.split(":")[0])
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)

            asyncio.run(main())
            """
        )
    )
    assert said.splitlines() == ["ForkedPool"] * number
    record_property("count", f"{number} of {number} forks")


@pytest.mark.fault("D4")
def test_a_program_that_leaves_its_sync_pool_open_ends() -> None:
    """The pool is closed at exit, with a warning that names it."""
    done = run("pool.sync.open(); print('end')", "-W", "always::ResourceWarning")
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "was never closed" in done.stderr
    assert "Traceback" not in done.stderr


def test_pools_that_a_program_leaves_open_close_at_once() -> None:
    """They share one limit and all close together, so that no work is given up."""
    done = run(
        """
        pools = [Pool(driver="simulated:h200") for _ in range(3)]

        def work():
            going.release()
            while any(each.is_ready for each in pools):
                threading.Event().wait(0.001)

        def lease(pool):
            with pool.sync.partition(16) as p:
                p.run(work)

        going = threading.Semaphore(0)
        for each in pools:
            each.sync.open()
            threading.Thread(target=lease, args=(each,), daemon=True).start()
        for _ in pools:
            going.acquire()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


#: A program with a block in a generator that it never ends.
LEFT_OPEN = """
    def generate():
        with {block}:
            yield
    {opening}
    entered = generate()
    next(entered)
    print('end')
"""
LEASE = "pool.sync.partition(16)"


@pytest.mark.parametrize(
    ("opening", "block"),
    [
        ("pool.sync.open()", LEASE),
        ("asyncio.run(pool.open())", LEASE),
        ("pass", f"pool.sync, {LEASE}"),
    ],
)
def test_a_program_that_leaves_a_sync_lease_open_ends(opening: str, block: str) -> None:
    """The exit does not wait for the loop, whose thread has stopped."""
    done = run(LEFT_OPEN.format(opening=opening, block=block), "-W", "always::ResourceWarning")
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "was never closed" in done.stderr
    assert "Traceback" not in done.stderr


# -- two processes on one GPU -----------------------------------------------------------------

#: A process with a pool on a GPU, as far as other processes see. A forked child outlives it.
HOLDER = """
import os, sys, time, types
from greensched.leasing import process
driver = types.SimpleNamespace(needs_binary=True)
process.claim_device(driver, 0, "GPU-1")
if os.fork() == 0:
    time.sleep(60)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.fault("E6")
def test_a_gpu_has_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second process's pool is refused, by the GPU's UUID, until the first process ends."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    driver = types.SimpleNamespace(needs_binary=True)

    def claim(ordinal: int, uuid: str) -> None:
        process.claim_device(driver, ordinal, uuid)  # type: ignore[arg-type]
        process.release_devices(driver, [ordinal])  # type: ignore[arg-type]

    command = [sys.executable, *FLAGS, "-c", HOLDER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            claim(1, "GPU-2")
            assert process.other_holder("GPU-1") == holder.pid
            assert process.other_holder("GPU-2") is process.other_holder("GPU-3") is None
            with pytest.raises(greensched.DeviceTaken, match="--workers 1") as caught:
                claim(0, "GPU-1")
            assert caught.value.process == holder.pid
            (tmp_path / "control").touch()  # MPS runs: several processes are meant
            claim(0, "GPU-1")
            assert process.other_holder("GPU-1") is None
            (tmp_path / "control").unlink()
            holder.kill()
            holder.wait()
            claim(0, "GPU-1")
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


def test_a_folder_that_is_a_link_is_not_used_for_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user could have made the link so that this process writes elsewhere."""
    aim = tmp_path / "aim"
    aim.mkdir()
    (tmp_path / f"greensched-{os.geteuid()}").symlink_to(aim)
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    process._lock_gpu((0, 0), "GPU-of-the-test")
    assert not list(aim.iterdir())
    (record,) = caplog.records
    assert "is not a folder that this user owns" in record.getMessage()
