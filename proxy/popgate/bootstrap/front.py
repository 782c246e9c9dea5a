"""Lets clients in and stops the process, for a proxy that runs alone and for one of several workers."""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Protocol

import uvicorn

from popgate.api.connection_limiter import ConnectionLimiter
from popgate.bootstrap.acceptor import Acceptor
from popgate.bootstrap.banner import banner
from popgate.bootstrap.endings import ending_on_signals
from popgate.bootstrap.listening import listening_for_clients
from popgate.config import ServeOptions


class Front(Protocol):
    """Accepts clients and stops the proxy. ``worker`` is the number among several workers; None for a single
    process."""

    worker: int | None

    def opened(self, stop: asyncio.Event) -> AbstractContextManager[None]:
        """Let clients connect and wait, and set ``stop`` when the process is told to end. Raises: StartupError."""
        ...

    def serves(self, server: uvicorn.Server, limiter: ConnectionLimiter) -> None:
        """Accept clients into ``limiter``: ``server`` serves now."""
        ...

    def close(self) -> None:
        """Stop accepting clients. Idempotent."""
        ...


class SingleProcessFront:
    """A single process with its own port; it prints the banner when it is ready."""

    worker: int | None = None

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def opened(self, stop: asyncio.Event) -> Generator[None]:
        with ending_on_signals(stop), listening_for_clients(self._options) as self._listener:
            yield

    def serves(self, server: uvicorn.Server, limiter: ConnectionLimiter) -> None:
        assert self._listener is not None, "it was opened before"
        self._acceptor = Acceptor(self._listener, server, limiter)
        self._acceptor.open()
        print(banner(self._options), flush=True)

    def close(self) -> None:
        if self._acceptor is not None and self._listener is not None:
            self._acceptor.close()
            self._listener.close()


_conforms: type[Front] = SingleProcessFront
