"""The streaming source and the batch reader on a real proxy: `format("popgate")`, found without registering."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from popgate_client import Client, OutgoingMessage
from popgate_spark import ack_batch, release_batch
from spark.conftest import GROUP, SparkTopic, bodies_of, parquet_bodies
from support.proxy import ProxyProcess, popgate_command

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def drain(
    spark: "SparkSession", topic: SparkTopic, folder: Path, *, sink: str = "parquet", **options: object
) -> "StreamingQuery":
    """One run of a query with Trigger.AvailableNow, to its end."""
    source = spark.readStream.format("popgate").options(**topic.options, **{k: str(v) for k, v in options.items()})
    query = (
        source.load()
        .writeStream.format(sink)
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    return query


def test_a_drain_takes_what_is_there_in_batches_and_acks_it_all(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    bodies = topic.publish_numbered(250)
    query = drain(spark, topic, tmp_path, maxMessagesPerBatch=100, partitions=2)
    assert parquet_bodies(tmp_path / "out") == sorted(bodies)
    assert [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]] == [100, 100, 50]
    assert topic.lease_groups() == []
    state = topic.state()
    assert (state["ready"], state["in_flight"]) == (0, 0)
    later = topic.publish_numbered(10, first=250)
    drain(spark, topic, tmp_path)
    assert parquet_bodies(tmp_path / "out") == sorted(bodies + later)


def forget(folder: Path, batch: int) -> None:
    """Take a batch out of a checkpoint's commit log."""
    for name in (f"{batch}", f".{batch}.crc"):
        (folder / "checkpoint" / "commits" / name).unlink()


def test_a_batch_that_was_acked_is_not_replayed_as_an_empty_one_in_silence(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    topic.publish_numbered(20)
    drain(spark, topic, tmp_path, sink="noop", maxMessagesPerBatch=10)
    forget(tmp_path, 1)
    with pytest.raises(Exception, match=r"batch 2 of stream .* is not leased any more.*; start .* onUnknownGroup"):
        drain(spark, topic, tmp_path, sink="noop")
    topic.publish("late")
    query = drain(spark, topic, tmp_path, sink="noop", onUnknownGroup="empty")
    assert [one["numInputRows"] for one in query.recentProgress][:2] == [0, 1]


def test_a_lost_checkpoint_of_a_named_stream_is_told(spark: "SparkSession", topic: SparkTopic, tmp_path: Path) -> None:
    bodies = topic.publish_numbered(30)
    drain(spark, topic, tmp_path / "first", streamId="lake", maxMessagesPerBatch=10)
    topic.publish("late")
    with pytest.raises(Exception, match=r"batch 1 of stream lake was acked before: the checkpoint is lost"):
        drain(spark, topic, tmp_path / "second", streamId="lake")
    drain(spark, topic, tmp_path / "second", streamId="lake", onUnknownGroup="empty")
    assert parquet_bodies(tmp_path / "second" / "out") == ["late"]
    assert parquet_bodies(tmp_path / "first" / "out") == sorted(bodies)
    topic.publish("later")
    drain(spark, topic, tmp_path / "second", streamId="lake")
    assert parquet_bodies(tmp_path / "second" / "out") == ["late", "later"]
    assert topic.lease_groups() == []


def test_what_another_checkpoint_had_leased_is_not_acked_unread(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    bodies = topic.publish_numbered(6)
    stream = topic.client.lease_stream(topic.name, GROUP, "lake")
    assert [stream.lease(epoch, 2).count for epoch in (3, 4)] == [2, 2]
    with pytest.raises(Exception, match=r"ends with batch 0, but batch 4 of stream lake is leased: "):
        drain(spark, topic, tmp_path, streamId="lake")
    drain(spark, topic, tmp_path, streamId="lake", onUnknownGroup="empty")
    drain(spark, topic, tmp_path, streamId="lake")
    assert parquet_bodies(tmp_path / "out") == sorted(bodies)


def test_rows_have_all_that_the_message_had(spark: "SparkSession", topic: SparkTopic) -> None:
    headers = {"text": "ü", "int": 7, "yes": True, "none": None}
    topic.publish(
        OutgoingMessage(body=b"\xff\x00", headers=headers, message_id="first", ordering_key="k"),
        OutgoingMessage(body="grün"),
    )
    rows = spark.read.format("popgate").options(**topic.options).load().collect()
    found = {bytes(row["body"]): row for row in rows}
    first, second = found[b"\xff\x00"], found["grün".encode()]
    assert (first["message_id"], first["ordering_key"], first["delivery_count"]) == ("first", "k", 1)
    assert first["headers"] == {"text": "ü", "int": "7", "yes": "true", "none": None}
    assert (second["headers"], second["ordering_key"]) == ({}, None)
    assert first["published_at"] <= first["first_delivered_at"]
    assert {row["queue"] for row in rows} <= {0, 1}
    assert sorted(row["position"] for row in rows) == [0, 1]


def test_a_batch_read_is_the_same_at_each_action_until_it_is_acked(spark: "SparkSession", topic: SparkTopic) -> None:
    bodies = topic.publish_numbered(20)
    named: dict[str, Any] = {**topic.options, "batchId": "nightly"}
    frame = spark.read.format("popgate").options(**named, maxMessagesPerBatch=15, partitions=3).load()
    first = bodies_of(frame.collect())
    assert len(first) == 15
    assert bodies_of(frame.collect()) == first
    assert bodies_of(spark.read.format("popgate").options(**named).load().collect()) == first
    acked = ack_batch(**named)
    assert (acked.acked, acked.lost) == (15, 0)
    assert ack_batch(**named).acked == 0
    with pytest.raises(Exception, match="batch nightly was acked; name another batchId"):
        spark.read.format("popgate").options(**named).load().collect()
    with pytest.raises(Exception, match=r"batch 1 of stream nightly can't be read any more: .* was acked"):
        frame.collect()
    rest = spark.read.format("popgate").options(**topic.options, batchId="next").load()
    assert bodies_of(rest.collect()) == sorted({*bodies} - {*first})
    assert release_batch(**topic.options, batchId="next") == 5
    assert sorted(one.text for one in topic.take_all()) == sorted({*bodies} - {*first})


def test_a_batch_read_of_nothing_has_no_rows(spark: "SparkSession", topic: SparkTopic) -> None:
    def frame() -> "DataFrame":
        return spark.read.format("popgate").options(**topic.options, batchId="b").load()

    assert frame().collect() == []
    topic.publish("late")
    assert bodies_of(frame().collect()) == ["late"]


def test_a_schema_may_leave_columns_out_and_nothing_else(spark: "SparkSession", topic: SparkTopic) -> None:
    topic.publish("one")
    reader = spark.read.format("popgate").options(**topic.options, batchId="b")
    assert reader.schema("queue int, body binary").load().columns == ["queue", "body"]
    assert bodies_of(reader.schema("queue int, body binary").load().collect()) == ["one"]
    with pytest.raises(Exception, match=r"column body string is not one of the source's .*; leave"):
        reader.schema("body string").load().collect()


# ---------------------------------------------------------------- what users are told


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"topic": None}, r'popgate: option topic: is missing; set .option\("topic", ...\)'),
        ({"group": None}, r"popgate: option group: is missing"),
        ({"url": None}, r"popgate: option url: is missing; set the proxy's address"),
        ({"url": "ftp://x"}, r"popgate: option url: 'ftp://x' is not an http:// or https:// URL"),
        ({"topic": "a b"}, r"popgate: option topic: must be 1 to 64 of A-Z a-z 0-9 . _ -, not 'a b'"),
        ({"partitions": "0"}, r"popgate: option partitions: must be a whole number from 1 to 1024, not '0'"),
        (
            {"maxMessagesPerBatch": "1e6"},
            r"popgate: option maxMessagesPerBatch: must be a whole number from 1 to 100000",
        ),
        ({"invisibilitySeconds": "nan"}, r"popgate: option invisibilitySeconds: must be seconds from 1 to 43200"),
        ({"partitoins": "2"}, r"popgate: option partitoins: is not known; did you mean partitions\?"),
        ({"zzz": "2"}, r"popgate: option zzz: is not known; known are url, "),
        ({"path": "x"}, r"popgate: option path: is not known"),
        ({"asyncProgressTrackingEnabled": "true"}, r"popgate: option asyncProgressTrackingEnabled: popgate can't be "),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], told: str
) -> None:
    monkeypatch.delenv("POPGATE_URL", raising=False)
    options = {"url": "http://127.0.0.1:1", "topic": "t", "group": "g", **changed}
    given = {name: value for name, value in options.items() if value is not None}
    with pytest.raises(Exception, match=told) as raised:
        spark.readStream.format("popgate").options(**given).load()
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batchId": "b"}, "popgate: option batchId: is not an option of readStream, which has url, "),
        ({"onUnknownGroup": "skip"}, "popgate: option onUnknownGroup: must be fail or empty, not 'skip'"),
        ({"retrySeconds": "1"}, "popgate: no proxy of http://127.0.0.1:1, http://127.0.0.1:2 answered for 1 s; is "),
    ],
)
def test_a_query_that_can_not_run_says_why_in_one_line(
    spark: "SparkSession", tmp_path: Path, options: dict[str, str], told: str
) -> None:
    where = {"url": "http://anna:s3cret@127.0.0.1:1,http://127.0.0.1:2", "topic": "t", "group": "g"}
    frame = spark.readStream.format("popgate").options(**where, **options).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(Exception, match=told) as raised:
        query.awaitTermination(60)
    assert "Traceback" not in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_executors_read_the_token_file_and_nothing_shows_it(
    spark: "SparkSession", tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys, token = tmp_path / "keys.toml", tmp_path / "token"

    def add(name: str, role: str) -> str:
        command = popgate_command("keys", "add", name, "--role", role, "--file", str(keys))
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    lake, monitor = add("lake", "worker,creator"), add("grafana", "monitor")
    with ProxyProcess(tmp_path, "--keys-file", str(keys)) as process, Client(process.url, token=lake) as client:
        topic = SparkTopic(process.url, client)
        given = {**topic.options, "tokenFile": str(token)}
        token.write_text(lake)
        for number, secret in enumerate(({"tokenFile": str(token)}, {"token": lake})):
            options = {**topic.options, **secret, "batchId": f"b{number}"}
            topic.publish("a", "b", "c")
            frame = spark.read.format("popgate").options(**options).load()
            assert bodies_of(frame.collect()) == ["a", "b", "c"]
            frame.explain(extended=True)
            assert ack_batch(**options).acked == 3
        token.write_text(monitor)
        with pytest.raises(Exception, match="no permission 'consume'") as refused:
            spark.read.format("popgate").options(**given).load().collect()
        token.unlink()
        with pytest.raises(Exception, match=f"the token file {token} can't be read: No such file") as missing:
            spark.read.format("popgate").options(**given).load().collect()
    printed = capfd.readouterr()
    assert "Physical Plan" in printed.out
    for text in (printed.out, printed.err, str(refused.value), str(missing.value)):
        assert lake not in text
        assert monitor not in text
