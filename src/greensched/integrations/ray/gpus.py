"""GPUs: the one that Ray assigned to this process, and those of the cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray

from greensched.errors import InvalidRequest, NoPool

#: The default directory of MPS's control pipe. Source: MPS manual, "Environment Variables",
#: CUDA_MPS_PIPE_DIRECTORY.
MPS = Path("/", "tmp", "nvidia-mps")
#: Seconds until released resources show: nodes report them to the head node periodically.
SETTLED_S = 3.0
#: Seconds for a node to take a connection: many times what a network needs.
ANSWER_S = 0.5


def own_gpu() -> int:
    """Return the ordinal, in this process, of the one GPU that Ray assigned to its actor.

    Unless it was told not to, Ray sets `CUDA_VISIBLE_DEVICES` before this code runs; either way
    this is the assigned GPU. CUDA is not touched.

    Raises:
        InvalidRequest: Ray assigned no GPU, part of one, several, or one that is not visible here.
    """
    context = ray.get_runtime_context()
    share = context.get_assigned_resources().get("GPU", 0)
    given = context.get_accelerator_ids().get("GPU", [])
    if 0 < share < 1 and not _has_mps():
        raise InvalidRequest(
            f"Ray assigned {share:g} of a GPU to this process: several processes on one GPU take "
            "turns on all of its SMs and do not see each other's partitions. Request num_gpus=1 "
            "and let one pool divide the GPU, or start MPS"
        )
    if len(given) != 1:
        raise InvalidRequest(
            f"Ray assigned {share:g} GPUs to this process, and a pool uses one: request num_gpus=1"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else visible.split(",")
    if names is not None and given[0] not in names:
        raise InvalidRequest(
            f"Ray assigned GPU {given[0]} to this process, which sees only {visible!r}: leave "
            "CUDA_VISIBLE_DEVICES to Ray"
        )
    return int(given[0]) if names is None else names.index(given[0])


def _has_mps() -> bool:
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS), "control").exists()


def check_free(pools: int) -> None:
    """Check that this many more pools can be placed now: otherwise Ray would wait silently.

    Blocks on Ray.

    Raises:
        NoPool: fewer GPUs are free.
    """
    until = time.monotonic() + SETTLED_S
    while (there := free()) < pools:
        if time.monotonic() > until:
            raise NoPool(
                f"{pools} more pools need {pools} free GPUs, and {there} of the {count()} in the "
                "cluster are free: add nodes, end what uses the others, or give pools= for fewer"
            )
        time.sleep(0.1)


def count(without: Collection[str] = ()) -> int:
    """Return the number of whole GPUs of the cluster's live nodes. Blocks on Ray."""
    alive = (node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in without)
    return sum(int(node["Resources"].get("GPU", 0)) for node in alive)


def free() -> int:
    """Return the number of GPUs that are free as far as Ray knows. Blocks on Ray."""
    return int(ray.available_resources().get("GPU", 0))


def gone(nodes: Collection[str]) -> set[str]:
    """Return the nodes that are lost: Ray says so, or its daemon's port there does not answer.

    Ray itself goes by heartbeats and takes 15 s (2.60). Blocks.
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
