"""What a partition is asked for. A room of its own: it can be compiled, and `wishes` cannot."""

from __future__ import annotations

from greensched.execution.submission import Channel
from greensched.scheduling.cells import SizeRange
from greensched.scheduling.requests import Duration
from greensched.typing import Size


class LeaseRequest:
    """What a partition is asked for: checked, and not yet requested."""

    __slots__ = (
        "deadline",
        "device",
        "duration",
        "is_shared",
        "near",
        "parked",
        "parts",
        "service",
        "sizes"
    )  # fmt: skip

    def __init__(
        self,
        parts: tuple[SizeRange, ...],
        sizes: tuple[Size, ...],
        device: int | None,
        service: str,
        deadline: float | None,
        duration: Duration | None,
        near: int | None,
    ) -> None:
        self.parts = parts
        self.sizes = sizes
        self.device = device
        self.service = service
        self.deadline = deadline
        self.duration = duration
        self.near = near
        #: One object stands for all who ask this.
        self.is_shared = False
        #: Leases that ended without work, by the thread of their loop (`parking`).
        self.parked: dict[int, list[Channel]] = {}

    def __str__(self) -> str:
        return "sms=" + ", ".join([repr(size) for size in self.sizes])
