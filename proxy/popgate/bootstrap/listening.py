"""Opens listening sockets. A proxy binds them before it starts its other parts, so that a port in use is reported
immediately."""

import contextlib
import errno
import socket
from collections.abc import Callable, Generator
from functools import partial

from popgate.config import ServeOptions
from popgate.domain.errors import StartupError
from popgate.domain.hosts import is_loopback, names_other_machines

LISTEN_BACKLOG = 4_096


@contextlib.contextmanager
def listening(host: str, port: int, why_not: Callable[[OSError], str]) -> Generator[socket.socket]:
    """Yield a socket that listens on ``host`` and ``port`` (0: any free port).

    Raises: StartupError if the socket can't listen, or if ``host`` is a name of this machine that leads to an address
    which other machines can reach. ``why_not`` converts the system's error to the text.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # If the protocol is specified, asyncio disables Nagle's algorithm on accepted connections. Otherwise every answer
    # would wait 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            _check_loopback(host, listener)
            listener.listen(LISTEN_BACKLOG)
        except OSError as error:
            raise StartupError(why_not(error)) from error
        listener.setblocking(False)
        yield listener


def is_open(listener: socket.socket, options: ServeOptions) -> bool:
    """Return whether other machines can reach the ``listener`` for clients without authentication or without TLS."""
    authenticates = options.keys_file is not None or options.oidc_issuer is not None
    if is_loopback(_address(listener)):
        return not authenticates and names_other_machines(options.allowed_hosts)
    return not authenticates or options.tls_certificate_file is None


def listening_for_clients(options: ServeOptions) -> contextlib.AbstractContextManager[socket.socket]:
    """Return a context manager for the socket that listens for clients. Raises: StartupError."""
    return listening(options.host, options.port, partial(_why_not_for_clients, options))


def _why_not_for_clients(options: ServeOptions, error: OSError) -> str:
    where = f"{options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return f"port {options.port} on {options.host} is taken by another program; choose one with --port"
    if error.errno == errno.EACCES:
        return f"not allowed to listen on {where}; choose a port above 1023 with --port"
    return f"can't listen on {where}: {error.strerror or error}; check --host and --port"


def _check_loopback(host: str, listener: socket.socket) -> None:
    """Check that a name which stands for this machine has led to a loopback address. The resolver decides where a name
    leads, and without keys, the proxy relies on the name. Raises: StartupError."""
    if is_loopback(host) and not is_loopback(_address(listener)):
        raise StartupError(
            f"{host} leads to {_address(listener)} on this machine, which other machines can reach; name the address "
            "to listen on, such as 127.0.0.1, or correct /etc/hosts"
        )


def _address(listener: socket.socket) -> str:
    address: str = listener.getsockname()[0]
    return address
