"""The one line of greensched that imports `cuda.bindings.driver`.

The wheel ships no types, so `cuda` is `Any`, here and in no room above this package. Rooms look
their functions up once, at import; only what a 13.x wheel or driver may lack is looked up with a
default.

`CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM` is not looked at: it changes what stream 0 means, and
no verb passes stream 0. (It would matter for code that does, under a current green context: the
per-thread stream is refused there. That is not ours to forbid.)
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import (  # type: ignore[import-untyped]  # the wheel ships no types
    __version__,
    driver,
)

#: `cuda.bindings.driver`.
cuda: Any = driver

#: The wheel's version, for messages only: what it can do is asked of its attributes.
WHEEL_VERSION: str = __version__

if not hasattr(cuda, "cuCtxSynchronize_v2"):
    # Came with CUDA 13.0, as did the three-argument cuCtxCreate and the 1-tuples we unpack.
    raise ImportError(f"13.0 or newer is needed, this is {WHEEL_VERSION}")


def number(handle: Any) -> int:
    """The number that a wrapper wraps. Not for hot paths: calls take wrappers, and cheaper."""
    return int(handle)
