"""Dead letters over HTTP on both brokers: listed, inspected, redriven, purged."""

import base64
import json
import time

import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem, put
from contract.http_server import lean_server as server
from support.processes import wait_until

__all__ = ["server"]


class Desk:
    """The dead letters of one group."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.client = topic.client
        self.group_path = f"{topic.admin_path}/groups/{topic.group}"
        self.path = f"{self.group_path}/dead-letters"

    def bury(self, *bodies: str, reason: str = "bad", **fields: object) -> None:
        """Publish, pop and reject, in this order."""
        self.topic.publish(*bodies, **fields)
        self.bury_popped(self.topic.pop_all(len(bodies), invisibility_seconds=60), reason)

    def bury_popped(self, messages: list[Json], reason: str = "bad") -> None:
        entries = [{"receipt_handle": message["receipt_handle"], "reason": reason} for message in messages]
        for entry in entries:  # one by one, to keep this order
            assert self.topic.settle("reject", [entry]) == [{"status": "rejected"}]

    def page(self, **query: object) -> Json:
        return answer(self.client.get(self.path, params={name: str(value) for name, value in query.items()}))

    def listed(self, **query: object) -> list[Json]:
        """Return all pages."""
        page = self.page(**query)
        letters: list[Json] = page["messages"]
        while "next" in page:
            page = self.page(**{**query, "after": page["next"]})
            letters += page["messages"]
        return letters

    def bodies(self) -> list[str]:
        return [letter["body"] for letter in self.listed()]

    def redrive(self, **fields: object) -> Json:
        """Redrive until the end."""
        response = self.client.post(f"{self.path}/redrive", json={"wait_seconds": 20, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def start(self, **fields: object) -> Json:
        response = self.client.post(f"{self.path}/redrive", json=fields)
        assert response.status_code == 202, response.text
        return response.json()

    def progress(self) -> Json:
        return answer(self.client.get(f"{self.path}/redrive"))

    def purge(self, **fields: object) -> Json:
        return answer(self.client.post(f"{self.path}/purge", json=fields))

    def drained(self) -> list[str]:
        """Pop and ack everything visible."""
        bodies: list[str] = []
        while messages := self.topic.pop(max_messages=256):
            bodies += [message["body"] for message in messages]
            assert set(self.topic.ack(*messages)) == {"acked"}
        return bodies


@pytest.fixture
def desk(server: HttpServer) -> Desk:
    return Desk(server.topic())


# ---------------------------------------------------------------- list and inspect


@pytest.mark.rabbitmq_versions
def test_a_dead_letter_shows_its_message_and_why_it_died(desk: Desk) -> None:
    before = time.time()
    (published,) = desk.topic.publish("a", headers={"color": "red", "n": 7}, ordering_key="k")
    first = desk.topic.pop_one(invisibility_seconds=30)
    desk.topic.settle("release", [{"receipt_handle": first["receipt_handle"]}])
    second = desk.topic.pop_one(invisibility_seconds=30)
    desk.bury_popped([second], "can't be read")
    page = desk.page()
    (letter,) = page["messages"]
    assert page["dead"] == 1
    assert "next" not in page
    assert letter["message_id"] == published["message_id"]
    assert letter["body"] == "a"
    assert letter["body_bytes"] == 1
    assert letter["headers"] == {"color": "red", "n": 7}
    assert letter["ordering_key"] == "k"
    assert letter["reason"] == "can't be read"
    assert letter["cause"] == "rejected"
    assert letter["delivery_count"] == 2
    assert letter["source_queue"] == second["queue"]
    assert letter["published_at"] == second["published_at"]
    assert letter["first_delivered_at"] == second["first_delivered_at"]
    assert before - 1 <= letter["dead_lettered_at"] <= time.time() + 1
    assert letter["id"] not in (letter["message_id"], first["message_id"])
    assert answer(desk.client.get(f"{desk.path}/{letter['id']}")) == letter


@pytest.mark.rabbitmq_versions
def test_what_was_delivered_too_often_says_so(desk: Desk) -> None:
    desk.topic.policy(max_deliveries=1)
    desk.topic.publish("a")
    message = desk.topic.pop_one(invisibility_seconds=30)
    desk.topic.settle("release", [{"receipt_handle": message["receipt_handle"]}])
    assert desk.topic.pop(wait_seconds=1) == []
    (letter,) = desk.listed()
    assert letter["reason"] == letter["cause"] == "max_deliveries"
    assert letter["delivery_count"] == 1


@pytest.mark.rabbitmq_versions
def test_letters_are_listed_in_order_and_a_page_at_a_time_and_stay_as_they_are(desk: Desk) -> None:
    bodies = [f"m{number:02}" for number in range(25)]
    desk.bury(*bodies)
    assert [letter["body"] for letter in desk.listed(max_messages=10)] == bodies
    first = desk.page(max_messages=10)
    assert len(first["messages"]) == 10
    assert first["dead"] == 25
    assert desk.topic.state()["dead"] == 25, "while the list keeps its place, too"
    again = desk.page(max_messages=10)
    assert again == first
    assert desk.bodies() == bodies
    third = desk.page(max_messages=10, after=first["next"])
    assert [letter["body"] for letter in third["messages"]] == bodies[10:20], "also where it has lost its place"
    last = desk.page(max_messages=5, after=third["next"])
    assert [letter["body"] for letter in last["messages"]] == bodies[20:]
    assert "next" not in last


def test_a_page_goes_on_where_the_letter_before_it_is_gone(desk: Desk) -> None:
    desk.bury(*(f"m{number}" for number in range(6)))
    page = desk.page(max_messages=2)
    assert desk.purge(ids=[page["next"]])["purged"] == 1
    rest = desk.page(max_messages=2, after=page["next"])
    assert [letter["body"] for letter in rest["messages"]] == ["m2", "m3"]
    rest = desk.page(max_messages=2, after=rest["next"])
    assert [letter["body"] for letter in rest["messages"]] == ["m4", "m5"]
    assert "next" not in rest


def test_bodies_are_text_or_base64_and_may_be_cut_or_left_out(desk: Desk) -> None:
    binary = bytes(range(256))
    entry = {"body_base64": base64.b64encode(binary).decode()}
    answer(desk.client.post(f"{desk.topic.path}/messages", json={"messages": [entry]}))
    desk.topic.publish("äöü", json.dumps({"n": 1}), "")
    desk.bury_popped(desk.topic.pop_all(4, invisibility_seconds=60))
    by_size = {letter["body_bytes"]: letter for letter in desk.listed()}
    assert base64.b64decode(by_size[256]["body_base64"]) == binary
    assert "body" not in by_size[256]
    assert by_size[6]["body"] == "äöü"
    assert by_size[0]["body"] == ""
    assert "body_is_cut" not in by_size[6]
    cut = {letter["body_bytes"]: letter for letter in desk.listed(body_bytes_max=3)}
    assert cut[6]["body"] == "ä", "no half characters"
    assert base64.b64decode(cut[256].get("body_base64", "")) == binary[:3] or cut[256]["body"] == "\x00\x01\x02"
    assert cut[6]["body_is_cut"] is cut[256]["body_is_cut"] is True
    assert "body_is_cut" not in cut[0]
    assert {letter["body"] for letter in desk.listed(body_bytes_max=0)} == {""}


def test_an_answer_stops_at_32_mib_and_goes_on_with_the_next(desk: Desk) -> None:
    bodies = [letter * (12 * 1024 * 1024) for letter in "abc"]
    for body in bodies:
        desk.bury(body)
    page = desk.page()
    assert [letter["body"][0] for letter in page["messages"]] == ["a", "b"]
    rest = desk.page(after=page["next"])
    assert [letter["body"] for letter in rest["messages"]] == bodies[2:]
    assert [letter["body"] for letter in desk.page(body_bytes_max=2)["messages"]] == ["aa", "bb", "cc"]
    (letter,) = rest["messages"]
    assert answer(desk.client.get(f"{desk.path}/{letter['id']}"))["body"] == bodies[2]


def test_a_group_has_a_list_as_soon_as_it_is_created(server: HttpServer) -> None:
    """Its first queue is claimed a moment before its proxy takes over the letters."""
    topic = server.topic()
    for number in range(20):
        put(server.client, f"{topic.admin_path}/groups/g{number}")
        assert Desk(topic.of(f"g{number}")).page() == {"messages": [], "dead": 0}


def test_an_empty_list_and_unknown_letters(desk: Desk) -> None:
    assert desk.page() == {"messages": [], "dead": 0}
    problem(desk.client.get(f"{desk.path}/nobody"), 404, "dead_letter_not_found")
    problem(desk.client.get(f"{desk.topic.admin_path}/groups/nobody/dead-letters"), 404, "group_not_found")
    problem(desk.client.get("/v1/admin/topics/nothing/groups/nobody/dead-letters"), 404, "topic_not_found")
    problem(desk.client.get(f"{desk.path}/redrive"), 404, "redrive_not_found")
    problem(desk.client.delete(f"{desk.path}/redrive"), 404, "redrive_not_found")


# ---------------------------------------------------------------- redrive


@pytest.mark.rabbitmq_versions
def test_all_are_redriven_to_their_own_group_only(server: HttpServer) -> None:
    topic = server.topic("one", "two", queues=3)
    desk, other = Desk(topic.of("one")), Desk(topic.of("two"))
    bodies = [f"m{number}" for number in range(30)]
    desk.bury(*bodies, headers={"color": "red"})
    assert sorted(other.drained()) == sorted(bodies)
    before = {letter["message_id"]: letter for letter in desk.listed()}
    done = desk.redrive()
    assert (done["state"], done["total"], done["moved"], done["failed"]) == ("done", 30, 30, 0)
    assert done["started_at"] <= done["ended_at"]
    assert desk.page() == {"messages": [], "dead": 0}
    messages = desk.topic.pop_all(30, invisibility_seconds=60)
    for message in messages:
        letter = before[message["message_id"]]
        assert message["delivery_count"] == 1
        assert message["headers"] == {"color": "red"}
        assert message["body"] == letter["body"]
        assert message["queue"] == letter["source_queue"]
        assert message["published_at"] == letter["published_at"]
    assert set(desk.topic.ack(*messages)) == {"acked"}
    assert desk.drained() == []
    assert other.topic.pop(wait_seconds=1) == [], "the other group has had them"


def test_an_ordering_key_keeps_its_queue(server: HttpServer) -> None:
    desk = Desk(server.topic(queues=4))
    for number in range(8):
        desk.bury(f"m{number}", ordering_key=f"k{number}")
    queues = {letter["ordering_key"]: letter["source_queue"] for letter in desk.listed()}
    assert desk.redrive()["moved"] == 8
    again = desk.topic.pop_all(8, invisibility_seconds=60)
    assert {message["ordering_key"]: message["queue"] for message in again} == queues


@pytest.mark.rabbitmq_versions
def test_some_are_redriven_and_the_others_keep_their_order(desk: Desk) -> None:
    for number in range(10):
        desk.bury(f"m{number}", message_id=f"id{number % 3}")
    letters = desk.listed()
    done = desk.redrive(ids=[letters[7]["id"], letters[2]["id"], "nobody"])
    assert (done["state"], done["moved"], done["not_found"]) == ("done", 2, 1)
    assert sorted(desk.drained()) == ["m2", "m7"]
    assert desk.bodies() == [f"m{number}" for number in range(10) if number not in (2, 7)]
    assert desk.redrive(message_ids=["id0"])["moved"] == 4
    assert sorted(desk.drained()) == ["m0", "m3", "m6", "m9"]
    assert desk.redrive(max_messages=1)["moved"] == 1
    assert desk.drained() == ["m1"], "the oldest first"
    assert desk.bodies() == ["m4", "m5", "m8"]
    # A listing has just given its letters back. RabbitMQ 4.0 counts them 3 ms after it has closed the channel.
    wait_until(lambda: desk.topic.state()["dead"] == 3, timeout_seconds=1, what="RabbitMQ to count what it got back")


def test_a_redrive_to_another_topic_is_a_publish_there(server: HttpServer) -> None:
    desk = Desk(server.topic())
    target = server.topic("one", "two", queues=2)
    desk.bury("a", "b", "c", headers={"color": "red"})
    done = desk.redrive(target_topic=target.name)
    assert (done["state"], done["moved"], done["target_topic"]) == ("done", 3, target.name)
    assert desk.page()["dead"] == 0
    assert desk.drained() == []
    for group in ("one", "two"):
        messages = target.of(group).pop_all(3)
        assert sorted(message["body"] for message in messages) == ["a", "b", "c"]
        assert {message["delivery_count"] for message in messages} == {1}
        assert all(message["headers"] == {"color": "red"} for message in messages)


def test_a_target_that_nobody_reads_is_refused(server: HttpServer) -> None:
    desk = Desk(server.topic())
    desk.bury("a")
    path = f"{desk.path}/redrive"
    problem(desk.client.post(path, json={"target_topic": "no-such"}), 404, "topic_not_found")
    empty = f"{desk.topic.name}-empty"
    put(desk.client, f"/v1/admin/topics/{empty}", {"queues": 1})
    problem(desk.client.post(path, json={"target_topic": empty}), 409, "conflict")
    assert desk.bodies() == ["a"]


def test_a_redrive_with_a_rate_tells_its_progress_is_alone_and_can_be_cancelled(desk: Desk) -> None:
    bodies = [f"m{number:02}" for number in range(40)]
    desk.bury(*bodies)
    started = desk.start(rate_per_second=10)
    assert started["state"] == "running"
    again = problem(desk.client.post(f"{desk.path}/redrive", json={}), 409, "conflict")
    assert started["id"] in again["detail"]
    time.sleep(1.5)
    running = desk.progress()
    assert (running["id"], running["state"], running["total"]) == (started["id"], "running", 40)
    assert 5 <= running["moved"] <= 25
    listed = desk.listed()
    assert len(listed) <= 40 - running["moved"], "a list in between is answered"
    cancelled = answer(desk.client.delete(f"{desk.path}/redrive"))
    assert cancelled["state"] == "cancelled"
    moved = cancelled["moved"]
    assert moved < 40
    assert answer(desk.client.delete(f"{desk.path}/redrive")) == cancelled == desk.progress()
    assert desk.bodies() == bodies[moved:]
    assert sorted(desk.drained()) == bodies[:moved]
    assert desk.redrive()["moved"] == 40 - moved


@pytest.mark.rabbitmq_versions
def test_a_message_that_dies_again_meanwhile_is_not_redriven_again(desk: Desk) -> None:
    desk.bury(*(f"m{number}" for number in range(6)))
    desk.start(rate_per_second=4)
    desk.bury_popped([desk.topic.pop_one(wait_seconds=5, invisibility_seconds=30)], "again")
    deadline = time.monotonic() + 20
    while desk.progress()["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert desk.progress()["moved"] == 6
    (letter,) = desk.listed()
    assert (letter["body"], letter["reason"], letter["delivery_count"]) == ("m0", "again", 1)
    assert sorted(desk.drained()) == ["m1", "m2", "m3", "m4", "m5"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"ids": []}, "ids"),
        ({"ids": ["a"], "message_ids": ["b"]}, "message_ids"),
        ({"max_messages": 0}, "max_messages"),
        ({"rate_per_second": 0}, "rate_per_second"),
        ({"target_topic": "a b"}, "target_topic"),
        ({"wait_seconds": 31}, "wait_seconds"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_redrive_names_its_field(desk: Desk, body: dict[str, object], field: str) -> None:
    assert problem(desk.client.post(f"{desk.path}/redrive", json=body), 400, "invalid_request")["field"] == field


# ---------------------------------------------------------------- purge


@pytest.mark.rabbitmq_versions
def test_letters_are_purged_by_name_by_age_or_all(desk: Desk) -> None:
    for number in range(6):
        desk.bury(f"m{number}", message_id=f"id{number % 2}")
    letters = desk.listed()
    assert desk.purge(ids=[letters[1]["id"], "nobody"]) == {"purged": 1, "dead": 5, "complete": True}
    assert desk.purge(message_ids=["id0"])["purged"] == 3
    assert desk.bodies() == ["m3", "m5"]
    assert desk.purge(older_than_seconds=3600) == {"purged": 0, "dead": 2, "complete": True}
    assert desk.purge(older_than_seconds=0)["purged"] == 2
    desk.bury("x", "y")
    assert desk.purge() == {"purged": 2, "dead": 0, "complete": True}
    assert desk.page() == {"messages": [], "dead": 0}
    assert desk.topic.state()["dead"] == 0
    assert desk.drained() == []


@pytest.mark.rabbitmq_versions
def test_a_purge_of_a_group_drops_what_is_visible_and_leaves_leases_alone(desk: Desk) -> None:
    topic = desk.topic
    for start in (0, 250):
        topic.publish(*(f"m{number}" for number in range(start, start + 250)))
    leased = topic.pop_all(3, invisibility_seconds=60)
    delayed = topic.pop_one(invisibility_seconds=60)
    topic.settle("release", [{"receipt_handle": delayed["receipt_handle"], "delay_seconds": 2}])
    purged = answer(desk.client.post(f"{desk.group_path}/purge"))
    assert purged == {"purged": 496, "complete": True}
    state = topic.state()
    assert (state["ready"], state["in_flight"], state["dead"]) == (0, 3, 0)
    assert topic.ack(*leased) == ["acked"] * 3
    assert topic.pop_one(wait_seconds=5)["message_id"] == delayed["message_id"]
    topic.publish("later")
    assert topic.pop_one()["body"] == "later"


def test_a_purge_of_a_group_leaves_other_groups_alone(server: HttpServer) -> None:
    topic = server.topic("one", "two")
    topic.publish("a", "b")
    desk = Desk(topic.of("one"))
    assert answer(desk.client.post(f"{desk.group_path}/purge"))["purged"] == 2
    assert desk.drained() == []
    assert Desk(topic.of("two")).drained() == ["a", "b"]


def test_neither_a_pause_nor_max_in_flight_holds_up_a_purge(desk: Desk) -> None:
    desk.topic.publish("leased", "a", "b")
    leased = desk.topic.pop_one()
    desk.topic.policy(max_in_flight=1)
    assert desk.client.post(f"{desk.group_path}/pause").is_success
    assert desk.topic.pop(wait_seconds=0.5) == []
    assert answer(desk.client.post(f"{desk.group_path}/purge")) == {"purged": 2, "complete": True}
    desk.topic.publish("later")
    assert desk.topic.ack(leased) == ["acked"]
    assert desk.topic.pop(wait_seconds=0.5) == [], "it is still paused"
    assert desk.client.post(f"{desk.group_path}/resume").is_success
    assert desk.topic.pop_one()["body"] == "later"


def test_events_are_counted(server: HttpServer) -> None:
    desk = Desk(server.topic())
    desk.bury("a", "b", "c")
    desk.redrive(max_messages=2)
    desk.purge()
    answer(desk.client.post(f"{desk.group_path}/purge"))
    labels = f'topic="{desk.topic.name}"'
    counted = {
        name.split('kind="')[1].split('"')[0]: value
        for name, value in server.metrics().items()
        if name.startswith("popgate_events_total") and labels in name
    }
    assert (counted["redriven"], counted["purged"]) == (2, 3)
    assert answer(server.client.get("/v1"))["features"].count("dead_letters") == 1
    assert "purge" in answer(server.client.get("/v1"))["features"]
