"""Settlements at their edges, over HTTP and on each broker: one receipt handle twice."""

import pytest

from contract.http_server import HttpServer, Topic, answer, server

__all__ = ["server"]


@pytest.fixture
def topic(server: HttpServer) -> Topic:
    return server.topic()


def dead_letters(topic: Topic) -> list[str]:
    path = f"{topic.admin_path}/groups/{topic.group}/dead-letters"
    return [letter["body"] for letter in answer(topic.client.get(path))["messages"]]


# ---------------------------------------------------------------- one receipt handle twice


def test_a_receipt_that_stands_twice_in_a_rejection_makes_one_dead_letter(topic: Topic) -> None:
    topic.publish(*map(str, range(20)))
    messages = topic.pop_all(20, invisibility_seconds=60)
    entries = [{"receipt_handle": message["receipt_handle"]} for message in messages]
    rejected = topic.settle("reject", [entries[0], *entries, entries[0]])
    assert rejected == [{"status": "rejected"}] * 22
    assert sorted(map(int, dead_letters(topic))) == list(range(20))
    assert topic.settle("reject", entries[:1] * 2) == [{"status": "rejected"}] * 2, "also where it is done already"
