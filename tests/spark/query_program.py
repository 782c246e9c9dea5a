"""`python -m spark.query_program FOLDER MASTER TRIGGER OPTIONS` runs one query into FOLDER/out, for tests that kill it.

TRIGGER is "now" (drain what is there and end) or "on" (go on until killed). OPTIONS is JSON. The checkpoint is in
FOLDER, too. Prints "started" when the query is.
"""

import json
import os
import sys
from pathlib import Path

from spark.dying_source import DyingDataSource
from support.spark import started_spark


def main(folder: Path, master: str, trigger: str, options: dict[str, str]) -> None:
    (folder / "pid").write_text(f"{os.getpgid(0)}")
    with started_spark(folder / "spark", master=master) as session:
        session.dataSource.register(DyingDataSource)
        writer = (
            session.readStream.format("dying")
            .options(**options, dieFolder=str(folder))
            .load()
            .writeStream.format("parquet")
            .option("path", str(folder / "out"))
            .option("checkpointLocation", str(folder / "checkpoint"))
        )
        query = writer.trigger(availableNow=True).start() if trigger == "now" else writer.start()
        print("started", flush=True)  # noqa: T201  # whoever started this waits for it
        query.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
