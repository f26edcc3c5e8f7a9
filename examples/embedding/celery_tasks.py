"""Use a pool in a Celery worker's threads: `total.delay([1, 2, 3.5])` for their sum.

cd examples/embedding && celery -A celery_tasks worker --pool threads --concurrency 16
"""

from __future__ import annotations

import numpy as np
from celery import Celery
from celery.signals import worker_init, worker_shutdown

from greensched import LaunchConfig, Pool, QueueFull
from greensched.kernels import reduce_sum

app = Celery("celery_tasks")  # CELERY_BROKER_URL and CELERY_RESULT_BACKEND say where
pool = Pool(max_waiting=16, prepare=[reduce_sum])


@worker_init.connect
def open_pool(**_: object) -> None:
    """Open the pool in the worker's process, and not in those that only send tasks."""
    pool.sync.open()


@worker_shutdown.connect
def close_pool(**_: object) -> None:
    """Close the pool once the tasks in progress have ended."""
    pool.sync.close()


@app.task(name="total", autoretry_for=(QueueFull,), retry_backoff=True)
def total(numbers: list[float]) -> float:
    values = np.array(numbers, np.float32)
    zero = np.zeros(1, np.float32)
    with pool.sync.partition(16) as p, p.upload(values) as x, p.upload(zero) as y:
        p.launch(LaunchConfig(grid=16, block=256), reduce_sum, x, y, values.size)
        return float(p.download(y)[0])
