"""Why a pop gets no message: each reason from the standing of a group, and the order of several."""

from dataclasses import replace

import pytest

from popgate.domain.reasons import available, reasons
from popgate.domain.standing import (
    BlockingMessage,
    GroupStanding,
    ProxyStanding,
    QueueStanding,
    UnownedQueue,
    UnreachableProxy,
)

QUEUE = QueueStanding(queue=0, broker_queue="popgate:t:g:0", is_open=True)
PROXY = ProxyStanding(proxy="a", queues=[QUEUE])
GROUP = GroupStanding(topic="t", group="g", mode="pop", dead=0, proxies=[PROXY])


def with_queue(**fields: object) -> GroupStanding:
    return with_proxy(queues=[replace(QUEUE, **fields)])  # type: ignore[arg-type]  # fields of the test


def with_proxy(**fields: object) -> GroupStanding:
    return replace(GROUP, proxies=[replace(PROXY, **fields)])  # type: ignore[arg-type]  # fields of the test


def codes(group: GroupStanding) -> list[str]:
    found = reasons(group)
    for reason in found:
        assert reason.detail.endswith(".")
        assert reason.remedy
    return [reason.code for reason in found]


def test_a_pop_that_gets_a_message_has_no_reason_against_it() -> None:
    group = with_queue(ready=2, not_shown=3)
    assert (codes(group), available(group)) == ([], 5)


def test_an_unreachable_broker_is_named_once() -> None:
    lost = replace(QUEUE, trouble="the connection was lost", not_shown=None)
    assert codes(with_proxy(broker_trouble="the connection was lost", queues=[lost])) == ["broker_unavailable"]


@pytest.mark.parametrize(
    ("group", "code"),
    [
        (with_queue(), "empty"),
        (replace(with_queue(ready=1), paused=True), "paused"),
        (replace(with_queue(ready=1), mode="pull"), "pull_mode"),
        (replace(with_queue(ready=1), mode="draining"), "draining"),
        (replace(with_queue(ready=1, leased=2), max_in_flight=2), "max_in_flight"),
        (with_proxy(is_stopping=True), "proxy_stopping"),
        (with_proxy(broker_trouble="it refuses"), "broker_unavailable"),
        (with_proxy(store_trouble="it is full"), "state_unavailable"),
        (with_queue(exists=False, not_shown=None), "queue_missing"),
        (with_queue(is_claimed=False, not_shown=4), "not_claimed"),
        (with_queue(trouble="another consumer", not_shown=4), "queue_not_consumed"),
        (with_queue(is_sorting=True, not_shown=4), "sorting"),
        (with_queue(delayed=1), "delayed"),
        (with_queue(delayed_at_broker=1), "delayed"),
        (with_queue(leased=1), "all_leased"),
        (with_queue(moving=1), "moving"),
        (with_queue(set_aside=1), "set_aside"),
        (replace(GROUP, proxies=[], unowned=[UnownedQueue(queue=0, broker_queue="q", ready=4)]), "no_owner"),
        (replace(GROUP, proxies=[], unreachable=[UnreachableProxy(proxy="b", detail="dead")]), "proxy_unreachable"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_reason_is_found(group: GroupStanding, code: str) -> None:
    assert codes(group)[0] == code


def test_messages_behind_one_key_name_the_message_that_blocks_them() -> None:
    head = BlockingMessage(id="1f", message_id="order-7", state="leased", ordering_key="k", client="c", until=9.0)
    group = with_queue(blocked=3, leased=1, blocking=[head])
    blocked, leased = reasons(group)
    assert (blocked.code, blocked.until, leased.code) == ("blocked_by_key", 9.0, "all_leased")
    assert "message order-7 of key 'k' is leased by c" in blocked.detail
    assert available(group) == 0


def test_messages_at_the_broker_are_available_unless_memory_is_full() -> None:
    assert available(with_queue(blocked=3, leased=1, not_shown=5)) == 5
    full = with_queue(blocked=3, leased=1, not_shown=5, is_paused=True)
    assert available(full) == 0
    assert "5 more messages are at the broker" in reasons(full)[0].detail


def test_filters_that_pass_nothing_concern_only_the_pops_that_have_them() -> None:
    group = with_proxy(queues=[replace(QUEUE, ready=4)], filtered_pops=2, filters_pass=False)
    (reason,) = reasons(group)
    assert (reason.code, reason.stops_all) == ("filters", False)
    assert codes(with_proxy(queues=[replace(QUEUE, ready=4)], filtered_pops=2, filters_pass=True)) == []


def test_a_reason_of_one_proxy_of_several_does_not_stop_all() -> None:
    other = ProxyStanding(proxy="b", queues=[replace(QUEUE, queue=1, ready=2)])
    group = replace(GROUP, proxies=[replace(PROXY, broker_trouble="it refuses"), other])
    (reason,) = reasons(group)
    assert (reason.code, reason.stops_all, reason.queues) == ("broker_unavailable", False, [0])
    front = replace(GROUP, proxies=[ProxyStanding(proxy="front"), replace(PROXY, broker_trouble="it refuses")])
    assert reasons(front)[0].stops_all, "the front owns nothing"
