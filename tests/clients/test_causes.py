"""What a `Consumer` says about a handler that fails reaches the dead letter."""

import threading
from typing import Any

import pytest

from popgate_client import Client, Consumer, Message, Reject
from popgate_client.handling import RetryDelays, settlement_for
from support.processes import wait_until
from support.proxy import ProxyProcess

GROUP = "default"


def letters(client: Client, topic: str) -> list[dict[str, Any]]:
    return list(client.dead_letters(topic, GROUP)["messages"])


class NoSuchCustomer(Exception):
    pass


def consumed(proxy: ProxyProcess, client: Client, topic: str, handler: Any, **options: Any) -> dict[str, Any]:
    """Consume until one message is dead, and return the letter."""
    consumer = Consumer(topic, GROUP, handler, base_url=proxy.url, retry_initial_seconds=0.0, **options)
    running = threading.Thread(target=consumer.run)
    running.start()
    try:
        wait_until(lambda: bool(letters(client, topic)), timeout_seconds=30, what="the dead letter")
    finally:
        consumer.stop()
        running.join()
    (letter,) = letters(client, topic)
    assert letter["client"] == consumer.client_id
    return letter


def test_a_failing_handler_leaves_its_exception_in_the_dead_letter(
    shared_proxy: ProxyProcess, client: Client, topic: str
) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, GROUP, max_deliveries=2)
    client.publish(topic, "a")

    def fail(message: Message) -> None:
        raise NoSuchCustomer(f"customer {message.text} is unknown")

    letter = consumed(shared_proxy, client, topic, fail)
    assert letter["error"] == {"type": f"{__name__}.NoSuchCustomer", "text": "customer a is unknown"}
    assert [(one["attempt"], one["outcome"]) for one in letter["attempts"]] == [(1, "released"), (2, "released")]
    assert letter["reason"] == "max_deliveries"


def test_a_consumer_that_sends_no_texts_sends_the_type_only(
    shared_proxy: ProxyProcess, client: Client, topic: str
) -> None:
    client.publish(topic, "a")

    def reject(message: Message) -> None:
        raise Reject("it is bad") from ValueError(message.text)

    letter = consumed(shared_proxy, client, topic, reject, error_texts=False)
    assert (letter["error"], letter["reason"]) == ({"type": "ValueError", "text": ""}, "it is bad")


@pytest.mark.parametrize("error", [Reject(ValueError("x")), Reject("x"), OSError("x" * 9_999)])
def test_the_entry_has_the_exception(error: Exception) -> None:
    message = Message(
        topic="t",
        group="g",
        receipt_handle="h",
        body=b"",
        queue=0,
        delivery_count=1,
        first_delivered_at=0.0,
        invisible_until=0.0,
    )
    entry = settlement_for(message, error, RetryDelays()).entry
    expected = {"ValueError": ("ValueError", 1), "OSError": ("OSError", 500)}
    inner = error.error if isinstance(error, Reject) else error
    if inner is None:
        assert (entry.error_type, entry.error_text) == (None, None)
    else:
        assert (entry.error_type, len(entry.error_text or "")) == expected[type(inner).__name__]
