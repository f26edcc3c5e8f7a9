"""Set up a pool with leases of every kind in virtual time; draw `greensched top`.

`python -m tests.helpers.screens FOLDER` draws it at 80 and 200 columns, light and dark, as SVG.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from greensched import DeadlineExceeded, LaunchConfig, Pool, ServiceClass, Snapshot
from greensched.cli.top import Screen
from greensched.integrations.testing import SimGPU
from greensched.kernels import spin

MS = 1_000_000
CLASSES = (
    ServiceClass("critical", reserve=64, priority=1, latency=0.100),
    ServiceClass("train", preemptible=True, checkpoint_interval=0.010),
    ServiceClass("embed", cap=24),
)


def in_scene(then: Callable[[Pool], None]) -> None:
    """Call a function while SMs are leased, lent, draining and free, and three requests wait."""
    gpu = SimGPU()

    async def main() -> None:
        async with gpu.pool(services=CLASSES, socket=True) as pool:

            async def hold(sms: int, service: str, seconds: float, **options: Any) -> None:
                async with pool.partition(sms, service=service, **options):
                    await anyio.sleep(seconds)

            async def expire() -> None:
                with suppress(DeadlineExceeded):
                    await hold(96, "critical", 0, deadline=0.002)

            async def cancelled() -> None:
                with anyio.CancelScope() as scope:
                    async with pool.partition(8, service="train") as p:
                        p.launch(LaunchConfig(grid=1, block=1), spin, 500 * MS)
                        scope.cancel()

            for number in range(40):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(hold, 64, "train", 0.009)
                    tasks.start_soon(hold, 24, "embed", 0.001)
                    tasks.start_soon(hold, 32, "critical", 0.004)
                    tasks.start_soon(hold, 32, "critical", 0.002 + 0.0001 * number)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hold, 16, "embed", 9, name="embed documents")
                await anyio.sleep(0.001)
                tasks.start_soon(cancelled, name="train step 811")
                await anyio.sleep(0.002)
                tasks.start_soon(
                    partial(hold, 64, "train", 9, duration=0.040), name="train step 812"
                )
                await anyio.sleep(0.001)
                for _ in range(3):
                    tasks.start_soon(expire)
                await anyio.sleep(0.011)
                tasks.start_soon(hold, 16, "critical", 9, name="request 4711")
                await anyio.sleep(0.001)
                tasks.start_soon(hold, 48, "critical", 9, name="request 4712")
                tasks.start_soon(hold, 16, "embed", 9, name="embed queries")
                tasks.start_soon(hold, 16, "train", 9, name="evaluation")
                await anyio.sleep(0.006)
                then(pool)
                tasks.cancel_scope.cancel()
            await anyio.sleep(1)  # the work of the cancelled task ends

    gpu.run(main)


# -- pictures ----------------------------------------------------------------------------------

_NORMAL = [
    (0, 0, 0), (205, 49, 49), (13, 150, 80), (180, 130, 0), (36, 114, 200), (188, 63, 188),
    (17, 145, 175), (110, 110, 110),
]  # fmt: skip
THEMES = {
    "light": TerminalTheme((255, 255, 255), (40, 40, 40), _NORMAL),
    "dark": TerminalTheme((30, 30, 30), (212, 212, 212), _NORMAL),
}
WIDTHS = 80, 200
#: Without a font from another site: the picture is shown as it is.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace"
)


def draw(snapshot: Snapshot, width: int, theme: str) -> str:
    """Return the screen as SVG."""
    console = Console(
        file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="256",
        highlight=False, markup=False, legacy_windows=False,
    )  # fmt: skip
    console.print(Screen([snapshot.as_dict()]))
    name = f"top-{width}-{theme}"
    return console.export_svg(
        title="greensched top", theme=THEMES[theme], code_format=FORMAT, unique_id=name
    )


def main(folder: Path) -> None:
    taken: list[Snapshot] = []
    in_scene(lambda pool: taken.append(pool.snapshot()))
    snapshot = replace(taken[0], pid=4711)
    for width in WIDTHS:
        for theme in THEMES:
            (folder / f"top-{width}-{theme}.svg").write_text(draw(snapshot, width, theme))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
