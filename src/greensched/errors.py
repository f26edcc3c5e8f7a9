"""The exception tree. Catch by class and read the attributes; no message needs to be parsed.

* Refused before anything is queued, the caller's mistake: `InvalidRequest` and its subclasses.
* Used after its end: `Closed`.
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
    """Base of every error that greensched raises on purpose. It can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle would make the error from its message, which is not what its class takes.
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[GreenschedError], args: tuple[object, ...]) -> GreenschedError:
    error = kind.__new__(kind)
    error.args = args
    return error


# -- the caller's mistake: refused before anything is queued ------------------------------------


class InvalidRequest(GreenschedError, ValueError):
    """A value that can never be right; the message says what would be."""


class InvalidSize(InvalidRequest):
    """`sms` is not a size: not a positive whole number, a range of them, or a named size."""

    def __init__(self, value: object) -> None:
        self.value = value
        super().__init__(
            f"sms={value!r} is not a size: give a positive int, a pair (least, most) with "
            "least <= most, (least, ALL), ALL or REST"
        )


class TooManySMs(InvalidRequest):
    """More SMs than any device can ever grant to this request.

    Attributes:
        asked: the SMs of the request.
        most: the most that can ever be granted.
        nearest: for a request of several parts, the nearest sizes that can be granted together.
        is_ruled: reserves or caps of service classes limit `most`.
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
            "on behalf of a class (`service=`) that reserves the rest, has a larger cap, or may "
            "borrow the rest (preemptible, and with a `duration` or `checkpoint_interval` within "
            "the owner's `max_wait_for_reserve`)"
        )
        instead = f"at most {most}" if len(nearest) < 2 else f"{together}, the nearest that can be"
        if is_ruled or not nearest:
            instead += f", or {other if is_ruled else 'for ALL SMs of a device'}"
        super().__init__(
            f"{asked} SMs{' together' if nearest else ''} can never be granted here, at most "
            f"{most} can: ask for {instead}"
        )


class InvalidSplit(InvalidRequest):
    """SMs cannot be cut into the requested groups.

    Attributes:
        asked: SMs of each group; None stands for the largest possible group.
        sm_count: SMs that were to be cut.
        why: the reason.
        nearest: the nearest groups that can be cut instead; empty if there are none.
    """

    def __init__(
        self, asked: tuple[int | None, ...], sm_count: int, why: str, nearest: tuple[int, ...]
    ) -> None:
        self.asked = asked
        self.sm_count = sm_count
        self.why = why
        self.nearest = nearest
        groups = ", ".join("the largest size" if one is None else str(one) for one in asked)
        instead = f"ask for {', '.join(map(str, nearest))}" if nearest else "no split is possible"
        super().__init__(f"{sm_count} SMs cannot be cut into groups of {groups}: {why}; {instead}")


class InvalidCombination(InvalidRequest):
    """Resources that cannot be in one context; `why` is the reason."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"these resources cannot be in one context: {why}")


class InvalidLaunch(InvalidRequest):
    """A launch geometry beyond a limit of the device or the kernel."""

    def __init__(self, what: str, value: object, limit: object) -> None:
        self.what = what
        self.value = value
        self.limit = limit
        rule = f"must be {limit}" if isinstance(limit, str) else f"can be at most {limit} here"
        super().__init__(f"{what} is {value}, it {rule}")


class InvalidCapture(InvalidRequest):
    """A function that cannot be captured; `why` says what it did, or did not do."""

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
    """An array or dtype that cannot be moved to a device, or does not fit its destination."""


class CompileFailed(GreenschedError):
    """CUDA source did not compile; `log` is the compiler's, with file and line."""

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

    Only the simulated driver runs references. The job fails; the device stays usable.
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
        super().__init__(f"{what} belongs to device {has}, and this is device {wants}")


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
    """Another pool is on the device; both would cut it into overlapping partitions.

    Attributes:
        process: the number of the other pool's process; 0: unknown; None: this process.
    """

    def __init__(self, device: int, process: int | None = None) -> None:
        self.device, self.process = device, process
        if process is None:
            text = "in this process: share the first pool, or close it before"
        else:
            text = (
                f"in process {process or '(unknown)'}: run one process for each GPU (a server's "
                "`--workers 1`), or give each another GPU (CUDA_VISIBLE_DEVICES)"
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
            f"{what!r} cannot be used with {other!r}: a context of its own shares no streams and "
            "events with other contexts"
        )


class WrongThread(GreenschedError, RuntimeError):
    """A call from a thread that may not make it; the message says what to do instead."""


class CurrentElsewhere(WrongThread):
    """A green context is already current on another thread.

    Attributes:
        holder: the name of the thread on which it is current.
        asker: the name of the thread that was refused.
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

    The current context belongs to the thread, so every other task of the loop then runs with it.
    A warning, and in debug mode an error.

    Attributes:
        context: a description of the context.
        block: `file:line` of the `with`.
        task: the names of the task and of its coroutine.
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
    """An object was used after its end, or before its beginning; `state` says which."""

    #: What to do where it is closed.
    _remedy = ""

    def __init__(self, what: str, state: str = "closed") -> None:
        self.what = what
        self.state = state
        super().__init__(f"{what} is {state}{self._remedy if state == 'closed' else ''}")


class PartitionClosed(Closed):
    """A partition was used outside its `async with` block."""

    _remedy = ": use it inside its block, or request another"


class PoolClosed(Closed):
    """The pool is closed, closing or was never opened (`state` says which)."""

    _remedy = ": open another"


class BufferClosed(Closed):
    """A buffer was used after its close(), or after its pool's."""


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
    """A call that never waits would have had to wait."""


class WouldDeadlock(GreenschedError, RuntimeError):
    """The task waits for SMs that it holds itself: the request can never be granted meanwhile.

    Attributes:
        holds: SMs that the task holds.
        asked: SMs of the request.
        most: the most that could be granted while the task holds them.
        together: the nearest sizes, held and requested, that can be granted in one request.
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
        super().__init__(f"{waiting} requests are waiting already; retry in {retry_after:.3g} s")


class DeadlineExceeded(GreenschedError, TimeoutError):
    """The deadline passed while the request was still queued; nothing was granted."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        super().__init__(f"not granted within its deadline of {deadline:g} s")


class DeadlineImpossible(GreenschedError, TimeoutError):
    """The request is known to miss its deadline; it was not queued.

    Attributes:
        predicted: seconds from now until its work would be done.
        deadline: seconds from now until its deadline.
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

    A simulation is never used in its place unless it is asked for; the message says how.

    Attributes:
        name: the driver's status, as of `CUDAError`: `"NO_DEVICE"`; "" if there was none.
    """

    def __init__(self, problem: str, name: str = "") -> None:
        self.problem = problem
        self.name = name
        super().__init__(
            f"{problem}. To run without a GPU, choose a simulated one: "
            'Pool(driver="simulated:h200"), or GREENSCHED_DRIVER=simulated:h200'
        )


class NotSupported(GreenschedError, RuntimeError):
    """The driver or device lacks a feature; the message says what is needed and what is here."""

    def __init__(self, what: str, needs: str, has: str) -> None:
        self.what = what
        self.needs = needs
        self.has = has
        super().__init__(f"{what} needs {needs}; this is {has}")


class SocketUnavailable(GreenschedError, OSError):
    """A pool cannot listen at a Unix socket, or none answers there.

    Attributes:
        path: of the socket.
        problem: what is in the way.
    """

    def __init__(self, path: str | Path, problem: str) -> None:
        self.path = str(path)
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class MissingPackage(GreenschedError, ImportError):
    """An optional package is not installed; the message says which, and how to install it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.what = what
        self.package = package
        self.extra = extra
        super().__init__(f"{what} needs {package}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra, of an installation or of a checkout.

    An installed greensched satisfies its own name, also where no package index has it; one that
    runs from its sources is named by its folder.
    """
    sources = Path(__file__).absolute().parents[1]
    if sources.name == "src" and (sources.parent / "pyproject.toml").is_file():
        return f"pip install -e '{sources.parent}[{extra}]'"
    return f"pip install 'greensched[{extra}]'"


class VerificationFailed(GreenschedError):
    """`pool.verify()` found an SM in two partitions, or a partition without its number of SMs."""


# -- a driver call failed -----------------------------------------------------------------------


class CUDAError(GreenschedError):
    """A driver call returned a status other than success.

    Attributes:
        status: the `CUresult` as an int, also one newer than the installed bindings.
        name: its name without the `CUDA_ERROR_` prefix.
        call: the driver call, or a description of it.
    """

    def __init__(self, status: int, name: str, call: str, detail: str = "") -> None:
        self.status = status
        self.name = name
        self.call = call
        super().__init__(f"{call}: {name} ({status})" + (f": {detail}" if detail else ""))


class OutOfMemory(CUDAError):
    """Device or pinned memory ran out; the pool stays usable.

    Attributes:
        asked, free, total: bytes; `free` and `total` are None where the driver did not say.
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
        super().__init__(2, "OUT_OF_MEMORY", call, ", ".join(facts))


class DeviceFault(CUDAError):
    """A status after which the process must be replaced (a sticky error).

    Attributes:
        device: the ordinal of the device that failed; None if it is unknown.
    """

    device: int | None = None


class DriverMisuse(GreenschedError, RuntimeError):
    """The simulated driver was given a wrong, dead or foreign handle: a bug in the caller.

    A real driver crashes the process or, worse, continues.
    """


class DeviceLost(GreenschedError, RuntimeError):
    """A device fault ended CUDA for this process: replace the process.

    Attributes:
        cause: the first fault, from whichever call met it; also the `__cause__`. The message of a
            simulated fault says what happened on the device.
        device: the ordinal of the device that failed; None if it is unknown.
    """

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        self.device: int | None = getattr(cause, "device", None)
        which = "a device" if self.device is None else f"device {self.device}"
        super().__init__(f"{which} failed and is unusable until this process is replaced: {cause}")
        self.__cause__ = cause


class DeviceHung(GreenschedError, TimeoutError):
    """Work did not end within `hang_after` of its turn on its stream, and may still run.

    Nothing can stop it. The SMs of its executor are not granted to others until it has ended; the
    rest of the pool goes on. A job that raised this has its result if its work ends after all.

    Attributes:
        job: the name of the job that raised this; "": the end of a block, or another use.
        work: the name of what hangs; "": not known.
        behind: the names of the jobs that stand behind it on the same executor.
        device: the ordinal of the device.
        sms: the SMs of the executor, in so many `cells`, a bit mask.
        service: the class of the lease; "": none.
        holder: the name of the task or thread that holds the lease.
        place: `file:line` of the code that took the lease; "": not known.
        leased: seconds since the lease was granted, when this was found.
        hung: seconds since the turn of the work came, when this was found.
        hang_after: the limit, in seconds.
        beside: the other executors of the device that have work, and for how long without
            progress, the longest first. They may wait behind it in one of the device's `queues`
            hardware queues: the driver does not tell which streams share one.
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
            text += f"; {len(behind)} jobs stand behind it: {_shortened(behind)}"
        if beside:
            text += (
                f"; {len(beside)} other executors have work without progress, perhaps behind it in "
                f"one of the device's {queues} hardware queues: {_shortened(beside)}"
            )
        super().__init__(text)

    def of(self, job: str) -> DeviceHung:
        """Return a new one, for another job and its own traceback."""
        other = type(self).__new__(type(self))
        other.args, other.__dict__ = self.args, {**self.__dict__, "job": job}
        return other


def _shortened(names: tuple[str, ...]) -> str:
    """Return at most the first three names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def wrong_thread() -> WrongThread:
    """Return the error of using a partition on another thread than its loop's."""
    return WrongThread(
        "a partition can be used only on the thread of the loop that entered it: call it there "
        "with loop.call_soon_threadsafe or anyio.from_thread.run"
    )


# -- fleets: pools in other processes -----------------------------------------------------------


class PoolLost(GreenschedError, RuntimeError):
    """A pool of a fleet was lost with a job, which may have run; `why` is the reason."""

    def __init__(self, pool: str, why: str) -> None:
        self.pool = pool
        self.why = why
        super().__init__(
            f"{pool} was lost, and its jobs may or may not have run ({why}): submit again what is "
            "harmless to repeat, or submit with idempotent=True"
        )


class NoPool(GreenschedError, RuntimeError):
    """No pool of the fleet can take this job now; the message says why, and what to do."""


class FleetTimeout(DeadlineExceeded):
    """The deadline of a fleet's job passed before its reply came; it may have run."""

    def __init__(self, deadline: float) -> None:
        super().__init__(deadline)
        self.args = (f"no reply within its deadline of {deadline:g} s; it may have run",)


class VersionSkew(GreenschedError, RuntimeError):
    """A client and a pool speak different versions of the fleet's protocol."""

    def __init__(self, pool: str, theirs: int, ours: int) -> None:
        self.theirs = theirs
        self.ours = ours
        super().__init__(
            f"{pool} speaks protocol version {theirs}, and this process {ours}: install the same "
            "greensched on all nodes, then stop the fleet and start it again"
        )


class JobFailed(GreenschedError, RuntimeError):
    """A fleet's job raised an error that cannot be sent; the message describes it."""
