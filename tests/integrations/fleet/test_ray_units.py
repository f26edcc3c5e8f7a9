"""Parts of a fleet without a cluster: balancing, packing, both ends of a connection, GPUs."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import greensched
from greensched import ALL, REST, InvalidRequest, InvalidSize, Pool, TooManySMs

pytest.importorskip("ray", reason="ray is not installed: make test-integrations")
from greensched.integrations import asgi
from greensched.integrations.ray import balancing, gpus, pool_actor, protocol, registry, supervisor
from greensched.integrations.ray import connection as connections
from greensched.integrations.ray.connection import CALLS, PoolConnection
from greensched.integrations.ray.fleet import Fleet
from greensched.integrations.ray.remote_client import RemoteClient


@pytest.fixture(autouse=True)
def _once(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--driver") != "simulated":
        pytest.skip("uses no CUDA driver: it runs once, on the simulated one")


# -- choosing ---------------------------------------------------------------------------------


@dataclass
class Known:
    """What is known of a pool."""

    name: str
    node: str = "here"
    most: int = 132
    is_open: bool = True
    is_fresh: bool = True
    load: tuple[float, float] = (0.0, 0.0)


def chosen(
    pools: list[Known],
    sms: int = 16,
    held: dict[str, int] | None = None,
    leaving: frozenset[str] = frozenset(),
) -> set[str]:
    """Return the pools that chance can have chosen."""
    chance = random.Random(1)
    found = (balancing.choose(pools, leaving, sms, held or {}, chance) for _ in range(200))
    return {pool.name for pool in found if pool is not None}


def test_of_two_by_chance_the_one_with_less_to_do() -> None:
    """The less loaded of two random pools is chosen; the queue's wait breaks a tie."""
    pools = [Known("a", load=(0.5, 0)), Known("b", load=(0.1, 0)), Known("c", load=(0.9, 0))]
    assert chosen(pools) == {"a", "b"}
    assert chosen([Known("a", load=(0.5, 0.2)), Known("b", load=(0.5, 0.1))]) == {"b"}


def test_where_the_data_is_comes_before_load() -> None:
    """The pool with most bytes of the arguments is chosen, however loaded it is."""
    pools = [Known("a", "x", load=(9, 0)), Known("b", "y"), Known("c", "z")]
    assert chosen(pools, held={"x": 2, "y": 1}) == {"a"}
    assert chosen(pools, held={"elsewhere": 5}) == {"a", "b", "c"} - {"a"}


def test_an_unfit_pool_is_not_chosen() -> None:
    """Closed and too small pools are never chosen; silent pools only if there is no other."""
    silent = Known("silent", is_fresh=False)
    pools = [Known("closed", is_open=False), Known("small", most=8), silent]
    assert chosen(pools) == {"silent"}
    assert chosen([*pools, Known("well", load=(9, 9))]) == {"well"}
    assert chosen(pools[:2]) == set()


def test_a_leaving_pool_is_chosen_only_if_there_is_no_other() -> None:
    """Neither less load nor the job's data sends a job to a pool that will be closed."""
    leaves, other = Known("leaves", "x"), Known("other", "y", load=(9, 9))
    leaving = frozenset({"leaves"})
    assert chosen([leaves, other], held={"x": 2}, leaving=leaving) == {"other"}
    assert chosen([leaves], leaving=leaving) == {"leaves"}
    assert chosen([leaves, Known("small", most=8)], leaving=leaving) == {"leaves"}


def test_what_no_pool_can_grant_is_refused() -> None:
    """A request for more SMs than the largest pool has is refused with that pool's count."""
    balancing.check_feasible(132, [132, 48])
    with pytest.raises(TooManySMs) as caught:
        balancing.check_feasible(133, [132, 48])
    assert caught.value.most == 132


# -- packing ----------------------------------------------------------------------------------


def test_a_failure_tells_what_and_where() -> None:
    """An error arrives as its own class, with the pool's traceback as a note."""
    try:
        raise KeyError("k")
    except KeyError as error:
        outcome = protocol.failure(3, error, has_begun=True)
    got = protocol.unpack_error(outcome, "f/0")
    assert isinstance(got, KeyError)
    assert "test_a_failure_tells" in got.__notes__[0]
    assert "f/0" in got.__notes__[0]


class Unsendable(Exception):
    """Made of two things, so pickle cannot make it anew."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("error", [Unsendable(1, 2), SystemExit(3), asyncio.CancelledError()])
def test_what_cannot_be_raised_here_is_reported(error: BaseException) -> None:
    """An error that cannot be pickled, or that would end the caller's task, becomes JobFailed."""
    got = protocol.unpack_error(protocol.failure(3, error, has_begun=True), "f/0")
    assert isinstance(got, greensched.JobFailed)
    assert type(error).__name__ in str(got)


class Silent(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise KeyError("no text")


class Forged(Exception):
    """An error that pickle makes a string of."""

    def __reduce__(self) -> Any:
        return str, ("forged",)


@pytest.mark.parametrize("error", [Silent(), Forged()])
def test_an_error_of_any_making_is_reported(error: Exception) -> None:
    """Any error reaches the caller as itself or as JobFailed, so no outcome is lost."""
    got = protocol.unpack_error(protocol.failure(3, error, has_begun=True), "f/0")
    assert type(got) in (Silent, greensched.JobFailed)


def test_results_fail_alone() -> None:
    """A result that cannot be pickled fails its own job and no other."""
    generator = (n for n in ())  # not a lock: other libraries teach pickle those
    outcome = asyncio.run(protocol.success(3, generator))
    assert isinstance(protocol.unpack_error(outcome, "f/0"), InvalidRequest)
    assert protocol.unpack_value(asyncio.run(protocol.success(3, {"x": 1})).value) == {"x": 1}
    assert protocol.unpack_value(asyncio.run(protocol.success(3, None)).value) is None


def test_functions_are_packed_once() -> None:
    """A function is pickled once, equal code has one digest, and other objects are refused."""
    functions = protocol.Functions()
    first = functions.digest(test_functions_are_packed_once)
    assert functions.digest(test_functions_are_packed_once) == first
    lambdas = [lambda x: x + 1 for _ in range(2)]
    assert len({functions.digest(one) for one in lambdas}) == 1
    assert len(functions.code) == 2
    for wrong in (3, "f", None):
        with pytest.raises(InvalidRequest, match="function"):
            functions.digest(wrong)  # type: ignore[arg-type]


def test_functions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new function for each job is refused beyond a limit, because pools keep every function."""
    monkeypatch.setattr(protocol, "MOST_FUNCTIONS", 2)
    functions = protocol.Functions()
    for n in range(2):
        functions.digest(eval(f"lambda: {n}"))
    functions.digest(eval("lambda: 0"))
    with pytest.raises(InvalidRequest, match="arguments"):
        functions.digest(eval("lambda: 2"))


def test_sizes() -> None:
    """The least SMs of each valid size are returned, and invalid sizes are refused."""
    assert [protocol.least_sms(one) for one in (16, (8, 64), ALL, REST)] == [16, 8, 1, 1]
    for wrong in (0, -1, "16", 1.5, True, (0, 8), None):
        with pytest.raises(InvalidSize):
            protocol.least_sms(wrong)


def test_services_answer_for_a_fleet() -> None:
    """A full fleet is 429 to a client, a lost or missing pool 503, and a late answer 504."""
    full, late = greensched.QueueFull(3, 0.2), greensched.FleetTimeout(1)
    lost, none = greensched.PoolLost("f/0", "x"), greensched.NoPool("x")
    answers = {
        type(error): [status for kind, status in asgi.STATUS.items() if isinstance(error, kind)]
        for error in (full, lost, none, late)
    }
    assert list(answers.values()) == [[429], [503], [503], [504]]


def test_a_job_that_was_never_sent_has_not_started() -> None:
    """A job that found no pool by its deadline raises an error that says it never started."""

    async def main() -> None:
        fleet = Fleet("f")
        fleet._registry.is_open, fleet._registry.most = True, {"f/0": 132}
        with pytest.raises(greensched.FleetTimeout, match="never started") as caught:
            await fleet.submit(len, (), sms=8, deadline=0.001)
        assert not caught.value.was_sent
        with pytest.raises(greensched.FleetTimeout, match="never started"):
            async with fleet.partition(8, deadline=0.001):
                pass

    asyncio.run(main())


# -- a caller's end of a line -----------------------------------------------------------------


MAKE = protocol.cloudpickle.dumps(Pool)
SNAPSHOT = protocol.Snapshot(True, 132, 132, 0, 0, 0.0)
FACTS = protocol.PoolInfo("f/0", "node", 132, SNAPSHOT)
#: Jobs, one in each turn, that have a Ray call each.
ALONE = protocol.FEW + 1


class Actor:
    """A fake of Ray's handle of a pool's actor: it records batches, and a test replies."""

    def __init__(self) -> None:
        self.batches: list[protocol.MessageBatch] = []
        self.answers: list[Future[Any]] = []
        self.gone = False
        self.exchange = types.SimpleNamespace(remote=self._exchange)
        self.goodbye = types.SimpleNamespace(remote=self._goodbye)

    def _exchange(self, sent: Any) -> Any:
        self.batches.append(protocol.unpack_batch(sent)[1])
        self.answers.append(Future())
        return types.SimpleNamespace(future=lambda answer=self.answers[-1]: answer)

    def _goodbye(self, _key: str) -> None:
        self.gone = True

    def reply(self, place: int, *numbers: int, snapshot: protocol.Snapshot = SNAPSHOT) -> None:
        outcomes = [protocol.Outcome(number) for number in numbers]
        reply = protocol.ReplyBatch(self.batches[place].number, outcomes, snapshot)
        self.answers[place].set_result(protocol.pack_reply(reply))


def job(
    connection: PoolConnection, digest: bytes = b"d", sms: int = 16
) -> asyncio.Task[protocol.Outcome]:
    message = protocol.Message("run", connection.next_number(), digest, sms=sms)
    return asyncio.ensure_future(connection.request(message, sms))


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def on_a_line(test: Callable[[PoolConnection, Actor], Any]) -> None:
    async def main() -> None:
        patched.setattr(connections, "IDLE", 1000)
        actor = Actor()
        connection = PoolConnection(actor, "key", FACTS, {b"d": b"code", b"e": b"more"})
        await turn()
        assert [len(batch.messages) for batch in actor.batches] == [0]  # a new connection polls
        actor.reply(0)
        await turn()
        actor.batches.clear()
        actor.answers.clear()
        try:
            await test(connection, actor)
        finally:
            connection.close()
            await turn()

    with pytest.MonkeyPatch.context() as patched:
        asyncio.run(main())


def test_a_new_line_listens() -> None:
    """A new connection sends an empty batch, so that both sides notice if the other ends."""

    async def test(connection: PoolConnection, actor: Actor) -> None:
        assert connection.is_fresh
        assert not actor.gone

    on_a_line(test)


def test_what_is_asked_in_one_turn_goes_together() -> None:
    """Jobs of one turn of the loop are one batch; only the first that needs code has it."""

    async def test(connection: PoolConnection, actor: Actor) -> None:
        jobs = [job(connection) for _ in range(5)]
        await turn()
        assert [len(batch.messages) for batch in actor.batches] == [5]
        assert dict(actor.batches[0].code) == {b"d": b"code"}
        actor.reply(0, 1, 2, 3, 4, 5)
        await asyncio.gather(*jobs)
        jobs = [job(connection), job(connection, b"e")]
        await turn()
        assert dict(actor.batches[1].code) == {b"e": b"more"}
        for one in jobs:
            one.cancel()

    on_a_line(test)


def test_calls_of_ray_are_bounded() -> None:
    """Beyond the limit of concurrent calls, jobs wait for a reply and then form one batch."""

    async def test(connection: PoolConnection, actor: Actor) -> None:
        jobs = []
        for _ in range(ALONE + 4):
            jobs.append(job(connection))
            await turn()
        assert len(actor.batches) == ALONE
        actor.reply(0, 1)
        await turn()
        assert [len(batch.messages) for batch in actor.batches] == [1] * ALONE + [4]
        for one in jobs:
            one.cancel()

    on_a_line(test)


def test_many_jobs_have_two_calls() -> None:
    """Jobs that are submitted while two calls are in flight go with the next call."""

    async def test(connection: PoolConnection, actor: Actor) -> None:
        jobs = [job(connection) for _ in range(ALONE)]
        for _ in range(CALLS + 1):
            await turn()
            jobs.append(job(connection))
        await turn()
        assert [len(batch.messages) for batch in actor.batches] == [ALONE] + [1] * (CALLS - 1)
        actor.reply(0)
        await turn()
        assert len(actor.batches[CALLS].messages) == 2
        for one in jobs:
            one.cancel()

    on_a_line(test)


def test_while_something_is_awaited_a_call_listens() -> None:
    """A reply without the outcome is followed by an empty batch that waits for it."""

    async def test(connection: PoolConnection, actor: Actor) -> None:
        one = job(connection)
        await turn()
        actor.reply(0)
        await asyncio.sleep(0.001)
        await turn()
        assert [len(batch.messages) for batch in actor.batches] == [1, 0]
        actor.reply(1, 1)
        await one

    on_a_line(test)


def test_a_cancellation_is_sent_at_once() -> None:
    """An unsent job is dropped; a sent one is cancelled at once, beyond any limit of calls."""

    async def test(connection: PoolConnection, actor: Actor) -> None:
        jobs = []
        for _ in range(ALONE + 1):
            jobs.append(job(connection))
            await turn()
        assert len(actor.batches) == ALONE
        jobs[-1].cancel()
        await turn()
        assert len(actor.batches) == ALONE
        jobs[0].cancel()
        await turn()
        assert [list(batch.messages) for batch in actor.batches[ALONE:]] == [
            [protocol.Message("cancel", 1)]
        ]
        for one in jobs:
            one.cancel()

    on_a_line(test)


@pytest.mark.fault("E4")
def test_a_broken_line_says_what_was_sent() -> None:
    """Sent jobs are lost, unsent jobs have not begun, and later jobs are not sent."""

    async def test(connection: PoolConnection, actor: Actor) -> None:
        sent = []
        for _ in range(ALONE):
            sent.append(job(connection))
            await turn()
        unsent = job(connection)
        await turn()
        actor.answers[0].set_exception(OSError("gone"))
        await turn()
        for one in sent:
            with pytest.raises(greensched.PoolLost, match="gone"):
                await one
        for outcome in (await unsent, await job(connection)):
            assert not outcome.has_begun
            assert isinstance(protocol.unpack_error(outcome, "f/0"), greensched.PoolLost)
        assert not connection.is_open

    on_a_line(test)


def test_load_has_what_the_pool_has_not_seen() -> None:
    """The load includes SMs of requests that the pool's last report does not include yet."""

    async def test(connection: PoolConnection, actor: Actor) -> None:
        assert connection.load == (0, 0)
        jobs = [job(connection, sms=66), job(connection, sms=66)]
        await turn()
        assert connection.load == (1, 0)
        actor.reply(0, snapshot=SNAPSHOT._replace(wanted=132, wait=0.5))
        await turn()
        assert connection.load == (1, 0.5)
        for one in jobs:
            one.cancel()

    on_a_line(test)


def test_a_silent_pool_is_lost() -> None:
    """A pool is lost after several missed heartbeats; one reply answers all earlier ones."""

    async def test(connection: PoolConnection, actor: Actor) -> None:
        one = job(connection)
        await turn()
        connection.beat()
        for _ in range(connections.SILENT - 1):
            connection.beat()
        actor.reply(0)
        await turn()
        connection.beat()
        for _ in range(connections.SILENT - 1):
            connection.beat()
        assert connection.is_open
        connection.beat()
        with pytest.raises(greensched.PoolLost, match="no reply for 10 s"):
            await one

    on_a_line(test)


# -- a pool's end -----------------------------------------------------------------------------


def with_a_caller(test: Callable[[RemoteClient, pool_actor.PoolActor], Any]) -> None:
    async def main() -> None:
        actor = pool_actor.PoolActor("f/0", MAKE)
        async with Pool(driver="simulated:h200") as pool:
            actor._pool = pool
            actor.count()
            caller = RemoteClient(actor)
            await test(caller, actor)
            caller.close()
            await turn()

    asyncio.run(main())


def batch(number: int, *messages: protocol.Message, **code: Any) -> protocol.MessageBatch:
    return protocol.MessageBatch(number, messages, {k.encode(): v for k, v in code.items()})


def run_of(number: int, digest: bytes) -> protocol.Message:
    return protocol.Message("run", number, digest, sms=8)


async def three(p: Any) -> int:
    return 3


async def endless(p: Any) -> None:
    await asyncio.Event().wait()


def test_batches_are_handled_in_their_order() -> None:
    """A batch that overtook another waits, so a cancellation never precedes its job."""

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        code = protocol.cloudpickle.dumps(three)
        late = asyncio.ensure_future(caller.reply(batch(1, run_of(2, b"d"))))
        await turn()
        assert not late.done()
        first = asyncio.ensure_future(caller.reply(batch(0, run_of(1, b"d"), d=code)))
        answers = await asyncio.wait_for(asyncio.gather(first, late), 10)
        assert sorted(o.number for reply in answers for o in reply.outcomes) == [1, 2]

    with_a_caller(test)


def test_an_early_batch_of_a_closed_client_is_not_handled() -> None:
    """A closed client's early batch is dropped; its jobs and sessions would never end."""

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        opens = protocol.Message("open", 1, sms=8)
        early = [asyncio.ensure_future(caller.reply(batch(n, opens))) for n in (1, 2)]
        await turn()
        first = asyncio.ensure_future(caller.reply(batch(0)))
        await asyncio.sleep(0)  # the first is handled, and the next one's turn has come
        caller.close()
        assert await asyncio.wait_for(asyncio.gather(*early), 10) == [None, None]
        assert not (await first).outcomes
        assert not caller.is_busy
        assert not actor.pool.statistics().leases

    with_a_caller(test)


async def ends_itself(p: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def ends_late(p: Any) -> int:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return 3


def test_a_job_that_cancels_itself_has_an_outcome() -> None:
    """A job that cancels itself gets an outcome; otherwise its caller would wait for ever."""

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        code = protocol.cloudpickle.dumps(ends_itself)
        reply = await asyncio.wait_for(caller.reply(batch(0, run_of(1, b"d"), d=code)), 10)
        assert reply is not None
        (outcome,) = reply.outcomes
        with pytest.raises(greensched.JobFailed, match="CancelledError"):
            raise protocol.unpack_error(outcome, "f/0")

    with_a_caller(test)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_job_that_ends_behind_its_end_has_no_other_outcome(how: str) -> None:
    """The result of a job that ignores its cancellation is not sent."""

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        code = protocol.cloudpickle.dumps(ends_late)
        first = asyncio.ensure_future(caller.reply(batch(0, run_of(1, b"d"), d=code)))
        await turn()
        assert actor.pool.statistics().leases == 1
        if how == "failed":
            caller.fail(ZeroDivisionError())
            reply = await asyncio.wait_for(first, 10)
            assert reply is not None
            assert [outcome.number for outcome in reply.outcomes] == [1]
        else:
            second = caller.reply(batch(1, protocol.Message("cancel", 1)))
            replies = await asyncio.wait_for(asyncio.gather(first, second), 10)
            assert [reply and reply.outcomes for reply in replies] == [[], []]
        await asyncio.gather(*caller._tasks.values())
        await turn()
        assert not caller.is_busy

    with_a_caller(test)


def test_a_newer_batch_releases_the_older() -> None:
    """At most one batch waits for outcomes, so that a client can always send another."""

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        first = asyncio.ensure_future(caller.reply(batch(0)))
        await turn()
        assert not first.done()
        second = asyncio.ensure_future(caller.reply(batch(1)))
        assert not (await asyncio.wait_for(first, 10)).outcomes
        assert not second.done()
        second.cancel()

    with_a_caller(test)


def test_each_of_few_jobs_has_a_batch_that_waits() -> None:
    """With few jobs each keeps its own waiting batch; with more, only the newest batch waits."""

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        code = protocol.cloudpickle.dumps(endless)
        replies: list[asyncio.Future[protocol.ReplyBatch]] = []
        for number in range(protocol.FEW):
            sent = batch(number, run_of(number + 1, b"d"), **({} if number else {"d": code}))
            replies.append(asyncio.ensure_future(caller.reply(sent)))
            await turn()
        assert not any(reply.done() for reply in replies)
        caller.fail(ZeroDivisionError())
        ended = (await asyncio.wait_for(replies.pop(0), 10)).outcomes
        assert [outcome.number for outcome in ended] == [*range(1, protocol.FEW + 1)]
        assert not any(reply.done() for reply in replies)
        jobs = [run_of(number, b"d") for number in range(10, 11 + protocol.FEW)]
        last = asyncio.ensure_future(caller.reply(batch(protocol.FEW, *jobs)))
        await asyncio.wait_for(asyncio.gather(*replies), 10)
        assert not last.done()

    with_a_caller(test)


def test_a_reply_no_longer_counts_the_job_that_it_answers() -> None:
    """A reply's load excludes the job that it answers, or a free pool would look busy."""

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        code = protocol.cloudpickle.dumps(three)
        reply = await asyncio.wait_for(caller.reply(batch(0, run_of(1, b"d"), d=code)), 10)
        assert [outcome.number for outcome in reply.outcomes] == [1]
        assert reply.snapshot.wanted == 0

    with_a_caller(test)


def test_a_caller_is_told_what_is_new_of_the_pool() -> None:
    """A waiting batch gets its reply when the pool's state changes, and not before."""

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        first = asyncio.ensure_future(caller.reply(batch(0)))
        await turn()
        caller.update(actor.snapshot())
        assert (await asyncio.wait_for(first, 10)).snapshot.sms_free == 132
        second = asyncio.ensure_future(caller.reply(batch(1)))
        await turn()
        caller.update(actor.snapshot())
        await turn()
        assert not second.done()
        async with actor.pool.partition(16):
            actor.count()
            caller.update(actor.snapshot())
            assert (await asyncio.wait_for(second, 10)).snapshot.sms_free == 116

    with_a_caller(test)


def test_a_pool_stops_once_its_outcomes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends only then, so that clients learn which queued jobs have not begun."""

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        monkeypatch.setattr(pool_actor, "POLL", 0.001)
        monkeypatch.setattr(pool_actor, "SENDING_S", 0.0)
        monkeypatch.setattr(pool_actor, "LAST_S", 1000.0)
        actor._clients["key"] = caller
        code = protocol.cloudpickle.dumps(three)
        with pytest.raises(greensched.PoolClosed):
            async with actor.pool.partition(greensched.ALL):
                first = asyncio.ensure_future(caller.reply(batch(0, run_of(1, b"d"), d=code)))
                await turn()
                first.cancel()
                await asyncio.wait([first])
                await actor.pool.aclose(grace=0)
        stopping = asyncio.ensure_future(actor.stop(0))
        await asyncio.wait([stopping], timeout=0.01)
        assert not stopping.done()
        (failed,) = (await caller.reply(batch(1))).outcomes
        assert not failed.has_begun
        await asyncio.wait_for(stopping, 10)

    with_a_caller(test)


def test_jobs_of_one_pool_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job beyond the limit is refused at once and has not begun."""
    monkeypatch.setattr(pool_actor, "MOST_JOBS", 0)

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        (outcome,) = (await caller.reply(batch(0, run_of(1, b"d")))).outcomes
        assert not outcome.has_begun
        assert isinstance(protocol.unpack_error(outcome, "f/0"), greensched.QueueFull)

    with_a_caller(test)


def test_callers_of_one_pool_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client beyond the limit is refused, because its calls would queue invisibly inside Ray."""
    assert pool_actor.MOST_CALLERS * (ALONE + 1) < pool_actor.CONCURRENCY
    monkeypatch.setattr(pool_actor, "MOST_CALLERS", 0)
    with pytest.raises(greensched.QueueFull):
        asyncio.run(pool_actor.PoolActor("f/0", MAKE).hello("key", protocol.PROTOCOL))


def test_another_version_is_refused() -> None:
    """A client of another version gets an error with both versions before the pool opens."""
    actor = pool_actor.PoolActor("f/0", MAKE)
    with pytest.raises(greensched.VersionSkew) as caught:
        asyncio.run(actor.hello("key", protocol.PROTOCOL + 1))
    assert (caught.value.theirs, caught.value.ours) == (protocol.PROTOCOL, protocol.PROTOCOL + 1)
    assert actor._pool is None


def test_a_spoilt_process_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fault of an idle pool, clients get errors, and the process exits with its status."""
    left: list[int] = []
    monkeypatch.setattr(pool_actor.os, "_exit", left.append)
    monkeypatch.setattr(
        pool_actor, "fault_of", lambda pool: greensched.DeviceFault(700, "X", "look")
    )

    async def test(caller: RemoteClient, actor: pool_actor.PoolActor) -> None:
        actor._clients["key"] = caller
        reply = asyncio.ensure_future(actor.exchange(protocol.pack_batch("key", batch(0))))
        await asyncio.wait_for(actor._watch(), 10)
        assert left == [pool_actor.EXIT]
        assert not protocol.unpack_reply(await reply).snapshot.is_open

    with_a_caller(test)


def test_what_has_no_references_goes_as_bytes() -> None:
    """Values without object references are sent as bytes; Ray must see references to count them."""
    for refs in ((), ((0, object()),)):
        message = protocol.Message("run", 1, b"d", b"", refs, sms=(8, 64))
        sent = protocol.MessageBatch(0, [message], {b"d": b"code"})
        packed = protocol.pack_batch("key", sent)
        assert isinstance(packed, bytes) is (not refs)
        assert protocol.unpack_batch(packed) == ("key", sent)
    for outcome in (protocol.Outcome(1), protocol.Outcome(1, ref=object())):
        reply = protocol.ReplyBatch(0, [outcome], SNAPSHOT)
        packed = protocol.pack_reply(reply)
        assert isinstance(packed, bytes) is (outcome.ref is None)
        assert protocol.unpack_reply(packed) == reply


# -- whose GPU --------------------------------------------------------------------------------


def given(
    monkeypatch: pytest.MonkeyPatch, share: float, ids: list[str], seen: str | None
) -> list[int]:
    context = types.SimpleNamespace(
        get_assigned_resources=lambda: {"GPU": share} if share else {},
        get_accelerator_ids=lambda: {"GPU": ids},
    )
    monkeypatch.setattr(gpus.ray, "get_runtime_context", lambda: context)
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    return gpus.own_gpus()


def test_the_gpu_is_the_one_ray_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool uses the GPU that Ray assigned, whether or not Ray sets CUDA_VISIBLE_DEVICES."""
    assert given(monkeypatch, 1, ["3"], "3") == [0]
    assert given(monkeypatch, 1, ["3"], None) == [3]
    assert given(monkeypatch, 1, ["3"], "2,3") == [1]
    assert given(monkeypatch, 1, ["GPU-b"], "GPU-a,GPU-b") == [1]
    assert given(monkeypatch, 2, ["2", "5"], "2,5") == [0, 1]
    with pytest.raises(InvalidRequest, match="GPU 3"):
        given(monkeypatch, 1, ["3"], "0,1")
    with pytest.raises(InvalidRequest, match="num_gpus=1"):
        given(monkeypatch, 0, [], None)


def test_a_part_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fraction of a GPU is refused unless MPS runs, because processes would take turns."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with pytest.raises(InvalidRequest, match="turns"):
        given(monkeypatch, 0.5, ["0"], "0")
    (tmp_path / "control").touch()
    assert given(monkeypatch, 0.5, ["0"], "0") == [0]


def test_nothing_of_cuda_is_touched_before_the_first_caller() -> None:
    """Importing the module and making an actor load no CUDA, because the process may fork."""
    program = """
import sys
from greensched.integrations.ray.pool_actor import PoolActor
host = PoolActor("f/0", b"")
assert not [m for m in sys.modules if m.split(".")[0] == "cuda"]
assert host._pool is None
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_arrays_are_measured_by_bytes() -> None:
    """An array of at least the limit goes by reference; a smaller one goes with its job."""
    functions = protocol.Functions()
    small = np.zeros(protocol.LARGE - 1, np.uint8)
    packed = asyncio.run(protocol.pack_job(functions, three, [small, 2]))
    assert packed.refs == ()
    got, two = asyncio.run(protocol.load_arguments(protocol.Message("run", 1, *packed, sms=8)))
    assert (got.nbytes, two) == (protocol.LARGE - 1, 2)


# -- how many pools ---------------------------------------------------------------------------


class Place:
    """A fake of Ray's handle of a pool's actor, on a node that is there or lost."""

    def __init__(self, node: str) -> None:
        self.node, self.is_lost, self.stopped = node, False, None
        self.health = types.SimpleNamespace(options=lambda **_: self._method(self._health))
        self.stop = self._method(self._stop)
        self.open = self._method(self._open)

    def _method(self, function: Callable[..., Any]) -> Any:
        return types.SimpleNamespace(remote=function)

    async def _health(self) -> Any:
        if self.is_lost:
            raise supervisor.RayError
        return types.SimpleNamespace(node=self.node)

    async def _open(self) -> None: ...

    async def _stop(self, grace: float) -> None:
        self.stopped = grace


@dataclass
class Cluster:
    """What a supervisor sees of a cluster with a GPU on each node."""

    nodes: list[str]
    draining: dict[str, float]
    pools: dict[str, Place]

    @property
    def unused(self) -> list[str]:
        usable = [node for node in self.nodes if node not in self.draining]
        return [n for n in usable if n not in {one.node for one in self.pools.values()}]


def tended(
    wanted: int | None, test: Callable[[supervisor.Supervisor, Cluster], Any], nodes: int = 3
) -> None:
    cluster = Cluster([f"n{n}" for n in range(nodes)], {}, {})

    def start(name: str, make: bytes, namespace: str) -> Place:
        node = cluster.unused[0] if cluster.unused else "pending"
        cluster.pools[name] = Place(node)
        cluster.pools[name].is_lost = node == "pending"
        return cluster.pools[name]

    def kill(handle: Place, no_restart: bool) -> None:
        (name,) = [key for key, one in cluster.pools.items() if one is handle]
        del cluster.pools[name]

    async def main() -> None:
        made = supervisor.Supervisor("f", MAKE, wanted, False)
        await made.join("program")
        made._tending.cancel()  # a test looks itself
        await made._look()
        await test(made, cluster)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supervisor, "SPARE_S", 0.0)
        patched.setattr(supervisor, "find_pools", lambda fleet: {})
        patched.setattr(supervisor, "pool_actor", start)
        patched.setattr(supervisor.ray, "kill", kill)
        patched.setattr(gpus, "free", lambda: len(cluster.unused))
        patched.setattr(
            gpus, "count", lambda: len([n for n in cluster.nodes if n not in cluster.draining])
        )
        patched.setattr(gpus, "draining", lambda: dict(cluster.draining))
        asyncio.run(main())


def test_a_fleet_on_a_cluster_without_gpus_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet without a GPU fails to open, because its jobs could never start."""
    monkeypatch.setattr(gpus, "SETTLED_S", -1.0)

    async def test(fleet: supervisor.Supervisor, cluster: Cluster) -> None:
        raise AssertionError("the fleet has opened")

    with pytest.raises(greensched.NoPool, match="no node of the Ray cluster has the resource GPU"):
        tended(None, test, nodes=0)


def test_a_lost_node_leaves_no_surplus_pool() -> None:
    """A fleet of all GPUs drops the pool of a lost node and starts one on the next node."""

    async def test(fleet: supervisor.Supervisor, cluster: Cluster) -> None:
        assert len(cluster.pools) == 3
        cluster.pools["f/1"].is_lost = True
        cluster.nodes.append("new")
        await fleet._look()
        assert len(cluster.pools) == 3
        cluster.nodes.remove("new")
        cluster.nodes.remove("n1")
        await fleet._look()
        assert [*cluster.pools] == [*fleet._pools] == ["f/0", "f/2"]
        cluster.nodes.append("n4")
        await fleet._look()
        assert cluster.pools["f/1"].node == "n4"

    tended(None, test)


def test_a_gpu_for_a_lost_one_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement's GPU is taken at once; another GPU must have been free for some time."""

    async def test(fleet: supervisor.Supervisor, cluster: Cluster) -> None:
        monkeypatch.setattr(supervisor, "SPARE_S", 1000.0)
        fleet._spare_since = None
        cluster.pools["f/1"].is_lost = True
        cluster.nodes.remove("n1")
        await fleet._look()
        cluster.nodes += ["n3", "n4"]
        for _ in range(3):
            await fleet._look()
        assert {one.node for one in cluster.pools.values()} == {"n0", "n2", "n3"}

    tended(None, test)


def test_pools_of_a_fixed_number_are_left_to_ray() -> None:
    """With `pools=` a lost pool waits for a GPU, and no other pool is started for it."""

    async def test(fleet: supervisor.Supervisor, cluster: Cluster) -> None:
        cluster.pools["f/1"].is_lost = True
        cluster.nodes.remove("n1")
        await fleet._look()
        assert [*cluster.pools] == ["f/0", "f/1"]

    tended(2, test)


def test_a_pool_on_a_draining_node_is_replaced_first() -> None:
    """The replacement opens before the old pool closes, which has the rest of the deadline."""

    async def test(fleet: supervisor.Supervisor, cluster: Cluster) -> None:
        old = cluster.pools["f/0"]
        cluster.draining[old.node] = time.time() + 100
        version = fleet._version
        await fleet._look()
        assert [*cluster.pools] == ["f/0", "f/1", "f/2"]
        found = await fleet.members("program", version)
        assert found is not None
        assert found.leaving == {"f/0"}
        await asyncio.gather(*fleet._leaving.values())
        assert [*fleet._pools] == ["f/1", "f/2"]
        assert 90 < old.stopped <= 100 - supervisor.MARGIN_S

    tended(2, test)


def test_a_restarted_supervisor_knows_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted supervisor finds the pools by name, and each program registers again."""

    async def test(fleet: supervisor.Supervisor, cluster: Cluster) -> None:
        monkeypatch.setattr(supervisor, "find_pools", lambda name: dict(cluster.pools))
        restarted = supervisor.Supervisor("f", MAKE, 2, False)
        assert await restarted.members("program", 1) is None
        assert (await restarted.join("program")).pools == cluster.pools
        assert len(cluster.pools) == 2
        restarted._tending.cancel()

    tended(2, test)


@pytest.mark.fault("E4")
def test_a_pool_that_starts_meanwhile_ends_with_its_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that starts while its fleet ends is closed, and a joining program starts no other."""
    begun, go = threading.Event(), threading.Event()

    async def test(fleet: supervisor.Supervisor, cluster: Cluster) -> None:
        start = supervisor.pool_actor

        def slowly(*args: Any) -> Any:
            begun.set()
            go.wait(10)
            return start(*args)

        async def exits(_: supervisor.Supervisor) -> None: ...

        monkeypatch.setattr(supervisor, "pool_actor", slowly)
        monkeypatch.setattr(supervisor.Supervisor, "_exit", exits)
        cluster.nodes.append("new")
        looks = asyncio.ensure_future(fleet._look())
        assert await asyncio.to_thread(begun.wait, 10)
        stops = asyncio.ensure_future(fleet.stop(0))
        late = asyncio.ensure_future(fleet.join("late"))
        await turn()
        go.set()
        await asyncio.gather(looks, stops)
        assert (await late).is_stopped
        assert cluster.pools == fleet._pools == {}

    tended(None, test)


def part_of(**calls: Callable[..., Any]) -> registry.PoolRegistry:
    """Return the registry of a program whose supervisor replies in this way."""
    made = registry.PoolRegistry("f", None, None, False, {})
    made._supervisor = types.SimpleNamespace(
        **{name: types.SimpleNamespace(remote=call) for name, call in calls.items()}
    )
    made.is_open = True
    return made


@pytest.mark.fault("E4")
def test_a_program_ends_without_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closing program waits some time for a silent supervisor, and not for a dead one."""
    monkeypatch.setattr(registry, "END_S", 0.01)

    async def dead(*_: Any) -> None:
        raise registry.ActorDiedError

    async def main() -> None:
        for leave in (lambda _: asyncio.Event().wait(), dead):
            await asyncio.wait_for(part_of(leave=leave).aclose(), 10)
            await asyncio.wait_for(part_of(stop=leave).stop(0), 10)
        program = part_of(members=dead)
        await asyncio.wait_for(program._follow(1), 10)
        assert not program.is_open  # it was stopped: another supervisor is not started

    asyncio.run(main())


@pytest.mark.fault("E4")
def test_a_program_that_opens_follows_the_pools() -> None:
    """The opening waits for the replacement of a pool that ends before its first reply."""

    async def dead(*_: Any) -> None:
        raise registry.ActorDiedError

    async def hello(*_: Any) -> protocol.PoolInfo:
        return FACTS

    async def main(*later: registry.Membership) -> None:
        ended, there, left = Actor(), Actor(), iter(later)
        ended.hello = types.SimpleNamespace(remote=dead)
        there.hello = types.SimpleNamespace(remote=hello)
        names = {"f/0": ended, "f/1": there}

        def reply(found: registry.Membership) -> registry.Membership:
            return found._replace(pools={name: names[name] for name in found.pools})

        async def members(*_: Any) -> registry.Membership:
            for found in left:
                return reply(found)
            return await asyncio.Event().wait()

        async def join() -> registry.Membership:
            return reply(registry.Membership(1, {"f/0": None}))

        async def leave(_: str) -> None: ...

        program = part_of(members=members, leave=leave)
        program._join = join
        try:
            await asyncio.wait_for(program.open(), 10)
            assert [*program.connections] == ["f/1"]
            assert program.leaving == {"f/1"}
        finally:
            await program.aclose()

    asyncio.run(main(registry.Membership(2, {"f/1": None}, leaving=frozenset({"f/1"}))))
    with pytest.raises(greensched.PoolClosed):
        asyncio.run(main(registry.Membership(2, {}, is_stopped=True)))
