"""The state in Redis behind Sentinels, over TLS and over a local socket."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.conftest import TlsFiles
from contract.lease_bench import FIRST, QUEUE, SECOND, SUBSCRIPTION, A
from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.leases import RedisLeaseStore
from popgate.domain.errors import StateUnavailable
from popgate.domain.lease import GrantStatus
from popgate.domain.names import LeaseId
from popgate.ports.leases import GrantEntry, GrantRequest
from support.processes import PortBlock
from support.redis import RedisServer, ReplicatedRedis


async def grant(store: RedisLeaseStore, lease_id: LeaseId) -> GrantStatus:
    epoch = await store.claim(QUEUE)
    request = GrantRequest(
        subscription=SUBSCRIPTION,
        lease_id=lease_id,
        entries=[GrantEntry(QUEUE, epoch, A, 0)],
        invisibility_seconds=60.0,
        max_deliveries=None,
        mode_generation=1,
    )
    (answer,) = await store.grant(request)
    return answer.status


@pytest.fixture
def replicated(redis_server: RedisServer, tmp_path: Path) -> Iterator[ReplicatedRedis]:
    """Depends on the shared Redis, which handles a missing installation."""
    with ReplicatedRedis(tmp_path) as replicated:
        yield replicated


async def test_a_failover_is_followed_and_keeps_the_leases(replicated: ReplicatedRedis) -> None:
    connection = RedisConnection(parse_address(replicated.sentinel.url))
    store = RedisLeaseStore(connection)
    try:
        epoch = await store.claim(QUEUE)
        assert await grant(store, FIRST) is GrantStatus.GRANTED
        assert await connection.command("WAIT", 1, 2000) == 1
        replicated.master().kill()
        refused = 0
        async with asyncio.timeout(20):
            while True:
                try:
                    status = await grant(store, SECOND)
                    break
                except StateUnavailable:
                    refused += 1
                    await asyncio.sleep(0.1)
        assert refused
        assert status is GrantStatus.HELD
        assert await store.claim(QUEUE) > epoch
    finally:
        await connection.close()


async def test_a_redis_on_a_local_socket(redis_server: RedisServer, tmp_path: Path) -> None:
    place = tmp_path / "redis.sock"
    with RedisServer(tmp_path / "redis", {"unixsocket": str(place)}):
        connection = RedisConnection(parse_address(f"unix://{place}?db=1"))
        try:
            assert await grant(RedisLeaseStore(connection), FIRST) is GrantStatus.GRANTED
        finally:
            await connection.close()


async def test_a_redis_that_speaks_tls(redis_server: RedisServer, tls_files: TlsFiles, tmp_path: Path) -> None:
    (port,) = PortBlock().ports
    settings = {
        "tls-port": str(port),
        "tls-cert-file": str(tls_files.certificate),
        "tls-key-file": str(tls_files.key),
        "tls-auth-clients": "no",
    }
    with RedisServer(tmp_path / "redis", settings):
        trusting = RedisConnection(parse_address(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tls_files.certificate}"))
        wary = RedisConnection(parse_address(f"rediss://127.0.0.1:{port}/0"))
        try:
            assert await grant(RedisLeaseStore(trusting), FIRST) is GrantStatus.GRANTED
            with pytest.raises(StateUnavailable, match="certificate"):
                await grant(RedisLeaseStore(wary), FIRST)
        finally:
            await trusting.close()
            await wary.close()
