"""Ticket words: pinned memory that streams write when work is done, and hosts read.

Each has a cache line of its own, so that no reader waits for another's writer.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from greensched._cleanup import run_all
from greensched.device.streams import (
    Event,
    EventTicketedStream,
    Stream,
    StreamOwner,
    TicketedStream,
)
from greensched.driver.types import HostMemory
from greensched.errors import CUDAError, DeviceFault
from greensched.typing import Feature

#: A word for each ticket on a cache line of its own: 64 bytes on x86-64 and most of AArch64.
LINE = 64
PAGE = 4096


class TicketMemory:
    """Pinned words for tickets, each on a cache line of its own. For one thread at a time."""

    def __init__(self, primary: StreamOwner) -> None:
        self._primary = primary
        #: Whether streams write them; `try_writing` finds out.
        self.are_written = True
        self._pages: list[HostMemory] = []
        #: One list for life: tracks give their words back to it.
        self._free: list[tuple[memoryview[int], int]] = []

    def _take(self) -> tuple[memoryview[int], int]:
        if not self._free:
            with self._primary.entered():
                page = self._primary.driver.allocate_host(PAGE)
            self._pages.append(page)
            words = page.view.cast("B").cast("I")
            step = LINE // 4
            self._free += [
                (words[i : i + 1], page.device_address + 4 * i) for i in range(0, PAGE // 4, step)
            ]
        return self._free.pop()

    def create_track(self, context: StreamOwner) -> TicketedStream:
        """A new stream of a context, and the tickets of its work. May block."""
        with ExitStack() as undo:
            stream = Stream(context)
            undo.callback(stream.close)
            event = Event(context)
            undo.callback(event.close)
            track = self._track(stream, event)
            undo.pop_all()
        return track

    def _track(self, stream: Stream, event: Event) -> TicketedStream:
        if not self.are_written:
            return EventTicketedStream(stream, event)
        word, address = taken = self._take()
        give_back = partial(self._free.append, taken)
        try:
            return TicketedStream(stream, event, word, address, give_back)
        except CUDAError:
            give_back()
            raise

    def try_writing(self, context: StreamOwner) -> None:
        """Finds out, once, whether streams of a context write words; else events stand for them.

        A driver may have the call and refuse it (virtual GPUs), or not do it. Blocks.
        """
        self.are_written = context.driver.supports(Feature.WRITE_VALUE)
        if not self.are_written:
            return
        track = self.create_track(context)
        try:
            track.mark(track.issue())
            track.stream.sync()
            self.are_written = track.is_idle
        except DeviceFault:
            raise
        except CUDAError:
            self.are_written = False
        finally:
            track.close()

    def close(self) -> None:
        """Ends all pages, also where one cannot be. May block."""
        self._free.clear()
        pages, self._pages = self._pages, []
        with self._primary.entered():
            run_all(partial(self._primary.driver.free_host, page) for page in pages)
