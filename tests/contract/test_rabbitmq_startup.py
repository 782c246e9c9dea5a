"""Starting against RabbitMQ: the one clear line when it fails, the guard, and what operators see."""

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator

import aiormq
import pytest
from yarl import URL

from contract.brokers import KEYS, rabbit_broker
from contract.conftest import TlsFiles
from contract.recorder import WAIT_SECONDS, Recorder, declare, layout, publish
from popgate.adapters.rabbitmq import guard
from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.guard import GUARD, HOLDER, GuardHeldError, take_guard
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.session import Session
from popgate.domain.errors import BrokerUnavailable, StartupError
from support.rabbitmq import RabbitNode

SECRET = "h0rse-b4ttery"
COMING_SECONDS = 6.0
"""Seconds. If popgates did not take turns, two names would share the guard within two seconds on 4.3.6; and if its
exchange deleted itself, the virtual host would break.
"""
COMING_SECONDS_MAX = 40.0
"""Maximum seconds on a slow machine, where each popgate continues until it has had the guard several times."""


async def failure(amqp_url: str, **options: float | str) -> str:
    """Return the line with which a start fails."""
    broker = RabbitBroker(RabbitOptions(amqp_urls=(amqp_url,), **options), KEYS)  # type: ignore[arg-type]
    with pytest.raises(StartupError) as failed:
        await broker.start()
    await broker.stop()
    line = failed.value.detail
    assert "\n" not in line
    assert SECRET not in line
    return line


@pytest.fixture
async def silent_port() -> AsyncIterator[int]:
    """A port that accepts connections and never sends anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
async def http_port() -> AsyncIterator[int]:
    """A port that speaks another protocol."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_no_rabbitmq_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert f"nothing listens on 127.0.0.1:{port}" in await failure(f"amqp://guest:{SECRET}@127.0.0.1:{port}/")
    assert f"nothing listens on localhost:{port}" in await failure(f"amqp://guest:{SECRET}@localhost:{port}/")


async def test_an_unknown_host() -> None:
    assert "'no-such-host.invalid' is unknown" in await failure(f"amqp://u:{SECRET}@no-such-host.invalid/")


async def test_a_wrong_password(amqp_url: str) -> None:
    line = await failure(str(URL(amqp_url).with_password(SECRET)))
    assert "refused the user 'guest': check user and password" in line


async def test_an_unknown_virtual_host(amqp_url: str) -> None:
    line = await failure(str(URL(amqp_url).with_path("/nowhere")))
    assert "no such virtual host" in line
    assert "'nowhere'" in line or "nowhere" in line


async def test_a_virtual_host_that_is_down(amqp_url: str, rabbitmq: RabbitNode) -> None:
    vhost = amqp_url.rpartition("/")[2]
    await asyncio.to_thread(rabbitmq.ctl, "eval", f'rabbit_vhost_sup_sup:stop_and_delete_vhost(<<"{vhost}">>).')
    line = await failure(amqp_url)
    assert "has not started the virtual host" in line
    assert "rabbitmqctl restart_vhost" in line


async def test_a_user_without_access_to_the_virtual_host(amqp_url: str, rabbitmq: RabbitNode) -> None:
    rabbitmq.api("PUT", "users", "stranger", body={"password": SECRET, "tags": ""})
    line = await failure(str(URL(amqp_url).with_user("stranger").with_password(SECRET)))
    assert "gives 'stranger' no access to the virtual host" in line


async def test_a_server_that_says_nothing(silent_port: int) -> None:
    line = await failure(f"amqp://u:{SECRET}@127.0.0.1:{silent_port}/", connect_timeout_seconds=0.3)
    assert "did not answer within 0.3 s" in line


async def test_a_server_that_speaks_something_else(http_port: int) -> None:
    assert "does not speak AMQP" in await failure(f"amqp://u:{SECRET}@127.0.0.1:{http_port}/")


async def test_tls_where_there_is_none(amqp_url: str) -> None:
    assert "does not speak TLS" in await failure(amqp_url.replace("amqp://", "amqps://"))


@pytest.mark.parametrize("url", ["", "localhost", "http://localhost/", "amqp://", "amqp://[::1", "amqp://host:port/"])
async def test_an_unusable_url(url: str) -> None:
    assert "must look like amqp://" in await failure(url)


# ---------------------------------------------------------------- TLS


def tls_url(tls_files: TlsFiles, **query: str) -> str:
    return str(URL(f"amqps://guest:guest@127.0.0.1:{tls_files.port}/").with_query(query))


async def test_a_certificate_that_nobody_vouches_for(fragile_node: RabbitNode, tls_files: TlsFiles) -> None:
    assert "is not trusted" in await failure(tls_url(tls_files))


async def test_a_certificate_of_another_host(fragile_node: RabbitNode, tls_files: TlsFiles) -> None:
    url = tls_url(tls_files, cafile=str(tls_files.certificate)).replace("127.0.0.1", "localhost")
    assert "is not trusted (Hostname mismatch" in await failure(url)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("cafile={key}", "NO_CERTIFICATE_OR_CRL_FOUND"),
        ("cafile={missing}", "No such file or directory"),
        ("cafile={folder}", "Is a directory"),
        ("certfile={key}&keyfile={key}", "SSL"),
        ("certfile={certificate}&keyfile={missing}", "No such file or directory"),
    ],
)
async def test_a_wrong_file_in_the_url_is_not_taken_for_a_server_without_tls(
    tls_files: TlsFiles, silent_port: int, query: str, reason: str
) -> None:
    key, certificate = tls_files.key, tls_files.certificate
    given = query.format(key=key, certificate=certificate, missing=key.with_name("missing"), folder=key.parent)
    line = await failure(f"amqps://u:{SECRET}@127.0.0.1:{silent_port}/?{given}")
    assert f"no TLS with 127.0.0.1:{silent_port}" in line
    assert reason in line
    assert "check the files in the AMQP URL" in line
    assert "amqp://" not in line


async def test_no_tls_where_there_must_be(fragile_node: RabbitNode, tls_files: TlsFiles) -> None:
    told = await failure(tls_url(tls_files).replace("amqps", "amqp"))
    assert "amqps:// if it expects TLS" in told


async def test_everything_works_over_tls(fragile_node: RabbitNode, tls_files: TlsFiles) -> None:
    fragile_node.start()
    options = RabbitOptions(amqp_urls=(tls_url(tls_files, cafile=str(tls_files.certificate)),))
    billing = layout("tls")
    async with rabbit_broker(options) as broker:
        await declare(broker, billing)
        bodies = [b"%d" % number + b"x" * 200_000 for number in range(30)]
        await publish(broker, bodies)
        listener = Recorder()
        channel = await broker.consume(billing.queues[0], billing, 10, listener)
        for done in range(0, 30, 5):
            await listener.until_count(done + 5)
            channel.ack(listener.tags[done : done + 5])
            await channel.flush()
        assert listener.bodies == bodies
        await channel.close()
        await broker.delete_group(billing)


# ---------------------------------------------------------------- the guard


async def test_a_second_popgate_is_refused_until_the_first_has_gone(
    amqp_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "popgate")
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))):
        line = await failure(amqp_url, guard_wait_seconds=1)
        assert "another popgate uses" in line
        assert "popgate:guard" in line
        assert [record.message for record in caplog.records].count("another popgate holds the guard; waiting") == 1
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,), guard_wait_seconds=0)):
        pass


async def test_a_second_popgate_waits_for_one_that_lingers(amqp_url: str) -> None:
    first = RabbitBroker(RabbitOptions(amqp_urls=(amqp_url,)), KEYS)
    await first.start()
    second = RabbitBroker(RabbitOptions(amqp_urls=(amqp_url,)), KEYS)
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(second.start())
        await asyncio.sleep(0.7)
        assert not starting.done()
        await first.stop()
    await second.stop()


async def test_popgates_that_share_their_state_work_side_by_side_and_others_are_refused(amqp_url: str) -> None:
    options = RabbitOptions(amqp_urls=(amqp_url,), cluster="one", guard_wait_seconds=0)
    async with rabbit_broker(options):
        async with rabbit_broker(options):
            pass
        async with rabbit_broker(options):
            assert "give both the same --redis-url" in await failure(amqp_url, guard_wait_seconds=0)
        assert "share no state" in await failure(amqp_url, guard_wait_seconds=0)
        assert "share no state" in await failure(amqp_url, guard_wait_seconds=0, cluster="another")
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,), guard_wait_seconds=0)):
        assert "share no state" in await failure(amqp_url, guard_wait_seconds=0, cluster="one")
    async with rabbit_broker(options):
        pass


@pytest.mark.parametrize("cluster", [None, "one"])
async def test_the_guard_is_taken_again_before_anything_is_consumed(
    amqp_url: str, rabbitmq: RabbitNode, cluster: str | None
) -> None:
    vhost = amqp_url.rpartition("/")[2]
    options = RabbitOptions(amqp_urls=(amqp_url,), cluster=cluster)
    async with rabbit_broker(options) as broker:
        await asyncio.to_thread(rabbitmq.close_connections, vhost)
        async with asyncio.timeout(WAIT_SECONDS):
            while broker.unavailable_reason() is not None:  # noqa: ASYNC110 - the port has no event for it
                await asyncio.sleep(0.02)
        assert "another popgate uses" in await failure(amqp_url, guard_wait_seconds=0)
        assert "another popgate uses" in await failure(amqp_url, guard_wait_seconds=0, cluster="another")


async def test_a_guard_that_was_declared_and_never_taken_keeps_nobody_out(amqp_url: str) -> None:
    connection = await aiormq.connect(amqp_url)
    channel = await connection.channel()
    await channel.exchange_declare(
        GUARD, exchange_type="fanout", auto_delete=True, arguments={HOLDER: "one that was killed just then"}
    )
    await connection.close()
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))):
        assert "share no state" in await failure(amqp_url, guard_wait_seconds=1)


async def test_of_many_that_start_at_once_those_of_one_name_get_the_guard(amqp_url: str) -> None:
    for _ in range(3):
        brokers = [
            RabbitBroker(RabbitOptions(amqp_urls=(amqp_url,), cluster=cluster, guard_wait_seconds=2), KEYS)
            for cluster in ("one", "two", "one", "two", None, None)
        ]
        outcomes = await asyncio.gather(*(broker.start() for broker in brokers), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {type(None), StartupError}
        started = [number for number, outcome in enumerate(outcomes) if outcome is None]
        assert started in ([0, 2], [1, 3], [4], [5])
        await asyncio.gather(*(broker.stop() for broker in brokers))


@pytest.mark.rabbitmq_versions
async def test_popgates_that_come_and_go_at_once_never_share_the_guard_and_leave_a_virtual_host_that_starts_again(
    fragile_node: RabbitNode,
) -> None:
    """4.3.6 binds to an exchange that is deleted at the same moment: then two names have it, and no node recovers."""
    fragile_node.start()
    fragile_node.add_vhost("guarded")
    options = RabbitOptions(amqp_urls=(fragile_node.amqp_url("guarded"),))
    holders: Counter[str] = Counter()
    shared: list[Counter[str]] = []

    async def come_and_go(number: int) -> int:
        taken, began, chance = 0, time.monotonic(), random.Random(number)
        while (seconds := time.monotonic() - began) < COMING_SECONDS or (taken < 9 and seconds < COMING_SECONDS_MAX):
            name = chance.choice(["one", "two"])
            url = URL(options.amqp_urls[0])
            session = await Session.connect(options, url, f"guard {number}", connect_seconds=WAIT_SECONDS)
            with contextlib.suppress(GuardHeldError):
                await take_guard(session, name, wait_seconds=chance.choice([0, 1]), chance=chance)
                holders[name] += 1
                if all(holders[each] for each in ("one", "two")):
                    shared.append(holders.copy())
                await asyncio.sleep(chance.uniform(0, 0.03))
                holders[name] -= 1
                taken += 1
            await session.close()
        return taken

    try:
        taken = await asyncio.gather(*(come_and_go(number) for number in range(6)))
        assert not shared
        assert sum(taken) > 50
        await asyncio.to_thread(fragile_node.stop)
        await asyncio.to_thread(fragile_node.start)
        async with rabbit_broker(options):
            pass
    finally:
        fragile_node.start()
        fragile_node.delete_vhost("guarded")


async def test_a_turn_that_another_connection_keeps_is_named(amqp_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "TURN_SECONDS", 0.3)
    connection = await aiormq.connect(amqp_url)
    channel = await connection.channel()
    await channel.queue_declare(guard.TURN, exclusive=True)
    options = RabbitOptions(amqp_urls=(amqp_url,))
    session = await Session.connect(options, URL(amqp_url), "guard", connect_seconds=WAIT_SECONDS)
    with pytest.raises(BrokerUnavailable, match=r"another connection has kept the queue popgate:guard:turn for 0\.3 s"):
        await take_guard(session, "one", wait_seconds=0, chance=random.Random(1))
    await connection.close()
    await take_guard(session, "one", wait_seconds=0, chance=random.Random(1))
    await session.close()


# ---------------------------------------------------------------- the rest


async def test_operators_see_who_is_connected_and_who_consumes(amqp_url: str, rabbitmq: RabbitNode) -> None:
    vhost = amqp_url.rpartition("/")[2]
    billing = layout()
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,), role="tester")) as broker:
        await declare(broker, billing)
        await broker.consume(billing.queues[0], billing, 10, Recorder())
        names: set[str] = set()
        tags: list[str] = []
        async with asyncio.timeout(WAIT_SECONDS):
            while len(names) < 2 or not tags:
                connections = await asyncio.to_thread(rabbitmq.api, "GET", "vhosts", vhost, "connections")
                names = {each.get("client_properties", {}).get("connection_name", "") for each in connections} - {""}
                tags = [each["consumer_tag"] for each in await asyncio.to_thread(rabbitmq.consumers, vhost)]
    assert all(name.startswith("popgate tester ") for name in names)
    assert {name.rpartition(" ")[2] for name in names} == {"(consume)", "(publish)"}
    assert tags[0].startswith(f"popgate {socket.gethostname()}:")


async def test_before_its_start_the_broker_is_unavailable_and_may_be_stopped(amqp_url: str) -> None:
    broker = RabbitBroker(RabbitOptions(amqp_urls=(amqp_url,)), KEYS)
    assert broker.unavailable_reason() is not None
    with pytest.raises(BrokerUnavailable):
        await broker.depth([])
    await broker.stop()


async def test_stopping_takes_no_time_even_when_rabbitmq_hangs(amqp_url: str, rabbitmq: RabbitNode) -> None:
    broker = RabbitBroker(RabbitOptions(amqp_urls=(amqp_url,)), KEYS)
    await broker.start()
    rabbitmq.pause()
    try:
        started = time.monotonic()
        await broker.stop()
        assert time.monotonic() - started < 3
    finally:
        rabbitmq.resume()
