"""A random program leaves the current context of every thread as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.standin

SEED = 20261120
STEPS = 100_000
THREADS = 4

#: Runs in a process with two devices of its own. Each thread does its share of the steps: trees of
#: blocks, scopes, pushes and plain sets, left normally or by an exception, with other libraries'
#: calls (the driver's own) in between, and contexts closed and made anew. Every
#: enclosing construct asserts that it left the thread with what it found.
PROGRAM = """
import random, threading
from contextlib import suppress
from greensched import Context, ContextOptions, Device, SMResourceOptions, errors
from greensched.driver import cuda
from greensched.driver.cuda.bindings import cuda as raw

SEED, STEPS, THREADS, DEEP = {seed}, {steps}, {threads}, 6
driver = cuda.open()
driver.initialise()
devices = [Device(n, driver=driver) for n in (0, 1)]
counts, failures = dict.fromkeys(
    ("enter", "exit", "exception", "foreign", "close", "busy", "stand"), 0), []
lock = threading.Lock()
# Contexts that threads share: one may be green, current on a thread of at most one.
shared = [Context.create(devices[0]), Context.create(devices[1])]
eighths = [d.resources.sm.split(SMResourceOptions(count=8))[0][0] for d in devices]
shared += [d.create_context(ContextOptions(resources=[s])) for d, s in zip(devices, eighths)]


class Planned(Exception):
    pass


def now():
    status, context = raw.cuCtxGetCurrent()  # asked bypassing greensched
    assert not status
    return int(context)


class Walk:
    def __init__(self, number):
        self.rng = random.Random(SEED * 1000 + number)
        self.left = STEPS // THREADS
        self.mine = [Context.create(devices[number % 2])]
        self.theirs = Context.create(devices[0])  # another library's: what it leaves is not closed
        self.counts, self.pushed = dict.fromkeys(counts, 0), 0

    def step(self, what):
        self.left -= what != "busy"
        self.counts[what] += 1

    def run(self):
        while self.left > 0:
            before = now()
            with suppress(Planned):
                self.body(0)
            assert now() == before == 0, (before, now())
        for context in (*self.mine, self.theirs):
            context.close()

    def body(self, depth):
        for _ in range(self.rng.randrange(1, 6)):
            if self.left <= 0:
                return
            before = now()
            try:
                self.construct(depth)
            finally:
                assert now() == before, (hex(before), hex(now()))
            if self.rng.random() < 0.05:
                self.step("exception")
                raise Planned

    def construct(self, depth):
        rng, kind = self.rng, self.rng.random()
        if kind < 0.70 and depth < DEEP:
            one = rng.choice([*devices, *self.mine, *shared])
            try:
                if rng.random() < 0.8:
                    with one:
                        self.step("enter")
                        self.inside(depth)
                else:
                    one = one.primary if isinstance(one, Device) else one
                    def scope():
                        self.step("enter")
                        self.inside(depth)
                    one.scoped(scope)
            except errors.CurrentElsewhere:
                self.step("busy")
                return
            self.step("exit")
        elif kind < 0.80 and depth < DEEP:
            self.stand(depth)
        elif kind < 0.95:
            self.churn()
        else:
            context = Context.current(driver)
            assert (context is None) == (now() == 0)
            self.step("stand")

    def inside(self, depth):
        '''Nested constructs, then what a block must undo: foreign calls that are not undone.'''
        self.body(depth + 1)
        if self.rng.random() < 0.4:
            self.foreign(depth)

    def stand(self, depth):
        '''Pushed and popped by hand, as a library with a floating context does.'''
        context = self.rng.choice([*self.mine, *shared])
        try:
            context.push()
        except errors.CurrentElsewhere:
            self.step("busy")
            return
        self.pushed += 1
        try:
            self.step("stand")
            self.body(depth + 1)
        finally:
            self.pushed -= 1
            context.pop()

    def foreign(self, depth):
        self.step("foreign")
        own = self.theirs.handle
        # What is pushed or popped and not balanced is undone where nothing lies below on the stack.
        kind = self.rng.randrange(1 if depth or self.pushed else 5)
        if kind == 0:
            raw.cuCtxSetCurrent(own)
        elif kind == 1:
            raw.cuCtxPushCurrent(own)
        elif kind == 2:
            for _ in range(self.rng.randrange(1, 4)):
                raw.cuCtxPushCurrent(own)
        elif kind == 3:
            raw.cuCtxSetCurrent(raw.CUcontext(0))
        else:
            raw.cuCtxPopCurrent()

    def churn(self):
        '''Closes one of this thread's contexts, if nothing stands on it, and makes another.'''
        context = self.rng.choice(self.mine)
        try:
            if not any(ref() for ref in context.inside):
                self.mine.remove(context)
            context.close()
        except errors.InvalidRequest:
            self.step("busy")
            return
        self.step("close")
        if self.rng.random() < 0.5 or not self.mine:
            self.mine.append(Context.create(self.rng.choice(devices)))


def thread(number):
    walk = Walk(number)
    try:
        walk.run()
    except BaseException as error:
        failures.append((number, repr(error)))
        raise
    finally:
        with lock:
            for what, n in walk.counts.items():
                counts[what] += n

threads = [threading.Thread(target=thread, args=(n,)) for n in range(THREADS)]
for t in threads: t.start()
for t in threads: t.join()
for context in shared:
    context.close()
for device in devices:
    device.close()
assert not failures, failures
import ctypes, os
stub = ctypes.CDLL(os.environ["LD_LIBRARY_PATH"] + "/libcuda.so.1")
for counter in (stub.stubcuda_live, stub.stubcuda_misuse):
    counter.restype = ctypes.c_longlong
print(sum(counts.values()) - counts['busy'], min(counts.values()), stub.stubcuda_live(None),
      stub.stubcuda_misuse(None))
print("seed", SEED, counts)
"""


def test_current_before_is_current_after(python: Callable[..., str]) -> None:
    """100,000 nested entries, exits, exceptions and foreign switches leave no trace."""
    program = PROGRAM.format(seed=SEED, steps=STEPS, threads=THREADS)
    answer = python(program, STUBCUDA_DEVICES="2", STUBCUDA_KERNEL_US="0")
    print(answer)  # with the seed
    steps, least, alive, misused = map(int, answer.splitlines()[0].split())
    assert steps >= STEPS
    assert least > STEPS // 1000, "the program does some of everything"
    assert (alive, misused) == (0, 0)
