"""Ask a real GPU how its driver treats green contexts, and print the answers as JSON.

`python -m benchmarks.probes.gpu [--out FILE] [--quick]` needs cuda-bindings with NVRTC and numpy,
uses torch where it is installed, and takes four minutes (`--quick`: one). Run it again
with CUDA_DEVICE_MAX_CONNECTIONS=32 for `many_contexts`. Every question is asked in isolation: one
that fails is recorded as {"error": ...}, and the next is asked. Times are microseconds of the
host's clock unless a key says otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from cuda.bindings import driver as drv

from benchmarks.probes import contexts, execution, libraries, sharing
from benchmarks.probes.device import Answer, Gpu, ok

Question = Callable[[Gpu], Answer]

#: In order: after the last one nothing works.
QUESTIONS: tuple[Question, ...] = (
    contexts.splits,
    contexts.combine,
    contexts.disjoint,
    contexts.nested_split,
    contexts.costs,
    contexts.how_many,
    contexts.current_context,
    execution.host_calls,
    execution.completion,
    execution.isolation,
    execution.scaling,
    sharing.bandwidth,
    sharing.power,
    execution.graphs,
    execution.pooled_memory,
    contexts.destroy_in_flight,
    contexts.driver_edges,
    contexts.churn,
    contexts.pending_waits,
    execution.words_on_green_streams,
    execution.call_contention,
    execution.many_contexts,
    execution.first_launch_beside_a_latch,
    libraries.torch_interop,
    libraries.torch_current,
    contexts.poison,
)


def ask_all(*, quick: bool, only: Sequence[str] = ()) -> dict[str, Answer]:
    """Ask every question of device 0, or only those of these names; the answers by name.

    Raises:
        CudaError: there is no device.
    """
    gpu = Gpu(quick=quick)
    answers: dict[str, Answer] = {}
    for name, question in (
        ("device", Gpu.facts),
        ("compile", Gpu.compile),
        ("load", Gpu.load),
        *((each.__name__, each) for each in QUESTIONS if not only or each.__name__ in only),
    ):
        ok(drv.cuCtxSetCurrent(gpu.primary))
        answers[name] = _answer(name, question, gpu)
    return answers


def _answer(name: str, question: Question, gpu: Gpu) -> Answer:
    start = time.perf_counter()
    try:
        answer = question(gpu)
    except Exception as error:
        where = traceback.format_exc().splitlines()[-3:]
        answer = {"error": f"{type(error).__name__}: {error}", "where": where}
    took = time.perf_counter() - start
    print(f"[{took:6.2f}s] {name}: {json.dumps(answer, default=str)[:600]}", file=sys.stderr)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probes.gpu",
        description="Ask a real GPU how its driver treats green contexts.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the answers there, too")
    parser.add_argument("--quick", action="store_true", help="ask with fewer samples")
    names = [question.__name__ for question in QUESTIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="ask only these")
    options = parser.parse_args()
    text = json.dumps(ask_all(quick=options.quick, only=options.only), indent=1, default=str)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
