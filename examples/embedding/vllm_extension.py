"""Use a pool in vLLM's workers: the engine has a partition, and other work has the other SMs.

vllm serve <model> --worker-extension-cls vllm_extension.Partitioned

The file must be importable: on PYTHONPATH, or in an installed package.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import greensched.integrations.torch as gs_torch
from greensched import Pool

if TYPE_CHECKING:
    import torch

#: SMs of the engine, for its whole life.
ENGINE_SMS = 96


class Partitioned:
    """A base class that vLLM adds to its worker, so its names must differ from the worker's."""

    device: torch.device

    def init_worker_extension(self) -> None:
        """Lease the engine's partition; vLLM calls this on the worker's thread, before CUDA work.

        From then on the thread's current stream is the partition's: weights, warm-up, graph capture
        and every step run there.
        """
        with ExitStack() as undo:
            self.greensched = Pool([self.device.index])
            undo.enter_context(self.greensched.sync)
            engine = undo.enter_context(self.greensched.sync.partition(ENGINE_SMS))
            undo.enter_context(gs_torch.current(engine.partition))
            self._greensched_end = undo.pop_all()

    def greensched_state(self) -> dict[str, Any]:
        """Return the pool's state, for `llm.collective_rpc("greensched_state")`.

        Work beside the engine uses `self.greensched.sync.partition(16)` on another thread.
        """
        statistics = self.greensched.statistics()
        return {"is_ready": self.greensched.is_ready, "sms_free": statistics.sms_free}

    def destroy_worker_extension(self) -> None:
        """Close the pool; vLLM calls this before the worker ends."""
        self._greensched_end.close()
