"""The data plane of the HTTP interface (decision 1), against a real server on each broker.

One sentence of the interface a test. Errors are in test_http_errors, the admin interface in test_http_admin,
MessagePack in test_http_msgpack, clients that go away in test_http_client_gone.
"""

import base64
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.http_server import CREATED_QUEUES, HttpServer, Json, Topic, answer, problem, server
from popgate import __version__

__all__ = ["server"]


# -- the server -------------------------------------------------------------------------------------------------------


def test_the_index_says_what_the_server_is_and_can_do(server: HttpServer) -> None:
    index = answer(server.client.get("/v1"))
    assert index["service"] == "popgate"
    assert index["version"] == __version__
    assert index["protocol"] == {"min": 1, "max": 1}
    assert index["broker"] == server.broker
    assert {"pop", "attempt_id", "msgpack", "auto_create"} <= set(index["features"])
    assert ("adopt" in index["features"]) == (server.broker == "rabbitmq")


def test_a_running_server_is_healthy_and_ready(server: HttpServer) -> None:
    assert answer(server.client.get("/healthz")) == {"status": "ok"}
    assert answer(server.client.get("/readyz")) == {"status": "ok"}


def test_metrics_count_events_and_requests(server: HttpServer, topic: Topic) -> None:
    topic.publish("a", "b")
    (message,) = topic.pop_all(1)
    topic.ack(message)
    metrics = server.client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    lines = metrics.text.splitlines()
    of_group = f'topic="{topic.name}"'
    values = server.metrics()
    assert values[f'popgate_events_total{{group="",kind="published",{of_group}}}'] == 2
    assert values[f'popgate_events_total{{group="default",kind="delivered",{of_group}}}'] == 1
    assert values[f'popgate_events_total{{group="default",kind="acked",{of_group}}}'] == 1
    assert values[f'popgate_in_flight{{group="default",{of_group}}}'] == 0
    assert values[f'popgate_parked_pops{{group="default",{of_group}}}'] == 0
    assert any(line.startswith('popgate_http_requests_total{operation="publish",status="200"} ') for line in lines)
    assert any(line.startswith("popgate_build_info{") for line in lines)
    assert any(line.startswith("process_cpu_seconds_total ") for line in lines)


def test_the_documentation_needs_no_other_server(server: HttpServer) -> None:
    page = server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "://" not in page.text
    for name in ("swagger-ui.css", "swagger-ui-bundle.js", "start.js", "favicon-32x32.png"):
        assert f"docs/{name}" in page.text
        assert server.client.get(f"/docs/{name}").status_code == 200
    problem(server.client.get("/docs/other.js"), 404, "not_found")


# -- publish and pop --------------------------------------------------------------------------------------------------


def test_a_published_message_is_popped_with_everything_about_it(topic: Topic) -> None:
    before = time.time()
    headers = {"text": "grün", "int": -(2**63), "float": 1.5, "yes": True, "nothing": None}
    (result,) = topic.publish("hello", headers=headers, message_id="m-1", ordering_key="k")
    assert result == {"status": "published", "message_id": "m-1"}
    message = topic.pop_one(invisibility_seconds=60)
    assert message.keys() == {
        "message_id",
        "receipt_handle",
        "body",
        "headers",
        "ordering_key",
        "queue",
        "delivery_count",
        "published_at",
        "first_delivered_at",
        "invisible_until",
    }
    assert message["message_id"] == "m-1"
    assert message["body"] == "hello"
    assert message["headers"] == headers
    assert message["ordering_key"] == "k"
    assert message["queue"] == 0
    assert message["delivery_count"] == 1
    assert before - 1 <= message["published_at"] <= message["first_delivered_at"] + 1 <= time.time() + 2
    assert 50 < message["invisible_until"] - time.time() <= 61


def test_a_message_without_options_gets_a_message_id_and_no_ordering_key(topic: Topic) -> None:
    (result,) = topic.publish("x")
    message = topic.pop_one()
    assert message["message_id"] == result["message_id"] != ""
    assert message["headers"] == {}
    assert "ordering_key" not in message


@pytest.mark.parametrize("body", ["", "text", 'quotes " and \\', "\x00\x7f", "日本語 🎈", "x" * 1_000_000], ids=len)
def test_a_text_comes_back_as_it_was_published(topic: Topic, body: str) -> None:
    topic.publish(body)
    message = topic.pop_one()
    assert message["body"] == body
    assert "body_base64" not in message


@pytest.mark.parametrize("body", [b"\xff", b"\x80" * 1000, bytes(range(256))], ids=len)
def test_bytes_that_are_no_text_come_back_in_base64(topic: Topic, body: bytes) -> None:
    entry = {"body_base64": base64.b64encode(body).decode()}
    answer(topic.client.post(f"{topic.path}/messages", json={"messages": [entry]}))
    message = topic.pop_one()
    assert base64.b64decode(message["body_base64"]) == body
    assert "body" not in message


def test_bytes_that_are_a_text_come_back_as_text(topic: Topic) -> None:
    entry = {"body_base64": base64.b64encode(b"text").decode()}
    answer(topic.client.post(f"{topic.path}/messages", json={"messages": [entry, {"body_base64": ""}]}))
    assert [message["body"] for message in topic.pop_all(2)] == ["text", ""]


def test_a_message_of_16_mib_comes_back(topic: Topic) -> None:
    body = "m" * (16 * 1024 * 1024)
    topic.publish(body)
    assert topic.pop_one(wait_seconds=5)["body"] == body


def test_256_messages_are_published_at_once_and_popped_in_order(topic: Topic) -> None:
    bodies = [str(number) for number in range(256)]
    results = topic.publish(*bodies)
    assert len({result["message_id"] for result in results}) == 256
    assert [message["body"] for message in topic.pop_all(256)] == bodies


def test_an_answer_stops_at_32_mib(topic: Topic) -> None:
    for number in range(5):
        topic.publish(str(number) + "x" * (8 * 1024 * 1024))
    first = topic.pop(max_messages=5, wait_seconds=5)
    assert 1 <= len(first) <= 4
    assert len(topic.pop_all(5 - len(first))) == 5 - len(first)


@pytest.mark.parametrize("body", [b"\xff" * 2**20, b"\x01" * 2**20, b'"' * 2**20], ids=["base64", "controls", "quotes"])
def test_an_answer_stops_at_32_mib_as_it_is_written(topic: Topic, body: bytes) -> None:
    count = 40
    for _ in range(count // 10):
        messages = [{"body_base64": base64.b64encode(body).decode()}] * 10
        answer(topic.client.post(f"{topic.path}/messages", json={"messages": messages}))
    asked = {"max_messages": count, "wait_seconds": 5, "invisibility_seconds": 600}
    popped = topic.client.post(f"{topic.group_path}/pop", json=asked)
    assert len(popped.content) <= 32 * 2**20
    assert 1 <= len(answer(popped)["messages"]) < count


def test_a_pop_gives_at_most_max_messages_and_one_unless_asked(topic: Topic) -> None:
    topic.publish(*"abcdef")
    assert len(topic.pop(wait_seconds=1)) == 1
    assert len(topic.pop(wait_seconds=1, max_messages=2.0)) <= 2


def test_every_group_gets_every_message(server: HttpServer) -> None:
    topic = server.topic("one", "two")
    topic.publish("x")
    assert topic.of("one").pop_one()["body"] == "x"
    assert topic.of("two").pop_one()["body"] == "x"


def test_messages_with_one_ordering_key_go_to_one_queue(server: HttpServer) -> None:
    topic = server.topic(queues=4)
    topic.publish(*(str(number) for number in range(20)), ordering_key="k")
    messages: list[Json] = []
    while len(messages) < 20:  # the next client has to wait until the messages before are settled
        more = topic.pop(max_messages=20, wait_seconds=2)
        assert topic.ack(*more) == ["acked"] * len(more)
        messages += more
    assert len({message["queue"] for message in messages}) == 1
    assert [message["body"] for message in messages] == [str(number) for number in range(20)]


def test_messages_without_a_key_are_spread_over_the_queues(server: HttpServer) -> None:
    topic = server.topic(queues=4)
    topic.publish(*(str(number) for number in range(8)))
    assert {message["queue"] for message in topic.pop_all(8)} == {0, 1, 2, 3}


def test_publishing_to_an_unknown_topic_creates_it_with_the_group_default(server: HttpServer) -> None:
    topic = Topic(server.client, f"created-{time.time_ns()}")
    topic.publish("x")
    assert answer(server.client.get(topic.admin_path))["queues"] == CREATED_QUEUES
    assert topic.pop_one()["body"] == "x"


def test_popping_as_an_unknown_group_creates_it_for_what_comes_later(server: HttpServer, topic: Topic) -> None:
    topic.publish("before")
    late = topic.of("late")
    assert late.pop() == []
    topic.publish("after")
    assert late.pop_one()["body"] == "after"


def test_a_message_that_no_group_would_get_is_answered_as_failed(server: HttpServer) -> None:
    topic = server.topic()
    server.client.delete(f"{topic.admin_path}/groups/default").raise_for_status()
    response = server.client.post(f"{topic.path}/messages", json={"messages": [{"body": "x", "message_id": "m"}]})
    (result,) = answer(response)["results"]
    assert result["status"] == "failed"
    assert result["message_id"] == "m"
    assert result["error"]["code"] == "no_subscribers"
    assert result["error"]["detail"]


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_an_empty_body_is_a_pop_with_all_defaults(topic: Topic) -> None:
    topic.publish("x")
    assert answer(topic.client.post(f"{topic.group_path}/pop"))["messages"] or topic.pop_one()


def test_a_pop_that_does_not_wait_answers_an_empty_list_at_once(topic: Topic) -> None:
    topic.pop()
    begun = time.monotonic()
    assert topic.pop() == []
    assert time.monotonic() - begun < 0.5


def test_a_pop_that_waits_answers_an_empty_list_when_the_wait_ends(topic: Topic) -> None:
    begun = time.monotonic()
    assert topic.pop(wait_seconds=0.5) == []
    assert 0.4 < time.monotonic() - begun < 2


def test_a_parked_pop_wakes_when_a_message_comes(topic: Topic) -> None:
    topic.pop()
    late: list[float] = []
    with ThreadPoolExecutor() as pool:
        for _ in range(10):
            parked = pool.submit(topic.pop_one, wait_seconds=20)
            time.sleep(0.05)  # until it is parked; a later moment is only easier
            topic.publish("x")
            published_at = time.monotonic()
            topic.ack(parked.result())
            late.append(time.monotonic() - published_at)
    sys.stdout.write(f"\nacked {1000 * sorted(late)[5]:.1f} ms after its publish was answered (median)\n")
    assert sorted(late)[5] < 0.1


def test_parked_pops_each_get_a_message_of_their_own(topic: Topic) -> None:
    with ThreadPoolExecutor(8) as pool:
        parked = [pool.submit(topic.pop_one, wait_seconds=20) for _ in range(8)]
        time.sleep(0.1)
        topic.publish(*"abcdefgh")
        assert sorted(each.result()["body"] for each in parked) == list("abcdefgh")


# -- leases -----------------------------------------------------------------------------------------------------------


def test_nobody_else_gets_a_leased_message_until_its_lease_ends(topic: Topic) -> None:
    topic.publish("x")
    first = topic.pop_one(invisibility_seconds=1)
    assert topic.pop(wait_seconds=0.3) == []
    second = topic.pop_one(wait_seconds=5)
    assert second["message_id"] == first["message_id"]
    assert second["delivery_count"] == 2
    assert second["first_delivered_at"] == pytest.approx(first["first_delivered_at"])
    assert second["receipt_handle"] != first["receipt_handle"]


def test_an_acked_message_never_comes_again(topic: Topic) -> None:
    topic.publish("x")
    message = topic.pop_one(invisibility_seconds=1)
    assert topic.ack(message) == ["acked"]
    assert topic.pop(wait_seconds=1.5) == []
    assert topic.state()["in_flight"] == 0


def test_a_repeated_ack_is_told_so(topic: Topic) -> None:
    topic.publish("x")
    message = topic.pop_one()
    assert topic.ack(message) == ["acked"]
    assert topic.ack(message, message) == ["already_acked", "already_acked"]


def test_a_late_ack_is_accepted_while_nobody_else_has_the_message(topic: Topic) -> None:
    topic.publish("x")
    message = topic.pop_one(invisibility_seconds=1)
    time.sleep(1.3)
    assert topic.ack(message) == ["acked"]
    assert topic.pop(wait_seconds=0.3) == []


def test_a_late_ack_does_not_settle_another_consumers_lease(topic: Topic) -> None:
    topic.publish("x")
    first = topic.pop_one(invisibility_seconds=1)
    second = topic.pop_one(wait_seconds=5)
    assert topic.ack(first) == ["expired"]
    assert topic.ack(second) == ["acked"]


def test_results_come_in_the_order_asked_also_when_some_failed(topic: Topic) -> None:
    topic.publish(*"abc")
    messages = topic.pop_all(3)
    topic.ack(messages[1])
    handles = [
        messages[0]["receipt_handle"],
        "forged",
        messages[1]["receipt_handle"],
        messages[2]["receipt_handle"],
        "",
    ]
    assert topic.ack(*handles) == ["acked", "invalid", "already_acked", "acked", "invalid"]


@pytest.mark.parametrize("damage", ["truncated", "changed", "longer", "grün", "A" * 5000])
def test_a_forged_receipt_handle_is_invalid(topic: Topic, damage: str) -> None:
    topic.publish("x")
    handle = topic.pop_one()["receipt_handle"]
    changed = handle[:-5] + ("A" if handle[-5] != "A" else "B") + handle[-4:]
    forged = {"truncated": handle[:-3], "changed": changed, "longer": handle + "A"}.get(damage, damage)
    assert topic.ack(forged) == ["invalid"]
    assert topic.settle("release", [{"receipt_handle": forged}]) == [{"status": "invalid"}]
    assert topic.settle("extend", [{"receipt_handle": forged, "invisibility_seconds": 5}]) == [{"status": "invalid"}]
    assert topic.settle("reject", [{"receipt_handle": forged}]) == [{"status": "invalid"}]


def test_a_receipt_handle_of_another_group_is_invalid(server: HttpServer) -> None:
    topic = server.topic("one", "two")
    topic.publish("x")
    message = topic.of("one").pop_one()
    assert topic.of("two").ack(message) == ["invalid"]
    assert topic.of("one").ack(message) == ["acked"]


def test_a_released_message_is_visible_again_at_once(topic: Topic) -> None:
    topic.publish("x")
    message = topic.pop_one()
    assert topic.settle("release", [{"receipt_handle": message["receipt_handle"]}]) == [{"status": "released"}]
    assert topic.pop_one()["delivery_count"] == 2
    assert topic.ack(message) == ["expired"]


def test_a_release_with_a_delay_keeps_the_message_back_for_so_long(topic: Topic) -> None:
    topic.publish("x")
    message = topic.pop_one()
    entry = {"receipt_handle": message["receipt_handle"], "delay_seconds": 1.2, "reason": "later"}
    assert topic.settle("release", [entry]) == [{"status": "released"}]
    released_at = time.monotonic()
    assert topic.state()["delayed"] == 1
    assert topic.pop_one(wait_seconds=5)["delivery_count"] == 2
    assert time.monotonic() - released_at > 1.0


def test_an_extended_lease_ends_so_much_later_and_keeps_its_receipt_handle(topic: Topic) -> None:
    topic.publish("x")
    message = topic.pop_one(invisibility_seconds=1)
    entry = {"receipt_handle": message["receipt_handle"], "invisibility_seconds": 30}
    (result,) = topic.settle("extend", [entry])
    assert result["status"] == "extended"
    assert 25 < result["invisible_until"] - time.time() <= 31
    assert topic.pop(wait_seconds=1.5) == []
    assert topic.ack(message) == ["acked"]


def test_a_rejected_message_stands_in_the_dead_letters(topic: Topic) -> None:
    topic.publish("x")
    message = topic.pop_one()
    entry = {"receipt_handle": message["receipt_handle"], "reason": "can't be read"}
    assert topic.settle("reject", [entry]) == [{"status": "rejected"}]
    assert topic.settle("reject", [entry]) == [{"status": "rejected"}]
    state = topic.state()
    assert (state["dead"], state["ready"], state["in_flight"]) == (1, 0, 0)
    assert topic.ack(message) == ["expired"]


def test_a_message_that_was_delivered_max_deliveries_times_stands_in_the_dead_letters(topic: Topic) -> None:
    topic.policy(max_deliveries=2)
    topic.publish("x")
    for count in (1, 2):
        message = topic.pop_one()
        assert message["delivery_count"] == count
        topic.settle("release", [{"receipt_handle": message["receipt_handle"]}])
    assert topic.pop(wait_seconds=1) == []
    assert topic.state()["dead"] == 1


def test_the_retry_policy_delays_a_message_after_an_expiry_and_after_a_release_without_a_delay(topic: Topic) -> None:
    topic.policy(retry={"initial_seconds": 1, "multiplier": 1})
    topic.publish("x")
    message = topic.pop_one()
    topic.settle("release", [{"receipt_handle": message["receipt_handle"]}])
    begun = time.monotonic()
    topic.pop_one(wait_seconds=5, invisibility_seconds=1)
    assert time.monotonic() - begun > 0.8, "after the release"
    begun = time.monotonic()
    message = topic.pop_one(wait_seconds=5)
    assert time.monotonic() - begun > 1.7, "after the expiry: a second of lease and one of delay"
    topic.settle("release", [{"receipt_handle": message["receipt_handle"], "delay_seconds": 0}])
    begun = time.monotonic()
    topic.pop_one(wait_seconds=5)
    assert time.monotonic() - begun < 0.8, "a delay of its own goes before the policy's"


def test_the_lease_lasts_as_the_policy_says_unless_the_pop_does(topic: Topic) -> None:
    topic.policy(invisibility_seconds=120)
    topic.publish("a", "b")
    assert 110 < topic.pop_one()["invisible_until"] - time.time() <= 121
    assert 1 < topic.pop_one(invisibility_seconds=5)["invisible_until"] - time.time() <= 6


def test_a_pop_that_repeats_its_attempt_id_gets_the_same_messages_and_receipts(topic: Topic) -> None:
    topic.publish(*"abc")
    first = topic.pop(max_messages=2, wait_seconds=1, attempt_id="one")
    repeated = topic.pop(max_messages=2, wait_seconds=1, attempt_id="one")
    assert [message["receipt_handle"] for message in repeated] == [message["receipt_handle"] for message in first]
    assert [message["body"] for message in repeated] == [message["body"] for message in first]
    other = topic.pop(max_messages=1, wait_seconds=1, attempt_id="two")
    assert {message["body"] for message in other}.isdisjoint(message["body"] for message in first)
    assert topic.ack(*first) == ["acked"] * len(first)


def test_a_repeat_of_a_parked_attempt_takes_its_place(topic: Topic) -> None:
    topic.pop()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(topic.pop, wait_seconds=20, attempt_id="a")
        time.sleep(0.1)
        second = pool.submit(topic.pop, wait_seconds=20, attempt_id="a")
        assert first.result(timeout=5) == []
        topic.publish("x")
        assert second.result(timeout=5)[0]["body"] == "x"


# -- the state of a subscription --------------------------------------------------------------------------------------


def test_the_state_counts_what_waits_what_is_leased_and_what_is_delayed(topic: Topic) -> None:
    topic.publish(*"abcd")
    leased, delayed = topic.pop_all(2)
    topic.settle("release", [{"receipt_handle": delayed["receipt_handle"], "delay_seconds": 60}])
    deadline = time.monotonic() + 5
    while (state := topic.state())["ready"] != 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (state["ready"], state["in_flight"], state["delayed"], state["dead"]) == (2, 1, 1, 0)
    assert state["mode"] == "pop"
    assert state["oldest_age_seconds"] >= 0
    (queue,) = state["queues"]
    assert queue == {
        "queue": 0,
        "broker_queue": f"popgate:{topic.name}:default:0",
        "ready": 2,
        "in_flight": 1,
        "delayed": 1,
        "blocked": 0,
        "owned": True,
    }
    assert state["policy"] == {
        "invisibility_seconds": 30,
        "max_deliveries": 16,
        "retry": {"initial_seconds": 0, "multiplier": 2, "max_seconds": 600},
        "max_in_flight": None,
        "max_lease_seconds": 43_200,
        "paused": False,
        "min_replicas": None,
    }
    assert topic.ack(leased) == ["acked"]


def test_many_clients_never_share_a_message(topic: Topic) -> None:
    count = 400
    topic.publish(*(str(number) for number in range(200)))
    topic.publish(*(str(number) for number in range(200, count)))
    taken: list[str] = []
    lock = threading.Lock()

    def drain() -> None:
        while messages := topic.pop(max_messages=7, wait_seconds=1):
            assert topic.ack(*messages) == ["acked"] * len(messages)
            with lock:
                taken.extend(message["body"] for message in messages)

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(drain) for _ in range(8)]:
            each.result()
    assert sorted(taken, key=int) == [str(number) for number in range(count)]
