"""Changes of topics and groups that wait for another change, of a caller that leaves or loses its key meanwhile."""

import secrets
import socket
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from contract.guarded_server import Guarded, connected, head_of, is_refused, limited
from popgate.api.gate import CHECK_SECONDS
from support.key_files import KeyFile, everything
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode


@pytest.fixture
def server(rabbitmq: RabbitNode, tmp_path: Path) -> Iterator[Guarded]:
    keys = KeyFile(tmp_path / "keys.toml")
    admin = keys.principal("admin", everything())
    with (
        rabbitmq.own_vhost("line") as vhost,
        ProxyProcess(tmp_path, "--keys-file", str(keys.path), "--amqp-url", rabbitmq.amqp_url(vhost)) as process,
    ):
        yield Guarded(process, keys, admin, forwards=False)


@contextmanager
def suspended(rabbitmq: RabbitNode) -> Generator[None]:
    rabbitmq.pause()
    try:
        yield
    finally:
        rabbitmq.resume()


def test_a_creator_does_not_declare_its_group_again(server: Guarded, rabbitmq: RabbitNode) -> None:
    creator = server.new({"actions": ["create"]})
    path = f"/v1/admin{server.empty_group().removeprefix('/v1')}"
    with suspended(rabbitmq):
        assert server.send("PUT", path, creator).status_code == 200


def test_a_change_in_line_counts_as_waiting_and_leaves_the_line_without_its_client_or_key(
    server: Guarded, rabbitmq: RabbitNode
) -> None:
    first, of_leaver, of_revoked = (f"/v1/admin/topics/t-{secrets.token_hex(4)}" for _ in range(3))
    for path in (first, of_leaver, of_revoked):
        assert server.send("PUT", path, server.admin, body={"queues": 1}).status_code == 201
    creator, revoked = server.new({"actions": ["create"]}, limits={"parked_pops": 0}), server.new(everything())

    def is_in_line() -> bool:
        try:
            answered = server.process.client.put(f"{first}/groups/g", headers=creator.headers, timeout=1)
        except httpx.ReadTimeout:  # this one was the first
            return False
        limited(answered, "parked_pops")
        return True

    with ThreadPoolExecutor(2) as threads, connected(server) as connection:
        with suspended(rabbitmq):
            declaring = threads.submit(server.send, "PUT", f"{first}/groups/g", server.admin)
            wait_until(is_in_line, timeout_seconds=10, what="the line")
            connection.sendall(head_of("DELETE", of_leaver, f"authorization: Bearer {server.admin.token}"))
            deleting = threads.submit(server.send, "DELETE", of_revoked, revoked)
            time.sleep(0.3)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
            server.keys.revoke(revoked)
            wait_until(lambda: is_refused(server, revoked), timeout_seconds=5, what="the key's end")
            time.sleep(2 * CHECK_SECONDS)  # the requests in progress lose it at the next check
        assert declaring.result().status_code in (200, 201)
        assert deleting.result().status_code == 401
    for path in (of_leaver, of_revoked):
        assert server.send("GET", path, server.admin).status_code == 200
