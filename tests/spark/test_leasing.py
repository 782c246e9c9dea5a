"""How a driver and its tasks lease, find again and hold batches; runs without Spark."""

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from popgate_client import LeaseGroupExpired
from popgate_client.lease_groups import LeaseStream
from popgate_client.tokens import current_token
from popgate_spark.columns import SCHEMA
from popgate_spark.errors import BatchUnavailable
from popgate_spark.heartbeat import Heartbeat
from popgate_spark.leasing import START, BatchLeases, Offset
from popgate_spark.options import Options, Place, StreamOptions
from popgate_spark.slices import LeasedSlice, SliceReader
from spark.conftest import GROUP, SparkTopic
from support.processes import wait_until

STREAM = "nightly"
ROWS = 10_000


def options(topic: SparkTopic, **more: object) -> StreamOptions:
    given = {**topic.options, "streamId": STREAM, "partitions": "2", **{name: str(one) for name, one in more.items()}}
    return Options(given).stream()


@pytest.fixture
def driver(topic: SparkTopic) -> Iterator[Callable[..., BatchLeases]]:
    """What a driver's process has; one more for each call."""
    with ExitStack() as stack:

        def start(**more: object) -> BatchLeases:
            return stack.enter_context(closing(BatchLeases(options(topic, **more))))

        yield start


def wait_for_the_leases_end(topic: SparkTopic) -> None:
    wait_until(lambda: topic.lease_groups()[0]["state"] == "expired", timeout_seconds=20, what="the leases' end")


# ---------------------------------------------------------------- the heartbeat


def test_a_heartbeat_goes_on_after_an_error_that_nobody_expected(
    topic: SparkTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic.publish("a")
    of_one_second = options(topic, invisibilitySeconds=1)
    stream = topic.client.lease_stream(topic.name, GROUP, STREAM)
    assert stream.lease(1, 1, invisibility_seconds=1).count == 1
    extend, calls = LeaseStream.extend, list[float]()

    def fail_at_first(self: LeaseStream, invisibility_seconds: float) -> list[dict[str, Any]]:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise ZeroDivisionError("nobody expects this")
        return extend(self, invisibility_seconds)

    monkeypatch.setattr(LeaseStream, "extend", fail_at_first)
    with closing(Heartbeat(of_one_second)) as heartbeat:
        heartbeat.watch(STREAM, 1)
        wait_until(lambda: len(calls) >= 5, timeout_seconds=20, what="beats after the error")
    assert topic.lease_groups()[0]["held_seconds"] > 1.0, "the leases were held for longer than they last"
    assert "nobody expects this" in caplog.text


# ---------------------------------------------------------------- what is found again


def test_a_drain_takes_up_the_batch_of_a_killed_driver_where_nothing_else_is_ready(
    topic: SparkTopic, driver: Callable[..., BatchLeases]
) -> None:
    """The driver was killed before Spark had recorded the batch."""
    topic.publish_numbered(3)
    killed = driver().lease(START, ROWS)
    assert killed == Offset(stream=STREAM, epoch=1)
    assert topic.state()["ready"] == 0
    drain = driver()
    drain.limit_to_what_is_there()
    end = drain.lease(START, ROWS)
    assert end == killed
    later = topic.publish_numbered(2, first=3)
    drain.ack(end)
    assert drain.lease(end, ROWS) == end, "what came after the start of the drain is for the next one"
    assert sorted(one.text for one in topic.take_all()) == later


@pytest.mark.parametrize("has_expired", [False, True])
def test_a_drain_takes_what_was_ready_beside_the_batch_of_a_killed_driver_and_no_more(
    topic: SparkTopic, driver: Callable[..., BatchLeases], has_expired: bool
) -> None:
    topic.publish_numbered(3)
    driver(invisibilitySeconds=1 if has_expired else 300, holdSecondsMax=1).lease(START, ROWS)
    if has_expired:
        wait_for_the_leases_end(topic)
        wait_until(lambda: topic.state()["ready"] == 3, timeout_seconds=20, what="messages that are visible again")
    topic.publish_numbered(2, first=3)
    drain = driver()
    drain.limit_to_what_is_there()
    end: Offset = START
    topic_rows: list[int] = []
    while (following := drain.lease(end, 3)) != end:
        if not topic_rows:
            topic.publish_numbered(4, first=5)
        topic_rows.append(topic.lease_groups()[0]["count"])
        drain.ack(following)
        end = following
    assert topic_rows == [3, 2]
    assert sorted(one.text for one in topic.take_all()) == ["m5", "m6", "m7", "m8"]


def test_a_batch_that_was_given_back_is_not_formed_anew_for_a_replay(
    topic: SparkTopic, driver: Callable[..., BatchLeases]
) -> None:
    topic.publish_numbered(3)
    end = driver().lease(START, ROWS)
    assert topic.client.lease_stream(topic.name, GROUP, STREAM).release(0) == 3
    with pytest.raises(BatchUnavailable, match="batch 1 of stream nightly is not leased any more: it was acked or giv"):
        driver().plan(end)
    assert topic.lease_groups() == []
    assert len(topic.take_all()) == 3


# ---------------------------------------------------------------- what tasks read


def slice_of(topic: SparkTopic, number: int, lost: int = 0) -> LeasedSlice:
    return LeasedSlice(stream=STREAM, epoch=1, number=number, lost=lost)


def count(reader: SliceReader, one: LeasedSlice) -> int:
    return sum(batch.num_rows for batch in reader.read(one))


def test_no_task_reads_a_batch_otherwise_than_it_was_planned(
    topic: SparkTopic, driver: Callable[..., BatchLeases]
) -> None:
    """One task finds that a rival took a message, and leases the rest again. Other tasks, and its own repeat, could
    then read the rest, but a task that had ended before also has the rival's message."""
    topic.publish_numbered(10)
    driver(invisibilitySeconds=2, holdSecondsMax=1).lease(START, ROWS)
    reader = SliceReader(options=options(topic, invisibilitySeconds=60).leased, schema=SCHEMA)
    wait_for_the_leases_end(topic)
    assert len(topic.client.pop(topic.name, GROUP, max_messages=1, wait_seconds=10, invisibility_seconds=60)) == 1
    with pytest.raises(LeaseGroupExpired):
        topic.client.lease_stream(topic.name, GROUP, STREAM).messages(1, 0)
    for number in (0, 1, 0, 1):
        with pytest.raises(BatchUnavailable, match="1 messages of batch 1 of stream nightly went to another consumer"):
            count(reader, slice_of(topic, number))
    assert sum(count(reader, slice_of(topic, number, lost=1)) for number in (0, 1)) == 9, "Spark's next attempt"


def test_leases_that_ran_out_are_leased_again_by_the_task(
    topic: SparkTopic, driver: Callable[..., BatchLeases]
) -> None:
    topic.publish_numbered(10)
    driver(invisibilitySeconds=1, holdSecondsMax=1).lease(START, ROWS)
    wait_for_the_leases_end(topic)
    reader = SliceReader(options=options(topic, invisibilitySeconds=60).leased, schema=SCHEMA)
    assert [count(reader, slice_of(topic, number)) for number in (0, 1)] == [5, 5]
    assert topic.lease_groups()[0]["state"] == "leased"


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    "url",
    [
        "ftp://anna:s3cret@x",
        "http://anna:s3cret@x:port",
        "anna:s3cret@x",
        "http://anna:1,s3cret@x",
        "http://anna:s3cret,1@x",
    ],
)
def test_a_wrong_url_is_told_without_its_password(url: str) -> None:
    with pytest.raises(Exception, match="popgate: option url: ") as raised:
        Options({"url": url, "topic": "t", "group": "g"}).stream()
    assert "s3cret" not in str(raised.value)


def test_options_are_shown_without_passwords_and_tokens() -> None:
    given = {"url": "http://anna:s3cret@x", "token": "t0ken", "topic": "t", "group": "g"}
    shown = repr(Options(given).stream())
    assert "topic='t'" in shown
    assert "s3cret" not in shown
    assert "t0ken" not in shown


def test_the_token_is_the_drivers_or_is_read_from_a_file_on_each_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"url": "http://x", "topic": "t", "group": "g"}
    file = tmp_path / "token"
    file.write_text("of-the-file\n")

    def token(**options: str) -> str:
        place: Place = pickle.loads(pickle.dumps(Options({**given, **options}).batch("b").leased.place))
        return current_token(place.token_source)

    monkeypatch.delenv("POPGATE_TOKEN", raising=False)
    monkeypatch.setenv("POPGATE_TOKEN_FILE", str(file))
    assert token() == token(tokenFile=str(file)) == "of-the-file"
    monkeypatch.setenv("POPGATE_TOKEN", "of-the-driver")
    assert token() == "of-the-driver"
    assert token(TOKENFILE=str(file)) == "of-the-file"
    assert token(token="of-the-option") == "of-the-option"
    for wrong, told in (
        ({"token": "t0ken", "tokenFile": "x"}, "option tokenFile: is given together with token"),
        ({"token": "t0ken\u00e9"}, "option token: has characters"),
        ({"token": "t0ken\nx"}, "option token: has characters"),
    ):
        with pytest.raises(Exception, match=told) as raised:
            token(**wrong)
        assert "t0ken" not in str(raised.value)
