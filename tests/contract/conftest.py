"""The brokers under the contract suites, and a RabbitMQ that a test may break."""

import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from contract.brokers import embedded_broker, rabbit_broker
from contract.http_server import HttpServer, Topic, creating_server, leave_out_a_pair
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.ports.broker import Broker
from simulator.direct import memory_broker
from support.lock_clients import LockClients
from support.processes import PortBlock
from support.rabbitmq import RabbitCluster, RabbitNode, RabbitSettings
from support.rabbitmq_releases import RabbitRelease

CONSUMER_TIMEOUT_SECONDS = 1.5
BODY_BYTES_MAX = 1_000_000
"""Maximum body size of the fragile node."""


@pytest.fixture(params=["embedded", "rabbitmq", "simulated"])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Broker]:
    """A started broker without any topic."""
    if request.param == "embedded":
        async with embedded_broker(tmp_path) as embedded:
            yield embedded
    elif request.param == "simulated":
        async with memory_broker() as simulated:
            yield simulated
    else:
        async with rabbit_broker(RabbitOptions(amqp_urls=(request.getfixturevalue("amqp_url"),))) as rabbit:
            yield rabbit


@pytest.fixture(scope="session", params=["embedded", "rabbitmq", "front"])
def lock_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, *, full_run: bool
) -> Iterator[HttpServer]:
    """One server on each broker for all tests of locks over HTTP; each test uses separate locks."""
    leave_out_a_pair(request, full_run=full_run)
    with creating_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture
def topic(server: HttpServer) -> Topic:
    """A topic that only this test uses, on the `server` that its module imports."""
    return server.topic()


@pytest.fixture
async def lock_clients(amqp_url: str) -> AsyncIterator[LockClients]:
    """Lock clients, whose connections end with the test."""
    clients = LockClients(amqp_url)
    yield clients
    await clients.close()


@dataclass(frozen=True)
class TlsFiles:
    """A self-signed certificate for 127.0.0.1, and the port on which the fragile node uses it."""

    certificate: Path
    key: Path
    ports: PortBlock

    @property
    def port(self) -> int:
        return self.ports.ports[0]


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    files = TlsFiles(certificate=folder / "certificate.pem", key=folder / "key.pem", ports=PortBlock())
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=popgate test"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*request, *names, "-keyout", files.key, "-out", files.certificate], check=True, capture_output=True)
    return files


@pytest.fixture(scope="session")
def fragile_node(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq_release: RabbitRelease, tls_files: TlsFiles
) -> Iterator[RabbitNode]:
    """A node that may be killed and paused, accepts only small messages and only briefly, and speaks TLS as well."""
    settings = RabbitSettings(
        consumer_timeout_seconds=CONSUMER_TIMEOUT_SECONDS,
        channel_tick_interval_seconds=0.2,
        configuration={
            "max_message_size": BODY_BYTES_MAX,
            "listeners.ssl.1": f"127.0.0.1:{tls_files.port}",
            "ssl_options.cacertfile": str(tls_files.certificate),
            "ssl_options.certfile": str(tls_files.certificate),
            "ssl_options.keyfile": str(tls_files.key),
        },
    )
    folder = tmp_path_factory.mktemp("fragile")
    with RabbitCluster(folder, release=rabbitmq_release, settings=settings) as cluster:
        yield cluster.nodes[0]
