"""torch on a partition's SMs. Needs the extra `torch`.

    import greensched.integrations.torch as gs_torch

    y = await p.run(model, x)           # torch's current stream is the partition's, by the import
    with gs_torch.current(p, x):        # the same for what is submitted here and now
        z = model(x)
    gs_torch.take(p, z)                 # ... and for using that elsewhere

A tensor is a kernel argument as it is (`p.launch(config, kernel, x)`): by DLPack, behind torch's
current stream. On a simulated GPU torch works on the CPU, and everything here lets it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from greensched import CallContext, Partition, call_context, current_call, register_call_hook
from greensched.errors import InvalidRequest


def stream(where: Partition | CallContext | None = None) -> torch.cuda.ExternalStream:
    """Torch's view of a partition's stream, or of the running call's. As good as the lease.

    Raises:
        InvalidRequest: neither is there, or the GPU is simulated.
        WouldBlock: as `Partition.stream`.
    """
    call = call_context(where)
    return torch.cuda.ExternalStream(call.stream.address, device=call.device)


@contextmanager
def current(p: Partition, *tensors: torch.Tensor) -> Iterator[torch.cuda.Stream | None]:
    """A block in which torch's current stream is the partition's; no `await` inside.

    It comes behind what torch's current stream had before. Nothing is waited for: leaving the
    partition's block does, or `take` orders what comes elsewhere. Of the calling thread alone.

    Args:
        p: whose launches and copies it is in one order with.
        tensors: those made elsewhere that are used inside: they are kept until that is done, so
            their memory is not used again before.

    Returns:
        The stream, or None on a simulated GPU, where torch is left as it is.

    Raises:
        InvalidRequest: torch's current stream is capturing.
        WouldBlock: as `Partition.stream`.
    """
    call = p.call
    with call.entered():
        if call.is_simulated:
            yield None
            return
        ours = stream(call)
        _follow(ours, _mark(torch.cuda.current_stream(call.device)))
        try:
            with torch.cuda.stream(ours):
                yield ours
        finally:
            # Not `record_stream`: torch would mark our stream when it frees them, which may be long
            # after the pool has ended it, and ends the process then.
            if tensors:
                p.keep_alive(*tensors)


def take(p: Partition, *tensors: torch.Tensor) -> None:
    """Torch's current stream waits, on the device, for the partition's; no thread does.

    Args:
        p: where the tensors were made, in a block of `current`.
        tensors: what is to be used here: their memory is not used again before that is done. In a
            block of another partition it is that block to which they are named.

    Raises:
        InvalidRequest: tensors are named in a block of `current`, or in a call; the partition's
            stream is capturing.
        WouldBlock: as `Partition.stream`.
    """
    call = p.call
    if call.is_simulated:
        return
    if tensors and current_call() is not None:
        raise InvalidRequest("name the tensors to the block that uses them: `current(p, tensor)`")
    here = torch.cuda.current_stream(call.device)
    _follow(here, _mark(stream(call)))
    for tensor in tensors:
        _lives_until(here, tensor)


def sm_count() -> int:
    """The SMs that code has: of the running call or block, else of torch's current device.

    For grids that are as large as the GPU: give it to a Triton kernel as its `NUM_SMS`.
    """
    call = current_call()
    if call is not None:
        return call.sm_count
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


class SizesGrids(Protocol):
    """A library that is told, for the whole process, how many SMs to use; DeepGEMM is one."""

    def set_num_sms(self, count: int) -> None: ...

    def get_num_sms(self) -> int: ...


@contextmanager
def sized(library: SizesGrids) -> Iterator[int]:
    """A block in which a library such as `deep_gemm` uses as many SMs as `sm_count` says.

    The number is the process's, so two such blocks are never entered at once: the second waits.
    Launch inside, and do no more: nothing that waits for the GPU.
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
    given: Sequence[object],  # noqa: ARG001  any argument may be of this library
) -> Callable[[Callable[[], Any]], Any] | None:
    """What `p.run` does for torch, a call hook registered when this module is imported.

    The call's stream comes behind torch's current stream of who submits it, and is torch's current
    one in the call. The arguments live until it is done. What is returned, be it in tuples, lists
    or dicts, may be used on that stream of the submitter's: its memory is not used again before.
    A submitter inside a block of `current` names it to the block that uses it.

    Raises:
        InvalidRequest: torch's current stream is capturing.
    """
    if call.is_simulated or not _has_cuda():
        return None
    # Not the one to start CUDA in torch, here: it takes seconds. Then there is nothing to wait for.
    mark = None
    if torch.cuda.is_initialized():
        mark = _mark(torch.cuda.current_stream(call.device))
    from_a_block = current_call() is not None

    def around(function: Callable[[], Any]) -> Any:
        ours = stream(call)
        if mark is not None:
            _follow(ours, mark)
        with torch.cuda.stream(ours):
            result = function()
        if not from_a_block:
            theirs = torch.cuda.default_stream(call.device) if mark is None else mark[0]
            for tensor in _tensors(result):
                _lives_until(theirs, tensor)
        return result

    return around


@functools.cache
def _has_cuda() -> bool:
    return bool(torch.cuda.is_available())


#: A stream, and what it had when it was marked.
_Mark = tuple[torch.cuda.Stream, torch.cuda.Event]


def _mark(source: torch.cuda.Stream) -> _Mark:
    if source == torch.cuda.current_stream():  # mostly: torch takes 20 us to change it
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


def _lives_until(here: torch.cuda.Stream, tensor: torch.Tensor) -> None:
    """Its memory is not used again before what `here`, a stream of torch's own, has then."""
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
