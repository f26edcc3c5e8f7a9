"""Ask how NCCL over two GPUs behaves inside partitions: what is right, how fast, and what hangs.

`python -m benchmarks.probes.nccl [--json FILE]` needs two GPUs and torch. A process has a rank on
each device, and each rank's calls run by `p.run` on a partition of that device. Each question is
asked in a process of its own, which is ended after a while: some orders of launches hang by NCCL's
rules.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from greensched import Partition, Pool

#: Seconds for a question, with the start of CUDA and NCCL, and for collectives that may hang.
LIMIT_S, HANGS_S = 45, 5.0
FLOAT32, SUM = 7, 0
WIDTH, HIDDEN, ROWS = 4096, 16384, 64


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`: 128 bytes, passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


def library() -> ctypes.CDLL:
    """Return NCCL as torch has it."""
    import torch  # noqa: F401  loads it

    spec = importlib.util.find_spec("nvidia.nccl")
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        for file in Path(place, "lib").glob("libnccl.so*"):
            return ctypes.CDLL(str(file))
    return ctypes.CDLL("libnccl.so.2")


def checked(status: int) -> None:
    if status:
        raise RuntimeError(f"NCCL: status {status}")


class Communicator:
    """A communicator of two ranks, each of which is made and used in calls of its own partition."""

    def __init__(self) -> None:
        self._nccl, self._id = library(), UniqueId()
        self._nccl.ncclCommInitRank.argtypes = (
            ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int,
        )  # fmt: skip
        self._nccl.ncclAllReduce.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
            ctypes.c_void_p, ctypes.c_void_p,
        )  # fmt: skip
        checked(self._nccl.ncclGetUniqueId(ctypes.byref(self._id)))
        self._ranks: dict[int, Any] = {}

    def join(self, rank: int) -> None:
        """Make a rank; waits for the other one."""
        made = ctypes.c_void_p()
        checked(self._nccl.ncclCommInitRank(ctypes.byref(made), 2, self._id, rank))
        self._ranks[rank] = made

    def add_up(self, rank: int, tensor: Any) -> None:
        """All-reduce a tensor in place, on torch's current stream."""
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        data = tensor.data_ptr()
        checked(
            self._nccl.ncclAllReduce(
                data, data, tensor.numel(), FLOAT32, SUM, self._ranks[rank], stream
            )
        )


async def both(first: Partition, second: Partition, call: Callable[[int], Any]) -> list[Any]:
    """Call a function of the rank in both partitions at once."""
    return list(await asyncio.gather(first.run(call, 0), second.run(call, 1)))


async def joined(first: Partition, second: Partition) -> Communicator:
    """Make a communicator over two partitions."""
    made = Communicator()
    await both(first, second, made.join)
    return made


@asynccontextmanager
async def pairs(*sizes: int) -> AsyncIterator[list[tuple[Partition, Partition]]]:
    """Open partitions of these sizes on each of two devices; those of one size are a pair."""
    async with (
        Pool([0, 1]) as pool,
        pool.partitions(*sizes, device=0) as here,
        pool.partitions(*sizes, device=1) as there,
    ):
        yield list(zip(here, there, strict=True))


async def keeps_context(p: Partition) -> bool:
    """Say whether the next call has the partition's context, whatever the last one did."""
    return bool(await p.run(p.device.driver.current) == p.context.handle)


class Layers:
    """Half of two layers on a device: columns of the first, rows of the second."""

    def __init__(self, rank: int) -> None:
        import torch

        device = f"cuda:{rank}"
        generator = torch.Generator().manual_seed(1)

        def weights(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, generator=generator) / columns**0.5

        up, down = weights(HIDDEN, WIDTH), weights(WIDTH, HIDDEN)
        mine = slice(rank * HIDDEN // 2, (rank + 1) * HIDDEN // 2)
        self.x = torch.randn(ROWS, WIDTH, generator=generator)
        self.expected = torch.relu(self.x @ up.t()) @ down.t()
        self.up, self.down = up[mine].to(device), down[:, mine].to(device)
        self.x = self.x.to(device)

    def compute(self) -> Any:
        """Return this half's share of the sum."""
        import torch

        return torch.relu(self.x @ self.up.t()) @ self.down.t()


async def tensor_parallel() -> dict[str, Any]:
    """Two layers shared out over both devices: eager, and as a graph with the all-reduce in it."""
    import torch

    torch.set_float32_matmul_precision("highest")
    found: dict[str, Any] = {}
    async with pairs(64) as ((p, q),):
        made = await joined(p, q)
        found["the next call has its context"] = [await keeps_context(p), await keeps_context(q)]
        layers = await both(p, q, Layers)
        graphs: dict[int, Any] = {}

        def step(rank: int) -> Any:
            share = layers[rank].compute()
            made.add_up(rank, share)
            return share

        def error(rank: int, out: Any) -> float:
            expected = layers[rank].expected.to(out.device)
            return float((out - expected).norm() / expected.norm())

        def once(rank: int) -> float:
            return error(rank, step(rank))

        def capture(rank: int) -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                graphs[rank] = graph, step(rank)

        def replay(rank: int) -> float:
            graphs[rank][0].replay()
            torch.cuda.current_stream().synchronize()
            return error(rank, graphs[rank][1])

        def timed(rank: int) -> float:
            torch.cuda.current_stream().synchronize()
            took = []
            for _ in range(50):
                began = time.perf_counter()
                graphs[rank][0].replay()
                torch.cuda.current_stream().synchronize()
                took.append(1e3 * (time.perf_counter() - began))
            return statistics.median(took)

        found["error, eager"] = await both(p, q, once)
        await p.run(capture, 0)
        await q.run(capture, 1)
        found["error, as a graph"] = await both(p, q, replay)
        found["ms, as a graph"] = await both(p, q, timed)
    return found


async def bandwidth() -> dict[str, Any]:
    """All-reduces of 64 MiB by the SMs of both partitions: GB/s of the bus."""
    import torch

    found: dict[str, Any] = {}
    number = 2**24
    for sms in (8, 16, 32, 64, 128):
        async with pairs(sms) as ((p, q),):
            made = await joined(p, q)

            def measure(rank: int, made: Communicator = made) -> float:
                tensor = torch.ones(number, device=f"cuda:{rank}")
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(3):
                    made.add_up(rank, tensor)
                began.record()
                for _ in range(20):
                    made.add_up(rank, tensor)
                ended.record()
                ended.synchronize()
                return 4 * number * 20 / 1e6 / began.elapsed_time(ended)

            found[f"{sms} SMs"] = [round(each, 1) for each in await both(p, q, measure)]
    return found


async def in_order(calls: list[Callable[[], Any]]) -> dict[str, Any]:
    """Start calls in this order; say whether all ended in time."""
    tasks = [asyncio.ensure_future(call()) for call in calls]
    _, pending = await asyncio.wait(tasks, timeout=HANGS_S)
    return {"hangs": bool(pending)}


def adds(made: Communicator, rank: int, times: int = 20) -> Callable[[int], float]:
    """Return a call that adds up a tensor of 4 MiB so many times, and waits."""

    def call(_: int) -> float:
        import torch

        tensor = torch.ones(2**20, device=f"cuda:{rank}")
        for _ in range(times):
            made.add_up(rank, tensor)
        torch.cuda.current_stream().synchronize()
        return float(tensor[0])

    return call


async def two_pairs_in_opposite_orders() -> dict[str, Any]:
    """Two communicators, each with partitions of its own, launched in opposite orders."""
    found: dict[str, Any] = {}
    async with pairs(32, 32) as ((a, b), (c, d)):
        one, other = await joined(a, b), await joined(c, d)
        for _ in range(20):
            found = await in_order(
                [
                    lambda: a.run(adds(one, 0), 0),
                    lambda: d.run(adds(other, 1), 0),
                    lambda: c.run(adds(other, 0), 0),
                    lambda: b.run(adds(one, 1), 0),
                ]
            )
            if found["hangs"]:
                return ended(found)
    return found


async def one_pair_in_opposite_orders() -> dict[str, Any]:
    """Two communicators over the same two partitions, launched in opposite orders."""
    async with pairs(32) as ((p, q),):
        one, other = await joined(p, q), await joined(p, q)

        def first(rank: int) -> None:
            for made in (one, other) if rank == 0 else (other, one):
                adds(made, rank, 1)(0)

        found = await in_order([lambda: p.run(first, 0), lambda: q.run(first, 1)])
        return ended(found) if found["hangs"] else found


def ended(found: dict[str, Any]) -> dict[str, Any]:
    """Print what was found, and end the process: collectives that hang are never done."""
    print(json.dumps(found), flush=True)
    os._exit(0)


QUESTIONS = {
    each.__name__: each
    for each in (
        tensor_parallel,
        bandwidth,
        two_pairs_in_opposite_orders,
        one_pair_in_opposite_orders,
    )
}


def ask(name: str) -> dict[str, Any]:
    """Ask a question in a process of its own."""
    # Multicast is off: where it fails, it takes all GPUs of a host that others may share.
    env = os.environ | {"NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, "-m", "benchmarks.probes.nccl", "--only", name]
    try:
        ran = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_S} s"}
    if ran.returncode:
        return {"error": f"exit code {ran.returncode}: {ran.stderr[-1500:]}"}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probes.nccl", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", choices=QUESTIONS, help="ask this here, in this process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answers there, too")
    options = parser.parse_args()
    if options.only is not None:
        import greensched.integrations.torch  # noqa: F401  calls have torch's stream by this

        print(json.dumps(asyncio.run(QUESTIONS[options.only]())))
        return 0
    found = {name: ask(name) for name in QUESTIONS}
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("error" in each for each in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
