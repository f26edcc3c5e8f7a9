"""gunicorn's settings for gunicorn_service.py."""

workers = 1  # one process for each GPU
worker_class = "gthread"
threads = 16  # a request in progress has one: those that run on the GPU, and those that wait for it


def post_worker_init(_worker: object) -> None:
    """Open the pool in the worker: after the fork, also with `preload_app`."""
    from gunicorn_service import pool

    pool.sync.open()


def worker_exit(_server: object, _worker: object) -> None:
    """Close the pool once the worker has answered its requests."""
    from gunicorn_service import pool

    pool.sync.close()
