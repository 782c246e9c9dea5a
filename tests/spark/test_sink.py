"""The sink, streaming and batch, on a real proxy."""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spark.conftest import GROUP, SparkTopic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def where(topic: SparkTopic) -> dict[str, str]:
    return {"url": topic.url, "topic": topic.name}


def write(frame: "DataFrame", topic: SparkTopic, **options: str) -> None:
    frame.write.format("popgate").mode("append").options(**where(topic), **options).save()


def test_a_batch_write_publishes_every_row_once(spark: "SparkSession", topic: SparkTopic) -> None:
    write(spark.range(600, numPartitions=2).selectExpr("concat('m', id) AS value"), topic)
    assert sorted(one.text for one in topic.take_all()) == sorted(f"m{number}" for number in range(600))


def test_a_message_has_all_that_its_row_had(spark: "SparkSession", topic: SparkTopic) -> None:
    frame = spark.sql(
        "SELECT X'FF00' AS body, map('a', 'b', 'n', null) AS headers, 'k' AS ordering_key, 'first' AS message_id, "
        "0.5D AS delay_seconds, CAST(600 AS INT) AS ttl_seconds"
    )
    write(frame, topic)
    (message,) = topic.client.pop(topic.name, GROUP, wait_seconds=10)
    assert (message.body, message.headers) == (b"\xff\x00", {"a": "b", "n": None})
    assert (message.ordering_key, message.message_id) == ("k", "first")
    assert message.published_at is not None
    assert message.first_delivered_at - message.published_at >= 0.5


def test_a_repeated_write_publishes_nothing_twice(spark: "SparkSession", topic: SparkTopic) -> None:
    frame = spark.range(20, numPartitions=2).selectExpr("concat('m', id) AS value", "concat('id', id) AS id")
    for _ in range(2):
        write(frame.select("value"), topic, writeId="nightly")
        write(frame, topic, idColumn="id")
    shuffled = frame.repartition(3)
    write(shuffled, topic, idColumn="id")
    assert len(topic.take_all()) == 40


def test_a_task_that_is_tried_again_publishes_nothing_twice(spark: "SparkSession", topic: SparkTopic) -> None:
    """Publishes the rows twice under the same ids, as if Spark had not got the result of the first attempt."""
    from pyspark.sql.types import StringType, StructField, StructType

    from popgate_spark.options import Options
    from popgate_spark.sink import PopgateBatchWriter, RowPublisher

    schema = StructType([StructField("value", StringType())])
    rows = RowPublisher(Options(where(topic)).sink(streaming=False), schema, overwrite=False)
    writer = PopgateBatchWriter(rows)
    frame: Any = spark.range(10, numPartitions=1).selectExpr("concat('m', id) AS value")

    def twice(batches: Iterator[Any]) -> Iterator[Any]:
        arrow: Any = import_module("pyarrow")  # it has no type stubs
        kept = list(batches)
        counts = [writer.write(iter(kept)) for _ in range(2)]
        yield arrow.record_batch([[one.published for one in counts], [one.duplicates for one in counts]], ["p", "d"])

    counted = frame.mapInArrow(twice, "p long, d long").collect()
    assert [(row["p"], row["d"]) for row in counted] == [(10, 0), (0, 10)]
    assert len(topic.take_all()) == 10


def test_a_stream_into_popgate_publishes_nothing_twice_when_its_batch_is_replayed(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    """Make Spark forget that the last batch was committed, as if it were killed before it records that."""
    lines = [f"m{number}" for number in range(300)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "lines.txt").write_text("\n".join(lines))

    def run() -> None:
        query = (
            spark.readStream.text(str(tmp_path / "in"))
            .writeStream.format("popgate")
            .options(**where(topic), checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        assert [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]] == [300]

    run()
    for name in ("0", ".0.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    run()
    assert sorted(one.text for one in topic.take_all()) == sorted(lines)


def test_writes_of_one_batch_do_not_take_each_other_for_repeats(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    """Each task of both begins with row 0 of partition 0, in the same query and batch; then the batch is replayed."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "lines.txt").write_text("\n".join(f"m{number}" for number in range(10)))

    def both(frame: "DataFrame", number: int) -> None:
        write(frame.filter("value < 'm5'"), topic, writeId="low")
        write(frame.filter("value >= 'm5'"), topic, writeId="high")
        write(frame.selectExpr("concat('unnamed-', value) AS value"), topic)
        if (tmp_path / "fails").exists():
            (tmp_path / "fails").unlink()
            raise RuntimeError("the disk is full")

    def run() -> None:
        query = (
            spark.readStream.text(str(tmp_path / "in"))
            .writeStream.foreachBatch(both)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)

    (tmp_path / "fails").touch()
    with pytest.raises(Exception, match="the disk is full"):
        run()
    run()
    taken = sorted(one.text for one in topic.take_all())
    assert [text for text in taken if text.startswith("m")] == [f"m{number}" for number in range(10)]
    assert len([text for text in taken if text.startswith("unnamed-")]) == 20, "nothing tells a repeat from another"


def test_from_topic_to_topic_and_neither_password_nor_token_is_shown(
    spark: "SparkSession", new_topic: Callable[[], SparkTopic], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = new_topic(), new_topic()
    bodies = source.publish_numbered(300)
    secret = {"url": source.url.replace("http://", "http://anna:s3cret@"), "token": "s3cret"}
    read = spark.readStream.format("popgate").options(**{**source.options, **secret, "maxMessagesPerBatch": "100"})
    query = (
        read.load()
        .writeStream.format("popgate")
        .options(**{**where(target), **secret}, idColumn="message_id", checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    assert sorted(one.text for one in target.take_all()) == sorted(bodies)
    assert source.lease_groups() == []
    query.explain(extended=True)
    printed = capfd.readouterr()
    assert "Physical Plan" in printed.out
    shown = [printed.out, printed.err, *(str(one.json) for one in query.recentProgress)]
    shown += [one.read_text() for one in (tmp_path / "checkpoint").rglob("*[!c]") if one.is_file()]
    assert len(shown) > 6
    assert [one for one in shown if "s3cret" in one] == []


def test_spark_refuses_asynchronous_progress_into_popgate(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    frame = spark.readStream.format("rate").load().selectExpr("CAST(value AS STRING) AS value")
    writer = frame.writeStream.format("popgate").options(**where(topic), checkpointLocation=str(tmp_path))
    with pytest.raises(Exception, match="Sink popgate does not support async progress tracking"):
        writer.option("asyncProgressTrackingEnabled", "true").start().awaitTermination(60)


@pytest.mark.parametrize(
    ("columns", "options", "told"),
    [
        ("1 AS id", {}, "popgate: exactly one column must be named body or value; there are id"),
        ("'x' AS body, 'y' AS value", {}, "popgate: exactly one column must be named body or value"),
        ("'x' AS body, 1 AS price", {}, "popgate: column price can't be published; drop it, or put it into headers"),
        ("1 AS body", {}, "popgate: column body must be string or binary, not int; cast it"),
        ("'x' AS body, map('a', 1) AS headers", {}, "popgate: column headers must be map<string,string>, not map<"),
        ("'x' AS body", {"idColumn": "nr"}, "popgate: option idColumn: there is no column nr, only body"),
        ("'x' AS body", {"group": "g"}, "popgate: option group: is not an option of write, which has url, "),
        ("CAST(null AS STRING) AS body", {}, "popgate: row 0 has no body; filter such rows out"),
        ("'x' AS body, -1 AS delay_seconds", {}, "popgate: .*delay_seconds"),
        ("'x' AS body", {"topic": "nobody-reads-this"}, "popgate: 1 of 1 messages were not published; .*no_subscr"),
    ],
)
def test_what_can_not_be_published_is_told(
    spark: "SparkSession", topic: SparkTopic, columns: str, options: dict[str, str], told: str
) -> None:
    topic.client.put_topic("nobody-reads-this", queues=1)
    for group in topic.client.get_topic("nobody-reads-this").get("groups", []):
        topic.client.delete_group("nobody-reads-this", group)
    frame = spark.sql(f"SELECT {columns}")
    with pytest.raises(Exception, match=told):
        frame.write.format("popgate").mode("append").options(**{**where(topic), **options}).save()


def test_only_appending_is_possible(spark: "SparkSession", topic: SparkTopic) -> None:
    frame = spark.range(1).selectExpr("'x' AS body")
    with pytest.raises(Exception, match=r'messages can only be added: use mode."append".'):
        frame.write.format("popgate").mode("overwrite").options(**where(topic)).save()
