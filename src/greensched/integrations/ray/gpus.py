"""Which GPU is whose: what Ray gave this process, and what there is in the cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray

from greensched.errors import InvalidRequest, NoPool

#: Where MPS has its control pipe, unless told otherwise. Source: MPS manual, "Environment
#: Variables", CUDA_MPS_PIPE_DIRECTORY.
MPS = Path("/", "tmp", "nvidia-mps")
#: Seconds until what was given back shows: nodes tell the head of it every now and then.
SETTLED_S = 3.0
#: Seconds for a node to take a connection: many times what a network needs.
ANSWER_S = 0.5


def own_gpu() -> int:
    """The ordinal, in this process, of the one GPU that Ray gave its actor.

    Ray sets `CUDA_VISIBLE_DEVICES` where it gives a GPU, before any code of ours, unless it was
    told not to. Either way this is the GPU it meant. Nothing of CUDA is touched.

    Raises:
        InvalidRequest: it gave none, a part of one, several, or one that is not visible here.
    """
    context = ray.get_runtime_context()
    share = context.get_assigned_resources().get("GPU", 0)
    given = context.get_accelerator_ids().get("GPU", [])
    if 0 < share < 1 and not _has_mps():
        raise InvalidRequest(
            f"Ray gave this process {share:g} of a GPU: several processes on one get it in turns, "
            "each with all of its SMs, and know nothing of each other's partitions. Ask for "
            "num_gpus=1 and let one pool divide it, or start MPS"
        )
    if len(given) != 1:
        raise InvalidRequest(
            f"Ray gave this process {share:g} GPUs, and a pool's has one: ask for num_gpus=1"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else visible.split(",")
    if names is not None and given[0] not in names:
        raise InvalidRequest(f"Ray gave this process GPU {given[0]}, and it sees {visible!r} alone")
    return int(given[0]) if names is None else names.index(given[0])


def _has_mps() -> bool:
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS), "control").exists()


def check_free(pools: int) -> None:
    """Whether so many more pools can be placed now: where they cannot, Ray waits, and says nothing.

    Blocks on Ray.

    Raises:
        NoPool: there are not so many GPUs free.
    """
    until = time.monotonic() + SETTLED_S
    while (there := free()) < pools:
        if time.monotonic() > until:
            raise NoPool(
                f"{pools} more pools need {pools} free GPUs, and the cluster has {there} of "
                f"{count()}: add nodes, end what holds the others, or say pools= for fewer"
            )
        time.sleep(0.1)


def count(without: Collection[str] = ()) -> int:
    """The whole GPUs of the cluster's living nodes, less some of these. Blocks on Ray."""
    alive = (node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in without)
    return sum(int(node["Resources"].get("GPU", 0)) for node in alive)


def free() -> int:
    """The GPUs that nobody has, as far as Ray has heard. Blocks on Ray."""
    return int(ray.available_resources().get("GPU", 0))


def gone(nodes: Collection[str]) -> set[str]:
    """Which of some nodes are gone: Ray says so, or nobody answers on its daemon's port there.

    Ray itself goes by heartbeats, and takes 15 s for it (2.60). Blocks.
    """
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    return {name for name in nodes if name not in alive or not _answers(alive[name])}


def _answers(node: dict[str, Any]) -> bool:
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        socket.create_connection(address, ANSWER_S).close()
    except OSError:
        return False
    return True
