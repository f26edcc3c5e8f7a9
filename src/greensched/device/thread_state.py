"""What is known of the calling thread.

A room of its own, because it is Python in a compiled build, too: of a class of `threading.local`
mypyc makes one whose attributes all threads share, and no weak reference can go to its classes.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from greensched.device.current_context import Enterable, UserContextScope


class _ThreadToken:
    """Stands for a thread, as long as it lives."""

    def __init__(self) -> None:
        self.name = threading.current_thread().name


class _ThreadState(threading.local):
    """What is known of the calling thread.

    Attributes:
        blocks: the `with` blocks it is inside, the innermost last.
        standing: what it made current without a block, and whether on a place of the stack that
            was pushed for it; else it was set in the place of what was there, a block's perhaps,
            and stands until something else is set there.
    """

    def __init__(self) -> None:
        self.me = _ThreadToken()
        self.ref = weakref.ref(self.me)
        self.blocks: list[UserContextScope] = []
        self.standing: list[tuple[Enterable, bool]] = []


here = _ThreadState()
