"""Use a pool in Triton's Python backend: sum each row of `numbers`.

tritonserver --model-repository=examples/embedding/triton
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from greensched import LaunchConfig, Pool, errors
from greensched.kernels import reduce_sum

#: Answered with UNAVAILABLE: Triton has no status for a full queue or a missed deadline.
RETRIABLE = errors.QueueFull, errors.DeadlineExceeded, errors.PoolClosed, errors.DeviceLost


class TritonPythonModel:
    """Runs in the instance's process; its main thread calls the methods and runs no event loop."""

    def initialize(self, _: dict[str, str]) -> None:
        self.pool = Pool(prepare=[reduce_sum])
        self.pool.sync.open()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Serve a batch of requests concurrently; the next batch comes when all are answered."""
        given = [triton.get_input_tensor_by_name(one, "numbers").as_numpy() for one in requests]
        return self.pool.sync.call(self._answer_all, given)

    async def _answer_all(self, given: list[np.ndarray]) -> list[Any]:
        return await asyncio.gather(*map(self._answer, given))

    async def _answer(self, rows: np.ndarray) -> Any:
        try:
            sums = np.array([[await self._total(row)] for row in rows], np.float32)
        except RETRIABLE as error:
            status = triton.TritonError(str(error), triton.TritonError.UNAVAILABLE)
            return triton.InferenceResponse(error=status)
        return triton.InferenceResponse([triton.Tensor("sum", sums)])

    async def _total(self, values: np.ndarray) -> float:
        async with self.pool.partition(16, deadline=0.5) as p:
            with await p.upload(values) as x, await p.upload(np.zeros(1, np.float32)) as y:
                p.launch(LaunchConfig(grid=16, block=256), reduce_sum, x, y, values.size)
                return float((await p.download(y))[0])

    def finalize(self) -> None:
        self.pool.sync.close()
