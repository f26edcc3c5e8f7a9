"""Jobs of two programs on one fleet, while pools, nodes and the owner of the fleet are lost.

`make bench-ray` runs it. Three programs, processes of their own, use one fleet: the owner, which
starts it, and two drivers. Each fault has a sixth of the drivers' jobs, and one sixth has none:

    an actor is killed     ray.kill, as by a crash
    an actor is stopped    SIGSTOP, and SIGCONT after 25 s
    a node drains          `ray drain-node`; another node joined before
    the owner is killed    SIGKILL
    a node is lost         its processes are killed; another node joins 3 s later

Every second job is idempotent. Each job records that it ran, so a job that ran twice, or was
answered without having run, is known. A job belongs to the fault that came last before it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import ray
from ray.cluster_utils import Cluster

from greensched import GreenschedError, LaunchConfig, Partition, Pool
from greensched.integrations.ray import Fleet, Health
from greensched.integrations.ray.supervisor import find_pools
from greensched.kernels import spin

ROOT = Path(__file__).parents[2]
FLEET = "faults"
DRIVERS = ("one", "two")
#: Jobs in flight: of each driver, and of the owner. Their size, and nanoseconds of their kernel.
CLIENTS, OWNERS, SMS, KERNEL_NS = 150, 4, 16, 15_000_000
#: A job's deadline in seconds, and how much later its answer may come.
DEADLINE, LATE = 20.0, 0.2
#: Seconds for which an actor is stopped; until another node joins; that a draining node has.
STOPPED, AWAY, DRAIN = 25.0, 3.0, 20
#: Seconds until everything is as before a fault; else the run ends.
SETTLED = 60.0

CONFIG = LaunchConfig(grid=1, block=32)
make = partial(Pool, driver="simulated:h200", prepare=[spin])


# -- in the programs --------------------------------------------------------------------------


async def noted(p: Partition, number: int, folder: str) -> int:
    """Record that the job runs, run a kernel, and return the process."""
    with Path(folder, f"ran {os.getpid()}").open("a") as journal:  # noqa: ASYNC230  some 30 us
        journal.write(f"{number}\n")
    await p.launch(CONFIG, spin, KERNEL_NS)
    return os.getpid()


class Result(NamedTuple):
    """How a job ended: `pid` is of the pool that answered, `error` the class of what it raised."""

    number: int
    began: float
    ended: float
    pid: int
    error: str
    is_expected: bool


async def program(name: str, folder: Path, numbers: Iterator[int], clients: int) -> None:
    """Keep so many jobs in flight until the file `end` is there, and write the results down."""
    with (folder / f"results {name}").open("w", buffering=1) as results:

        async def client(fleet: Fleet) -> None:
            while not (folder / "end").exists():
                results.write(json.dumps(await _job(fleet, next(numbers), str(folder))) + "\n")

        async with Fleet(FLEET, make if name == "owner" else None) as fleet:
            (folder / f"open {name}").touch()
            await asyncio.gather(*(client(fleet) for _ in range(clients)))


async def _job(fleet: Fleet, number: int, folder: str) -> Result:
    began, pid, error, is_expected = time.monotonic(), 0, "", True
    options: Any = {"sms": SMS, "deadline": DEADLINE, "idempotent": number % 2 == 0}
    try:
        pid = await fleet.submit(noted, number, folder, **options)
    except GreenschedError as raised:
        error = type(raised).__name__
    except Exception as raised:
        error, is_expected = repr(raised), False
    return Result(number, began, time.monotonic(), pid, error, is_expected)


# -- the faults -------------------------------------------------------------------------------


@dataclass
class Fault:
    """What happened, and the results of the jobs that ended after it and before the next."""

    what: str
    began: float
    #: Seconds from the fault, or from when a new node had joined, until the fleet was as before.
    recovery: float = 0.0
    results: list[Result] = field(default_factory=list)

    def bars(self, ran: Counter[int]) -> dict[str, bool]:
        """Return each condition, and whether it holds."""
        failed = [one for one in self.results if one.error]
        answered = [one for one in self.results if not one.error]
        late = max((one.ended - one.began for one in self.results), default=0.0) - DEADLINE
        return {
            f"{len(self.results)} jobs told, latest {late:+.2f} s after the deadline": (
                bool(self.results) and late < LATE
            ),
            "no wrong error": all(one.is_expected for one in failed),
            "no idempotent job lost": not any(one.number % 2 == 0 for one in failed),
            "others ran at most once": all(
                ran[one.number] <= 1 for one in self.results if one.number % 2
            ),
            "all answered have run": all(ran[one.number] for one in answered),
        }

    def __str__(self) -> str:
        errors = dict(Counter(one.error for one in self.results if one.error))
        recovery = f", as before after {self.recovery:.2f} s" if self.recovery else ""
        return f"{self.what}{recovery}; not answered: {errors or 'none'}"


class Run:
    """The programs, and what happens to their fleet."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.faults: list[Fault] = []
        self.owner: subprocess.Popen[bytes] | None = None
        #: How often each job began to run.
        self.ran: Counter[int] = Counter()
        self._files: dict[Path, IO[str]] = {}
        self._results: dict[str, list[Result]] = {name: [] for name in (*DRIVERS, "owner")}

    def all(self, jobs: int) -> None:
        """Run so many jobs of the drivers, or more, and every fault."""
        programs: list[subprocess.Popen[bytes]] = []
        try:
            for number, name in enumerate(("owner", *DRIVERS)):
                programs.append(self._start(name, number))
                self._wait(lambda name=name: (self.folder / f"open {name}").exists())
            self.owner = programs[0]
            happen: list[tuple[str, Callable[[], float]]] = [
                ("two programs, no fault", lambda: 0.0),
                ("an actor is killed", self._kill_actor),
                ("an actor is stopped", self._stop_actor),
                ("a node drains", self._drain_node),
                ("the owner is killed", self._kill_owner),
                ("a node is lost", self._lose_node),
            ]
            for what, fault in happen:
                self.faults.append(Fault(what, time.monotonic()))
                told = self._told() + jobs / len(happen)
                self.faults[-1].recovery = fault()
                self._wait(lambda told=told: self._told() >= told)
            (self.folder / "end").touch()
            for one in programs[1:]:
                if one.wait(DEADLINE + SETTLED):
                    raise RuntimeError("a program failed; its traceback is above")
        finally:
            for one in programs:
                one.kill()
        self._read()
        for result in (one for results in self._results.values() for one in results):
            fault = max(
                i for i, one in enumerate(self.faults) if one.began <= result.ended or not i
            )
            self.faults[fault].results.append(result)
        for journal in self.folder.glob("ran *"):
            self.ran.update(map(int, journal.read_text().split()))

    def _start(self, name: str, number: int) -> subprocess.Popen[bytes]:
        given = [name, str(number), str(self.folder), self.cluster.address]
        return subprocess.Popen([sys.executable, "-m", __spec__.name, *given], cwd=ROOT)

    # -- what happens -------------------------------------------------------------------------

    def _kill_actor(self) -> float:
        began, before = time.monotonic(), self._pools()
        ray.kill(find_pools(FLEET)[min(before)], no_restart=False)
        return self._answer({one.pid for one in before.values()}, began) - began

    def _stop_actor(self) -> float:
        pid = min(self._pools().items())[1].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.kill(pid, signal.SIGCONT)
        resumed = time.monotonic()
        self._wait(lambda: any(one.pid == pid and one.ended > resumed for one in self._all()))
        return time.monotonic() - resumed

    def _drain_node(self) -> float:
        before = self._pools()
        self.cluster.add_node(num_cpus=1, num_gpus=1)
        self._wait(lambda: len(self._pools()) > len(before))
        node, began = self._worker(), time.monotonic()
        drain = ["drain-node", "--address", self.cluster.address, "--node-id", node.node_id]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "benchmark"]
        seconds = ["--deadline-remaining-seconds", str(DRAIN)]
        ray_cli = [sys.executable, "-m", "ray.scripts.scripts", *drain, *reason, *seconds]
        subprocess.run(ray_cli, stdout=subprocess.DEVNULL, check=True)
        self._wait(lambda: all(one.node != node.node_id for one in self._pools().values()))
        emptied = time.monotonic() - began
        self.cluster.remove_node(node)
        return emptied

    def _kill_owner(self) -> float:
        assert self.owner is not None
        self.owner.kill()
        return 0.0

    def _lose_node(self) -> float:
        pids = {one.pid for one in self._pools().values()}
        self.cluster.remove_node(self._worker(), allow_graceful=False)
        time.sleep(AWAY)
        self.cluster.add_node(num_cpus=1, num_gpus=1)  # raises if it has not joined in 30 s
        joined = time.monotonic()
        return self._answer(pids, joined) - joined

    # -- what is known of the fleet -----------------------------------------------------------

    def _pools(self) -> dict[str, Health]:
        """Return the health of the pools that reply."""
        found = {}
        for name, handle in find_pools(FLEET).items():
            with contextlib.suppress(ray.exceptions.RayError):
                asked = handle.health.options(concurrency_group="control").remote()
                found[name] = ray.get(asked, timeout=1)
        return found

    def _worker(self) -> Any:
        """Return a node with a pool that is not the head node."""
        used = {one.node for one in self._pools().values()}
        return next(one for one in self.cluster.worker_nodes if one.node_id in used)

    def _answer(self, old: set[int], after: float) -> float:
        """Wait for an answer of a new process; return when it came."""

        def times() -> list[float]:
            answers = [one for one in self._all() if one.pid and one.pid not in old]
            return [one.ended for one in answers if one.ended > after]

        self._wait(lambda: bool(times()))
        return min(times())

    def _all(self) -> list[Result]:
        self._read()
        return [one for results in self._results.values() for one in results]

    def _told(self) -> int:
        self._read()
        return sum(len(self._results[name]) for name in DRIVERS)

    def _read(self) -> None:
        """Read what the programs have written since the last time."""
        for name, results in self._results.items():
            path = self.folder / f"results {name}"
            if path not in self._files:
                if not path.exists():
                    continue
                self._files[path] = path.open()
            lines = self._files[path].readlines()
            whole = [line for line in lines if line.endswith("\n")]
            if len(whole) < len(lines):  # the last one is being written, or its program is dead
                self._files[path].seek(self._files[path].tell() - len(lines[-1].encode()))
            results += [Result(*json.loads(line)) for line in whole]

    def _wait(self, holds: Callable[[], bool]) -> None:
        ends = time.monotonic() + SETTLED
        while not holds():
            if time.monotonic() > ends:
                what = self.faults[-1].what if self.faults else "the programs started"
                raise TimeoutError(f"the fleet is not as before {SETTLED:g} s after: {what}")
            time.sleep(0.05)


def faults(cluster: Cluster, jobs: int) -> bool:
    """Run the jobs with every fault, print the verdicts, and return whether all bars are met."""
    began, passed = time.monotonic(), True
    with tempfile.TemporaryDirectory() as folder:
        run = Run(cluster, Path(folder))
        run.all(jobs)
    told = sum(len(one.results) for one in run.faults)
    again = sum(times > 1 for times in run.ran.values())
    print(f"{told} jobs in {time.monotonic() - began:.0f} s, {again} of them ran more than once")
    for fault in run.faults:
        print(f"\n{fault}")
        for bar, holds in fault.bars(run.ran).items():
            passed &= holds
            print(f"  {bar}: {'PASS' if holds else 'FAIL'}")
    return passed


def main() -> None:
    """Run one of the programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("first", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("address")
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=False, logging_level="error")
    numbers = iter(range(options.first * 10_000_000, (options.first + 1) * 10_000_000))
    clients = OWNERS if options.name == "owner" else CLIENTS
    asyncio.run(program(options.name, options.folder, numbers, clients))


if __name__ == "__main__":
    main()
