"""All exceptions. Catch them by class and read their attributes; no message needs parsing.

* The caller's mistake, refused before anything is queued: `InvalidRequest` and its subclasses.
* Use after the end: `Closed`.
* Not possible now: `WouldBlock`, `WouldDeadlock`, `QueueFull`, `DeadlineExceeded`,
  `DeadlineImpossible`.
* Not possible on this machine: `DriverUnavailable`, `NotSupported`, `SocketUnavailable`,
  `MissingPackage`.
* A driver call failed: `CUDAError`. It fails one job, unless it is a `DeviceFault`.
* Work on a device does not end: `DeviceHung`.
* The process must be replaced: `DeviceLost`.
"""

from __future__ import annotations

from pathlib import Path


class GreenschedError(Exception):
    """Base of every exception that greensched raises on purpose. It can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # By default pickle passes the message to the class, whose arguments differ.
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[GreenschedError], args: tuple[object, ...]) -> GreenschedError:
    error = kind.__new__(kind)
    error.args = args
    return error


# -- the caller's mistake: refused before anything is queued ------------------------------------


class InvalidRequest(GreenschedError, ValueError):
    """A value that can never be valid; the message says which values are."""


class DeviceNotFound(InvalidRequest):
    """The machine has no device with this number; the message lists its devices.

    Attributes:
        device: The number that was given.
        name: The name of the driver's status for it.
    """

    name = "INVALID_DEVICE"

    def __init__(self, device: object, count: int) -> None:
        self.device = device
        ordinals = ", ".join(map(str, range(count)))
        number = f"{count} device{'' if count == 1 else 's'}"
        super().__init__(
            f"device {device!r} does not exist: this machine has {number} ({ordinals})."
        )


class InvalidSize(InvalidRequest):
    """`sms` is not a size: not a positive int, a range, or a named size."""

    def __init__(self, value: object) -> None:
        self.value = value
        super().__init__(
            f"sms={value!r} is not a size: give a positive int, a pair (least, most) with "
            "least <= most, (least, ALL), ALL or REST"
        )


class TooManySMs(InvalidRequest):
    """More SMs than any device can ever grant to the request.

    Attributes:
        asked: The SMs of the request.
        most: The most that can ever be granted.
        nearest: The nearest sizes that can be granted together, for a request of several parts.
        is_ruled: Whether reserves, caps or sizes of service classes limit `most`.
    """

    def __init__(
        self, asked: int, most: int, *, nearest: tuple[int, ...] = (), is_ruled: bool = False
    ) -> None:
        self.asked = asked
        self.most = most
        self.nearest = nearest
        self.is_ruled = is_ruled
        together = f"pool.partitions({', '.join(map(str, nearest))})"
        other = (
            "name a class (`service=`) whose reserve, cap or sizes suffice, or that may borrow "
            "(`preemptible=True`, and a `duration` or `checkpoint_interval` of at most the owner's "
            "`max_wait_for_reserve`)"
        )
        instead = f"at most {most}" if len(nearest) < 2 else f"{together}, the nearest possible"
        if is_ruled or not nearest:
            instead += f", or {other if is_ruled else 'for ALL SMs of a device'}"
        instead = f"ask for {instead}" if most else other
        super().__init__(
            f"{asked} SMs{' together' if nearest else ''} can never be granted here (at most "
            f"{most} can): {instead}"
        )


class InvalidSplit(InvalidRequest):
    """SMs cannot be split into the requested groups.

    Attributes:
        asked: The SMs of each group; None stands for the largest possible group.
        sm_count: The SMs that were to be split.
        why: The reason.
        nearest: The nearest groups that are possible; empty if there are none.
    """

    def __init__(
        self, asked: tuple[int | None, ...], sm_count: int, why: str, nearest: tuple[int, ...]
    ) -> None:
        self.asked = asked
        self.sm_count = sm_count
        self.why = why
        self.nearest = nearest
        groups = ", ".join("the largest size" if count is None else str(count) for count in asked)
        instead = f"ask for {', '.join(map(str, nearest))}" if nearest else "no split is possible"
        super().__init__(f"{sm_count} SMs cannot be cut into groups of {groups}: {why}; {instead}")


class InvalidCombination(InvalidRequest):
    """Resources that cannot be combined in one context; `why` is the reason."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"these resources cannot be in one context: {why}")


class InvalidLaunch(InvalidRequest):
    """A launch geometry exceeds a limit of the device or the kernel."""

    def __init__(self, what: str, value: object, limit: object) -> None:
        self.what = what
        self.value = value
        self.limit = limit
        rule = f"must be {limit}" if isinstance(limit, str) else f"can be at most {limit} here"
        super().__init__(f"{what} is {value}, but {rule}")


class InvalidCapture(InvalidRequest):
    """A function cannot be captured; `why` is the reason."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"this function cannot be captured: {why}")


class ArgumentMismatch(GreenschedError, TypeError):
    """Kernel arguments of the wrong number or kind."""

    def __init__(self, kernel: str, problem: str) -> None:
        self.kernel = kernel
        self.problem = problem
        super().__init__(f"kernel {kernel!r}: {problem}")


class InvalidArray(GreenschedError, TypeError):
    """An array or dtype cannot be copied to a device, or does not fit its destination."""


class CompileFailed(GreenschedError):
    """CUDA source did not compile; `log` is the compiler's log, with file and line."""

    def __init__(self, name: str, arch: str, log: str) -> None:
        self.name = name
        self.arch = arch
        self.log = log
        super().__init__(f"{name} does not compile for {arch}:\n{log.strip()}")


class NotSimulable(GreenschedError):
    """A kernel without a reference or a cost was launched on the simulated driver."""

    def __init__(self, kernel: str, lacks: str = "reference") -> None:
        self.kernel = kernel
        self.lacks = lacks
        super().__init__(
            f"kernel {kernel!r} has no {lacks}, so it cannot be simulated: "
            f"add one with @kernel.{lacks}, or run on a GPU"
        )


class ReferenceFailed(GreenschedError):
    """A kernel's numpy reference raised an exception, which is the `__cause__`.

    Only the simulated driver runs references. The job fails, but the device stays usable.
    """

    def __init__(self, kernel: str, cause: Exception, part: str = "reference") -> None:
        self.kernel = kernel
        super().__init__(f"the {part} of kernel {kernel!r} raised {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class WrongDevice(InvalidRequest):
    """An object of one device was used with another device."""

    def __init__(self, what: str, has: int, wants: int) -> None:
        self.has = has
        self.wants = wants
        super().__init__(
            f"{what} belongs to device {has}, but is used on device {wants}: use it on device "
            f"{has}, or make another on device {wants}"
        )


class NotCopyable(GreenschedError, TypeError):
    """A pool, a partition, or another object of a device was copied or pickled."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(
            f"a {kind} cannot be copied or pickled, because it stands for something on a GPU in "
            "this process: share the object itself, or open a pool in the other process and send "
            "it arrays and sizes"
        )


class DeviceTaken(InvalidRequest):
    """Another pool uses the device; two pools would create overlapping partitions.

    Attributes:
        process: The ID of the other pool's process; 0 if unknown; None for this process.
    """

    def __init__(self, device: int, process: int | None = None) -> None:
        self.device, self.process = device, process
        if process is None:
            text = "in this process: share the first pool, or close it first"
        else:
            text = (
                f"in process {process or '(unknown)'}: run one process for each GPU (a server's "
                "`--workers 1`), or give each process its own GPU (CUDA_VISIBLE_DEVICES)"
            )
        super().__init__(
            f"device {device} already has a pool {text}; a second one would lease the same SMs"
        )


class WrongContext(InvalidRequest):
    """Streams and events of two unrelated contexts were used together."""

    def __init__(self, what: object, other: object) -> None:
        self.what = what
        self.other = other
        super().__init__(
            f"{what!r} cannot be used with {other!r}: streams and events work only within one "
            "context and the contexts that share its primary"
        )


class WrongThread(GreenschedError, RuntimeError):
    """A call from a thread that may not make it; the message says what to do."""


class CurrentElsewhere(WrongThread):
    """A green context is already current on another thread.

    Attributes:
        holder: The name of the thread on which it is current.
        asker: The name of the refused thread.
    """

    def __init__(self, context: object, holder: str, asker: str) -> None:
        self.holder = holder
        self.asker = asker
        super().__init__(
            f"{context!r} is current on another thread, {holder!r}, and cannot be made current on "
            f"{asker!r}: a green context is current on one thread at a time. Use p.run, or leave "
            "it on that thread first"
        )


class HeldAcrossAwait(GreenschedError, RuntimeWarning):
    """A block that makes a context current was still open when its task was suspended.

    The current context belongs to the thread, so the loop's other tasks then run with it.
    It is a warning, and in debug mode an error.

    Attributes:
        context: A description of the context.
        block: `file:line` of the `with`.
        task: The names of the task and its coroutine.
        suspended: `file:line` of the await.
    """

    def __init__(self, context: str, block: str, task: str, suspended: str) -> None:
        self.context = context
        self.block = block
        self.task = task
        self.suspended = suspended
        super().__init__(
            f"{context}, made current at {block}, is held across the await at {suspended} by "
            f"{task}: every task of the loop runs with it meanwhile. Leave the block before the "
            "await, or use p.run"
        )


class NoLoop(GreenschedError, RuntimeError):
    """A call that needs a running asyncio or trio loop was made without one."""

    def __init__(self) -> None:
        super().__init__(
            "no asyncio or trio loop is running on this thread: call this from a coroutine that "
            "asyncio.run or trio.run runs"
        )


class LoopWouldBlock(GreenschedError, RuntimeError):
    """A driver call that can block was made on an event-loop thread."""

    def __init__(self, call: str) -> None:
        self.call = call
        super().__init__(
            f"{call} can block and was called on an event-loop thread: "
            "call it from a worker thread (asyncio.to_thread, or p.run)"
        )


# -- used after its end -------------------------------------------------------------------------


class Closed(GreenschedError, RuntimeError):
    """An object was used after its end or before its beginning; `state` says which."""

    #: What to do if it is closed.
    _remedy = ""

    def __init__(self, what: str, state: str = "closed") -> None:
        self.what = what
        self.state = state
        super().__init__(f"{what} is {state}{self._remedy if state == 'closed' else ''}")


class PartitionClosed(Closed):
    """A partition was used outside its `async with` block."""

    _remedy = ": use it inside its block, or request another"


class PoolClosed(Closed):
    """The pool is closing, closed or not yet open; `state` says which."""

    _remedy = ": open another"


class BufferClosed(Closed):
    """A buffer was used after it, or its pool, was closed."""

    _remedy = ": allocate another, or close it after its last use"


class ForkedPool(Closed):
    """A CUDA object was used in a forked child: CUDA does not survive fork()."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what,
            "of the parent process, and CUDA does not survive fork(): open a pool here, "
            "in a process started with 'spawn' or 'forkserver'",
        )


# -- not possible now ---------------------------------------------------------------------------


class WouldBlock(GreenschedError):
    """A call that never waits would have to wait."""


class WouldDeadlock(GreenschedError, RuntimeError):
    """The task waits for SMs that it holds itself, so the request can never be granted.

    Attributes:
        holds: The SMs that the task holds.
        asked: The SMs of the request.
        most: The most that could be granted while the task holds them.
        together: The nearest sizes, held and requested, that one request can get together.
    """

    def __init__(
        self, holds: int, asked: int, most: int, *, together: tuple[int, ...] = ()
    ) -> None:
        self.holds = holds
        self.asked = asked
        self.most = most
        self.together = together
        sizes = ", ".join(map(str, together))
        super().__init__(
            f"this task already holds {holds} SMs, so {asked} more can never be granted to it (at "
            f"most {most} can): leave the outer block first"
            + (f", or make one request, pool.partitions({sizes})" if len(together) > 1 else "")
        )


class QueueFull(GreenschedError):
    """The pool's queue is full; `retry_after` is an estimate in seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        self.waiting = waiting
        self.retry_after = retry_after
        requests = "request is" if waiting == 1 else "requests are"
        super().__init__(f"{waiting} {requests} waiting already; retry in {retry_after:.3g} s")


class DeadlineExceeded(GreenschedError, TimeoutError):
    """The deadline passed while the request was still queued; nothing was granted."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        super().__init__(
            f"not granted within its deadline of {deadline:g} s: ask for fewer SMs, or give a "
            "later deadline"
        )


class DeadlineImpossible(GreenschedError, TimeoutError):
    """The request is known to miss its deadline, so it was not queued.

    Attributes:
        predicted: Seconds from now until its work would be done.
        deadline: Seconds from now until its deadline.
    """

    def __init__(self, predicted: float, deadline: float) -> None:
        self.predicted = predicted
        self.deadline = deadline
        super().__init__(
            f"done in {predicted:.3g} s at the earliest, after its deadline in {deadline:.3g} s: "
            "ask for more SMs, for less work or for a later deadline"
        )


# -- not possible on this machine ---------------------------------------------------------------


class DriverUnavailable(GreenschedError, RuntimeError):
    """No usable CUDA driver or device; the message says what to install or change.

    A simulated driver is used only if requested; the message says how.

    Attributes:
        name: The name of the driver's status, as in `CUDAError`, such as `"NO_DEVICE"`; or "".
    """

    def __init__(self, problem: str, name: str = "") -> None:
        self.problem = problem
        self.name = name
        super().__init__(
            f"{problem}. To run without a GPU, choose a simulated one: "
            'Pool(driver="simulated:h200"), or GREENSCHED_DRIVER=simulated:h200'
        )


class NotSupported(GreenschedError, RuntimeError):
    """The driver or device lacks a feature; the message says what is needed and what exists."""

    def __init__(self, what: str, needs: str, has: str) -> None:
        self.what = what
        self.needs = needs
        self.has = has
        super().__init__(f"{what} needs {needs}; this is {has}")


class SocketUnavailable(GreenschedError, OSError):
    """A pool cannot listen at a Unix socket, or no pool answers there.

    Attributes:
        path: The path of the socket.
        problem: What is wrong.
    """

    def __init__(self, path: str | Path, problem: str) -> None:
        self.path = str(path)
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class MissingPackage(GreenschedError, ImportError):
    """An optional package is not installed; the message says how to install it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.what = what
        self.package = package
        self.extra = extra
        super().__init__(f"{what} needs {package}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for a package or a checkout.

    An installed package is named `greensched`, which works without an index; a checkout is named
    by its folder.
    """
    sources = Path(__file__).absolute().parents[1]
    if sources.name == "src" and (sources.parent / "pyproject.toml").is_file():
        return f"pip install -e '{sources.parent}[{extra}]'"
    return f"pip install 'greensched[{extra}]'"


class VerificationFailed(GreenschedError):
    """`pool.verify()` found an SM in two partitions, or a partition with missing SMs."""


# -- a driver call failed -----------------------------------------------------------------------


class CUDAError(GreenschedError):
    """A driver call returned a status other than success.

    Attributes:
        status: The `CUresult` as an int; may be newer than the installed bindings.
        name: Its name without the `CUDA_ERROR_` prefix.
        call: The driver call, or a description of it.
    """

    def __init__(self, status: int, name: str, call: str, detail: str = "") -> None:
        self.status = status
        self.name = name
        self.call = call
        super().__init__(f"{call}: {name} ({status})" + (f": {detail}" if detail else ""))


class OutOfMemory(CUDAError):
    """Device or pinned memory ran out; the pool stays usable.

    Attributes:
        asked, free, total: Bytes; `free` and `total` are None if the driver did not report them.
    """

    def __init__(
        self, call: str, asked: int | None = None, free: int | None = None, total: int | None = None
    ) -> None:
        self.asked = asked
        self.free = free
        self.total = total
        facts = [
            f"{value} bytes {label}"
            for value, label in ((asked, "requested"), (free, "free"), (total, "in total"))
            if value is not None
        ]
        advice = "ask for less, or close buffers first"
        detail = f"{', '.join(facts)}: {advice}" if facts else advice
        super().__init__(2, "OUT_OF_MEMORY", call, detail)


class DeviceFault(CUDAError):
    """A status after which the process must be replaced (a sticky error).

    Attributes:
        device: The ordinal of the failed device; None if unknown.
    """

    device: int | None = None


class DriverMisuse(GreenschedError, RuntimeError):
    """The simulated driver was given a wrong, dead or foreign handle: a bug in the caller.

    In this case a real driver crashes the process or, worse, continues.
    """


class DeviceLost(GreenschedError, RuntimeError):
    """A device fault ended CUDA for this process: replace the process.

    Attributes:
        cause: The first fault that any call met; also the `__cause__`. The message of a
            simulated fault says what happened on the device.
        device: The ordinal of the failed device; None if unknown.
    """

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        self.device: int | None = getattr(cause, "device", None)
        which = "a device" if self.device is None else f"device {self.device}"
        super().__init__(f"{which} failed and is unusable until this process is replaced: {cause}")
        self.__cause__ = cause


class DeviceHung(GreenschedError, TimeoutError):
    """Work did not end within `hang_after` of its turn on its stream. It may still run.

    The work cannot be stopped. The SMs of its executor are not granted until it ends; the rest of
    the pool continues. If it does end, the jobs that raised this error have their results.

    Attributes:
        job: The name of the job that raised this; "" if it was not a job.
        work: The name of the hanging work; "" if unknown.
        behind: The names of the jobs that wait behind it on the same executor.
        device: The ordinal of the device.
        sms: The number of SMs of the executor; `cells` is their bit mask.
        service: The class of the lease, or "".
        holder: The name of the task or thread that holds the lease.
        place: `file:line` of the code that took the lease; "" if unknown.
        leased: Seconds from the grant of the lease to the discovery of the hang.
        hung: Seconds from the work's turn to the discovery of the hang.
        hang_after: The limit, in seconds.
        beside: The device's other executors that have work, and how long each has made no
            progress, longest first. They may wait behind it in one of the device's `queues`
            hardware queues; the driver does not report which streams share a queue.
    """

    def __init__(
        self,
        work: str,
        behind: tuple[str, ...],
        device: int,
        sms: int,
        cells: int,
        service: str,
        holder: str,
        place: str,
        leased: float,
        hung: float,
        hang_after: float,
        beside: tuple[str, ...] = (),
        queues: int = 8,
        job: str = "",
    ) -> None:
        self.job, self.work, self.behind = job, work, behind
        self.device, self.sms, self.cells = device, sms, cells
        self.service, self.holder, self.place = service, holder, place
        self.leased, self.hung, self.hang_after = leased, hung, hang_after
        self.beside, self.queues = beside, queues
        of_class = f" of class {service!r}" if service else ""
        text = (
            f"{work or 'work'} on device {device} has not ended {hung:.3g} s after its turn "
            f"(hang_after={hang_after:g}): the lease{of_class} of {holder or 'an unknown task'}, "
            f"taken {leased:.3g} s ago at {place or 'an unknown place'}, holds {sms} SMs (cells "
            f"{cells:b}), which are not granted until it ends"
        )
        if behind:
            text += f"; {len(behind)} jobs wait behind it: {_shortened(behind)}"
        if beside:
            text += (
                f"; {len(beside)} other executors have work without progress, perhaps behind it in "
                f"one of the device's {queues} hardware queues: {_shortened(beside)}"
            )
        super().__init__(text)

    def of(self, job: str) -> DeviceHung:
        """Return a new error for another job, with its own traceback."""
        other = type(self).__new__(type(self))
        other.args, other.__dict__ = self.args, {**self.__dict__, "job": job}
        return other


def _shortened(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def wrong_thread() -> WrongThread:
    """Return the error for use of a partition by another thread or loop than its own."""
    return WrongThread(
        "a partition can be used only by the loop that entered it, on that loop's thread: call it "
        "there with loop.call_soon_threadsafe or anyio.from_thread.run"
    )


# -- fleets: pools in other processes -----------------------------------------------------------


class PoolLost(GreenschedError, RuntimeError):
    """A fleet lost the pool that a job was sent to. The job may have run; `why` is the reason."""

    def __init__(self, pool: str, why: str) -> None:
        self.pool = pool
        self.why = why
        super().__init__(
            f"{pool} was lost, and its jobs may or may not have run ({why}): submit jobs again "
            "that are safe to repeat, with idempotent=True"
        )


class NoPool(GreenschedError, RuntimeError):
    """No pool of the fleet can take this job now; the message says why, and what to do."""


class FleetTimeout(DeadlineExceeded):
    """The deadline of a fleet's job passed before its reply came.

    The job may have run if `was_sent`; otherwise no pool was free for it, and it never started.
    """

    def __init__(self, deadline: float, *, was_sent: bool = True) -> None:
        super().__init__(deadline)
        self.was_sent = was_sent
        outcome = "it may have run" if was_sent else "it was sent to no pool, and never started"
        self.args = (f"no reply within its deadline of {deadline:g} s; {outcome}",)


class VersionSkew(GreenschedError, RuntimeError):
    """A client and a pool speak different versions of the fleet's protocol."""

    def __init__(self, pool: str, theirs: int, ours: int) -> None:
        self.theirs = theirs
        self.ours = ours
        super().__init__(
            f"{pool} speaks protocol version {theirs}, but this process speaks {ours}: install the "
            "same greensched on all nodes, then stop the fleet and start it again"
        )


class JobFailed(GreenschedError, RuntimeError):
    """A fleet's job raised an error that cannot be sent; the message describes that error."""
