"""`popgate topics`, `groups`, `stats` and `tail`, as programs against a real proxy."""

import signal
from collections.abc import Iterator
from typing import Any

import pika
import pytest

from popgate_client import Client, OutgoingMessage
from support.command_line import CommandLine, ended
from support.processes import wait_until
from support.proxy import ProxyProcess

GROUP = "default"
FREE = {"max_lease_seconds": 43_200.0, "max_in_flight": None, "paused": False, "min_replicas": None}


@pytest.fixture
def popgate(shared_proxy: ProxyProcess) -> CommandLine:
    return CommandLine(shared_proxy.url, may_fork=True)


# ---------------------------------------------------------------- topics and groups


def test_a_topic_is_created_listed_and_deleted(popgate: CommandLine, topic: str) -> None:
    (created,) = popgate("topics", "create", topic, "--queues", "2").rows
    assert (created["topic"], created["queues"], created["groups"]) == (topic, 2, [])
    assert created in popgate("topics").rows
    listed = popgate("topics", "list", "--output", "table").out.splitlines()
    assert listed[0].split() == ["TOPIC", "QUEUES", "ADOPTED", "GROUPS"]
    assert [topic, "2", "-", "-"] in [line.split() for line in listed]
    assert popgate("topics", "delete", topic, "--yes") == (0, "", f"popgate: deleted {topic}\n")
    again = popgate("topics", "delete", topic, "--yes")
    assert again.code == 1
    assert f"popgate topics create {topic}" in again.err


def test_a_groups_policy_is_set_shown_and_changed(popgate: CommandLine, topic: str) -> None:
    popgate("topics", "create", topic, "--queues", "1")
    flags = [
        "--invisibility-seconds",
        "60",
        "--max-deliveries",
        "never",
        "--retry-initial-seconds",
        "1.5",
        "--retry-max-seconds",
        "90",
    ]
    (created,) = popgate("groups", "create", topic, "billing", *flags).rows
    retry = {"initial_seconds": 1.5, "multiplier": 2.0, "max_seconds": 90.0}
    assert created["policy"] == {"invisibility_seconds": 60.0, "max_deliveries": None, "retry": retry, **FREE}
    (changed,) = popgate("groups", "policy", topic, "billing", "--max-deliveries", "5").rows
    assert changed["policy"] == {**created["policy"], "max_deliveries": 5}
    assert popgate("groups", "policy", topic, "billing").rows == [changed]
    kept = popgate("groups", "policy", topic, "billing", "--min-replicas", "5")
    assert kept.rows[0]["policy"]["min_replicas"] == 5
    assert "warning: min_replicas is stored, but has no effect here" in kept.err
    assert popgate("groups", "policy", topic, "billing", "--min-replicas", "unset").rows == [changed]
    (capped,) = popgate("groups", "policy", topic, "billing", "--max-lease-seconds", "3600").rows
    assert capped["policy"] == {**changed["policy"], "max_lease_seconds": 3_600.0}
    table = popgate("groups", "list", topic, "--output", "table").out.splitlines()
    assert table[1].split() == [
        topic,
        "billing",
        "pop",
        "1m",
        "0s",
        "1h",
        "0m",
        "5",
        "1.5s",
        "x2",
        "up",
        "to",
        "1m",
        "30s",
        "any",
        "-",
        "no",
    ]


def test_a_group_is_bounded_paused_and_resumed(popgate: CommandLine, topic: str, client: Client) -> None:
    client.publish(topic, "a", "b")
    (bounded,) = popgate("groups", "policy", topic, GROUP, "--max-in-flight", "1").rows
    assert bounded["policy"]["max_in_flight"] == 1
    assert len(popgate("pop", topic, "--wait-seconds", "5").rows) == 1
    refused = popgate("pop", topic, "--max-messages", "2")
    assert (refused.code, refused.out, "max_in_flight" in refused.err) == (1, "", True)
    assert "--timeout-seconds" not in refused.err, "that would not help"
    assert (
        popgate("groups", "policy", topic, GROUP, "--max-in-flight", "any").rows[0]["policy"]["max_in_flight"] is None
    )
    (paused,) = popgate("groups", "pause", topic, GROUP).rows
    assert paused["policy"]["paused"] is True
    assert popgate("pop", topic, "--wait-seconds", "0.5").rows == []
    assert popgate("groups", "resume", topic, GROUP).rows[0]["policy"]["paused"] is False
    assert len(popgate("pop", topic, "--wait-seconds", "5").rows) == 1


def test_changing_the_policy_of_a_misspelt_group_does_not_create_it(popgate: CommandLine, topic: str) -> None:
    popgate("topics", "create", topic, "--queues", "1")
    done = popgate("groups", "policy", topic, "biling", "--max-deliveries", "5")
    assert done.code == 1
    assert popgate("groups", "list", topic).rows == []


def test_a_value_that_the_server_refuses_is_named(popgate: CommandLine, topic: str) -> None:
    popgate("topics", "create", topic, "--queues", "1")
    done = popgate("groups", "create", topic, "billing", "--retry-multiplier", "1000")
    assert (done.code, "multiplier" in done.err) == (2, True)


def test_a_deleted_group_is_gone(popgate: CommandLine, topic: str) -> None:
    popgate("publish", topic, "a")
    assert popgate("groups", "delete", topic, GROUP, "--yes").code == 0
    assert popgate("groups", "list", topic).rows == []


# ---------------------------------------------------------------- stats


def test_stats_count_what_is_ready_in_flight_delayed_and_dead(popgate: CommandLine, topic: str, client: Client) -> None:
    client.publish(topic, *"abcdef")
    lease, other, third = client.pop(topic, GROUP, max_messages=3, wait_seconds=5)
    other.reject()
    third.release(delay_seconds=600)
    (row,) = popgate("stats", topic).rows
    counts = {name: row[name] for name in ("topic", "group", "mode", "ready", "in_flight", "delayed", "dead")}
    assert counts == {
        "topic": topic,
        "group": GROUP,
        "mode": "pop",
        "ready": 3,
        "in_flight": 1,
        "delayed": 1,
        "dead": 1,
    }
    assert row in [{**one, "oldest_age_seconds": row["oldest_age_seconds"]} for one in popgate("stats").rows]
    table = popgate("stats", topic, GROUP, "--output", "table").out.splitlines()
    titles = ["TOPIC", "GROUP", "MODE", "READY", "BLOCKED", "IN", "FLIGHT", "DELAYED", "DEAD", "OLDEST"]
    assert table[0].split() == titles
    assert table[1].split()[:8] == [topic, GROUP, "pop", "3", "0", "1", "1", "1"]
    assert len(table) == 2 + 1 + 1 + len(row["queues"])
    lease.ack()


def test_stats_count_what_waits_behind_its_ordering_key(popgate: CommandLine, topic: str, client: Client) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, GROUP)
    client.publish(topic, *(OutgoingMessage(body=body, ordering_key=key) for body, key in ("ak", "bk", "ck", "dj")))
    leases = client.pop(topic, GROUP, wait_seconds=5)
    while len(leases) < 2:  # for the last one the blocked ones have to be passed
        leases += client.pop(topic, GROUP, wait_seconds=5)
    assert [lease.text for lease in leases] == ["a", "d"]
    (row,) = popgate("stats", topic, GROUP).rows
    assert (row["ready"], row["blocked"], row["in_flight"]) == (2, 2, 2)
    table = [line.split() for line in popgate("stats", topic, GROUP, "--output", "table").out.splitlines()]
    assert table[1][:6] == [topic, GROUP, "pop", "2", "2", "2"]
    assert table[3][-5:] == ["READY", "BLOCKED", "IN", "FLIGHT", "DELAYED"]
    assert table[4][-4:] == ["2", "2", "2", "0"]
    client.ack(topic, GROUP, leases)


def test_stats_of_what_is_not_there_fail(popgate: CommandLine, topic: str) -> None:
    assert popgate("stats", topic).code == 1
    assert popgate("stats", topic, GROUP).code == 1


def test_watching_goes_on_until_ctrl_c(popgate: CommandLine, topic: str, client: Client) -> None:
    client.publish(topic, "a")
    with popgate.running("stats", topic, "--interval-seconds", "0.1") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert all(topic.encode() in line for line in lines)
    assert (done.code, done.err) == (130, "")


# ---------------------------------------------------------------- tail


def groups(client: Client, topic: str) -> list[str]:
    names: list[str] = client.get_topic(topic)["groups"]
    return names


@pytest.fixture
def tailed(client: Client, topic: str) -> str:
    """A topic with one message in its group `default`."""
    client.publish(topic, "before")
    return topic


def wait_for_its_group(client: Client, topic: str) -> None:
    wait_until(lambda: len(groups(client, topic)) == 2, timeout_seconds=10, what="the temporary group")


def test_tail_prints_what_comes_and_no_other_group_notices(popgate: CommandLine, tailed: str, client: Client) -> None:
    with popgate.running("tail", tailed, "--max-messages", "3") as process:
        wait_for_its_group(client, tailed)
        (temporary,) = set(groups(client, tailed)) - {GROUP}
        assert temporary.startswith("tail-")
        client.publish(tailed, "one", "two", "three")
        done = ended(process)
    assert (done.code, sorted(row["body"] for row in done.rows)) == (0, ["one", "three", "two"])
    assert groups(client, tailed) == [GROUP]
    assert client.stats(tailed, GROUP)["ready"] == 4


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        pytest.param(
            signal.SIGHUP,
            143,
            marks=pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="nohup"),
        ),
    ],
)
def test_tail_deletes_its_group_when_a_signal_ends_it(
    popgate: CommandLine, tailed: str, client: Client, number: signal.Signals, code: int
) -> None:
    with popgate.running("tail", tailed) as process:
        wait_for_its_group(client, tailed)
        process.send_signal(number)
        assert ended(process) == (code, "", "")
    assert groups(client, tailed) == [GROUP]


def test_tail_ends_when_nobody_reads_it_any_more(popgate: CommandLine, tailed: str, client: Client) -> None:
    with popgate.running("tail", tailed) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        wait_for_its_group(client, tailed)
        process.stdout.close()
        assert process.wait(20) == 141
        assert process.stderr.read() == b""
    assert groups(client, tailed) == [GROUP]


def test_a_named_group_stays_and_a_later_tail_goes_on_where_it_ended(
    popgate: CommandLine, tailed: str, client: Client
) -> None:
    with popgate.running("tail", tailed, "--group", "mine") as process:
        wait_for_its_group(client, tailed)
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == 143
    client.publish(tailed, "meanwhile")
    later = popgate("tail", tailed, "--group", "mine", "--max-messages", "1")
    assert (later.code, [row["body"] for row in later.rows]) == (0, ["meanwhile"])
    assert set(groups(client, tailed)) == {GROUP, "mine"}


def test_a_group_that_could_not_be_deleted_is_named(own_proxy: ProxyProcess) -> None:
    popgate = CommandLine(own_proxy.url)
    with Client(own_proxy.url) as client:
        client.publish("orders", "a")
        with popgate.running("tail", "orders", "--timeout-seconds", "0") as process:
            wait_for_its_group(client, "orders")
            own_proxy.kill()
            done = ended(process)
    assert done.code == 3
    assert "delete it with: popgate groups delete orders tail-" in done.err
    assert "Traceback" not in done.err


# ---------------------------------------------------------------- adopted queues


@pytest.fixture
def foreign_queues(amqp_url: str) -> Iterator[list[str]]:
    """Two queues that popgate has not created, with a message in each."""
    names = ["theirs.1", "theirs.2"]
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        channel = connection.channel()
        for name in names:
            arguments: dict[str, Any] = {"x-queue-type": "quorum"}
            channel.queue_declare(name, durable=True, arguments=arguments)
            channel.basic_publish("", name, b"old")
        yield names


def test_queues_are_adopted_drained_and_can_not_be_tailed(
    foreign_queues: list[str], rabbit_proxy: ProxyProcess
) -> None:
    popgate = CommandLine(rabbit_proxy.url)
    (adopted,) = popgate("topics", "create", "orders", "--adopt", *foreign_queues).rows
    assert adopted["adopted"] == foreign_queues
    popped = popgate("pop", "orders", "--max-messages", "9", "--wait-seconds", "10", "--ack")
    while len(popped.rows) < len(foreign_queues):
        popped = popped._replace(out=popped.out + popgate("pop", "orders", "--wait-seconds", "10", "--ack").out)
    assert [row["body"] for row in popped.rows] == ["old", "old"]
    tail = popgate("tail", "orders")
    assert (tail.code, len(tail.err.splitlines())) == (1, 1)
    assert "adopted" in tail.err
    missing = popgate("topics", "create", "more", "--adopt", "nowhere")
    assert missing.code == 1
    assert "'nowhere' does not exist" in missing.err
