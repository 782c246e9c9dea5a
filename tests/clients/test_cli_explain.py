"""`popgate explain` and `popgate peek`, as a user runs them, and the same calls of both Python clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from popgate_client import AsyncClient, Client, GroupNotFound, OutgoingMessage, TopicNotFound
from support.command_line import CommandLine
from support.processes import wait_until
from support.proxy import ProxyProcess

GROUP = "default"


@pytest.fixture
def blocked(client: Client, topic: str) -> str:
    """A topic with two messages of one key, of which the first is leased. Its name."""
    client.put_topic(topic, queues=1)
    client.put_group(topic, GROUP)
    bodies = [OutgoingMessage(body=f"body {n}", message_id=f"order/{n}", ordering_key="k") for n in (1, 2)]
    client.publish(topic, *bodies)
    (leased,) = client.pop(topic, GROUP, client_id="billing-7", wait_seconds=5, invisibility_seconds=60)
    assert leased.message_id == "order/1"
    # The proxy may have given out the first message before it has read the second one. It then reads on at the next
    # pop, or for a peek that wants it.
    wait_until(
        lambda: len(client.peek(topic, GROUP, fetch=True)["messages"]) == 2, timeout_seconds=10, what="both messages"
    )
    return topic


def test_a_person_reads_why_a_pop_gets_nothing(popgate: CommandLine, blocked: str) -> None:
    done = popgate("explain", blocked, GROUP, "--output", "table")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"A pop of {GROUP} of {blocked} gets nothing now.\n")
    assert "blocked_by_key: 1 message is waiting behind" in done.out
    assert "message order/1 of key 'k' is leased by billing-7" in done.out
    assert "what helps: " in done.out
    assert "Messages: 0 ready, 1 blocked, 1 leased" in done.out
    (row,) = popgate("explain", blocked, GROUP, "--output", "json").rows
    assert [reason["code"] for reason in row["reasons"]] == ["blocked_by_key", "all_leased"]


def test_a_person_reads_where_a_message_is(popgate: CommandLine, blocked: str) -> None:
    done = popgate("explain", blocked, "--message-id", "order/2", "--output", "table")
    assert done.code == 0
    assert done.out.startswith(f"{GROUP}: blocked\n  It waits in queue 0, behind message order/1")
    (row,) = popgate("explain", blocked, GROUP, "--message-id", "order/1", "--output", "json").rows
    assert row["groups"][0]["copies"][0]["message"]["lease"]["client"] == "billing-7"
    assert popgate("explain", blocked, "missing", "--message-id", "order/1").code == 1
    assert popgate("explain", blocked).code == 2
    assert "name a GROUP" in popgate("explain", blocked).err


def test_a_person_sees_messages_without_leasing_them(popgate: CommandLine, client: Client, blocked: str) -> None:
    done = popgate("peek", blocked, GROUP, "--output", "table")
    assert done.code == 0
    head, first, second = done.out.splitlines()
    assert head.split()[:3] == ["MESSAGE", "ID", "QUEUE"]
    assert first.split()[:6] == ["order/1", "0", "leased", "-", "1", "billing-7"]
    assert "behind order/1" in second
    assert [row["message_id"] for row in popgate("peek", blocked, GROUP, "--state", "blocked").rows] == ["order/2"]
    more = popgate("peek", blocked, GROUP, "--max-messages", "1")
    assert (len(more.rows), "there are more" in more.err) == (1, True)
    assert client.stats(blocked, GROUP)["in_flight"] == 1


def test_messages_at_the_broker_are_shown_on_demand(popgate: CommandLine, client: Client, topic: str) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, GROUP)
    client.publish(topic, "a", "b")
    idle = popgate("peek", topic, GROUP)
    assert (idle.out, "2 more wait at the broker" in idle.err, "--fetch" in idle.err) == ("", True, True)
    assert [row["body_preview"] for row in popgate("peek", topic, GROUP, "--fetch").rows] == ["a", "b"]


def test_a_message_at_the_broker_is_found_on_demand(popgate: CommandLine, client: Client, topic: str) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, GROUP)
    client.publish(topic, OutgoingMessage(body="a", message_id="order/1"))
    unknown = popgate("explain", topic, "--message-id", "order/1", "--output", "table")
    assert unknown.out.startswith(f"{GROUP}: unknown\n  It may wait at the broker")
    assert "--fetch" in unknown.out
    found = popgate("explain", topic, "--message-id", "order/1", "--fetch", "--output", "table")
    assert found.out == f"{GROUP}: ready\n  It is ready at place 1 of queue 0 (never handed out).\n"
    wrong = popgate("explain", topic, GROUP, "--fetch")
    assert (wrong.code, "needs --message-id" in wrong.err) == (2, True)


async def test_both_clients_ask_the_same(shared_proxy: ProxyProcess, client: Client, blocked: str) -> None:
    assert client.explain(blocked, GROUP)["would_get"] is False
    assert client.peek(blocked, GROUP, state="leased", key="k", limit=1)["messages"][0]["message_id"] == "order/1"
    assert client.find_message(blocked, "order/2")["groups"][0]["state"] == "blocked"
    with pytest.raises(GroupNotFound):
        client.explain(blocked, "missing")
    async with AsyncClient(shared_proxy.url) as other:
        assert (await other.explain(blocked, GROUP))["reasons"][0]["code"] == "blocked_by_key"
        page = await other.peek(blocked, GROUP, limit=1)
        assert (await other.peek(blocked, GROUP, after=page["next"]))["messages"][0]["message_id"] == "order/2"
        assert (await other.find_message(blocked, "order/2", fetch=True))["groups"][0]["state"] == "blocked"
        with pytest.raises(TopicNotFound):
            await other.find_message("missing", "1")


@pytest.fixture
def journaled(tmp_path: Path) -> Iterator[ProxyProcess]:
    flags = ["--journal", str(tmp_path / "journal"), "--journal-rotate-seconds", "1", "--auto-create", "true"]
    with ProxyProcess(tmp_path / "proxy", *flags) as proxy:
        yield proxy


def test_the_journal_tells_the_whole_story(journaled: ProxyProcess) -> None:
    popgate = CommandLine(journaled.url)
    with Client(journaled.url) as client:
        client.put_topic("orders", queues=1)
        client.put_group("orders", GROUP)
        client.publish("orders", OutgoingMessage(body="a", message_id="order-7"))
        (first,) = client.pop("orders", GROUP, client_id="w-1", wait_seconds=5)
        first.reject("bad")
        assert client.redrive("orders", GROUP, wait_seconds=20)["moved"] == 1
        (second,) = client.pop("orders", GROUP, client_id="w-2", wait_seconds=5)
        second.ack()

        def events() -> list[str]:
            return [event["event"] for event in client.find_message("orders", "order-7")["story"]["events"]]

        wait_until(lambda: "acked" in events(), timeout_seconds=20, what="the event in a file")
        told = ["published", "delivered", "dead_lettered", "rejected", "redriven", "delivered", "acked"]
        assert events() == told
        found = client.find_message("orders", "order-7")
    (group,) = found["groups"]
    (copy,) = group["copies"]
    assert (group["state"], copy["source"]) in (("settled", "journal"), ("settled", "store"))
    assert "by w-2" in copy["detail"]
    assert found["story"]["is_complete"]
    done = popgate("explain", "orders", "--message-id", "order-7", "--output", "table")
    assert "The journal tells:" in done.out
    assert "default w-2, attempt 1, after" in done.out
