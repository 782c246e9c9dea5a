"""Where a proxy's clients come in, and who tells it to end: a proxy that runs alone, or one of several workers."""

import asyncio
import contextlib
import socket
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import uvicorn

from popgate.bootstrap.banner import banner
from popgate.bootstrap.endings import ending_on_signals
from popgate.bootstrap.listening import listening_for_clients
from popgate.config import ServeOptions


class Front(Protocol):
    """``worker`` is the number among several; None where there is one process."""

    worker: int | None

    def opened(self, stop: asyncio.Event) -> AbstractContextManager[Sequence[socket.socket]]:
        """What the server itself accepts clients from. ``stop`` is set when the process is told to end.

        Raises: StartupError.
        """
        ...

    def serves(self, server: uvicorn.Server) -> None:
        """All is started, and ``server`` serves."""
        ...

    def close(self) -> None:
        """No client comes in any more, as far as that is not the server's business. Idempotent."""
        ...


class Alone:
    """One process with a port of its own; it says on standard output when it is ready."""

    worker: int | None = None

    def __init__(self, options: ServeOptions) -> None:
        self._options = options

    @contextlib.contextmanager
    def opened(self, stop: asyncio.Event) -> Generator[Sequence[socket.socket]]:
        with ending_on_signals(stop), listening_for_clients(self._options) as listener:
            yield [listener]

    def serves(self, server: uvicorn.Server) -> None:
        print(banner(self._options), flush=True)

    def close(self) -> None:
        pass


_conforms: type[Front] = Alone
