"""What a keeper outside of the proxies is told of groups' own counts, by real proxies, and where nobody tells it."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import pytest_asyncio

from contract.http_server import HttpServer, put, server
from popgate.adapters.replicas.proxy_groups import ProxyReplicaGroups
from popgate.domain.errors import PeerUnavailable
from popgate.domain.names import dead_letter_queue
from popgate.replicas.group_memory import RememberedGroups

__all__ = ["server"]

NOBODY = "http://127.0.0.1:1"


@pytest_asyncio.fixture
async def groups(server: HttpServer) -> AsyncGenerator[ProxyReplicaGroups]:
    """The first of its two proxies is gone."""
    made = ProxyReplicaGroups([NOBODY, server.process.url], server.vhost, None)
    yield made
    await made.close()


async def test_the_next_proxy_tells_where_the_first_is_gone(server: HttpServer, groups: ProxyReplicaGroups) -> None:
    if server.broker == "embedded":
        with pytest.raises(PeerUnavailable, match="has no RabbitMQ, and the queues are in") as raised:
            await groups.asking()
        assert "leave out --groups-url" in raised.value.detail
        return
    topic = server.topic("billing", "audit", queues=2)
    put(server.client, f"{topic.admin_path}/groups/billing", {"min_replicas": 5})
    (told,) = [one for one in await groups.asking() if one.group.topic == topic.name]
    assert (told.group.group, told.replicas) == ("billing", 5)
    own = [f"popgate:{topic.name}:billing:{number}" for number in range(2)]
    assert list(told.queues) == [*own, dead_letter_queue(told.group)]


async def test_a_proxy_of_another_virtual_host_is_not_believed(server: HttpServer) -> None:
    groups = ProxyReplicaGroups([server.process.url], "elsewhere", None)
    with pytest.raises(PeerUnavailable, match="and the queues are in 'elsewhere'"):
        await groups.asking()
    await groups.close()


class Stranger(BaseHTTPRequestHandler):
    """Some other program: it has an answer to everything."""

    def do_GET(self) -> None:
        self.send_response(int(self.path[1:4]))
        self.end_headers()
        self.wfile.write(b'{"groups": "many"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(("status", "says"), [(404, "answers 404"), (302, "answers 302"), (200, "is no popgate")])
async def test_what_is_no_proxy_is_said(status: int, says: str) -> None:
    with HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, args=(0.02,), daemon=True).start()
        groups = ProxyReplicaGroups([f"http://user:password@127.0.0.1:{stranger.server_port}/{status}"], "/", None)
        with pytest.raises(PeerUnavailable, match=says) as raised:
            await groups.asking()
        assert "password" not in raised.value.detail
        await groups.close()
        await asyncio.to_thread(stranger.shutdown)


async def test_before_the_first_answer_nothing_is_taken_for_known() -> None:
    groups = ProxyReplicaGroups([NOBODY], "/", None)
    with pytest.raises(PeerUnavailable, match=r"no proxy tells what its groups ask for \(127\.0\.0\.1:1: "):
        await RememberedGroups(groups).asking()
    await groups.close()
