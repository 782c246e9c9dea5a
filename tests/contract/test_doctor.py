"""``popgate doctor`` as a process, on real brokers: it finds and names each planted fault, and --fix repairs it."""

import json
import secrets
import shlex
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from support.command_line import CommandLine, Done, ended
from support.processes import PortBlock, wait_until
from support.proxy import ProxyProcess, plain_client
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

LIMIT = 2_000_000_000
LATE_RETRY = {"x-delayed-retry-type": "all", "x-delayed-retry-min": 1_000}
ADOPTED_QUORUM = {"delivery-limit-missing", "delivery-limit-low", "lost-node-timeout"}
"""Expected findings on an adopted quorum queue without arguments, by version."""
Doctor = Callable[..., "Told"]


class Told(NamedTuple):
    """The doctor's exit code, and its JSON output."""

    code: int
    said: dict[str, Any]

    @property
    def codes(self) -> set[str]:
        """Return the codes of the findings that need a repair."""
        return {one["code"] for one in self.said["findings"] if one["severity"] != "info"}

    @property
    def notes(self) -> set[str]:
        return {one["code"] for one in self.said["findings"] if one["severity"] == "info"}

    def finding(self, code: str) -> dict[str, Any]:
        (found,) = (one for one in self.said["findings"] if one["code"] == code)
        return dict(found)


@pytest.fixture
def vhost(amqp_url: str) -> str:
    return amqp_url.rpartition("/")[2]


@pytest.fixture
def channel(amqp_url: str) -> Iterator[BlockingChannel]:
    """A channel to plant faults with."""
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    yield connection.channel()
    if connection.is_open:
        connection.close()


@pytest.fixture
def management_url(rabbitmq: RabbitNode) -> str:
    return f"http://guest:guest@127.0.0.1:{rabbitmq.management_port}"


@pytest.fixture
def run(tmp_path: Path, amqp_url: str) -> Callable[..., Done]:
    """Run the doctor with AMQP alone."""
    nowhere = PortBlock()

    def doctor(*arguments: str) -> Done:
        ways = {
            "--amqp-url": amqp_url,
            "--data-dir": str(tmp_path / "data"),
            "--management-url": f"http://127.0.0.1:{nowhere.ports[0]}",
            "--replica-commands": "none",
        }
        given = [word for name, value in ways.items() if name not in arguments for word in (name, value)]
        return CommandLine("", may_fork=True)("doctor", *arguments, *given)

    return doctor


@pytest.fixture
def doctor(run: Callable[..., Done], management_url: str) -> Doctor:
    """Run the doctor with the management API."""

    def told(*arguments: str) -> Told:
        done = run("-o", "json", *arguments, "--management-url", management_url)
        assert not done.err or done.code == 2, done.err
        return Told(done.code, json.loads(done.out))

    return told


def declare_own(channel: BlockingChannel, **arguments: Any) -> str:
    """Declare a queue as popgate does, except for ``arguments``."""
    name = f"popgate:topic-{secrets.token_hex(3)}:group:0"
    own: dict[str, Any] = {"x-queue-type": "quorum", "x-single-active-consumer": True, "x-delivery-limit": LIMIT}
    channel.queue_declare(name, durable=True, arguments={**own, **arguments})
    return name


@pytest.mark.rabbitmq_versions
def test_a_clean_broker_needs_no_mending(doctor: Doctor, channel: BlockingChannel, rabbitmq: RabbitNode) -> None:
    declare_own(channel, **own_timeout(rabbitmq))
    told = doctor()
    assert (told.code, told.codes) == (0, set())
    assert all(note.startswith("version-") for note in told.notes)
    assert told.said["rabbitmq_version"] == str(rabbitmq.release)
    assert {one["flag"] for one in told.said["not_looked_at"]} <= {
        "--replica-commands",
        "--management-url or --replica-commands",
    }


def test_exchanges_that_delete_themselves_are_named_where_they_are_a_danger(
    doctor: Doctor, channel: BlockingChannel, rabbitmq: RabbitNode
) -> None:
    channel.exchange_declare("kept")
    assert doctor().codes == set()
    channel.exchange_declare("events", auto_delete=True)
    assert doctor().codes == ({"auto-delete-exchanges"} if rabbitmq.release.version >= (4, 3) else set())


def own_timeout(rabbitmq: RabbitNode) -> dict[str, Any]:
    return {"x-consumer-disconnected-timeout": 500} if rabbitmq.release.version >= (4, 3) else {}


def test_amqp_alone_works_and_says_what_it_did_not_see(run: Callable[..., Done]) -> None:
    done = run()
    assert done.code == 0, done
    assert "Not looked at:" in done.out
    assert "policies" in done.out
    assert "flag: --management-url" in done.out
    assert "0 findings to fix" in done.err


@pytest.mark.rabbitmq_versions
def test_a_policy_that_hurts_popgates_queues_is_replaced_by_a_copy_without_it(
    doctor: Doctor, channel: BlockingChannel, rabbitmq: RabbitNode, vhost: str
) -> None:
    queue = declare_own(channel, **own_timeout(rabbitmq))
    definition = {"max-length": 9, "message-ttl": 60_000, "dead-letter-exchange": "x", "max-length-bytes": 9_999}
    kept = {"queue-leader-locator": "balanced"}
    policy = {"pattern": ".*", "definition": {**definition, **kept}, "priority": 3, "apply-to": "queues"}
    rabbitmq.api("PUT", "policies", vhost, "all", body=policy)
    told = doctor()
    assert (told.code, told.codes) == (1, {"policy-drops-messages", "policy-dead-letters"})
    assert told.finding("policy-drops-messages")["queues"] == [queue]
    mended = doctor("--fix")
    assert (mended.code, mended.codes) == (0, set())
    assert [one["done"] for one in mended.said["fixed"]] == [True], "one policy mends both"
    written = rabbitmq.api("GET", "policies", vhost, "popgate")
    assert (written["pattern"], written["priority"], written["definition"]) == ("^popgate:", 4, kept)
    assert rabbitmq.api("GET", "policies", vhost, "all")["definition"] == {**definition, **kept}, "it is left alone"
    assert doctor().code == 0


def test_an_operator_policy_is_named_and_left_alone(doctor: Doctor, rabbitmq: RabbitNode, vhost: str) -> None:
    policy = {"pattern": ".*", "definition": {"max-length": 9}, "priority": 3, "apply-to": "queues"}
    rabbitmq.api("PUT", "operator-policies", vhost, "all", body=policy)
    told = doctor("--fix")
    found = told.finding("policy-drops-messages")
    assert (told.code, found["fixable"], told.said["fixed"]) == (1, False, [])
    assert found["command"].startswith("rabbitmqctl set_operator_policy")
    assert found["queues"] == [], "there is none yet, but popgate's would be hurt"


@pytest.mark.rabbitmq_versions
def test_an_adopted_queue_without_a_delivery_limit_gets_one(
    doctor: Doctor, channel: BlockingChannel, rabbitmq: RabbitNode, vhost: str
) -> None:
    channel.queue_declare("orders.eu", durable=True, arguments={"x-queue-type": "quorum"})
    policy = {"pattern": "^orders", "definition": {"max-length": 10_000}, "priority": 1, "apply-to": "queues"}
    rabbitmq.api("PUT", "policies", vhost, "orders", body=policy)
    assert doctor().code == 0, "nobody has named it"
    told = doctor("--queue", "orders.eu")
    version = rabbitmq.release.version
    codes = {"delivery-limit-low"} if version >= (4,) else {"delivery-limit-missing"}
    assert (told.code, told.codes) == (1, codes | ({"lost-node-timeout"} if version >= (4, 3) else set()))
    assert "policy-limits-adopted" in told.notes
    mended = doctor("--queue", "orders.eu", "--fix")
    assert (mended.code, mended.codes) == (0, set())
    assert len(mended.said["fixed"]) == 1
    written = rabbitmq.api("GET", "policies", vhost, "popgate-orders.eu")
    assert (written["pattern"], written["priority"]) == (r"^orders\.eu$", 2)
    assert written["definition"] == {
        "max-length": 10_000,
        "delivery-limit": LIMIT,
        **({"consumer-disconnected-timeout": 500} if version >= (4, 3) else {}),
    }


@pytest.mark.rabbitmq_versions
def test_a_queue_that_another_popgate_declared_without_a_limit_is_mended_by_a_policy(
    doctor: Doctor, channel: BlockingChannel, rabbitmq: RabbitNode
) -> None:
    version = rabbitmq.release.version
    queue = declare_own(channel, **{"x-delivery-limit": -1})
    told = doctor()
    if version < (4,):
        assert told.codes == {"delivery-limit-low"}
        assert not told.finding("delivery-limit-low")["fixable"], "RabbitMQ 3 takes the smaller limit"
        return
    code = "lost-node-timeout" if version >= (4, 3) else "delivery-limit-missing"
    assert (told.code, told.codes, told.finding(code)["queues"]) == (1, {code}, [queue])
    assert doctor("--fix").code == 0


def test_over_amqp_alone_a_queue_of_another_is_seen_but_not_mended(
    run: Callable[..., Done], channel: BlockingChannel, rabbitmq: RabbitNode
) -> None:
    channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 7})
    channel.queue_declare("classic", durable=True)
    done = run("-o", "json", "--queue", "orders", "--queue", "classic", "--queue", "missing", "--fix")
    told = Told(done.code, json.loads(done.out))
    expected = {"delivery-limit-low", "queue-missing"}
    assert told.codes == expected | ({"lost-node-timeout"} if rabbitmq.release.version >= (4, 3) else set())
    assert (told.code, told.said["fixed"]) == (1, [])
    assert "7" in told.finding("delivery-limit-low")["found"]


@pytest.mark.rabbitmq_versions
@pytest.mark.parametrize("with_api", [True, False])
def test_missing_permissions_are_found_and_added(
    run: Callable[..., Done],
    doctor: Doctor,
    channel: BlockingChannel,
    rabbitmq: RabbitNode,
    amqp_url: str,
    vhost: str,
    management_url: str,
    *,
    with_api: bool,
) -> None:
    channel.queue_declare("orders", durable=True)
    user = f"user-{secrets.token_hex(4)}"
    rabbitmq.api("PUT", "users", user, body={"password": "secret", "tags": ""})
    try:
        few = {"configure": "^other$", "write": "^popgate:.*$", "read": ""}
        rabbitmq.api("PUT", "permissions", vhost, user, body=few)
        url = amqp_url.replace("guest:guest@", f"{user}:secret@")
        if not with_api:
            done = run("-o", "json", "--amqp-url", url, "--queue", "orders")
            found = Told(done.code, json.loads(done.out)).finding("permissions")
            assert (done.code, found["fixable"]) == (1, False)
            assert "configure on popgate:..., orders" in found["found"]
            assert "write on amq.default" in found["found"]
            return
        told = doctor("--amqp-url", url, "--queue", "orders")
        assert (told.code, told.codes) == (1, {"permissions"})
        assert "read on popgate:..., orders" in told.finding("permissions")["found"]
        mended = doctor("--amqp-url", url, "--queue", "orders", "--fix")
        assert (mended.code, mended.codes) == (0, set())
        assert rabbitmq.api("GET", "permissions", vhost, user) == {
            "user": user,
            "vhost": vhost,
            "configure": "^other$|^(popgate:.*|orders)$",
            "write": r"^popgate:.*$|^(popgate:.*|amq\.default)$",
            "read": "^(popgate:.*|orders)$",
        }
    finally:
        rabbitmq.api("DELETE", "users", user)


def test_a_delayed_retry_of_popgates_returns_is_taken_out_of_the_policy(
    doctor: Doctor, channel: BlockingChannel, rabbitmq: RabbitNode, vhost: str
) -> None:
    if rabbitmq.release.version < (4, 3):
        return  # RabbitMQ refuses such a policy
    queue = declare_own(channel, **own_timeout(rabbitmq))
    definition = {"delayed-retry-type": "all", "delayed-retry-min": 1_000, "delayed-retry-max": 9_000}
    policy = {"pattern": "^popgate:", "definition": definition, "priority": 7, "apply-to": "queues"}
    rabbitmq.api("PUT", "policies", vhost, "retry", body=policy)
    channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum", **LATE_RETRY})
    told = doctor("--queue", "orders")
    assert told.codes == {"policy-delayed-retry", "delivery-limit-low", "lost-node-timeout"}
    found = {tuple(one["queues"]) for one in told.said["findings"] if one["code"] == "policy-delayed-retry"}
    assert found == {(queue,), ("orders",)}
    mended = doctor("--queue", "orders", "--fix")
    assert (mended.code, mended.codes) == (0, set())
    assert rabbitmq.api("GET", "policies", vhost, "retry")["definition"] == {"delivery-limit": LIMIT}


@pytest.mark.rabbitmq_versions
def test_rabbitmqs_tools_show_what_the_api_does_not(
    doctor: Doctor, channel: BlockingChannel, rabbitmq: RabbitNode
) -> None:
    declare_own(channel, **own_timeout(rabbitmq))
    told = doctor("--replica-commands", str(rabbitmq.command_prefix()), "--consumer-timeout-seconds", "3600")
    assert told.said["not_looked_at"] == []
    timeout: set[str] = set() if rabbitmq.release.version >= (4, 3) else {"consumer-timeout"}
    assert (told.codes, told.code) == (timeout, len(timeout)), "4.3's consumers of quorum queues say it themselves"


def test_a_redis_that_may_forget_is_mended(doctor: Doctor, tmp_path: Path, rabbitmq: RabbitNode) -> None:
    with RedisServer(tmp_path / "redis", {"appendonly": "no", "maxmemory-policy": "allkeys-lru"}) as redis:
        redis.start()
        told = doctor("--redis-url", redis.url())
        assert (told.code, told.codes) == (1, {"redis-append-only", "redis-eviction"})
        mended = doctor("--redis-url", redis.url(), "--fix")
        assert (mended.code, mended.codes) == (0, set())
        assert "redis-append-sync" in mended.notes
        assert redis.ask("DBSIZE") == 0, "it leaves nothing behind"


def adopt(proxy: ProxyProcess, topic: str, queue: str) -> None:
    with plain_client(proxy.url, timeout_seconds=30) as client:
        client.put(f"/v1/admin/topics/{topic}", json={"adopt": [queue]}).raise_for_status()
        client.put(f"/v1/admin/topics/{topic}/groups/g").raise_for_status()


@pytest.mark.rabbitmq_versions
def test_a_popgate_that_runs_is_found_healthy_and_its_adopted_queue_once_it_has_stopped(
    doctor: Doctor, run: Callable[..., Done], channel: BlockingChannel, tmp_path: Path, amqp_url: str
) -> None:
    channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
    with ProxyProcess(tmp_path, "--amqp-url", amqp_url) as proxy:
        proxy.start()
        adopt(proxy, "adopted", "orders")
        with plain_client(proxy.url, timeout_seconds=30) as client:
            client.put("/v1/admin/topics/own", json={"queues": 2}).raise_for_status()
            client.put("/v1/admin/topics/own/groups/g").raise_for_status()
            late = {"messages": [{"body": "x", "delay_seconds": 900}]}
            client.post("/v1/topics/own/messages", json=late).raise_for_status()
            client.post("/v1/topics/adopted/messages", json=late).raise_for_status()
            client.put("/v1/locks/busy", json={"kind": "mutex"}).raise_for_status()
            holder = {"holder": "me", "ttl_seconds": 60}
            client.post("/v1/locks/busy/acquire", json=holder).raise_for_status()
            client.post("/v1/topics/own/groups/g/pop", json={}).raise_for_status()
        told = doctor()
        assert (told.code, told.codes) == (0, set())
        (unseen,) = (one for one in told.said["not_looked_at"] if one["flag"] == "--queue NAME")
        assert "a running popgate uses the data folder" in unseen["why"]
    told = doctor()
    assert told.code == 1
    assert told.codes <= ADOPTED_QUORUM
    assert all(one["queues"] == ["orders"] for one in told.said["findings"] if one["severity"] != "info")
    over_amqp = run("-o", "json")
    assert Told(over_amqp.code, json.loads(over_amqp.out)).codes == told.codes
    with ProxyProcess(tmp_path, "--amqp-url", amqp_url) as again:
        again.start()  # the folder was left unchanged


def test_adopted_queues_are_known_by_the_catalog_in_redis(
    doctor: Doctor, channel: BlockingChannel, tmp_path: Path, amqp_url: str, redis_server: RedisServer
) -> None:
    channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
    redis_server.ask("FLUSHALL")
    with ProxyProcess(tmp_path, "--amqp-url", amqp_url, "--redis-url", redis_server.url()) as proxy:
        proxy.start()
        adopt(proxy, "adopted", "orders")
        told = doctor("--redis-url", redis_server.url())
        assert told.codes
        assert told.codes <= ADOPTED_QUORUM
        with plain_client(proxy.url, timeout_seconds=60) as client:
            assert client.get("/v1/admin/doctor").json()["latest"] is None
            run = client.post("/v1/admin/doctor").raise_for_status().json()
            codes = {one["code"] for one in run["findings"] if one["severity"] != "info"}
            assert codes >= told.codes, "the proxy's doctor finds what the command finds"
            assert all(one["queues"] == ["orders"] for one in run["findings"] if one["code"] in told.codes)
            assert run["seconds"] > 0
            assert client.get("/v1/admin/doctor").json()["latest"] == run
        assert doctor("--redis-url", redis_server.url(), "--fix").code == 0


def test_rabbitmqs_own_keeper_is_a_note_and_beside_popgates_a_warning(doctor: Doctor, rabbitmq: RabbitNode) -> None:
    if rabbitmq.release.version < (3, 13):
        return  # it has none
    switch = "application:set_env(rabbit, quorum_membership_reconciliation_enabled, {})."
    rabbitmq.ctl("eval", switch.format("true"))
    try:
        assert "membership-reconciliation" in doctor().notes
        told = doctor("--replica-keeper")
        assert (told.code, told.codes) == (1, {"membership-reconciliation"})
    finally:
        rabbitmq.ctl("eval", switch.format("false"))


def test_for_people_each_command_is_shown_and_what_became_of_it(
    run: Callable[..., Done], channel: BlockingChannel, rabbitmq: RabbitNode, management_url: str, vhost: str
) -> None:
    channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
    seen = run("--queue", "orders", "--management-url", management_url)
    assert seen.code == 1
    assert "WARNING delivery-limit-" in seen.out
    assert "\n  queues: orders\n  why:    " in seen.out
    assert "'popgate doctor --fix' carries out 1 command" in seen.err
    mended = run("--queue", "orders", "--management-url", management_url, "--fix")
    assert f"fix: rabbitmqctl set_policy -p {vhost} --priority 1 --apply-to queues popgate-orders" in mended.out
    assert (mended.code, "WARNING" in mended.out) == (0, False)
    rabbitmq.ctl(*shlex.split(mended.out.partition("fix: rabbitmqctl ")[2].partition("\n")[0]))


def test_ctrl_c_ends_it_quietly(amqp_url: str, rabbitmq: RabbitNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and sends nothing
        url = amqp_url.replace(f":{rabbitmq.amqp_port}/", f":{silent.getsockname()[1]}/")
        with CommandLine("").running("doctor", "--amqp-url", url) as process:
            accepted, _ = silent.accept()
            with accepted:
                process.send_signal(signal.SIGINT)
                assert ended(process) == Done(130, "", "")


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("amqp://guest:wrong@127.0.0.1:{port}/", "refused the user 'guest'"),
        ("amqp://guest:guest@127.0.0.1:{port}/nowhere-at-all", "has no such virtual host"),
        ("amqp://guest:guest@127.0.0.1:{free}/", "nothing listens on 127.0.0.1:{free}"),
        ("amqp://guest:guest@127.0.0.1:{port}/", "Redis"),
    ],
)
def test_it_says_in_one_line_why_it_could_not_look(
    run: Callable[..., Done], rabbitmq: RabbitNode, url: str, complaint: str
) -> None:
    block = PortBlock()
    ports = {"port": rabbitmq.amqp_port, "free": block.ports[0]}
    redis = ["--redis-url", f"redis://127.0.0.1:{block.ports[0]}/0"] if complaint == "Redis" else []
    done = run("--amqp-url", url.format(**ports), *redis)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("popgate: could not look: ")
    assert done.err.count("\n") == 1
    assert complaint.format(**ports) in done.err
    assert "wrong" not in done.err


def test_a_policy_that_is_set_while_popgate_runs_is_warned_of_until_it_is_gone(
    doctor: Doctor, tmp_path: Path, amqp_url: str, management_url: str, rabbitmq: RabbitNode, vhost: str
) -> None:
    flags = ["--amqp-url", amqp_url, "--management-url", management_url, "--policy-check-seconds", "0.2"]
    with ProxyProcess(tmp_path / "proxy", *flags) as proxy:
        proxy.client.put("/v1/admin/topics/orders", json={"queues": 1}).raise_for_status()
        proxy.client.put("/v1/admin/topics/orders/groups/billing", json={}).raise_for_status()
        log = proxy.folder / "output.log"
        assert "a policy of RabbitMQ" not in log.read_text()
        policy = {"pattern": "^popgate:orders:", "definition": {"max-length": 2}, "priority": 3, "apply-to": "queues"}
        rabbitmq.api("PUT", "policies", vhost, "harm", body=policy)
        wait_until(lambda: "code='policy-drops-messages'" in log.read_text(), timeout_seconds=10, what="the warning")
        assert "policy 'harm' sets max-length 2" in log.read_text()
        told = doctor()
        assert (told.code, told.codes) == (1, {"policy-drops-messages"})
        doctor("--fix")
        wait_until(lambda: "no longer endangers messages" in log.read_text(), timeout_seconds=10, what="the end of it")
        assert log.read_text().count("a policy of RabbitMQ endangers messages code") == 1, "it is said once"
