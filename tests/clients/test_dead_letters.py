"""Dead letters and purges through the Python client and the command line, against a real proxy."""

import signal
from collections.abc import Callable
from typing import Any

import pika
import pytest

from popgate_client import (
    AsyncClient,
    Client,
    Conflict,
    DeadLetterNotFound,
    OutgoingMessage,
    RedriveNotFound,
    RequestInvalid,
)
from support.command_line import CommandLine, ended
from support.processes import wait_until
from support.proxy import ProxyProcess

GROUP = "default"


@pytest.fixture
def bury(client: Client, topic: str) -> Callable[..., None]:
    """`bury("a", "b")`: publish, pop and reject these, in this order."""

    def bury(*bodies: str, reason: str = "bad") -> None:
        for body in bodies:
            client.publish(topic, body)
            (message,) = client.pop(topic, GROUP, wait_seconds=5)
            message.reject(reason)

    return bury


# ---------------------------------------------------------------- the Python client


def test_the_client_lists_shows_redrives_and_purges(client: Client, topic: str, bury: Callable[..., None]) -> None:
    bury("a", "b", "c", "d")
    page = client.dead_letters(topic, GROUP, max_messages=3, body_bytes_max=0)
    assert ([letter["body"] for letter in page["messages"]], page["dead"]) == ([""] * 3, 4)
    (last,) = client.dead_letters(topic, GROUP, after=page["next"])["messages"]
    assert last["body"] == "d"
    assert client.get_dead_letter(topic, GROUP, last["id"]) == last
    with pytest.raises(DeadLetterNotFound):
        client.get_dead_letter(topic, GROUP, "nobody")
    with pytest.raises(RedriveNotFound):
        client.get_redrive(topic, GROUP)
    assert client.redrive(topic, GROUP, ids=[last["id"]], wait_seconds=20)["moved"] == 1
    assert client.get_redrive(topic, GROUP)["state"] == "done"
    assert client.purge(topic, GROUP) == {"purged": 1, "complete": True}
    assert client.purge_dead_letters(topic, GROUP, ids=[page["next"]])["purged"] == 1
    assert client.redrive(topic, GROUP, rate_per_second=0.5)["state"] == "running"
    with pytest.raises(Conflict):
        client.redrive(topic, GROUP)
    assert client.cancel_redrive(topic, GROUP)["state"] == "cancelled"
    with pytest.raises(RequestInvalid):
        client.redrive(topic, GROUP, ids=["a"], message_ids=["b"])


async def test_the_asyncio_client_does_the_same(
    shared_proxy: ProxyProcess, topic: str, bury: Callable[..., None]
) -> None:
    bury("a", "b", "c")
    async with AsyncClient(shared_proxy.url) as client:
        page = await client.dead_letters(topic, GROUP, filter={"reason": "bad"})
        first, second, _ = page["messages"]
        assert await client.get_dead_letter(topic, GROUP, first["id"]) == first
        moved = await client.redrive(topic, GROUP, message_ids=[second["message_id"]], wait_seconds=20)
        assert moved == await client.get_redrive(topic, GROUP) == await client.cancel_redrive(topic, GROUP)
        assert moved["moved"] == 1
        assert (await client.purge_dead_letters(topic, GROUP, older_than_seconds=3600))["purged"] == 0
        assert (await client.purge_dead_letters(topic, GROUP))["purged"] == 2
        assert (await client.purge(topic, GROUP))["purged"] == 1


def test_a_letter_that_a_human_moves_back_is_a_new_message(rabbit_proxy: ProxyProcess, amqp_url: str) -> None:
    """As docs/rabbitmq.md says: take the message out of the queue, and publish it unchanged to its original queue."""
    with (
        Client(rabbit_proxy.url) as client,
        pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection,
    ):
        client.put_topic("orders", queues=2)
        client.put_group("orders", GROUP)
        sent = OutgoingMessage(body="a", headers={"kind": "express"}, message_id="order-7", ordering_key="k")
        client.publish("orders", sent)
        client.pop("orders", GROUP, wait_seconds=5)[0].reject("bad")
        (letter,) = client.dead_letters("orders", GROUP)["messages"]

        channel = connection.channel()
        dead = f"popgate:orders:{GROUP}:dead"
        got: list[Any] = []

        def take() -> bool:
            got[:] = channel.basic_get(dead)
            return got[0] is not None

        wait_until(take, timeout_seconds=10, what="the letter to be back in its place")
        method, properties, body = got
        assert properties.headers["x-popgate-copy-id"] == letter["id"]
        channel.basic_publish(
            "", f"popgate:orders:{GROUP}:{properties.headers['x-popgate-dead-queue']}", body, properties
        )
        channel.basic_ack(method.delivery_tag)

        (message,) = client.pop("orders", GROUP, wait_seconds=10)
        assert (message.text, message.message_id, message.ordering_key) == ("a", "order-7", "k")
        assert (message.headers, message.delivery_count) == ({"kind": "express"}, 1)
        message.ack()
        assert client.redrive("orders", GROUP, wait_seconds=10)["moved"] == 0


# ---------------------------------------------------------------- the command line


def test_letters_are_listed_and_shown(popgate: CommandLine, topic: str, bury: Callable[..., None]) -> None:
    bury("one", "two\x1b[2J", reason="can't\nbe read")
    rows = popgate("dead-letters", "list", topic, GROUP).rows
    assert [(row["body"], row["reason"]) for row in rows] == [
        ("one", "can't\nbe read"),
        ("two\x1b[2J", "can't\nbe read"),
    ]
    table = popgate("dead-letters", "list", topic, GROUP, "--output", "table").out.splitlines()
    assert table[0].split("  ")[0] == "ID"
    assert "can't\\nbe read" in table[1]
    assert "\\x1b[2J" in table[2]
    assert popgate("dead-letters", "show", topic, GROUP, rows[0]["id"]).rows == [rows[0]]
    assert "dead_lettered_at" in popgate("dead-letters", "show", topic, GROUP, rows[0]["id"], "--output", "table").out
    first = popgate("dead-letters", "list", topic, GROUP, "--max-messages", "1", "--body-bytes-max", "1")
    assert [row["body"] for row in first.rows] == ["o"]
    assert "there are 2 dead letters" in first.err
    unknown = popgate("dead-letters", "show", topic, GROUP, "nobody")
    assert unknown.code == 1
    assert "nobody" in unknown.err


def test_letters_are_selected_by_conditions(
    popgate: CommandLine, client: Client, topic: str, bury: Callable[..., None]
) -> None:
    bury("a", "b", reason="timeout at the bank")
    bury("c", reason="card declined")
    found = popgate("dead-letters", "list", topic, GROUP, "--reason", "TIMEOUT", "--newer-than-seconds", "3600")
    assert [row["body"] for row in found.rows] == ["a", "b"]
    counted = popgate("dead-letters", "count", topic, GROUP, "--text", "declined")
    assert counted.rows == [{"matching": 1, "dead": 3}]
    none = popgate("dead-letters", "list", topic, GROUP, "--cause", "max_deliveries")
    assert (none.rows, none.code) == ([], 0)
    assert "no dead letters that meet these conditions" in none.err
    asked = popgate("dead-letters", "purge", topic, GROUP, "--reason", "timeout")
    assert asked.code == 2
    assert "purging deletes 2 of 3 dead letters for good; confirm with --yes" in asked.err
    first = found.rows[0]["message_id"]
    moved = popgate("dead-letters", "redrive", topic, GROUP, "--reason", "timeout", "--message-id", first)
    assert (moved.code, moved.rows[0]["moved"]) == (0, 1)
    purge = ("dead-letters", "purge", topic, GROUP, "--reason", "timeout", "--older-than-seconds")
    assert popgate(*purge, "3600", "--yes").rows == [{"purged": 0, "dead": 2}]
    assert popgate(*purge, "0", "--yes").rows == [{"purged": 1, "dead": 1}]
    assert client.dead_letters(topic, GROUP, filter={"client": "worker-9"})["messages"] == []
    assert client.purge_dead_letters(topic, GROUP, filter={"text": "c"})["purged"] == 1


def test_letters_are_redriven_and_the_exit_code_tells(
    popgate: CommandLine, client: Client, topic: str, bury: Callable[..., None]
) -> None:
    bury("a", "b", "c")
    first, second, _ = popgate("dead-letters", "list", topic, GROUP).rows
    done = popgate("dead-letters", "redrive", topic, GROUP, "--id", first["id"])
    assert done.code == 0
    assert (done.rows[0]["state"], done.rows[0]["moved"]) == ("done", 1)
    missing = popgate("dead-letters", "redrive", topic, GROUP, "--id", second["id"], "--id", "nobody")
    assert missing.code == 1
    assert missing.rows[0]["moved"] == 1
    assert "1 of the ids" in missing.err
    client.put_topic(f"{topic}-repair", queues=1)
    client.put_group(f"{topic}-repair", GROUP)
    assert popgate("dead-letters", "redrive", topic, GROUP, "--target-topic", f"{topic}-repair").rows[0]["moved"] == 1
    assert [message.text for message in client.pop(f"{topic}-repair", GROUP)] == ["c"]
    assert popgate("dead-letters", "status", topic, GROUP).rows[0]["target_topic"] == f"{topic}-repair"
    assert popgate("dead-letters", "redrive", topic, GROUP, "--target-topic", "no-such").code == 1
    assert popgate("dead-letters", "redrive", topic, GROUP, "--rate-per-second", "0").code == 2
    assert popgate("dead-letters", "redrive", topic, GROUP, "--id", "a", "--message-id", "b").code == 2


def test_ctrl_c_leaves_a_redrive_running_and_says_how_to_end_it(
    popgate: CommandLine, client: Client, topic: str, bury: Callable[..., None]
) -> None:
    bury("a", "b", "c")
    with popgate.running("dead-letters", "redrive", topic, GROUP, "--rate-per-second", "0.2") as process:
        wait_until(lambda: client.stats(topic, GROUP)["dead"] < 3, timeout_seconds=20, what="the first to be moved")
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert done.code == 130
    assert f"popgate dead-letters cancel {topic} {GROUP}" in done.err
    assert popgate("dead-letters", "status", topic, GROUP).rows[0]["state"] == "running"
    again = popgate("dead-letters", "redrive", topic, GROUP)
    assert again.code == 1
    assert "is running" in again.err
    assert popgate("dead-letters", "cancel", topic, GROUP).rows[0]["state"] == "cancelled"
    detached = popgate("dead-letters", "redrive", topic, GROUP, "--rate-per-second", "0.2", "--no-wait")
    assert (detached.code, detached.rows[0]["state"]) == (0, "running")
    client.cancel_redrive(topic, GROUP)


def test_purges_want_a_yes(popgate: CommandLine, client: Client, topic: str, bury: Callable[..., None]) -> None:
    bury("a", "b")
    assert popgate("dead-letters", "purge", topic, GROUP).code == 2
    first, _ = popgate("dead-letters", "list", topic, GROUP).rows
    assert popgate("dead-letters", "purge", topic, GROUP, "--id", first["id"], "--yes").rows == [
        {"purged": 1, "dead": 1}
    ]
    assert (
        popgate("dead-letters", "purge", topic, GROUP, "--older-than-seconds", "3600", "--yes").rows[0]["purged"] == 0
    )
    assert popgate("dead-letters", "purge", topic, GROUP, "--yes").rows == [{"purged": 1, "dead": 0}]
    client.publish(topic, "x", "y")
    assert popgate("purge", topic, GROUP).code == 2
    assert popgate("purge", topic, GROUP, "--yes").rows == [{"purged": 2}]
    assert client.pop(topic, GROUP) == []
