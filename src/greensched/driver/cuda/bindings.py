"""The only import of `cuda.bindings.driver` in greensched.

The wheel ships no types, so `cuda` is `Any`, in this package only. Modules look up its functions
once, at import; only functions that a 13.x wheel or driver may lack are looked up with a default.

`CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM` is ignored: it changes the meaning of stream 0, and no
driver call passes stream 0. (Under a current green context, the per-thread stream is refused to
code that uses stream 0.)
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import (  # type: ignore[import-untyped]  # the wheel ships no types
    __version__,
    driver,
)

#: `cuda.bindings.driver`.
cuda: Any = driver

#: The wheel's version, for messages only; its attributes show what it can do.
WHEEL_VERSION: str = __version__

if not hasattr(cuda, "cuCtxSynchronize_v2"):
    # CUDA 13.0 introduced it, the three-argument cuCtxCreate, and the 1-tuples unpacked here.
    raise ImportError(f"13.0 or newer is needed, this is {WHEEL_VERSION}")


def number(handle: Any) -> int:
    """Return the number in a wrapper. Not for hot paths: calls take wrappers, which is cheaper."""
    return int(handle)
