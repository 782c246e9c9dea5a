"""Edge cases of settlements, over HTTP and on each broker: one receipt handle twice, and the maximum age of a lease."""

import time

import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem
from contract.http_server import lean_server as server
from support.processes import wait_until

__all__ = ["server"]


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


# ---------------------------------------------------------------- a lease that has expired


def test_an_expired_lease_may_be_acked_until_another_client_has_the_message(topic: Topic) -> None:
    topic.publish("late", "too late")
    late, too_late = topic.pop_all(2, invisibility_seconds=1)
    wait_until(lambda: topic.state()["ready"] == 2, timeout_seconds=10, what="the end of the leases")
    assert topic.ack(late) == ["acked"]
    (again,) = topic.pop(max_messages=2, wait_seconds=10, invisibility_seconds=60)
    assert again["message_id"] == too_late["message_id"]
    assert topic.ack(too_late) == ["expired"]
    assert topic.ack(again) == ["acked"]
    assert topic.state()["ready"] == topic.state()["in_flight"] == 0


# ---------------------------------------------------------------- the greatest age of a lease


def extend(topic: Topic, message: Json, seconds: float) -> Json:
    (result,) = topic.settle("extend", [{"receipt_handle": message["receipt_handle"], "invisibility_seconds": seconds}])
    return result


def test_an_extension_is_cut_at_the_greatest_age_and_then_the_lease_ends(topic: Topic) -> None:
    topic.policy(invisibility_seconds=1, max_lease_seconds=2.5)
    topic.publish("x")
    leased_at = time.monotonic()
    message = topic.pop_one()
    extended = extend(topic, message, 60)
    assert extended["status"] == "extended"
    assert extended["invisible_until"] - message["invisible_until"] == pytest.approx(1.5, abs=0.2)
    time.sleep(1.2)
    again = extend(topic, message, 60)
    assert again["status"] == "extended"
    assert again["invisible_until"] == pytest.approx(extended["invisible_until"], abs=0.2), "it moves no more"
    assert topic.pop(wait_seconds=0.2) == []
    other = topic.pop_one(wait_seconds=5)
    assert 2.4 < time.monotonic() - leased_at < 5
    assert other["delivery_count"] == 2
    assert extend(topic, message, 60) == {"status": "expired"}
    assert extend(topic, other, 1)["status"] == "extended"
    assert topic.ack(message, other) == ["expired", "acked"]


def test_an_extension_beyond_the_greatest_age_changes_nothing_and_the_ack_is_good(topic: Topic) -> None:
    topic.policy(invisibility_seconds=1, max_lease_seconds=1)
    topic.publish("x")
    message = topic.pop_one()
    time.sleep(1.2)
    assert extend(topic, message, 60) == {"status": "expired"}
    assert topic.ack(message) == ["acked"]


def test_a_pop_gets_no_longer_lease_than_there_may_be(topic: Topic) -> None:
    topic.policy(invisibility_seconds=5, max_lease_seconds=10)
    topic.publish("a", "b")
    assert 4 < topic.pop_one()["invisible_until"] - time.time() <= 6
    assert 9 < topic.pop_one(invisibility_seconds=60)["invisible_until"] - time.time() <= 11


def test_a_lease_group_has_a_limit_of_its_own(topic: Topic) -> None:
    topic.policy(invisibility_seconds=1, max_lease_seconds=1)
    topic.publish("x")
    path = f"{topic.group_path}/lease-groups/s"
    formed = topic.client.put(f"{path}/1", json={"max_messages": 1, "invisibility_seconds": 60})
    assert answer(formed)["count"] == 1
    (extended,) = answer(topic.client.post(f"{path}/extend", json={"invisibility_seconds": 600}))["lease_groups"]
    assert extended["status"] == "extended"
    assert 590 < extended["remaining_seconds"] <= 600
    assert answer(topic.client.post(f"{path}/ack", json={"through_epoch": 1}))["acked"] == 1


def test_leases_are_not_longer_than_they_may_be_extended(topic: Topic) -> None:
    path = f"{topic.admin_path}/groups/default"
    for body, field in (
        ({"max_lease_seconds": 29}, "max_lease_seconds"),
        ({"invisibility_seconds": 61, "max_lease_seconds": 60}, "invisibility_seconds"),
    ):
        document = problem(topic.client.put(path, json=body), 400, "invalid_request")
        assert document["field"] == field
    topic.policy(max_lease_seconds=30)
    document = problem(topic.client.put(path, json={"invisibility_seconds": 31}), 400, "invalid_request")
    assert (document["field"], "30" in document["detail"]) == ("invisibility_seconds", True)
    assert topic.state()["policy"]["max_lease_seconds"] == 30


def test_the_age_of_the_oldest_lease_is_a_metric(server: HttpServer, topic: Topic) -> None:
    def age() -> float:
        return server.metrics()[f'popgate_oldest_lease_age_seconds{{group="default",topic="{topic.name}"}}']

    assert age() == 0.0
    topic.publish("a", "b")
    begun = time.monotonic()
    old = topic.pop_one(invisibility_seconds=60)
    time.sleep(1)
    young = topic.pop_one(invisibility_seconds=60)
    assert extend(topic, old, 120)["status"] == "extended"
    assert 0.9 < age() < time.monotonic() - begun + 0.1
    assert topic.ack(old) == ["acked"]
    assert age() < 0.9
    assert topic.ack(young) == ["acked"]
    assert age() == 0.0
