"""popgate's promises for the messages of adopted queues (decision 3).

Identified: the admin has declared that every message_id names one message. Unidentified: all others, whose leases end
with the proxy's AMQP channel. The proxy is killed and the broker cuts its connections.
"""

import time
from collections import Counter
from pathlib import Path

import pytest
from pika.exceptions import ChannelClosedByBroker
from pika.spec import BasicProperties

from acceptance.adopting import GROUP, KINDS, Adopted, Popped, Site
from support.answers import bodies
from support.processes import wait_until
from support.rabbitmq import RabbitNode

LEASE_SECONDS = 2.0
LATE_SECONDS = 1.0
"""Maximum seconds from the end of a lease until another client gets the message."""
CLOCK_STEP_SECONDS = 0.05


def numbered(count: int) -> list[str]:
    return [f"m-{number:03}" for number in range(count)]


def fill(site: Site, kind: str, count: int, *, identified: bool) -> tuple[Adopted, str]:
    """Adopt a queue with that many messages."""
    queue = site.declare(kind)
    if identified:
        site.publish_with_ids(queue, numbered(count))
    else:
        site.publish(queue, *(name.encode() for name in numbered(count)))
    return site.adopt(queue, unique_message_ids=identified), queue


# ---------------------------------------------------------------- both columns


@pytest.mark.parametrize("identified", [False, True], ids=["unidentified", "identified"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_excludes_others_until_it_ends_and_then_the_message_comes_again(
    site: Site, kind: str, identified: bool
) -> None:
    adopted, _ = fill(site, kind, 1, identified=identified)
    first = adopted.pop_one(lease=LEASE_SECONDS)
    assert adopted.pop(wait=LEASE_SECONDS / 2) == []
    second = adopted.pop_one(wait=10)
    late = time.time() - first["invisible_until"]
    assert -CLOCK_STEP_SECONDS < late < LATE_SECONDS
    assert (second["body"], second["delivery_count"]) == (first["body"], 2)
    assert second["first_delivered_at"] == first["first_delivered_at"]
    assert adopted.ack(first) == ["expired"], "somebody else has it"
    assert adopted.ack(second) == ["acked"]
    assert adopted.ack(second) == ["already_acked"]


@pytest.mark.parametrize("identified", [False, True], ids=["unidentified", "identified"])
def test_a_late_ack_settles_a_message_that_nobody_else_has(site: Site, identified: bool) -> None:
    adopted, queue = fill(site, "quorum", 1, identified=identified)
    message = adopted.pop_one(lease=1)
    time.sleep(max(0.0, message["invisible_until"] - time.time()) + 0.2)
    assert adopted.ack(message) == ["acked"]
    assert adopted.pop(wait=1) == []
    assert site.ready(queue) == 0


@pytest.mark.parametrize("identified", [False, True], ids=["unidentified", "identified"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_acked_stays_away_when_the_proxy_is_killed_right_after_the_answer(
    own_site: Site, kind: str, identified: bool
) -> None:
    adopted, _ = fill(own_site, kind, 60, identified=identified)
    messages = adopted.pop_all()
    acked, leased = messages[:40], messages[40:]
    assert adopted.ack(*acked) == ["acked"] * len(acked)
    own_site.proxy.kill()
    own_site.proxy.start()
    if identified:
        adopted.extend(*leased, lease=1)
    again = adopted.pop_count(len(leased))
    assert sorted(bodies(again)) == sorted(bodies(leased))
    assert adopted.ack(*again) == ["acked"] * len(leased)
    assert adopted.pop(wait=1) == []


# ---------------------------------------------------------------- unidentified


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_on_an_unidentified_message_ends_with_the_channel(own_site: Site, kind: str) -> None:
    adopted, _ = fill(own_site, kind, 1, identified=False)
    first = adopted.pop_one(lease=600)
    own_site.node.close_connections(own_site.vhost)
    second = adopted.pop_one(wait=15)
    assert second["body"] == first["body"]
    assert second["receipt_handle"] != first["receipt_handle"]
    assert adopted.ack(first) == ["expired"], "never a false success"
    assert adopted.ack(second) == ["acked"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_delivery_count_of_an_unidentified_message_is_a_lower_bound_on_a_classic_queue(
    own_site: Site, kind: str
) -> None:
    adopted, _ = fill(own_site, kind, 1, identified=False)
    counts = [adopted.pop_one()["delivery_count"]]
    for _ in range(2):
        own_site.node.close_connections(own_site.vhost)
        counts.append(adopted.pop_one(wait=15)["delivery_count"])
    # Classic queues have no delivery count; a redelivered message may have been only in a buffer, unseen by any client.
    assert counts == ([1, 2, 3] if kind == "quorum" else [1, 1, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_were_only_buffered_are_not_counted_as_delivered(
    rabbitmq: RabbitNode, tmp_path: Path, kind: str
) -> None:
    with Site(rabbitmq, tmp_path / "site", "--idle-return-seconds", "0.3") as site:
        queue = site.declare(kind)
        site.publish(queue, *[f"{number}".encode() for number in range(8)])
        adopted = site.adopt(queue, max_deliveries=2)
        acked: list[Popped] = []
        while len(acked) < 4:
            acked.append(adopted.pop_one())
            assert adopted.ack(acked[-1]) == ["acked"]
            wait_until(lambda: site.ready(queue) == 8 - len(acked), timeout_seconds=10, what="the buffer's return")
        assert {message["delivery_count"] for message in acked + adopted.pop_count(4)} == {1}
        assert adopted.state()["dead"] == 0


# ---------------------------------------------------------------- identified


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_on_an_identified_message_outlives_a_killed_proxy(own_site: Site, kind: str) -> None:
    adopted, _ = fill(own_site, kind, 40, identified=True)
    leased = adopted.pop(6, lease=600) + adopted.pop(6, lease=600)
    acked, kept, given_back, ending = leased[:3], leased[3], leased[4], leased[5:]
    assert adopted.ack(*acked) == ["acked"] * 3
    own_site.proxy.kill()
    own_site.proxy.start()

    others = adopted.pop_all(lease=600)
    assert sorted(bodies(others)) == sorted(set(numbered(40)) - {message["message_id"] for message in leased})
    assert {message["delivery_count"] for message in others} == {1}, "only hand-outs to clients count"
    assert adopted.ack(kept) == ["acked"]
    assert adopted.ack(*acked) == ["already_acked"] * 3
    assert adopted.release(given_back) == ["released"]
    assert adopted.pop_one()["message_id"] == given_back["message_id"]
    assert set(adopted.extend(*ending, lease=1)) == {"extended"}
    again = adopted.pop_count(len(ending))
    assert sorted(bodies(again)) == sorted(bodies(ending))
    assert {message["delivery_count"] for message in again} == {2}
    assert adopted.ack(*ending) == ["expired"] * len(ending)


def test_a_lease_on_an_identified_message_outlives_a_cut_connection(own_site: Site) -> None:
    adopted, queue = fill(own_site, "quorum", 3, identified=True)
    first = adopted.pop_one(lease=600)
    own_site.node.close_connections(own_site.vhost)
    assert sorted(bodies(adopted.pop_count(2))) == ["m-001", "m-002"]
    assert adopted.pop(wait=1) == []
    assert adopted.ack(first) == ["acked"]
    assert own_site.ready(queue) == 0


def test_among_declared_ids_a_message_without_one_is_treated_as_unidentified(own_site: Site) -> None:
    adopted, queue = fill(own_site, "classic", 1, identified=True)
    own_site.publish(queue, b"without an id", b"without an id")
    leased = adopted.pop_all(lease=600)
    assert Counter(message["body"] for message in leased) == {"m-000": 1, "without an id": 2}
    own_site.node.close_connections(own_site.vhost)
    assert sorted(bodies(adopted.pop_count(2))) == ["without an id"] * 2
    assert adopted.pop(wait=1) == [], "the identified message is still leased"


def test_a_declared_id_may_be_any_text(site: Site) -> None:
    ids = ["~1.2.3", "a|b|c", "ü" * 127, " ", "%7E1", "\n", "x" * 255, '{"id": 1}']
    queue = site.declare("quorum")
    site.publish_with_ids(queue, ids)
    adopted = site.adopt(queue, unique_message_ids=True)
    messages = adopted.pop_count(len(ids))
    assert sorted(message["message_id"] for message in messages) == sorted(ids)
    assert adopted.ack(*messages) == ["acked"] * len(ids)
    assert adopted.ack(*messages) == ["already_acked"] * len(ids)
    assert site.ready(queue) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_message_with_a_declared_id_counts_as_the_same(site: Site, kind: str) -> None:
    """The documentation warns: ids that are declared unique but are not cause lost messages."""
    queue = site.declare(kind)
    site.publish_with_ids(queue, ["same", "same", "other"])
    adopted = site.adopt(queue, unique_message_ids=True)
    messages = adopted.pop_count(2)
    assert sorted(bodies(messages)) == ["other", "same"]
    assert adopted.ack(*messages) == ["acked"] * 2
    site.publish_with_ids(queue, ["same"])
    assert adopted.pop(wait=1) == []
    assert site.ready(queue) == 0


# ---------------------------------------------------------------- dead letters


@pytest.mark.parametrize("identified", [False, True], ids=["unidentified", "identified"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rejected_message_stands_in_the_groups_dead_letters_as_it_was(
    site: Site, kind: str, identified: bool
) -> None:
    queue = site.declare(kind)
    properties = BasicProperties(
        content_type="image/png", correlation_id="c-1", message_id="m-1" if identified else None, headers={"own": [1]}
    )
    site.publish(queue, b"\x00\xff", properties=properties)
    adopted = site.adopt(queue, unique_message_ids=identified)
    assert adopted.reject(adopted.pop_one(), reason="can't be read") == ["rejected"]
    assert (adopted.state()["dead"], site.ready(queue)) == (1, 0)

    dead, body = site.take(f"popgate:{adopted.topic}:{GROUP}:dead")
    assert body == b"\x00\xff"
    assert (dead.content_type, dead.correlation_id, dead.delivery_mode) == ("image/png", "c-1", 2)
    headers = dict(dead.headers or {})
    assert headers["own"] == [1]
    assert headers["x-popgate-dead-cause"] == "rejected"
    assert headers["x-popgate-dead-reason"] == "can't be read"
    assert headers["x-popgate-dead-topic"] == adopted.topic
    assert headers["x-popgate-dead-group"] == GROUP
    assert headers["x-popgate-dead-queue"] == 0
    assert headers["x-popgate-delivery-count"] == 1
    if identified:
        assert dead.message_id == "m-1"


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_was_delivered_too_often_is_dead_lettered(site: Site, kind: str) -> None:
    queue = site.declare(kind)
    site.publish(queue, b"poison")
    adopted = site.adopt(queue, max_deliveries=2)
    assert adopted.release(adopted.pop_one()) == ["released"]
    second = adopted.pop_one(lease=1)
    assert second["delivery_count"] == 2
    assert adopted.pop(wait=3) == [], "the second lease has ended, and nobody gets it a third time"
    wait_until(lambda: adopted.state()["dead"] == 1, timeout_seconds=10, what="a dead letter")

    dead, body = site.take(f"popgate:{adopted.topic}:{GROUP}:dead")
    headers = dict(dead.headers or {})
    assert body == b"poison"
    assert headers["x-popgate-dead-cause"] == "max_deliveries"
    assert headers["x-popgate-delivery-count"] == 2
    assert int(second["first_delivered_at"]) == headers["x-popgate-first-delivered-at"]  # pika truncates doubles
    assert -1 <= headers["x-popgate-dead-at"] - second["invisible_until"] < 3
    assert adopted.ack(second) == ["expired"]
    assert site.ready(queue) == 0


def test_deleting_the_topic_deletes_its_dead_letters_but_not_the_adopted_queue(site: Site) -> None:
    queue = site.declare("quorum")
    site.publish(queue, b"bad", b"good")
    adopted = site.adopt(queue)
    bad, good = sorted(adopted.pop_all(), key=lambda message: str(message["body"]))
    adopted.reject(bad, reason="bad")
    adopted.release(good)
    assert site.proxy.client.delete(f"/v1/admin/topics/{adopted.topic}").status_code == 204
    assert site.take(queue)[1] == b"good"
    with pytest.raises(ChannelClosedByBroker, match="no queue"):
        site.ready(f"popgate:{adopted.topic}:{GROUP}:dead")
