"""Groups of adopted queues are switched between pop and pull like others, even if messages have no stable id."""

from typing import Any

import pytest

from acceptance.adopting import GROUP, KINDS, Adopted, Site
from support.processes import wait_until

SWITCHED_SECONDS = 20.0


def switch(site: Site, adopted: Adopted, mode: str, drain_seconds: float | None = None) -> None:
    """Switch the mode; return once it is served."""
    path = f"/v1/admin/topics/{adopted.topic}/groups/{GROUP}/consume-mode"
    body: dict[str, object] = {"mode": mode}
    if drain_seconds is not None:
        body["drain_timeout_seconds"] = drain_seconds
    client = site.proxy.client
    assert client.put(path, json=body).is_success
    wait_until(lambda: bool(client.get(path).json()["converged"]), timeout_seconds=SWITCHED_SECONDS, what=mode)


def ask(site: Site, adopted: Adopted, path: str, **fields: object) -> Any:
    """Return the pull client's answer, retrying on 503."""
    answers: list[Any] = []

    def is_answered() -> bool:
        response = site.proxy.client.post(f"{adopted.path}/{path}", json={"client_id": "a", **fields})
        assert response.status_code in (200, 503), response.text
        answers.append(response.json())
        return response.is_success

    wait_until(is_answered, timeout_seconds=SWITCHED_SECONDS, what=path)
    return answers[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unique", [True, False])
def test_an_adopted_topic_is_switched_there_and_back_and_loses_nothing(site: Site, kind: str, unique: bool) -> None:
    queue = site.declare(kind)
    site.publish_with_ids(queue, [*"abcdef"])
    adopted = site.adopt(queue, unique_message_ids=unique)
    popped = adopted.pop_count(2)
    assert adopted.ack(popped[0]) == ["acked"]
    switch(site, adopted, "pull", drain_seconds=0.5)
    assert adopted.ack(popped[1]) == ["expired"], "the switch has cut it off"

    told = ask(site, adopted, "assignment", supports=["pull"])
    assert told["queues"] == [0]
    who = {"generation": told["generation"]}
    pulled = ask(site, adopted, "queues/0/pull", max_messages=3, wait_seconds=5, **who)["messages"]
    while len(pulled) < 3:
        after = pulled[-1]["receipt_handle"]
        pulled += ask(site, adopted, "queues/0/pull", max_messages=1, wait_seconds=5, after=after, **who)["messages"]
    ids = [message["message_id"] for message in pulled]
    assert popped[1]["message_id"] in ids, "it came again"
    committed = ask(site, adopted, "queues/0/commit", receipt_handle=pulled[1]["receipt_handle"], **who)
    assert committed == {"committed": 2}

    switch(site, adopted, "pop")
    rest = adopted.pop_count(3)
    gone = {popped[0]["message_id"], *ids[:2]}
    assert sorted(message["message_id"] for message in rest) == sorted({*"abcdef"} - gone)
    assert adopted.ack(*rest) == ["acked"] * 3
    assert adopted.pop(wait=0.5) == []
