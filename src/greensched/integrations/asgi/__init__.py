"""A pool in an ASGI service, Starlette's or FastAPI's. Needs the extra `asgi`.

    app = FastAPI(lifespan=asgi.lifespan(pool))
    app.add_middleware(asgi.PoolErrors)
    app.router.routes.extend(asgi.routes(pool))

and in an endpoint, around its work on the GPU, `async with asgi.while_connected(request):`; for an
answer in parts, `return asgi.LeaseStream(pool.partition(16), parts)`.
"""

from importlib.util import find_spec

from greensched.errors import MissingPackage

if find_spec("starlette") is None:
    raise MissingPackage(__name__, "starlette", "asgi")

from greensched.integrations.asgi.connection import while_connected
from greensched.integrations.asgi.errors import STATUS, PoolErrors
from greensched.integrations.asgi.lifespan import lifespan, routes
from greensched.integrations.asgi.stream import LeaseStream, stream_to_websocket

__all__ = [
    "STATUS",
    "LeaseStream",
    "PoolErrors",
    "lifespan",
    "routes",
    "stream_to_websocket",
    "while_connected",
]
