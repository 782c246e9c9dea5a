"""The death of a peer's process is noticed at once, and one that hangs or leaves in order is never considered dead."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from contract import peer_bench
from contract.peer_bench import HOST, listening, peer_node, tls_for
from popgate.adapters.peers import HttpPeers, http
from popgate.domain.errors import PeerUnavailable
from popgate.domain.names import InstanceId
from popgate.ports.claims import Member
from popgate.ports.peers import Learned
from support.processes import PortBlock, Server, accepts

pytestmark = pytest.mark.slow

A, B = InstanceId("a"), InstanceId("b")
LEARNED = Learned(records=())
NOTICED_SECONDS = 0.9
QUIET_SECONDS = 1.5
"""Seconds in which nothing may be noticed without a death: many times what detecting one takes."""


class PeerProcess(Server):
    """`contract.peer_bench` in a separate process."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 10

    def __init__(self, folder: Path, instance: str, block: PortBlock) -> None:
        (self.port,) = block.ports
        self.member = Member(InstanceId(instance), f"https://{HOST}:{self.port}", (1, 1))
        super().__init__(
            f"peer {instance}",
            folder,
            arguments=[sys.executable, "-m", "contract.peer_bench", str(self.port), instance, str(folder)],
            environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def _answers(self) -> bool:
        return accepts(self.port, say=b"GET / HTTP/1.1\r\n\r\n", expect=b"HTTP/1.1 400")


@pytest.fixture
def block() -> PortBlock:
    return PortBlock()


@pytest.fixture
def process(tmp_path: Path, block: PortBlock) -> Iterator[PeerProcess]:
    with PeerProcess(tmp_path / "b", "b", block) as process:
        yield process


def peers_of(member: Member) -> HttpPeers:
    return peer_bench.peers_of(A, lambda _: member.address)


@asynccontextmanager
async def watched(member: Member) -> AsyncGenerator[asyncio.Task[None]]:
    """Return the watch, once it is connected to the member."""
    watch = asyncio.create_task(peers_of(member).died(member), name="watch")
    try:
        await asyncio.sleep(0.3)  # it connects to the member within milliseconds; otherwise no death would be noticed
        assert not watch.done()
        yield watch
    finally:
        watch.cancel()
        await asyncio.wait({watch})


async def is_quiet(watch: asyncio.Task[None]) -> bool:
    done, _ = await asyncio.wait({watch}, timeout=QUIET_SECONDS)
    return not done


async def test_a_kill_is_noticed_at_once(process: PeerProcess) -> None:
    async with watched(process.member) as watch:
        began = time.monotonic()
        process.signal(signal.SIGKILL)
        await asyncio.wait({watch}, timeout=10)
        took = time.monotonic() - began
        assert watch.done()
    sys.stdout.write(f"\na SIGKILL was noticed after {1000 * took:.0f} ms\n")
    assert took < NOTICED_SECONDS


async def test_a_kill_is_noticed_where_another_process_is_at_the_address_at_once(
    process: PeerProcess, tmp_path: Path, block: PortBlock
) -> None:
    async with watched(process.member) as watch:
        process.signal(signal.SIGSTOP)
        process.signal(signal.SIGKILL)
        process.wait(10)
        async with peer_node(tmp_path / "later", "later", peer_port=process.port):
            await asyncio.wait({watch}, timeout=NOTICED_SECONDS)
            assert watch.done()


async def test_one_that_hangs_is_unavailable_in_time_and_has_not_died(
    process: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.5)
    peers = peers_of(process.member)
    await peers.ask(B, LEARNED)
    async with watched(process.member) as watch:
        process.pause()
        for _ in range(2):  # over a kept connection, and over a new one
            began = time.monotonic()
            with pytest.raises(PeerUnavailable, match=r"proxy b at .* does not answer in time"):
                await peers.ask(B, LEARNED)
            assert time.monotonic() - began < 3
        assert await is_quiet(watch)
        process.resume()
        await peers.ask(B, LEARNED)
        assert not watch.done()
        process.pause()
        process.signal(signal.SIGKILL)
        await asyncio.wait({watch}, timeout=NOTICED_SECONDS)
        assert watch.done()
    peers.close()


async def test_one_that_leaves_in_order_has_not_died_and_is_not_held_up(process: PeerProcess) -> None:
    async with watched(process.member) as watch:
        began = time.monotonic()
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
        took = time.monotonic() - began
        assert await is_quiet(watch)
    sys.stdout.write(f"\nit ended in order after {1000 * took:.0f} ms\n")
    assert took < 1, "the watch must not hold it up until the server gives up on what is under way"


async def test_one_that_was_never_there_is_not_said_to_have_died() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
    async with watched(Member(B, f"https://{HOST}:{port}", (1, 1))) as watch:
        assert await is_quiet(watch)


async def test_another_instance_at_the_address_from_the_beginning_is_no_death(tmp_path: Path) -> None:
    async with peer_node(tmp_path, "later") as node, watched(Member(B, node.peer_url, (1, 1))) as watch:
        assert await is_quiet(watch)


async def test_a_connection_that_is_cut_in_between_is_no_death(tmp_path: Path) -> None:
    async with peer_node(tmp_path, "b") as node, watched(Member(B, node.peer_url, (1, 1))) as watch:
        for _ in range(3):
            (connection,) = node.peer_connections
            connection.transport.abort()
            await asyncio.sleep(0.2)
            assert node.connections == 1, "it is held again"
        assert not watch.done()


async def test_an_idle_watch_is_left_open_by_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("popgate.api.server.KEEP_ALIVE_SECONDS", 0.2)
    async with peer_node(tmp_path, "b") as node, watched(Member(B, node.peer_url, (1, 1))):
        before = set(node.peer_connections)
        await asyncio.sleep(0.6)
        assert set(node.peer_connections) == before


async def test_an_address_that_is_none_can_not_be_watched() -> None:
    member = Member(B, "nonsense", (1, 1))
    with pytest.raises(PeerUnavailable, match="proxy b"):
        await peers_of(member).died(member)


async def test_a_foreign_certificate_at_the_address_of_one_that_was_killed_is_no_proof(
    process: PeerProcess,
) -> None:
    """Whoever can use the address, but has not the secret, must not be able to make a proxy seem dead."""
    async with watched(process.member) as watch:
        process.signal(signal.SIGSTOP)
        process.signal(signal.SIGKILL)
        process.wait(10)
        context = tls_for("b", secret=b"another secret of this length").server
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), HOST, process.port, ssl=context)
        async with server:
            assert await is_quiet(watch)
        await asyncio.wait({watch}, timeout=NOTICED_SECONDS)
        assert watch.done(), "the port refuses"
