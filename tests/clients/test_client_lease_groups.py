"""Lease groups through the Python client, synchronous and asyncio, and the command line, against a real proxy."""

from collections.abc import Callable, Sequence

import pytest

from popgate_client import (
    AsyncClient,
    Client,
    LeaseGroup,
    LeaseGroupAcked,
    LeaseGroupExpired,
    LeaseGroupNotFound,
    LeaseGroupsAcked,
    OutgoingMessage,
)
from support.command_line import CommandLine
from support.processes import wait_until
from support.proxy import ProxyProcess

GROUP = "default"
STREAM = "nightly"


def publish(client: Client, topic: str, *bodies: str | bytes, ordering_key: str | None = None) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, GROUP)
    messages = [OutgoingMessage(body=body, headers={"n": 1}, ordering_key=ordering_key) for body in bodies]
    assert all(result.ok for result in client.publish(topic, *messages))


def test_a_batch_is_leased_read_extended_and_acked(client: Client, topic: str) -> None:
    publish(client, topic, "a", b"\xff", "c", ordering_key="k")
    stream = client.lease_stream(topic, GROUP, STREAM)
    assert stream.lease(1, 100, slices=2) == LeaseGroup(epoch=1, count=3, slices=2, lost=0, existing=False)
    first, second = stream.messages(1, 0), stream.messages(1, 1)
    assert [(one.position, one.body) for one in [*first, *second]] == [(0, b"a"), (1, b"\xff"), (2, b"c")]
    assert first[0].text == "a"
    assert (first[0].headers, first[0].ordering_key, first[0].delivery_count) == ({"n": 1}, "k", 1)
    assert stream.messages(1, 1) == second
    assert stream.lease(1, 1).existing
    (extended,) = stream.extend(600)
    assert (extended["epoch"], extended["status"]) == (1, "extended")
    (listed,) = client.lease_groups(topic, GROUP)
    assert [listed[name] for name in ("stream", "epoch", "state", "count", "lost")] == [STREAM, 1, "leased", 3, 0]
    assert listed["remaining_seconds"] > 590
    assert stream.ack(1) == LeaseGroupsAcked(acked=3, already_acked=0, lost=0)
    assert stream.ack(1) == LeaseGroupsAcked(acked=0, already_acked=3, lost=0)
    with pytest.raises(LeaseGroupAcked):
        stream.messages(1)
    with pytest.raises(LeaseGroupNotFound):
        stream.messages(2)


def test_a_released_batch_is_visible_again(client: Client, topic: str) -> None:
    publish(client, topic, "a", "b")
    stream = client.lease_stream(topic, GROUP, STREAM)
    stream.lease(7, 100)
    assert stream.release(6) == 2
    assert len(client.pop(topic, GROUP, max_messages=2, wait_seconds=5)) == 2


def test_a_batch_whose_leases_ran_out_says_so(client: Client, topic: str) -> None:
    publish(client, topic, "a")
    stream = client.lease_stream(topic, GROUP, STREAM)
    stream.lease(1, 100, invisibility_seconds=1)
    wait_until(lambda: stream.groups()[0]["state"] == "expired", timeout_seconds=10, what="the leases to run out")
    with pytest.raises(LeaseGroupExpired):
        stream.messages(1)
    assert stream.lease(1, 100) == LeaseGroup(epoch=1, count=1, slices=1, lost=0, existing=True)


async def test_the_asyncio_client_does_the_same(client: Client, shared_proxy: ProxyProcess, topic: str) -> None:
    publish(client, topic, "a", "b")
    async with AsyncClient(shared_proxy.url) as twin:
        stream = twin.lease_stream(topic, GROUP, STREAM)
        assert (await stream.lease(1, 1)).count == 1
        assert (await stream.lease(2, 1)).count == 1
        assert [one.text for one in await stream.messages(1)] == ["a"]
        assert [one["epoch"] for one in await stream.extend(60)] == [1, 2]
        assert await stream.release(1) == 1
        assert [one["epoch"] for one in await stream.groups()] == [1]
        assert [one["epoch"] for one in await twin.lease_groups(topic, GROUP)] == [1]
        assert (await stream.ack(1)).acked == 1


def test_an_answer_that_was_lost_is_asked_for_again(
    wire_url: str, client: Client, topic: str, lose_answers: Callable[[str, Sequence[int]], None]
) -> None:
    publish(client, topic, "a", "b")
    lose_answers(f"/{STREAM}/", [1, 2])
    with Client(wire_url) as far:
        stream = far.lease_stream(topic, GROUP, STREAM)
        assert stream.lease(1, 100).count == 2
        assert [one.text for one in stream.messages(1)] == ["a", "b"]
        acked = stream.ack(1)
        assert acked.acked + acked.already_acked == 2


# ---------------------------------------------------------------- the command line


def epochs(client: Client, topic: str) -> list[int]:
    """The stream's lease groups that are not acked."""
    return [listed["epoch"] for listed in client.lease_stream(topic, GROUP, STREAM).groups()]


def test_the_command_line_lists_them(popgate: CommandLine, client: Client, topic: str) -> None:
    publish(client, topic, "a", "b")
    client.lease_stream(topic, GROUP, STREAM).lease(3, 1)
    client.lease_stream(topic, GROUP, "other").lease(1, 1)
    assert [(row["stream"], row["epoch"]) for row in popgate("lease-groups", "list", topic, GROUP).rows] == [
        ("nightly", 3),
        ("other", 1),
    ]
    lines = popgate("lease-groups", "list", topic, GROUP, "--stream", STREAM, "--output", "table").out.splitlines()
    assert lines[0].split() == ["STREAM", "EPOCH", "STATE", "COUNT", "LOST", "REMAINING", "HELD"]
    assert lines[1].split()[:5] == ["nightly", "3", "leased", "1", "0"]
    assert len(lines) == 2


def test_a_stuck_stream_is_extended_acked_as_far_as_it_came_and_released(
    popgate: CommandLine, client: Client, topic: str
) -> None:
    publish(client, topic, *"abcd")
    stream = client.lease_stream(topic, GROUP, STREAM)
    for epoch in (1, 2, 3):
        stream.lease(epoch, 1)
    extended = popgate("lease-groups", "extend", topic, GROUP, STREAM, "--invisibility-seconds", "3600")
    assert (extended.code, [(row["epoch"], row["status"]) for row in extended.rows]) == (
        0,
        [(1, "extended"), (2, "extended"), (3, "extended")],
    )
    assert all(3_500 < listed["remaining_seconds"] <= 3_600 for listed in stream.groups())

    ack = ("lease-groups", "ack", topic, GROUP, STREAM, "--through-epoch", "1")
    assert popgate(*ack) == (0, '{"acked":1,"already_acked":0,"lost":0}\n', "")
    assert popgate(*ack).rows == [{"acked": 0, "already_acked": 1, "lost": 0}], "a repeat is as good"
    table = popgate(*ack, "--output", "table").out.splitlines()
    assert [line.split() for line in table] == [["ACKED", "ALREADY", "ACKED", "LOST"], ["0", "1", "0"]]

    release = ("lease-groups", "release", topic, GROUP, STREAM, "--after-epoch")
    assert popgate(*release, "2") == (0, '{"released":1}\n', "")
    assert epochs(client, topic) == [2]
    assert popgate(*release, "-1").rows == [{"released": 1}]
    assert epochs(client, topic) == []
    assert sorted(one.text for one in client.pop(topic, GROUP, max_messages=9, wait_seconds=5)) == ["b", "c", "d"]


def test_what_a_lease_group_has_lost_is_no_success(popgate: CommandLine, client: Client, topic: str) -> None:
    publish(client, topic, "a", "b")
    stream = client.lease_stream(topic, GROUP, STREAM)
    stream.lease(1, 100, invisibility_seconds=1)
    (taken,) = client.pop(topic, GROUP, wait_seconds=10)
    expired = popgate("lease-groups", "extend", topic, GROUP, STREAM, "--invisibility-seconds", "60")
    assert (expired.code, [row["status"] for row in expired.rows]) == (1, ["expired"])
    acked = popgate("lease-groups", "ack", topic, GROUP, STREAM, "--through-epoch", "1")
    assert (acked.code, acked.rows) == (1, [{"acked": 1, "already_acked": 0, "lost": 1}])
    assert acked.err == "popgate: 1 messages had been leased by other clients and were not acked\n"
    taken.ack()


def test_a_misspelt_stream_is_noticed(popgate: CommandLine, client: Client, topic: str) -> None:
    publish(client, topic, "a")
    client.lease_stream(topic, GROUP, STREAM).lease(1, 100)
    acked = popgate("lease-groups", "ack", topic, GROUP, "nightley", "--through-epoch", "1")
    assert (acked.code, acked.err) == (0, "popgate: stream nightley had nothing to ack through epoch 1\n")
    released = popgate("lease-groups", "release", topic, GROUP, "nightley", "--after-epoch", "0")
    assert (released.code, released.err) == (0, "popgate: stream nightley had nothing to release after epoch 0\n")
    extended = popgate("lease-groups", "extend", topic, GROUP, "nightley", "--invisibility-seconds", "60")
    assert extended == (1, "", "popgate: stream nightley has no lease group to extend\n")
    assert epochs(client, topic) == [1]


def test_what_is_not_there_or_can_not_be_is_told_by_the_exit_code(popgate: CommandLine, topic: str) -> None:
    assert popgate("lease-groups", "list", topic, GROUP).code == 1
    assert popgate("lease-groups", "ack", topic, GROUP, STREAM, "--through-epoch", "1").code == 1
    assert popgate("lease-groups", "ack", topic, GROUP, "no such name!", "--through-epoch", "1").code == 2
