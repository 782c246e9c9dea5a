"""`python -m spark.query_program FOLDER MASTER TRIGGER OPTIONS SINK_OPTIONS` runs queries, for tests that kill them.

One reads the source into FOLDER/out; with SINK_OPTIONS another one publishes the lines of FOLDER/in, two files a batch.
TRIGGER is "now" (drain what is there and end) or "on" (go on until killed). OPTIONS are JSON. The checkpoints are in
FOLDER, too. Prints "started" when the queries are.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spark.dying_sink import DyingDataSink
from spark.dying_source import DyingDataSource
from support.spark import started_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

FILES_PER_BATCH = 2
"""Each is a task's."""
ROWS_PER_REQUEST = 40


def source_query(session: "SparkSession", folder: Path, options: dict[str, str]) -> "DataStreamWriter":
    session.dataSource.register(DyingDataSource)
    messages = session.readStream.format("dying").options(**options, dieFolder=str(folder)).load()
    return (
        messages.writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
    )


def sink_query(session: "SparkSession", folder: Path, options: dict[str, str]) -> "DataStreamWriter":
    session.dataSource.register(DyingDataSink)
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", ROWS_PER_REQUEST)
    lines = session.readStream.option("maxFilesPerTrigger", FILES_PER_BATCH).text(str(folder / "in"))
    return (
        lines.writeStream.format("dying-sink")
        .options(**options, dieFolder=str(folder))
        .option("checkpointLocation", str(folder / "sink-checkpoint"))
    )


def main(folder: Path, master: str, trigger: str, source: dict[str, str], sink: dict[str, str]) -> None:
    (folder / "pid").write_text(f"{os.getpgid(0)}")
    with started_spark(folder / "spark", master=master) as session:
        writers = [source_query(session, folder, source)]
        if sink:
            writers.append(sink_query(session, folder, sink))
        queries = [one.trigger(availableNow=True).start() if trigger == "now" else one.start() for one in writers]
        print("started", flush=True)  # noqa: T201  # whoever started this waits for it
        if trigger == "on":
            session.streams.awaitAnyTermination()
        for query in queries:
            query.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), json.loads(sys.argv[5]))
