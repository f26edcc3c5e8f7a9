"""The GPUs that Ray assigned to this process, and those of the cluster."""

from __future__ import annotations

import os
import time

import ray

from greensched.driver import mps
from greensched.errors import InvalidRequest, NoPool

#: Seconds until released resources show, because nodes report them periodically to the head node.
SETTLED_S = 3.0


def own_gpus() -> list[int]:
    """Return the ordinals, in this process, of the whole GPUs that Ray assigned to its actor.

    By default Ray sets `CUDA_VISIBLE_DEVICES` before this code runs. These are the assigned GPUs
    even if Ray is configured not to set it. CUDA is not used.

    Raises:
        InvalidRequest: Ray assigned no GPU, part of a GPU, or one that is not visible here.
    """
    context = ray.get_runtime_context()
    share = context.get_assigned_resources().get("GPU", 0)
    ids = context.get_accelerator_ids().get("GPU", [])
    if 0 < share < 1 and not mps.is_running():
        raise InvalidRequest(
            f"Ray assigned {share:g} of a GPU to this process: several processes on one GPU take "
            "turns on all of its SMs and do not see each other's partitions. Request num_gpus=1 "
            "and let one pool divide the GPU, or start MPS"
        )
    if not ids:
        raise InvalidRequest("Ray assigned no GPU to this process: request num_gpus=1")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [int(name) for name in ids]
    names = visible.split(",")
    if hidden := set(ids).difference(names):
        raise InvalidRequest(
            f"Ray assigned GPU {', '.join(hidden)} to this process, which sees only {visible!r}: "
            "leave CUDA_VISIBLE_DEVICES to Ray"
        )
    return [names.index(name) for name in ids]


def check_free(pools: int) -> None:
    """Check that this many more pools can be placed now; otherwise Ray would wait silently.

    Blocks on Ray.

    Raises:
        NoPool: Fewer GPUs are free, or the cluster has none.
    """
    until = time.monotonic() + SETTLED_S
    while (available := free()) < pools:
        if time.monotonic() > until:
            if not count():
                raise NoPool(
                    "no node of the Ray cluster has the resource GPU, which a pool needs: add a "
                    "node with a GPU, or start Ray where it finds one"
                )
            raise NoPool(
                f"{pools} more pools need {pools} free GPUs, and {available} of the {count()} in "
                "the cluster are free: add nodes, end what uses the others, or give pools= for "
                "fewer"
            )
        time.sleep(0.1)


def count() -> int:
    """Return the number of whole GPUs of live nodes that are not draining. Blocks on Ray."""
    leaving = draining()
    alive = (node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving)
    return sum(int(node["Resources"].get("GPU", 0)) for node in alive)


def free() -> int:
    """Return the number of GPUs that Ray reports as free. Blocks on Ray."""
    return int(ray.available_resources().get("GPU", 0))


def draining() -> dict[str, float]:
    """Return the draining nodes with their deadlines as Unix time (0: none). Blocks on Ray.

    Ray has no public function for this (2.60); Ray Serve calls the same internal one.
    """
    deadlines: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return {node: milliseconds / 1000 for node, milliseconds in deadlines.items()}
