"""An engine that batches prompts and tokens: each pass reads prompts, writes tokens, or both.

It does what serving programs do without partitions: one program uses the whole device. *Fused*:
every pass has a token of each running request, and as many prompt tokens as its token budget leaves
(Sarathi-Serve). *Prefill first*: waiting prompts get separate passes, with a number of decode steps
between them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from greensched.capacity.machine import Machine
from greensched.capacity.servers import CHUNK, Decode, Prefill
from greensched.capacity.strategies import Batching, Client
from greensched.capacity.traffic import Arrival
from greensched.capacity.workload import ServiceProfile

#: Between these numbers of tokens the time of a prompt is assumed to grow in proportion. Fewer
#: tokens take as long as reading the weights; with more, the tokens' attention to each other
#: counts, too.
COMPUTE_BOUND, TWICE = 512, 1024
#: How much longer a fused pass takes than a pass with the same number of tokens of one prompt,
#: because it calls attention twice and reads scattered memory. Fitted to two rows of
#: `measured.FITTED`.
FUSED = 1.14


def pass_seconds(prefill: ServiceProfile, tokens: int) -> float:
    """Return the seconds of a pass over some tokens of several sequences."""
    if tokens <= TWICE:
        return prefill.seconds(tokens)
    twice = prefill.seconds(TWICE)
    per_token = (twice - prefill.seconds(COMPUTE_BOUND)) / (TWICE - COMPUTE_BOUND)
    return twice + (tokens - TWICE) * per_token


def long_seconds(prefill: ServiceProfile, tokens: int) -> float:
    """Return the seconds that `pass_seconds` omits for a prompt of this many tokens."""
    return max(0.0, prefill.seconds(tokens) - pass_seconds(prefill, tokens))


@dataclass(slots=True)
class _Reading:
    """A prompt that is being read: its tokens so far, and the seconds of passes that read it."""

    arrival: Arrival
    began: float
    read: int = 0
    served: float = 0.0


class PromptQueue(Prefill):
    """The prompts of an engine, which reads them in its passes."""

    def __init__(
        self,
        machine: Machine,
        device: int,
        service: ServiceProfile,
        client: Client,
        engine: Engine,
    ) -> None:
        super().__init__(machine, device, service, client, engine)
        self._engine = engine
        self._reading: list[_Reading] = []
        engine.prompts = self

    async def serve(self) -> None:
        """Wait for ever, because the engine serves the prompts."""
        await asyncio.get_running_loop().create_future()

    @property
    def is_waiting(self) -> bool:
        """Say whether a prompt remains to be read."""
        return bool(self._reading or self._queue)

    def take_tokens(self, budget: int, *, together: bool = True) -> tuple[int, float, float]:
        """Put tokens of prompts into the next pass, or of one prompt if not `together`.

        Returns:
            The tokens; the seconds that their prompts take beyond a pass of that many tokens; and
            the seconds if each prompt had its own pass.
        """
        left, long, apart = budget, 0.0, 0.0
        while left > 0 and self.is_waiting and (together or left == budget):
            if not self._reading or self._reading[-1].read == self._reading[-1].arrival.context:
                if not self._queue:
                    break
                self._reading.append(_Reading(self.pick(), self._now()))
            reading = self._reading[-1]
            end = min(reading.arrival.context, reading.read + left)
            service = self.service
            long += long_seconds(service, end) - long_seconds(service, reading.read)
            apart += service.seconds(end) - service.seconds(reading.read)
            left -= end - reading.read
            reading.read = end
        return budget - left, long, apart

    async def read(self, seconds: float) -> None:
        """Run a pass that only reads prompts."""
        await self._client.run([round(seconds * 1e9)])

    def finish_pass(self, seconds: float) -> None:
        """Release the first tokens of prompts that a pass of this many seconds has finished."""
        reading, self._reading = self._reading, []
        for prompt in reading:
            prompt.served += seconds
            if prompt.read < prompt.arrival.context:
                self._reading.append(prompt)
                continue
            self._note_stretch(
                self._now() - prompt.began, self.service.seconds(prompt.arrival.context)
            )
            self._release_token(prompt.arrival, prompt.served)

    def waiting(self) -> list[float]:
        return [*super().waiting(), *(reading.arrival.at for reading in self._reading)]

    def _wake(self) -> None:
        self._engine.wake()


class Engine(Decode):
    """Runs the passes of prompts and tokens."""

    prompts: PromptQueue

    def __init__(
        self,
        machine: Machine,
        device: int,
        service: ServiceProfile,
        client: Client,
        batching: Batching,
    ) -> None:
        super().__init__(machine, device, service, client)
        self._batching = batching
        self._blocks = 1

    async def serve(self) -> None:
        """Run passes while there are prompts or requests."""
        steps = 0
        while True:
            prompts, running = self.prompts, len(self._ends) + len(self._queue)
            if not running and not prompts.is_waiting:
                await self._wait_for_work()
            elif not running:
                await self._read_prompts()
                steps = 0
            elif self._batching.budget:
                await self._run_fused(running)
            elif prompts.is_waiting and steps >= self._batching.interval:
                await self._read_prompts()
                steps = 0
            else:
                await self._run_step()
                steps += 1

    async def _read_prompts(self) -> None:
        began, prompts = self._now(), self.prompts
        tokens, long, apart = prompts.take_tokens(CHUNK, together=self._batching.together)
        seconds = min(pass_seconds(prompts.service, tokens) + long, apart)
        await prompts.read(seconds)
        prompts.samples.done += seconds
        prompts.finish_pass(self._now() - began)

    async def _run_fused(self, running: int) -> None:
        began, prompts = self._now(), self.prompts
        tokens, long, _ = prompts.take_tokens(self._batching.budget - running)
        if not tokens:
            await self._run_step()
            return
        step, whole = self.service.seconds(running), pass_seconds(prompts.service, running + tokens)
        # The weights are read once, as in a step of one request.
        added = max(0.0, whole - self.service.seconds(1)) + long
        await self._run_step(FUSED * (step + added) - step)
        prompts.samples.done += added
        prompts.finish_pass(self._now() - began)
