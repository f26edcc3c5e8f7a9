"""Use a pool in gunicorn's threads: POST [1, 2, 3.5] for their sum.

cd examples/embedding && gunicorn -c gunicorn_conf.py gunicorn_service:app
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import numpy as np

from greensched import LaunchConfig, Pool, errors
from greensched.kernels import reduce_sum

#: As in greensched.integrations.asgi.
STATUS = {
    errors.QueueFull: 429,
    errors.PoolClosed: 503,
    errors.DeviceLost: 503,
    errors.DeadlineExceeded: 504,
}

pool = Pool(max_waiting=8, prepare=[reduce_sum])  # gunicorn_conf.py opens it, in the worker


def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Answer a request, on a thread of the worker; the pool bounds how many run at a time."""
    values = np.array(json.load(environ["wsgi.input"]), np.float32)
    try:
        status, answer = 200, {"sum": total(values)}
    except tuple(STATUS) as error:
        status, answer = STATUS[type(error)], {"detail": str(error)}
    line = f"{status} {HTTPStatus(status).phrase}"
    start_response(line, [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]


def total(values: np.ndarray) -> float:
    zero = np.zeros(1, np.float32)
    with pool.sync.partition(16, deadline=0.5) as p, p.upload(values) as x, p.upload(zero) as y:
        p.launch(LaunchConfig(grid=16, block=256), reduce_sum, x, y, values.size)
        return float(p.download(y)[0])
