"""The Spark session of `popgate-pipeline`: quiet, on this machine or on a cluster, or that of `spark-submit`.

Owns the settings that the jobs need; settings made elsewhere (`spark-submit`, `spark-defaults.conf`, --conf) win.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark import SparkConf
from pyspark.sql import SparkSession

from popgate_spark.storage import first_line

LOCAL = "local[*]"
MEMORY = "2g"
PARTITIONS = 16
"""Partitions of a shuffle, so that each can hold its part of ten million events. Spark merges small ones."""
FILE_BYTES = "32m"
"""Maximum size of the journal's data per task, so that the last tasks end at about the same time."""
JAVA = "-XX:+UseParallelGC -XX:CompileThresholdScaling=4"
"""Java options for a minute's work on few cores: less code is compiled, and the collector adds no cost per write."""
LOGGING = """
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


class SparkUnavailable(Exception):
    """Spark can't start. The text says why, and what to do."""


@contextmanager
def spark_session(
    name: str, *, master: str | None = None, memory: str | None = None, settings: Mapping[str, str] | None = None
) -> Generator[SparkSession]:
    """Run Spark while the block runs. `master` None: that of spark-submit, else local[*].

    Raises: SparkUnavailable.
    """
    if shutil.which("java") is None and not (Path(os.environ.get("JAVA_HOME", "/nowhere")) / "bin" / "java").exists():
        raise SparkUnavailable("Spark needs Java 17, which was not found: install it (Debian: openjdk-17-jre-headless)")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory(prefix="popgate-pipeline-", ignore_cleanup_errors=True) as folder:
        active = SparkSession.getActiveSession()
        if active is not None:  # the caller's session
            yield active
            return
        configuration = SparkConf()
        configuration.setAppName(name)
        if master is not None or not configuration.contains("spark.master"):
            configuration.setMaster(master or LOCAL)
        wanted = _wanted(Path(folder), configuration.get("spark.master") or LOCAL, memory)
        for key, value in wanted.items():
            configuration.setIfMissing(key, value)
        for key, value in (settings or {}).items():
            configuration.set(key, value)
        try:
            session = SparkSession.builder.config(conf=configuration).getOrCreate()
        except Exception as error:  # any error of the JVM
            raise SparkUnavailable(f"Spark does not start: {first_line(error)}") from error
        try:
            yield session
        finally:
            session.stop()


def _wanted(folder: Path, master: str, memory: str | None) -> dict[str, str]:
    logging = folder / "log4j2.properties"
    logging.write_text(LOGGING)
    wanted = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        "spark.sql.files.maxPartitionBytes": FILE_BYTES,
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": memory or MEMORY,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{logging} -Duser.timezone=UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    if master.startswith("local"):
        wanted |= {
            "spark.driver.defaultJavaOptions": JAVA,
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.local.dir": str(folder / "local"),
            # A machine or process that was suspended for a while has not lost its executors.
            "spark.network.timeout": "3600s",
        }
    return wanted
