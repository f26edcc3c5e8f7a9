"""torch on a partition's SMs. Needs the extra `torch`.

    import greensched.integrations.torch as gs_torch

    y = await p.run(model, x)           # with the import, torch's current stream is the partition's
    with gs_torch.current(p, x):        # the same for work that is submitted here
        z = model(x)
    gs_torch.take(p, z)                 # orders the use of z elsewhere

A tensor can be a kernel argument (`p.launch(config, kernel, x)`) by DLPack, ordered after torch's
current stream. On a simulated GPU torch works on the CPU, and these functions do not change that.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from greensched import CallContext, Partition, call_context, current_call, register_call_hook
from greensched.errors import InvalidRequest, MissingPackage

try:
    import torch
except ModuleNotFoundError as error:
    raise MissingPackage(__name__, "torch", "torch") from error


def stream(where: Partition | CallContext | None = None) -> torch.cuda.ExternalStream:
    """Wrap the stream of a partition, or of the running call, for torch. Valid with the lease.

    Raises:
        InvalidRequest: There is no partition or call, or the GPU is simulated.
        WouldBlock: As for `Partition.stream`.
    """
    call = call_context(where)
    return torch.cuda.ExternalStream(call.stream.address, device=call.device_id)


@contextmanager
def current(p: Partition, *tensors: torch.Tensor) -> Iterator[torch.cuda.Stream | None]:
    """Open a block in which torch's current stream is the partition's; no `await` inside.

    The block's work is ordered after torch's current stream. Leaving the block does not wait for
    the work; leaving the partition's block does, and `take` orders work elsewhere after it. Affects
    only the calling thread.

    Args:
        p: The partition; the block's work is ordered with its launches and copies.
        tensors: Tensors from elsewhere that are used inside. They are kept until that work is done,
            so that their memory is not reused before.

    Returns:
        The stream, or None on a simulated GPU, where torch is not affected.

    Raises:
        InvalidRequest: torch's current stream is capturing.
        WouldBlock: As for `Partition.stream`.
    """
    call = p.call
    with call.entered():
        if call.is_simulated:
            yield None
            return
        own = stream(call)
        _follow(own, _mark(torch.cuda.current_stream(call.device_id)))
        try:
            with torch.cuda.stream(own):
                yield own
        finally:
            if tensors:
                p.keep_alive(*tensors)


def take(p: Partition, *tensors: torch.Tensor) -> None:
    """Order torch's current stream after the partition's, on the device; no thread waits.

    Args:
        p: The partition on which the tensors were made, in a block of `current`.
        tensors: Tensors that are used here. Their memory is not reused before that work is done.
            In a block of another partition, pass them to that block's `current` instead.

    Raises:
        InvalidRequest: Tensors are given inside a block of `current` or a call, or the partition's
            stream is capturing.
        WouldBlock: As for `Partition.stream`.
    """
    call = p.call
    if call.is_simulated:
        return
    if tensors and current_call() is not None:
        raise InvalidRequest(
            f"take() got {len(tensors)} tensors inside a block of current() or a call: give them "
            "to the block that uses them, current(p, tensor)"
        )
    here = torch.cuda.current_stream(call.device_id)
    _follow(here, _mark(stream(call)))
    for tensor in tensors:
        _keep_until(here, tensor)


def sm_count() -> int:
    """Return the SMs of the running call or block, or else of torch's current device.

    Use it for grids as large as the GPU, for example as `NUM_SMS` of a Triton kernel.
    """
    call = current_call()
    if call is not None:
        return call.sm_count
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


class SizesGrids(Protocol):
    """A library with a process-wide number of SMs to use, such as DeepGEMM."""

    def set_num_sms(self, count: int) -> None:
        """Set for how many SMs the library's kernels are sized."""

    def get_num_sms(self) -> int:
        """Return for how many SMs the library's kernels are sized."""


@contextmanager
def sized(library: SizesGrids) -> Iterator[int]:
    """Open a block in which a library such as `deep_gemm` uses `sm_count` SMs.

    The number is process-wide, so a second such block waits for the first. Only launch inside the
    block; do not wait for the GPU.
    """
    count = sm_count()
    with _sizing:
        before = library.get_num_sms()
        library.set_num_sms(count)
        try:
            yield count
        finally:
            library.set_num_sms(before)


_sizing = threading.Lock()


def around_call(
    call: CallContext,
    arguments: Sequence[object],  # noqa: ARG001  a call hook has it; the function may use this library whatever its arguments
) -> Callable[[Callable[[], Any]], Any] | None:
    """Run `p.run` with torch. A call hook, registered when this module is imported.

    The call's stream is ordered after torch's current stream at submission, and is torch's current
    stream in the call. The arguments live until the call is done. Tensors of the result, even in
    tuples, lists or dicts, may be used on the submitting stream, and their memory is not reused
    before. Inside a block of `current`, pass them to the block that uses them.

    Raises:
        InvalidRequest: torch's current stream is capturing.
    """
    if call.is_simulated or not _has_cuda():
        return None
    # Do not initialise CUDA in torch, which takes seconds. If uninitialised, it has no work.
    mark = None
    if torch.cuda.is_initialized():
        mark = _mark(torch.cuda.current_stream(call.device_id))
    from_a_block = current_call() is not None

    def around(function: Callable[[], Any]) -> Any:
        own = stream(call)
        if mark is not None:
            _follow(own, mark)
        with torch.cuda.stream(own):
            result = function()
        if not from_a_block:
            other = torch.cuda.default_stream(call.device_id) if mark is None else mark[0]
            for tensor in _tensors(result):
                _keep_until(other, tensor)
        return result

    return around


@functools.cache
def _has_cuda() -> bool:
    return bool(torch.cuda.is_available())


#: A stream, and an event after its work so far.
_Mark = tuple[torch.cuda.Stream, torch.cuda.Event]


def _mark(source: torch.cuda.Stream) -> _Mark:
    if source == torch.cuda.current_stream():  # the usual case; changing the stream takes 20 us
        is_capturing = torch.cuda.is_current_stream_capturing()
    else:
        with torch.cuda.stream(source):
            is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        raise InvalidRequest("torch's current stream is capturing: end the capture first")
    event = torch.cuda.Event()
    event.record(source)
    return source, event


def _follow(follower: torch.cuda.Stream, mark: _Mark) -> None:
    source, event = mark
    if source != follower:
        follower.wait_event(event)


def _keep_until(here: torch.cuda.Stream, tensor: torch.Tensor) -> None:
    """Keep a tensor's memory from reuse until the work of torch's stream `here` is done."""
    if tensor.is_cuda:
        tensor.record_stream(here)


def _tensors(result: object) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from _tensors(value)


register_call_hook(around_call)
