"""Count the library's objects, for tests of leaks."""

from __future__ import annotations

import gc
from collections import Counter


def library_objects() -> Counter[str]:
    """Count the objects of the library's types that the collector knows, by name."""
    kinds = (type(one) for one in gc.get_objects())
    return Counter(
        kind.__qualname__
        for kind in kinds
        if str(getattr(kind, "__module__", "")).startswith("greensched")
    )
