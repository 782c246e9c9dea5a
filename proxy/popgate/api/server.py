"""Configures uvicorn for the application, with the protocol that notices when clients disconnect."""

from starlette.types import ASGIApp

from popgate.api.connection_limiter import KEEP_ALIVE_SECONDS
from popgate.api.known_heads import OBSERVED, OBSERVED_TRACED, HttpConfig
from popgate.api.protocol import WatchedProtocol
from popgate.api.request_log import ObservedRequests, WithinTrace


def server_config(
    app: ASGIApp, *, host: str, port: int, shutdown_seconds: int = 1, within_trace: WithinTrace | None = None
) -> HttpConfig:
    """Return uvicorn's configuration for ``app``. It selects asyncio's own event loop, whose transports report when a
    peer disconnects.

    The process configures logging, not uvicorn. Requests are counted (/metrics), and logged by ``ObservedRequests``.
    ``within_trace`` continues the trace that the headers of a request name.
    """
    return HttpConfig(
        app,
        observed_app=ObservedRequests(app, within_trace),
        observed_headers=OBSERVED if within_trace is None else OBSERVED_TRACED,
        host=host,
        port=port,
        http=WatchedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_seconds,
        backlog=4096,
    )
