"""The recipes of docs/how-to/processes.md: gunicorn, Celery, multiprocessing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from helpers.hosts import ENVIRONMENT, RECIPES, hosted

celery = pytest.importorskip("celery", reason="Celery is not installed: make test-embedding")
pytest.importorskip("gunicorn", reason="gunicorn is not installed: make test-embedding")

#: A pool that is left open is told.
WARN = {"PYTHONWARNINGS": "always::ResourceWarning"}
GUNICORN = [sys.executable, "-m", "gunicorn", "--no-control-socket", "--preload"]


@pytest.mark.parametrize(
    ("options", "folder", "path"),
    [
        (["-c", "gunicorn_conf.py", "gunicorn_service:app"], RECIPES, "/"),
        (
            ["-w", "1", "-k", "uvicorn_worker.UvicornWorker", "app:service()"],
            RECIPES.parent / "07_fastapi",
            "/sum",
        ),
    ],
    ids=["gthread", "uvicorn"],
)
def test_gunicorn(port: int, options: list[str], folder: Path, path: str) -> None:
    """With `--preload` each worker opens the pool after the fork; SIGTERM ends all quietly."""
    command = [*GUNICORN, "-b", f"127.0.0.1:{port}", *options]
    with hosted(command, "Booting worker", folder, **WARN) as said:
        answer = httpx.post(f"http://127.0.0.1:{port}{path}", json=[1, 2, 3.5], timeout=30)
        assert answer.json() == {"sum": 6.5}
    assert "Shutting down: Master" in said.text
    assert not any(word in said.text for word in ("Traceback", "never closed", "ForkedPool"))


def test_gunicorn_workers_of_an_open_pool(port: int, tmp_path: Path) -> None:
    """Workers refuse a pool that was opened before the fork, and no process hangs at the end."""
    service = (RECIPES / "gunicorn_service.py").read_text()
    (tmp_path / "opened.py").write_text(f"{service}\n\npool.sync.open()\n")
    command = [*GUNICORN, "-b", f"127.0.0.1:{port}", "-k", "gthread", "-w", "2", "opened:app"]
    with hosted(command, "Booting worker", tmp_path) as said:
        assert httpx.post(f"http://127.0.0.1:{port}/", json=[1], timeout=30).status_code == 500
    assert "ForkedPool" in said.text
    assert "Shutting down: Master" in said.text


def test_celery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one worker share the pool, which closes when the worker ends."""
    monkeypatch.chdir(tmp_path)  # the broker is in the current folder of worker and client
    Path("data_in").mkdir()
    Path("data_out").symlink_to("data_in")
    results = f"file://{tmp_path}"
    command = [sys.executable, "-m", "celery", "-A", "celery_tasks", "worker", "--pool", "threads"]
    command += ["--concurrency", "4", "--without-gossip", "--without-mingle", "-l", "INFO"]
    variables = WARN | {
        "CELERY_BROKER_URL": "filesystem://",
        "CELERY_RESULT_BACKEND": results,
        "PYTHONPATH": f"{RECIPES}:{ENVIRONMENT.get('PYTHONPATH', '')}",
    }
    with (
        celery.Celery(broker="filesystem://", backend=results) as client,
        hosted(command, "ready.", tmp_path, **variables) as said,
    ):
        sent = [client.send_task("total", [[1.0, 2.0, n]]) for n in range(3)]
        assert [one.get(timeout=30, interval=0.01) for one in sent] == [3.0 + n for n in range(3)]
    assert "Warm shutdown" in said.text
    assert not any(word in said.text for word in ("Traceback", "never closed", "ForkedPool"))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing(method: str) -> None:
    """Processes of each start method prepare inputs, and the one with the pool sums them."""
    command = [sys.executable, "-W", "error", "multiprocessing_inputs.py", method]
    done = subprocess.run(
        command, cwd=RECIPES, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "8 sums\n", "")
