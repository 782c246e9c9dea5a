"""popgate works with the rights of the users that docs/security.md (Redis) and docs/rabbitmq.md describe."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as library
from redis.exceptions import NoPermissionError

from popgate.adapters import redis as redis_adapter
from support.answers import answer
from support.command_line import CommandLine
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.proxy_cluster import owners
from support.rabbitmq import RabbitNode
from support.redis import RedisServer
from support.rolling_load import RollingLoad

DOCS = Path(__file__).parents[2] / "docs"
NAMESPACE = "production"
PASSWORD = "a-password-of-redis"
SIZE = 2
BACK_SECONDS = 20.0
LOAD_COUNT = 50
ON_CONNECTING = {"auth", "ping", "select"}
"""Commands that the library sends when it connects, and to see whether a connection is alive."""
OF_THE_ADAPTER = {"eval", "evalsha", "get", "set", "subscribe", "unsubscribe"}


def documented_acl() -> list[str]:
    """Return the words of the ACL in docs/security.md for `NAMESPACE` and `PASSWORD`."""
    found = re.search(r"<!-- redis rights -->\n```\n(.*?)```", (DOCS / "security.md").read_text(), re.DOTALL)
    assert found is not None
    words = found[1].replace("NAMESPACE", NAMESPACE).replace("PASSWORD", PASSWORD).split()
    assert words[:3] == ["ACL", "SETUSER", "popgate"]
    return words


def documented_permissions() -> dict[str, str]:
    """Return the patterns in docs/rabbitmq.md, without its adopted queues."""
    found = re.search(r"<!-- permissions -->\n```sh\n(.*?)```", (DOCS / "rabbitmq.md").read_text(), re.DOTALL)
    assert found is not None
    patterns = [pattern.replace("|orders-classic|orders-quorum", "") for pattern in re.findall(r"'([^']+)'", found[1])]
    return dict(zip(("configure", "write", "read"), patterns, strict=True))


@pytest.fixture
def redis(tmp_path: Path, redis_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis that only its administrator and popgate's user may use. `redis_server` handles a missing installation."""
    with RedisServer(tmp_path / "redis", {"appendfsync": "always"}) as server:
        server.ask(*documented_acl())
        yield server


@pytest.fixture
def proxies(tmp_path: Path, rabbitmq: RabbitNode, redis: RedisServer) -> Iterator[list[ProxyProcess]]:
    with rabbitmq.own_vhost("rights") as vhost:
        rabbitmq.api("PUT", "users", vhost, body={"password": "rights", "tags": ""})
        rabbitmq.api("PUT", "permissions", vhost, vhost, body=documented_permissions())
        amqp_url = f"amqp://{vhost}:rights@127.0.0.1:{rabbitmq.amqp_port}/{vhost}"
        redis_url = redis.url(1).replace("redis://", f"redis://popgate:{PASSWORD}@")
        flags = ["--amqp-url", amqp_url, "--redis-url", redis_url, "--redis-namespace", NAMESPACE]
        many = [ProxyProcess(tmp_path / f"{number}", *flags, name=f"{number}") for number in range(SIZE)]
        try:
            for proxy in many:
                proxy.launch()
            for proxy in many:
                proxy.wait_ready()
            yield many
        finally:
            for proxy in many:
                proxy.close()
            rabbitmq.api("DELETE", "users", vhost)


def refused(redis: RedisServer) -> set[str]:
    """Return what Redis has refused to popgate, except what popgate does without: Redis's settings, and to say the name
    of its library.
    """
    entries: list[dict[bytes, bytes]] = redis.ask("ACL", "LOG", "128")
    told = {b": ".join((entry[b"reason"], entry[b"object"])).decode() for entry in entries}
    return told - {"command: config|get", "command: client|setinfo"}


def use_everything(proxies: list[ProxyProcess]) -> None:
    """Use each feature whose state is in Redis, through both proxies."""
    first, second = (proxy.client for proxy in proxies)
    popgate = CommandLine(proxies[0].url)

    def run(line: str) -> str:
        done = popgate(*line.split())
        assert done.code == 0, (line, done.err)
        return done.out

    run("topics create t --queues 4")
    run("groups create t g --max-deliveries 1 --max-in-flight 1000")
    wait_until(lambda: None not in owners(proxies[1]).values(), timeout_seconds=BACK_SECONDS, what="owners of queues")
    with RollingLoad([proxy.url for proxy in proxies], topic="t", group="g") as load:
        wait_until(lambda: len(load.delivered) > LOAD_COUNT, timeout_seconds=BACK_SECONDS, what="a load")
    load.assert_kept()
    for verb in ("release", "reject", "reject"):
        run("publish t body --delay-seconds 0.1 --ttl-seconds 600")
        pop = {"wait_seconds": 10, "invisibility_seconds": 60}
        (message,) = answer(second.post("/v1/topics/t/groups/g/pop", json=pop))["messages"]
        run(f"extend t g --invisibility-seconds 90 {message['receipt_handle']}")
        run(f"{verb} t g {message['receipt_handle']}")
    letters = run("dead-letters list t g")
    assert letters
    run("dead-letters redrive t g")
    run("groups policy t g --max-deliveries 5")
    formed = "/v1/topics/t/groups/g/lease-groups/s/1"
    answer(second.put(formed, json={"max_messages": 10}))
    answer(first.get(f"{formed}/messages?slice=0"))
    run("lease-groups extend t g s --invisibility-seconds 60")
    run("lease-groups ack t g s --through-epoch 1")
    run("mode t g pull --drain-timeout-seconds 0")
    run("mode t g pop")
    run("locks set l --kind semaphore --slots 2")
    given = answer(second.post("/v1/locks/l/acquire", json={"holder": "h", "ttl_seconds": 30}))
    for operation in ("renew", "verify", "release"):
        answer(first.post(f"/v1/locks/l/{operation}", json={"token": given["token"]}))
    run("locks delete l --yes")
    run("purge t g --yes")
    run("groups delete t g --yes")
    run("topics delete t --yes")


def test_the_documented_rights_are_enough(proxies: list[ProxyProcess], redis: RedisServer) -> None:
    use_everything(proxies)
    redis.ask("FLUSHALL")  # the proxies write back what they know
    wait_until(
        lambda: all(proxy.client.get("/readyz").is_success for proxy in proxies),
        timeout_seconds=BACK_SECONDS,
        what="the proxies to be ready again",
    )
    proxies[0].restart()
    use_everything(proxies)
    assert refused(redis) == set()
    for proxy in proxies:
        assert "NOPERM" not in proxy.output
        assert "ACCESS_REFUSED" not in proxy.output


def test_no_key_of_another_namespace_is_readable(redis: RedisServer) -> None:
    for command in (
        ("GET", "popgate:other:cluster"),
        ("GET", "x"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
    ):
        client = library.Redis(port=redis.port, username="popgate", password=PASSWORD)
        with client, pytest.raises(NoPermissionError):
            client.execute_command(*command)  # type: ignore[no-untyped-call]


def test_the_documented_commands_are_those_of_the_program() -> None:
    """Redis checks the commands in scripts, too."""
    scripts = Path(redis_adapter.__file__).parent / "scripts"
    used = set[str]()
    for script in scripts.glob("*.lua"):
        used |= {word.lower() for word in re.findall(r"\b(?:call|pcall|call_all)\('([A-Z]+)'", script.read_text())}
    documented = {word[1:] for word in documented_acl() if word.startswith("+")}
    assert documented == used | ON_CONNECTING | OF_THE_ADAPTER
