"""Requests that one proxy passes on to another, whole, for a client that asked the wrong one."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp, Scope

from contract.peer_bench import PeerNode, peer_node, peers_of, until
from popgate.adapters.peers import HttpPeers
from popgate.api.forwarding import ForwardingMiddleware
from popgate.domain.names import InstanceId

LETTERS = "/v1/admin/topics/t/groups/default/dead-letters"
POP = "/v1/topics/t/groups/default/pop"


class Cluster:
    """Proxies a and b; each passes requests for what begins with `theirs` on to the other one."""

    def __init__(self) -> None:
        self.nodes: dict[InstanceId, PeerNode] = {}
        self.theirs: Mapping[str, str] = {}
        self.seen: list[tuple[str, str]] = []

    def wrapped(self, node: PeerNode) -> ASGIApp:
        def target_of(scope: Scope) -> InstanceId | None:
            self.seen.append((node.instance, scope["path"]))
            target = next((to for begin, to in self.theirs.items() if scope["path"].startswith(begin)), None)
            return None if target is None else InstanceId(target)

        return ForwardingMiddleware(node.app, self.peers_of(node), target_of)

    def peers_of(self, node: PeerNode) -> HttpPeers:
        def address_of(instance: InstanceId) -> str | None:
            return self.nodes[instance].peer_url if instance in self.nodes else None

        return peers_of(node.instance, address_of)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster()
    async with AsyncExitStack() as stack:
        for name in ("a", "b"):
            node = await stack.enter_async_context(peer_node(tmp_path / name, name, wrap=cluster.wrapped))
            cluster.nodes[node.instance] = node
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a only."""
    url = cluster.nodes[InstanceId("a")].url
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=40) as client:
        yield client


async def test_a_request_to_either_plane_is_answered_by_who_can(cluster: Cluster, client: httpx.AsyncClient) -> None:
    async with httpx.AsyncClient(base_url=cluster.nodes[InstanceId("b")].url, trust_env=False) as other:
        await other.post("/v1/topics/t/messages", json={"messages": [{"body": "there"}]})
        assert (await client.get(LETTERS, params={"max_messages": 3})).status_code == 404, "a knows no such topic"
        cluster.theirs = {LETTERS: "b", POP: "b"}
        letters = await client.get(LETTERS, params={"max_messages": 3})
        assert (letters.status_code, letters.json()) == (200, {"messages": [], "dead": 0})
        assert letters.headers.get_list("content-length") == [str(len(letters.content))]
        assert len(letters.headers.get_list("date")) == 1
        popped = await client.post(POP, json={"wait_seconds": 5})
        assert [one["body"] for one in popped.json()["messages"]] == ["there"]
        wrong = await client.get(LETTERS, params={"max_messages": -1})
        assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_request")


async def test_what_was_passed_on_once_is_answered_and_passed_on_no_further(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    a, b = cluster.nodes
    async with httpx.AsyncClient(base_url=cluster.nodes[b].url, trust_env=False) as other:
        await other.post("/v1/topics/t/messages", json={"messages": [{"body": "there"}]})

    # Both consider b the right one: b would pass it on to itself forever.
    cluster.theirs = {LETTERS: "b"}
    assert (await client.get(LETTERS)).status_code == 200
    assert [node for node, path in cluster.seen if path == LETTERS] == [a, b], "b named itself, and answered"


async def test_a_target_that_is_gone_is_said_to_be_unavailable(cluster: Cluster, client: httpx.AsyncClient) -> None:
    cluster.theirs = {POP: "c", LETTERS: "c"}
    for answer in (await client.post(POP), await client.get(LETTERS)):
        assert answer.status_code == 503
        assert answer.json()["code"] == "peer_unavailable"
        assert answer.headers["retry-after"] == "1"
        assert "proxy c" in answer.json()["detail"]


async def test_a_client_that_leaves_ends_its_pop_at_the_other_proxy(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    cluster.theirs = {POP: "b"}
    other = cluster.nodes[InstanceId("b")]
    pop = asyncio.create_task(client.post(POP, json={"wait_seconds": 30}))
    await until(lambda: other.parked_pops == 1)
    pop.cancel()
    await until(lambda: other.parked_pops == 0)


async def test_a_body_over_the_limit_is_not_passed_on(tmp_path: Path) -> None:
    def wrapped(node: PeerNode) -> ASGIApp:
        nobody = peers_of(node.instance, lambda _: None)
        return ForwardingMiddleware(node.app, nobody, lambda _: InstanceId("b"), request_bytes_max=1_000)

    async with (
        peer_node(tmp_path, "a", wrap=wrapped) as node,
        httpx.AsyncClient(base_url=node.url, trust_env=False) as client,
    ):
        assert (await client.post(POP, content=b"x" * 1_001)).status_code == 413
        assert (await client.post(POP, content=b"x" * 1_000)).json()["code"] == "peer_unavailable"
