"""Serve a chat model beside a model that reads texts, and search how many texts each way reads.

`python -m benchmarks.gpu.two_models [--seconds 520] [--run 6] [--seeds 1] [--json FILE]`.

Two language models of one shape share a GPU, as in a service that answers questions about texts
that it embeds. The chat model gets `--chat` requests a second, each of a prompt and an answer; the
other one gets texts, and answers each with one token. The passes of two models cannot be fused, so
an engine of one of them cannot plan for the other. Each arm serves the chat in chunks with the
budget that is swept for it.

A chat request is in time by the rule of `benchmarks.gpu.engine`: first token within 0.5 s, nine of
ten times between tokens within the target. A text is in time if it is read within 0.5 s. The *knee*
of an arm is the highest rate of texts at which 99 % of both are in time. Lengths of prompts and
texts are drawn alike (a mean of 700 tokens).

`--small` serves small models on the simulated driver: that tests the program, and its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import (
    AHEAD,
    FIRST,
    IN_TIME,
    MAX_WAITING,
    RATES,
    SIMULATED,
    Arrival,
    Engine,
    Place,
    Search,
    Stream,
    draw_shares,
    figures,
    fused,
    green_stream,
    held,
    leased,
    measure,
    parser,
    poisson,
    search,
    serve,
    served,
    sized_classes,
    use_stream,
)
from benchmarks.lib.report import Report, clocks
from greensched import REST, Pool

#: Serve the chat's engine and that of the texts.
Serve = Callable[[Engine, Engine], Awaitable[None]]
#: The stream with the highest priority.
URGENT = "urgent chat"
#: Texts that are being read at a time.
READING = 8
#: What a run counts: requests in time, and all.
IN_TIME_OF = ("chat in time", "texts in time")


async def both(
    chat: Engine, texts: Engine, budget: int, most: int, places: tuple[Place, Place]
) -> None:
    """Serve the chat in chunks in one place; in the other read texts, `most` tokens in a pass."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fused(chat, places[0], budget))
        tasks.create_task(serve(texts, places[1], lambda: texts.read(most), lambda: texts.can_read))


class Pair:
    """Two models on a device, and the arms that serve them.

    Args:
        chat: the model of the chat.
        reader: the model that reads texts.
        driver: of the pools.
        sms: of the device.
    """

    def __init__(self, chat: Any, reader: Any, driver: str, sms: int) -> None:
        self.chat, self.reader, self.driver, self.sms = chat, reader, driver, sms
        #: Streams by name, and the places on them by what makes their graphs.
        self._streams = dict[str, Stream]()
        self._places = dict[Any, Place]()

    @asynccontextmanager
    async def plain(self, budget: int, most: int = 0) -> AsyncIterator[Serve]:
        """Plain streams: one for each model; at most `most` tokens of texts in a pass.

        Fair: passes are whole graphs, so neither model waits for the host of the other, and both
        sizes are swept.
        """
        yield self._on_streams("chat", "texts", budget, most)

    @asynccontextmanager
    async def priority(self, budget: int, most: int = 0) -> AsyncIterator[Serve]:
        """Priority streams: as plain streams, and the chat has the highest priority.

        Fair: the graphs were captured on that stream, so each of their kernels has the priority.
        """
        yield self._on_streams(URGENT, "texts", budget, most)

    @asynccontextmanager
    async def turns(self, budget: int, most: int) -> AsyncIterator[Serve]:
        """Take turns: a pass of the chat, then at most `most` tokens of texts, on one stream.

        Fair: each pass has the whole GPU and is submitted while that of the other model runs, and
        both sizes are swept.
        """
        yield self._on_streams("both", "both", budget, most, ahead=1)

    @asynccontextmanager
    async def torch_green(self, sms: int, budget: int) -> AsyncIterator[Serve]:
        """Torch's green contexts: `sms` for the chat, the others for texts.

        Fair: it is what torch's documentation shows. On driver 580 each context is a split of its
        own, so the two overlap.
        """
        sizes = {f"chat, {sms} SMs": sms, f"texts, {self.sms - sms} SMs": self.sms - sms}
        for stream, size in sizes.items():
            if stream not in self._streams:
                self._streams[stream] = green_stream(0, size)
        yield self._on_streams(*sizes, budget, 0)

    @asynccontextmanager
    async def split(self, sms: int, budget: int) -> AsyncIterator[Serve]:
        """Split the SMs once: `sms` for the chat, all others for texts, kept throughout."""
        async with (
            Pool(driver=self.driver) as pool,
            pool.partitions(sms, REST) as (chat, texts),
        ):
            graphs = await chat.local(partial(self.chat.fused_graphs, budget))
            reads = await texts.local(self.reader.prefill_graphs)
            places = (
                held(partial(chat.run, graphs.launch)),
                held(partial(texts.run, reads.launch)),
            )
            yield partial(both, budget=budget, most=0, places=places)

    @asynccontextmanager
    async def sized(self, sms: int, budget: int) -> AsyncIterator[Serve]:
        """greensched: leases that change with the load.

        The chat has `sms` SMs beside texts, and all once no text has come for a while. Texts have
        the SMs that are left, and all while the chat is idle.
        """
        services = sized_classes(sms, self.sms)
        async with Pool(driver=self.driver, services=services) as pool:
            graphs = partial(self.chat.fused_graphs, budget)
            await pool.prepare_local("decode", graphs)
            await pool.prepare_local("prefill", self.reader.prefill_graphs)

            def serve_both(chat: Engine, texts: Engine) -> Awaitable[None]:
                def chat_sms() -> int:
                    return self.sms if texts.is_quiet else sms

                def text_sms() -> int:
                    return self.sms if chat.is_idle else self.sms - sms

                def ahead(size: Any) -> int:
                    return 1 if size == self.sms else AHEAD

                places = (
                    leased(pool, "decode", graphs, chat_sms, ahead),
                    leased(pool, "prefill", self.reader.prefill_graphs, text_sms, ahead),
                )
                return both(chat, texts, budget, 0, places)

            yield serve_both

    def _on_streams(
        self, chat: str, texts: str, budget: int, most: int, ahead: int = AHEAD
    ) -> Serve:
        """Return how to serve each model on the stream of this name."""
        places = (
            self._place(chat, budget, partial(self.chat.fused_graphs, budget), ahead),
            self._place(texts, 0, self.reader.prefill_graphs, ahead),
        )
        return partial(both, budget=budget, most=most, places=places)

    def _place(self, stream: str, budget: int, make: Callable[[], Any], ahead: int) -> Place:
        """Return the place with these graphs; make it, and its stream, at the first use."""
        if stream not in self._streams:
            priority = -5 if stream == URGENT else 0
            self._streams[stream] = Stream(partial(use_stream, 0, priority))
        if (stream, budget) not in self._places:
            self._places[stream, budget] = self._streams[stream].place(make, ahead)
        return self._places[stream, budget]

    def arm(self, name: str) -> Any:
        """Return an arm by its name and parameters, such as `split:64:128`, to enter."""
        kind, *parameters = name.split(":")
        return getattr(self, kind)(*map(int, parameters))

    async def run(
        self, serve: Serve, chats: list[Arrival], texts: list[Arrival], target: int
    ) -> dict[str, Any]:
        """Serve requests and texts; return what the clients of each would have measured."""
        chat, reader = (Engine(m.shape, MAX_WAITING) for m in (self.chat, self.reader))
        requests = [(arrival, lambda: chat) for arrival in chats]
        requests += [(dataclasses.replace(arrival, tokens=1), lambda: reader) for arrival in texts]
        requests.sort(key=lambda request: request[0].at)
        sequences, seconds, late = await served([chat, reader], [serve(chat, reader)], requests)
        kinds = [s for s in sequences if s.wanted > 1], [s for s in sequences if s.wanted == 1]
        found = [figures(kind, seconds) for kind in kinds]
        return {
            "chat": found[0],
            "texts": {name: found[1][name] for name in ("requests", "complete", "ttft")},
            **{
                kind: [one[f"in time at {target}"], one["requests"]]
                for kind, one in zip(IN_TIME_OF, found, strict=True)
            },
            "late_ms": 1e3 * late,
        }


#: What is searched by default, the most important first.
DEFAULT = """
split:40:128@20=28 sized:48:128@20=24 plain:128:256@20=16 priority:128:256@20=14 turns:96:128@20=4
torch_green:40:128@20=3 split:48:128@20=24 sized:40:128@20=24 turns:128:128@20=4 plain:96:256@20=14
plain:160:256@20=12 plain:128:128@20=12 priority:128:384@20=6 plain:128:384@20=4 plain:128@20=3
"""


async def knees(pair: Pair, report: Report, scale: float, *, options: argparse.Namespace) -> None:
    """Search all knees, as far as the time suffices; report each run."""
    runs: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for what in options.search:
        if report.left < 4 * (options.run + FIRST + 3) * options.seeds:
            print(f"no time is left for {what}", flush=True)
            return
        try:
            async with AsyncExitStack() as entered:
                arm = await entered.enter_async_context(pair.arm(what.arm))

                async def keeps(rate: float, what: Search = what, arm: Serve = arm) -> bool:
                    parts = [
                        await pair.run(
                            arm,
                            poisson(options.chat, options.run, seed, scale),
                            poisson(rate, options.run, seed + 100, scale),
                            what.target,
                        )
                        for seed in range(options.seeds)
                    ]
                    runs.append({"arm": what.arm, "rate": rate, **merged(parts)})
                    report.put("runs", runs)
                    print(line(runs[-1]), flush=True)
                    return is_kept(runs[-1])

                knee = await search(what.start, keeps, RATES)
            found.append({"arm": what.arm, "target": what.target, "knee": knee})
            report.put("knees", found)
            print(f"{what.arm}, {what.target} ms: {knee:g} texts/s; {clocks()}", flush=True)
        except Exception:
            report.fail(what.arm)


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the requests of several runs; other figures are those of the slowest texts."""
    sums = [
        [sum(numbers) for numbers in zip(*(part[kind] for part in parts), strict=True)]
        for kind in IN_TIME_OF
    ]
    slowest = max(parts, key=lambda part: part["texts"]["ttft"][0])
    return {**slowest, "seeds": len(parts), **dict(zip(IN_TIME_OF, sums, strict=True))}


def is_kept(found: dict[str, Any]) -> bool:
    """Say whether enough of both kinds are in time."""
    return all(found[kind][0] >= IN_TIME * found[kind][1] for kind in IN_TIME_OF)


def line(found: dict[str, Any]) -> str:
    """Return a line of the table of runs."""
    times = [
        " / ".join(f"{ms:.0f}" for ms in part)
        for part in (found["chat"]["ttft"], found["chat"]["between"], found["texts"]["ttft"])
    ]
    shares = " and ".join("{} of {}".format(*found[kind]) for kind in IN_TIME_OF)
    return (
        f"{found['arm']:16}{found['rate']:>4g} texts/s; in time {shares}; chat: TTFT {times[0]}, "
        f"between {times[1]}; texts: {times[2]} ms"
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the share in time, of the chat or of the texts, whichever is less, against the rate."""
    from greensched.capacity.plot import pyplot, write

    figure, axis = pyplot().subplots(figsize=(7, 4))
    for arm in dict.fromkeys(run["arm"] for run in found["runs"]):
        points = [
            (run["rate"], *min(kinds, key=lambda counts: counts[0] / counts[1]))
            for run in found["runs"]
            if run["arm"] == arm and (kinds := [run[kind] for kind in IN_TIME_OF if run[kind][1]])
        ]
        draw_shares(axis, arm, points)
    axis.axhline(IN_TIME, color="grey", linewidth=0.5)
    axis.set(xlabel="texts per second beside the chat", ylabel="in time")
    axis.legend(fontsize="small")
    write(figure, path)


def load(options: argparse.Namespace) -> Pair:
    """Return the two models with their driver."""
    if options.small:
        import small

        return Pair(small.Small(), small.Small(), SIMULATED, 132)
    import torch
    from model import load as load_model

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return Pair(load_model(), load_model(slots=READING), "cuda", sms)


def main() -> int:
    made = parser("benchmarks.gpu.two_models", __doc__.split("\n")[0], 6, DEFAULT)
    made.add_argument("--chat", type=float, default=6, help="requests of the chat in a second")
    options = made.parse_args()
    return measure(options, load, partial(knees, options=options), draw)


if __name__ == "__main__":
    sys.exit(main())
