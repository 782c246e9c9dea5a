"""The text of a client's log message contains its facts with every formatter."""

import asyncio
import logging
from collections.abc import Iterator

import httpx
import pytest

from popgate_client import Client, ServerUnreachable
from popgate_client.facts import TEXT_LENGTH_MAX, FactLogger, about, cause_of
from popgate_client.outages import Outage

logger = FactLogger("popgate_client.of_a_test")


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "popgate_client")
    caplog.set_level(logging.INFO, "popgate_client.exchange")  # which a command of this process may have muted


def test_the_facts_are_in_the_text_and_in_the_record(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning(
        "it was so", extra={"topic": "orders", "count": 3, "cause": "two words", "empty": "", "line": "a\nb"}
    )
    (record,) = caplog.records
    assert record.getMessage() == "it was so: topic=orders count=3 cause='two words' empty='' line='a\\nb'"
    assert record.msg == "it was so: %s"
    assert (record.__dict__["topic"], record.__dict__["count"]) == ("orders", 3)
    assert (record.module, record.funcName) == (
        "test_client_facts",
        "test_the_facts_are_in_the_text_and_in_the_record",
    )


def test_a_message_without_facts_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("at 100 % of it")
    logger.debug("not shown", extra={"topic": "orders"})
    assert caplog.messages == ["at 100 % of it"]


def test_a_long_fact_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("it was so", extra={"cause": "x" * 10_000})
    assert len(caplog.messages[0]) < TEXT_LENGTH_MAX + 100


async def test_what_a_task_is_about_is_in_the_messages_of_its_tasks(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        logger.info("inside", extra={"queue": 1})

    with about(topic="orders", group="billing"):
        await asyncio.create_task(work())
    logger.info("outside")
    assert caplog.messages == ["inside: topic=orders group=billing queue=1", "outside"]


def test_a_cause_is_a_type_and_a_text() -> None:
    assert (cause_of(ValueError("no")), cause_of(TimeoutError())) == ("ValueError: no", "TimeoutError")


def test_a_repeated_call_is_logged_with_its_place_and_attempt(caplog: pytest.LogCaptureFixture) -> None:
    errors = [httpx.ConnectError("refused")]

    def answer(request: httpx.Request) -> httpx.Response:
        if errors:
            raise errors.pop()
        return httpx.Response(200, json={"topics": []})

    with Client("http://user:secret@popgate:8080", transport=httpx.MockTransport(answer)) as client:
        assert client.list_topics() == []
    told, end = caplog.messages
    assert end.startswith("popgate answers again: failed_for_seconds=0.")
    assert caplog.records[0].levelname == "WARNING"
    assert told.startswith("a call failed and will be repeated: method=GET path=/v1/admin/topics attempt=1 ")
    assert 'cause="ServerUnreachable: no answer from http://popgate:8080/v1/admin/topics: ' in told
    assert "secret" not in caplog.text


def test_an_error_names_the_server_that_did_not_answer() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with (
        Client("http://popgate:8080", transport=httpx.MockTransport(refuse), retry_seconds_max=0) as client,
        pytest.raises(ServerUnreachable, match="no answer from http://popgate:8080/v1/admin/topics"),
    ):
        client.list_topics()


def test_a_long_outage_is_told_at_once_and_then_seldom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "popgate_client")
    now = 100.0
    outage = Outage(logger, lambda: now)
    for _ in range(100):
        outage.failed("a pop failed", {"cause": "refused"})
        now += 1
    outage.succeeded()
    outage.succeeded()
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warnings == [
        "a pop failed: cause=refused",
        *(f"a pop failed: cause=refused failing_for_seconds={seconds}.0" for seconds in (30, 60, 90)),
    ]
    assert caplog.messages[-1] == "popgate answers again: failed_for_seconds=100.0"
    assert len(caplog.records) == 101
    outage.failed("a pop failed", {})
    assert caplog.records[-1].levelname == "WARNING"


@pytest.fixture
def _httpx_at_its_usual_level() -> Iterator[None]:
    """Other tests of this process configure the log as a proxy does."""
    httpx_logger = logging.getLogger("httpx")
    level = httpx_logger.level
    httpx_logger.setLevel(logging.NOTSET)
    yield
    httpx_logger.setLevel(level)


@pytest.mark.usefixtures("_httpx_at_its_usual_level")
def test_httpx_does_not_log_the_requests_of_the_client_unless_it_is_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answers = httpx.MockTransport(lambda request: httpx.Response(200, json={"topics": []}))
    with Client("http://popgate:8080", transport=answers) as client, httpx.Client(transport=answers) as other:
        client.list_topics()
        other.get("http://elsewhere:8080/v1/admin/topics")
        other.get("http://popgate:8081/v1/admin/topics")
        assert [one.name for one in caplog.records] == ["httpx", "httpx"]
        assert "popgate:8080" not in caplog.text
        with caplog.at_level(logging.INFO, "httpx"):
            client.list_topics()
    assert "popgate:8080" in caplog.text
