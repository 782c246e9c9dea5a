"""Sockets that listen, bound before anything is started: a port that is taken is told at once."""

import contextlib
import socket
from collections.abc import Callable, Generator

from popgate.domain.errors import StartupError

LISTEN_BACKLOG = 1_024


@contextlib.contextmanager
def listening(host: str, port: int, why_not: Callable[[OSError], str]) -> Generator[socket.socket]:
    """A socket on ``host`` and ``port`` (0: any free one). Raises: StartupError, in the words of ``why_not``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off for what it accepts; else every answer waits 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(LISTEN_BACKLOG)
        except OSError as error:
            raise StartupError(why_not(error)) from error
        listener.setblocking(False)
        yield listener
