"""`benchmarks.path`: what counts as an upward call is tried on a small package made here."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from benchmarks import path

_LOW = """
    from typing import Protocol

    class Listener(Protocol):
        def ended(self) -> None: ...

    class Owner:
        def closed(self): ...

    class Worker:
        def __init__(self, owner, callback):
            self.owner = owner
            self.changed = callback

        def by_attribute(self):
            self.changed()

        def by_parameter(self, callback):
            callback()

        def by_protocol(self, listener: Listener):
            listener.ended()

        def by_base(self):
            self.owner.closed()

        def by_property(self):
            return self.owner.state

        def by_method(self):
            self.owner.undeclared()

        def by_import(self):
            from high import changed
            changed()

        def by_class(self):
            from high import Owner
            Owner()

        def by_element(self, callbacks):
            for callback in callbacks:
                callback()

        def by_context(self, context, callback):
            context.run(callback)
    """
_HIGH = """
    import low

    class Owner(low.Owner):
        def __init__(self):
            self.is_open = True

        def closed(self):
            pass

        def ended(self):
            pass

        def undeclared(self):
            pass

        @property
        def state(self):
            return self.is_open

    def changed():
        pass
    """


@pytest.fixture
def modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ModuleType, ModuleType]]:
    """Create two modules, of which the second is above the first."""
    (tmp_path / "low.py").write_text(dedent(_LOW))
    (tmp_path / "high.py").write_text(dedent(_HIGH))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("low"), importlib.import_module("high")
    for name in ("low", "high"):
        del sys.modules[name]


@pytest.fixture
def tracer(tmp_path: Path) -> path.Tracer:
    return path.Tracer(tmp_path, {"low": 0, "high": 1})


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("by_attribute", "callback"),
        ("by_parameter", "callback"),
        ("by_element", "callback"),
        ("by_context", "callback"),
        ("by_protocol", "interface"),
        ("by_base", "interface"),
        ("by_property", "direct"),
        ("by_method", "direct"),
        ("by_import", "direct"),
        ("by_class", "direct"),
    ],
)
def test_an_upward_call_is_judged_by_its_expression(
    tracer: path.Tracer, modules: tuple[ModuleType, ModuleType], method: str, kind: str
) -> None:
    """A value that was handed over is a callback; a method that no lower class declares is not."""
    low, high = modules
    owner = high.Owner()
    worker = low.Worker(owner, high.changed)
    context = __import__("contextvars").copy_context()
    arguments = {
        "by_parameter": (owner.undeclared,),
        "by_element": ([high.changed],),
        "by_context": (context, high.changed),
        "by_protocol": (owner,),
    }
    with tracer.installed(), tracer.recording() as trace:
        getattr(worker, method)(*arguments.get(method, ()))
    assert list(trace.files) == ["low.py", "high.py"]
    assert [call.kind for call in trace.upward] == [kind]
    assert len(trace.direct) == (kind == "direct")


def test_calls_down_and_on_other_threads_are_traced(
    tracer: path.Tracer, modules: tuple[ModuleType, ModuleType]
) -> None:
    """A file counts whichever thread enters it, and a call from above is no upward call."""
    low, high = modules
    worker = low.Worker(high.Owner(), high.changed)
    with tracer.installed():
        thread = threading.Thread(target=worker.by_attribute, name="other")
        with tracer.recording() as trace:
            high.changed()
            thread.start()
            thread.join()
    assert list(trace.files) == ["high.py", "low.py"]
    assert list(trace.files["high.py"]) == ["MainThread", "other"]
    assert [str(call).split()[0] for call in trace.upward] == ["callback"]


def test_packages_that_count_once(tmp_path: Path, modules: tuple[ModuleType, ModuleType]) -> None:
    """All files of such a package are one entry."""
    _, high = modules
    tracer = path.Tracer(tmp_path.parent, {}, once=(tmp_path.name,))
    with tracer.installed(), tracer.recording() as trace:
        high.Owner().closed()
    assert list(trace.files) == [f"{tmp_path.name}/"]


def test_the_layers_are_those_of_the_contract() -> None:
    """The import contract is the one place where the order of the packages stands."""
    found = path.layers()
    assert found["pool"] > found["leasing"] > found["execution"] > found["device"]
    assert found["driver"] == found["scheduling"] > found["errors"]


def test_too_many_files_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a bar, or with a direct upward call, `--check` ends with 1; without it, with 0."""
    within, beyond = path.Trace({"pool.py": {}}), path.Trace({"pool.py": {}, "errors.py": {}})
    direct = path.Trace({}, {path.UpwardCall("low.py", "high.py", "direct"): None})
    monkeypatch.setattr(path, "MOST_FILES", {"an operation": 1})
    for trace, options, code in (
        (within, ["--check"], 0),
        (beyond, ["--check"], 1),
        (direct, ["--check"], 1),
        (beyond, [], 0),
    ):
        monkeypatch.setattr(path, "trace_all", lambda trace=trace: {"an operation": trace})
        monkeypatch.setattr(sys, "argv", ["path", *options])
        assert path.main() == code


def test_each_operation_is_traced() -> None:
    """A launch, a call and a queued lease begin in the public objects and reach the driver."""
    found = path.trace_all()
    assert list(found) == list(path.MOST_FILES)
    for trace in found.values():
        assert next(iter(trace.files)) in ("leasing/partition.py", "pool.py")
        assert "driver/" in trace.files
    launched, called, queued = found.values()
    assert "scheduling/" in queued.files
    assert "scheduling/" not in {**launched.files, **called.files}
    assert any(len(threads) > 1 for threads in called.files.values())  # the partition's thread
