"""A message on which popgate always fails: the others flow, the process lives, and the message is not lost."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest

from contract.http_server import Json, Topic, put
from contract.test_http_dead_letters import Desk
from contract.test_http_lease_groups import arrow_ipc, path, put_all
from support.journal_files import rows_of
from support.poisoned_proxy import poisoned_program
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

BARE = {"amqp-unreadable-headers": "{'poison': True}"}


class Poisoned:
    """Successive proxies with the same data that fail on poison, each in a different place."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self._folder = folder
        self._flags = ["--auto-create", "true", *flags]
        self._proxy: ProxyProcess | None = None

    @contextmanager
    def failing(self, place: str) -> Generator[tuple[ProxyProcess, Topic]]:
        data = self._folder / "data"
        program = poisoned_program(place)
        with ProxyProcess(self._folder, *self._flags, data_folder=data, program=program) as proxy:
            topic = Topic(proxy.client, "orders")
            put(proxy.client, topic.admin_path, {"queues": 1})
            put(proxy.client, f"{topic.admin_path}/groups/default", {"max_deliveries": 3})
            yield proxy, topic
            assert proxy.is_running()


@pytest.fixture
def poisoned(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Poisoned]:
    """On the embedded broker, unless the test requests RabbitMQ as well."""
    if getattr(request, "param", "embedded") == "embedded":
        yield Poisoned(tmp_path, [])
        return
    node: RabbitNode = request.getfixturevalue("rabbitmq")
    vhost = f"poison-{token_hex(4)}"
    node.add_vhost(vhost)
    yield Poisoned(tmp_path, ["--amqp-url", node.amqp_url(vhost)])
    node.delete_vhost(vhost)


def publish_all(topic: Topic) -> None:
    topic.publish("before")
    topic.publish("poison", headers={"poison": True})
    topic.publish("after")


def faults(proxy: ProxyProcess, part: str = "message") -> float:
    return metric(proxy, f'popgate_faults_total{{part="{part}"}}')


def metric(proxy: ProxyProcess, name: str) -> float:
    (line,) = [line for line in proxy.client.get("/metrics").text.splitlines() if line.startswith(name + " ")]
    return float(line.rpartition(" ")[2])


def the_letter(topic: Topic) -> Json:
    """Return the poison among the dead letters, once it is there."""
    desk = Desk(topic)
    wait_until(lambda: bool(desk.listed()), timeout_seconds=20, what="the dead letter")
    (letter,) = desk.listed()
    assert letter["body"] == "poison"
    return letter


@pytest.mark.parametrize("poisoned", ["embedded", "rabbitmq"], indirect=True)
def test_poison_in_a_delivery_is_quarantined_and_its_queue_flows(poisoned: Poisoned) -> None:
    with poisoned.failing("where it is delivered") as (proxy, topic):
        publish_all(topic)
        assert [message["body"] for message in topic.pop_all(2)] == ["before", "after"]
        letter = the_letter(topic)
        assert (letter["cause"], letter["reason"]) == ("unreadable", "unreadable: RecursionError: poison")
        assert letter["headers"] == BARE
        assert faults(proxy) == 2
    with poisoned.failing("where its dead letter is read") as (proxy, topic):
        assert Desk(topic).redrive()["moved"] == 1
        assert (topic.pop_one()["headers"]) == BARE


def test_poison_in_the_making_of_its_dead_letter_is_dead_lettered_bare(poisoned: Poisoned) -> None:
    with poisoned.failing("where its dead letter is made") as (proxy, topic):
        publish_all(topic)
        messages = topic.pop_all(3, invisibility_seconds=60)
        entries = [{"receipt_handle": message["receipt_handle"], "reason": "bad"} for message in messages]
        statuses = {
            message["body"]: one["status"]
            for message, one in zip(messages, topic.settle("reject", entries), strict=True)
        }
        assert (statuses["before"], statuses["after"]) == ("rejected", "rejected")
        desk = Desk(topic)
        wait_until(lambda: len(desk.listed()) == 3, timeout_seconds=20, what="the dead letters")
        causes = {letter["body"]: (letter["cause"], letter["headers"]) for letter in desk.listed()}
        assert causes == {"before": ("rejected", {}), "poison": ("unreadable", BARE), "after": ("rejected", {})}
        assert faults(proxy) == 2


def test_poison_that_no_dead_letter_can_be_made_of_stays_and_its_queue_flows(poisoned: Poisoned) -> None:
    with poisoned.failing("wherever its dead letter is made") as (proxy, topic):
        publish_all(topic)
        for number in range(3):
            for message in topic.pop_all(3 if number == 0 else 1, invisibility_seconds=1):
                if message["body"] != "poison":
                    assert topic.ack(message) == ["acked"]
        stuck = 'popgate_stuck{group="default",topic="orders"}'
        wait_until(lambda: metric(proxy, stuck) == 1, timeout_seconds=20, what="the message to be stuck")
        topic.publish("later")
        assert topic.pop_one()["body"] == "later"
        assert Desk(topic).listed() == []
    with poisoned.failing("where it is shown") as (proxy, topic):  # this one can make it
        topic.pop()
        assert the_letter(topic)["cause"] == "max_deliveries"


def test_poison_in_answers_is_shown_bare(poisoned: Poisoned) -> None:
    with poisoned.failing("where it is shown") as (proxy, topic):
        publish_all(topic)
        for accept in ("application/json", "application/msgpack"):
            response = topic.client.post(
                f"{topic.group_path}/pop", json={"max_messages": 3, "wait_seconds": 2}, headers={"accept": accept}
            )
            assert response.status_code == 200, response.text
            decode = msgspec.json.decode if accept.endswith("json") else msgspec.msgpack.decode
            messages = decode(response.content)["messages"]
            assert [message["headers"] for message in messages] == [{}, BARE, {}]
            handles = [message["receipt_handle"] for message in messages]
            release = [{"receipt_handle": handle, "delay_seconds": 0} for handle in handles]
            assert {one["status"] for one in topic.settle("release", release)} == {"released"}
        assert faults(proxy) == 2
        assert put_all(topic, 3, slices=1)["count"] == 3
        for accept in ("application/json", "application/msgpack", "application/vnd.apache.arrow.stream"):
            answer = topic.client.get(path(topic, "s", 1, "messages"), params={"slice": 0}, headers={"accept": accept})
            assert answer.status_code == 200, answer.text
            if accept.endswith("stream"):
                rows = arrow_ipc.open_stream(answer.content).read_all().to_pylist()
                shown = [msgspec.json.decode(row["headers"]) for row in rows]
            else:
                decode = msgspec.json.decode if accept.endswith("json") else msgspec.msgpack.decode
                shown = [message["headers"] for message in decode(answer.content)["messages"]]
            assert shown == [{}, BARE, {}]


def test_poison_in_the_listing_of_dead_letters_hides_no_other_one(poisoned: Poisoned) -> None:
    with poisoned.failing("where its dead letter is read") as (proxy, topic):
        desk = Desk(topic)
        publish_all(topic)
        desk.bury_popped(topic.pop_all(3, invisibility_seconds=60))
        assert desk.bodies() == ["before", "poison", "after"]
        assert faults(proxy) > 0
        assert desk.redrive()["moved"] == 3
        assert len(topic.pop_all(3)) == 3


def test_poison_in_the_journal_costs_only_its_own_events_and_the_journal_says_how_many(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    flags = ["--journal", f"{journal}", "--journal-rotate-seconds", "1"]
    bodies, events = ("before", "poison", "after"), ("acked", "delivered", "published")
    with Poisoned(tmp_path, flags).failing("where it is journaled") as (proxy, topic):
        for body in bodies:
            topic.publish(body, message_id=body)
        for body in bodies:
            message = topic.pop_one()
            assert message["body"] == body
            assert topic.ack(message) == ["acked"]
        assert faults(proxy, "journal") == 3
        assert metric(proxy, "popgate_journal_events_dropped_total") == 3
        for event in ("acked", "delivered"):
            counted = f'popgate_events_total{{group="default",kind="{event}",topic="orders"}}'
            assert metric(proxy, counted) == 3, "the other journal misses nothing"
        told = {(body, event) for body in bodies if body != "poison" for event in events}
        wait_until(lambda: told_in(journal) >= told, timeout_seconds=20, what="the journal's files")
        assert told_in(journal) == told
    assert sum(int(row["detail"]) for row in rows_of(journal) if row["event"] == "journal_lost") == 3
    assert (proxy.folder / "output.log").read_text().count("a journal failed and lost events") == 1


def told_in(journal: Path) -> set[tuple[str, str]]:
    """Return the messages and events of the journal's files."""
    return {(row["message_id"], row["event"]) for row in rows_of(journal) if row["message_id"]}
