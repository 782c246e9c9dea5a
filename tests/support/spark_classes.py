"""Keeps an archive of the classes that Spark loads at its start (class data sharing): a session then starts in half the
processor time.

The archive is made once for a virtual environment. A Java that can't use it, because it or Spark has changed since,
ignores it.
"""

import fcntl
import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
SECONDS_MAX = 300
PROGRAM = """
from pathlib import Path
from tempfile import TemporaryDirectory
from support.spark import started_spark
with TemporaryDirectory() as folder, started_spark(Path(folder)) as spark:
    assert len(spark.range(1_000).selectExpr("id % 7 AS k").groupBy("k").count().collect()) == 7
"""


def archive() -> Path:
    """Return the place of the archive."""
    try:
        release = version("pyspark")
    except PackageNotFoundError:
        release = "missing"
    return Path(sys.prefix) / f"spark-{release}.jsa"


def java_options() -> str:
    """Return the options with which Java uses the archive, if it is there, and does not complain where it can't."""
    return f"-XX:SharedArchiveFile={archive()} -Xlog:disable -Xlog:all=error:stderr"


def make_archive() -> None:
    """Make the archive if it is missing. Without it, everything works, too, so that a failure does not matter."""
    place = archive()
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return
        new = place.with_suffix(".new")
        options = f"{QUICK_COMPILER} -XX:ArchiveClassesAtExit={new} -Xlog:disable"
        environment = {**os.environ, "SPARK_SUBMIT_OPTS": options, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", PROGRAM]
        with suppress(subprocess.SubprocessError, FileNotFoundError):
            subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS_MAX, check=True)
            new.replace(place)
