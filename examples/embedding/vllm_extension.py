"""A pool in vLLM's workers: the engine has a partition, and others have the rest of the SMs.

vllm serve <model> --worker-extension-cls vllm_extension.Partitioned

The file must be importable: by PYTHONPATH, or as a package of your own.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import greensched.integrations.torch as gs_torch
from greensched import Pool

if TYPE_CHECKING:
    import torch

#: What the engine has, for its whole life.
ENGINE_SMS = 96


class Partitioned:
    """vLLM makes it a base of its worker, so its names must differ from the worker's."""

    device: torch.device

    def init_worker_extension(self) -> None:
        """Called by vLLM on the worker's thread: it has its device, and nothing on it yet.

        From here on that thread's current stream is the partition's: weights, warm-up, the capture
        of graphs and each step come there.
        """
        with ExitStack() as undo:
            self.greensched = Pool([self.device.index])
            undo.enter_context(self.greensched.sync)
            engine = undo.enter_context(self.greensched.sync.partition(ENGINE_SMS))
            undo.enter_context(gs_torch.current(engine.partition))
            self._greensched_end = undo.pop_all()

    def greensched_state(self) -> dict[str, Any]:
        """For `llm.collective_rpc("greensched_state")`.

        Work beside the engine asks `self.greensched.sync.partition(16)`, on a thread of its own.
        """
        statistics = self.greensched.statistics()
        return {"is_ready": self.greensched.is_ready, "sms_free": statistics.sms_free}

    def destroy_worker_extension(self) -> None:
        """Called by vLLM before the worker ends."""
        self._greensched_end.close()
