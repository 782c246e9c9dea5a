"""Fixtures of the client tests: real proxies, a separate topic for each test, and a TCP relay that can be cut.

Most tests share one proxy on the embedded broker and use only their own topic. Tests that kill a proxy start their own.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from popgate_client import Client, Consumer
from support.command_line import CommandLine
from support.processes import PortBlock
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

RUN_END_SECONDS = 40
"""Maximum seconds for the stop of a consumer."""


@pytest.fixture(scope="session")
def shared_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """The proxy on the embedded broker that all tests share; don't stop it."""
    with ProxyProcess(tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


@pytest.fixture
def own_proxy(tmp_path: Path) -> Iterator[ProxyProcess]:
    """A proxy on the embedded broker that this test may kill and restart."""
    with ProxyProcess(tmp_path / "proxy") as proxy:
        yield proxy


@pytest.fixture
def rabbit_proxy(tmp_path: Path, amqp_url: str) -> Iterator[ProxyProcess]:
    """A separate proxy for this test on RabbitMQ, in a separate virtual host."""
    with ProxyProcess(tmp_path / "proxy", "--amqp-url", amqp_url, "--auto-create", "true") as proxy:
        yield proxy


@pytest.fixture
def client(shared_proxy: ProxyProcess) -> Iterator[Client]:
    """A client of the shared proxy."""
    with Client(shared_proxy.url) as client:
        yield client


@pytest.fixture
def popgate(shared_proxy: ProxyProcess) -> CommandLine:
    """The command line of the shared proxy."""
    return CommandLine(shared_proxy.url)


@pytest.fixture
def topic() -> str:
    """The name of a topic that no other test uses."""
    return f"topic-{secrets.token_hex(4)}"


@pytest.fixture(params=["embedded", "rabbitmq"])
def killable_proxy(request: pytest.FixtureRequest) -> ProxyProcess:
    """A separate proxy for this test, once on each broker."""
    proxy = request.getfixturevalue("own_proxy" if request.param == "embedded" else "rabbit_proxy")
    assert isinstance(proxy, ProxyProcess)
    return proxy


@pytest.fixture
def running() -> Callable[[Consumer], AbstractContextManager[Future[None]]]:
    """`with running(consumer) as run:` runs it in a thread, and stops it at the end; `run` has its result."""
    return _running


@contextmanager
def _running(consumer: Consumer) -> Generator[Future[None]]:
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(consumer.run)
        try:
            yield run
        finally:
            consumer.stop()
            wait([run], timeout=RUN_END_SECONDS)
            if not run.done():
                consumer.stop_now()
    run.result()


# ---------------------------------------------------------------- a wire that can be cut


@pytest.fixture
def wire(shared_proxy: ProxyProcess) -> Iterator["Wire"]:
    """A TCP relay to the shared proxy."""
    with Wire(shared_proxy.port) as wire:
        yield wire


@pytest.fixture
def wire_url(wire: "Wire") -> str:
    """The shared proxy's URL through the relay."""
    return wire.url


@pytest.fixture
def lose_answers(wire: "Wire") -> Callable[[str, Sequence[int]], None]:
    """`lose_answers("/pop", [1, 3])`: the proxy serves all following pops, but two answers never arrive."""
    return wire.lose_answers


@pytest.fixture
def set_line(wire: "Wire") -> Callable[[bool], None]:
    """`set_line(False)` cuts the relay; `set_line(True)` restores it."""
    return wire.set_line


@pytest.fixture
def sent_requests(wire: "Wire") -> list[bytes]:
    """The requests that the relay has forwarded so far."""
    return wire.requests


@pytest.fixture
def broker_line(rabbitmq: RabbitNode) -> Iterator["Wire"]:
    """A TCP relay between a proxy and RabbitMQ."""
    with Wire(rabbitmq.amqp_port) as wire:
        yield wire


@pytest.fixture
def set_broker_line(broker_line: "Wire") -> Callable[[bool], None]:
    """`set_broker_line(False)` cuts the proxy of `remote_proxy` off from RabbitMQ; True restores the connection."""
    return broker_line.set_line


@pytest.fixture
def remote_proxy(tmp_path: Path, amqp_url: str, rabbitmq: RabbitNode, broker_line: "Wire") -> Iterator[ProxyProcess]:
    """A separate proxy for this test whose connection to RabbitMQ can be cut."""
    url = amqp_url.replace(f":{rabbitmq.amqp_port}/", f":{broker_line.port}/")
    with ProxyProcess(tmp_path / "proxy", "--amqp-url", url, "--auto-create", "true") as proxy:
        yield proxy


class Wire:
    """A TCP relay to a server: forwards every byte, and cuts connections when a test asks for it."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._block = PortBlock()
        (self.port,) = self._block.ports
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[bytes] = []
        self._losses: list[tuple[bytes, set[int]]] = []
        self._up = True
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, name="wire", daemon=True).start()

    def lose_answers(self, to: str, numbers: Sequence[int]) -> None:
        """Lose the answers to these of the following HTTP requests whose first line contains `to`, counted from 1."""
        with self._lock:
            self._losses.append((to.encode(), set(numbers)))

    def set_line(self, up: bool) -> None:
        """Cut every connection and reject new ones, or allow them again."""
        with self._lock:
            self._up = up
            for end in () if up else self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut the relay permanently."""
        self.set_line(False)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(near,), name="wire connection", daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near:
            try:
                far = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                return
            with far:
                with self._lock:
                    if not self._up:
                        return
                    self._open |= {near, far}
                cut = threading.Event()
                request: list[int] = []

                def forth(data: bytes) -> bool:
                    if self._note(data, request):
                        cut.set()
                    return True

                def back(_: bytes) -> bool:
                    return not cut.is_set()

                backwards = threading.Thread(target=_pump, args=(far, near, back), daemon=True)
                backwards.start()
                _pump(near, far, forth)
                backwards.join()
                with self._lock:
                    self._open -= {near, far}

    def _note(self, data: bytes, request: list[int]) -> bool:
        """Record what was sent; `request` holds the request number of this connection. True if its answer is lost."""
        first_line = data.partition(b"\r\n")[0]
        lost = False
        with self._lock:
            if not first_line.endswith(b" HTTP/1.1"):
                for number in request:
                    self.requests[number] += data
                return False
            request[:] = [len(self.requests)]
            self.requests.append(data)
            for place, (part, numbers) in enumerate(self._losses):
                if part in first_line:
                    lost = lost or 1 in numbers
                    self._losses[place] = (part, {number - 1 for number in numbers})
        return lost


def _pump(source: socket.socket, target: socket.socket, may_pass: Callable[[bytes], bool]) -> None:
    """Forward until the source ends or `may_pass` returns False; then end both directions."""
    with suppress(OSError):
        while (data := source.recv(65_536)) and may_pass(data):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
