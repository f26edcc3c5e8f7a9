"""vLLM's worker extension, without vLLM: it needs a GPU, and gigabytes.

What vLLM 0.33 does with it (`WorkerWrapperBase`) is done here by hand: the extension becomes a base
of the worker's class, and its hooks are called on the worker. torch is the real one.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from greensched import PoolState, current_call
from helpers.hosts import RECIPES

torch = pytest.importorskip("torch", reason="torch is not installed: make test-integrations")


def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_extension", RECIPES / "vllm_extension.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_engine_has_its_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its hook, the worker's thread is in the partition, and others have the other SMs."""
    monkeypatch.setenv("GREENSCHED_DRIVER", "simulated:h200")
    extension = recipe().Partitioned
    worker = type("Worker", (extension,), {"device": torch.device("cuda", 0)})()
    worker.init_worker_extension()
    call = current_call()
    assert call is not None
    assert call.sm_count == 96
    assert worker.greensched_state() == {"is_ready": True, "sms_free": 36}
    with worker.greensched.sync.partition(16) as p:
        assert p.run(lambda: 1) == 1
    worker.destroy_worker_extension()
    assert current_call() is None
    assert worker.greensched.state is PoolState.CLOSED
