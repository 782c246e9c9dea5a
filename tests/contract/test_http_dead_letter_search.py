"""Dead letters are searched, redriven and purged by conditions, on both brokers."""

import pytest

from contract.http_server import HttpServer, answer, problem
from contract.http_server import lean_server as server
from contract.test_http_dead_letters import Desk

__all__ = ["server"]
KINDS = ("card declined", "timeout at the bank", "no such customer")
COUNT = 9


@pytest.fixture
def desk(server: HttpServer) -> Desk:
    """Nine letters, in order: m0, m1 and m2 with the first reason, and so on."""
    desk = Desk(server.topic())
    for number in range(COUNT):
        desk.topic.publish(f"m{number}", headers={"n": number}, ordering_key=f"k{number % 4}-{number}")
    messages = sorted(desk.topic.pop_all(COUNT, invisibility_seconds=60), key=lambda message: message["body"])
    for place, reason in enumerate(KINDS):
        desk.bury_popped(messages[3 * place : 3 * place + 3], reason)
    return desk


def searched(desk: Desk, **conditions: object) -> list[str]:
    return [letter["body"] for letter in desk.listed(**conditions)]


def test_letters_are_searched_and_counted_page_by_page(desk: Desk) -> None:
    assert searched(desk, reason="TIMEOUT", max_messages=2) == ["m3", "m4", "m5"]
    first = desk.page(reason="timeout", max_messages=2)
    assert [letter["body"] for letter in first["messages"]] == ["m3", "m4"]
    assert (first["matching"], first["searched"], first["dead"]) == (2, 5, COUNT)
    assert searched(desk, text="m7") == ["m7"]
    letter = first["messages"][0]
    at = letter["dead_lettered_at"]
    assert searched(desk, message_id=letter["message_id"], cause="rejected", header="n: 3", ordering_key="k3-3") == [
        "m3"
    ]
    assert searched(desk, dead_after=at, dead_before=at + 0.0001) == ["m3"]
    assert searched(desk, cause="max_deliveries") == []
    counted = desk.page(max_messages=0, reason="customer")
    assert counted == {"messages": [], "dead": COUNT, "searched": COUNT, "matching": 3}
    assert "searched" not in desk.page(), "a plain list stays as it was"
    assert desk.bodies() == [f"m{number}" for number in range(COUNT)], "a search changes nothing"


def test_what_a_filter_selects_is_redriven_or_purged_and_the_rest_stays(desk: Desk) -> None:
    done = desk.redrive(filter={"reason": "timeout", "text": "m4"})
    assert (done["state"], done["total"], done["moved"]) == ("done", None, 1)
    assert desk.drained() == ["m4"]
    ids = [letter["id"] for letter in desk.listed(reason="timeout")]
    assert desk.redrive(filter={"header": "n: 5"}, ids=ids)["moved"] == 1, "both conditions"
    assert desk.purge(filter={"text": "DECLINED"}) == {"purged": 3, "dead": 4, "complete": True}
    assert desk.purge(filter={"text": "customer"}, older_than_seconds=3_600)["purged"] == 0
    assert desk.bodies() == ["m3", "m6", "m7", "m8"]


def test_a_wrong_filter_is_refused_and_selects_nothing(server: HttpServer) -> None:
    desk = Desk(server.topic())
    desk.bury("a")
    for wrong in ({}, {"colour": "red"}, {"text": ""}, {"dead_after": "yesterday"}, {"text": None}, "timeout"):
        said = problem(desk.client.post(f"{desk.path}/purge", json={"filter": wrong}), 400, "invalid_request")
        assert said["field"].startswith("filter")
    problem(desk.client.post(f"{desk.path}/redrive", json={"filter": {}}), 400, "invalid_request")
    problem(desk.client.get(desk.path, params={"colour": "red"}), 400, "invalid_request")
    problem(desk.client.get(desk.path, params={"dead_after": "inf"}), 400, "invalid_request")
    assert answer(desk.client.get(desk.path))["dead"] == 1
