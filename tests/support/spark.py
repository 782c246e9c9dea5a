"""A quiet Spark for the tests: no UI, no files outside one folder, no listener beyond this machine."""

import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.processes import ServerMissingError
from support.spark_classes import QUICK_COMPILER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

END_SECONDS = 30
QUICK_JAVA = f"{QUICK_COMPILER} -XX:+UseSerialGC"
"""JVM options that halve the cost of short sessions, which mostly start up and do everything once: no second
compiler, no garbage collection threads.
"""
TESTS_FOLDER = Path(__file__).parents[1]
LOGGING = """
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


def require_java() -> None:
    """Check that Java is installed. Raises: ServerMissingError."""
    if shutil.which("java") is None and not (Path(os.environ.get("JAVA_HOME", "/nowhere")) / "bin" / "java").exists():
        raise ServerMissingError("no Java is installed (Debian: openjdk-17-jre-headless)")


def environment() -> dict[str, str]:
    """Return what Spark's own Python processes need in addition to this environment: this interpreter and these
    sources.
    """
    paths = [str(TESTS_FOLDER), *(os.environ.get("PYTHONPATH") or "").split(os.pathsep)]
    return {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
    }


def settings(folder: Path) -> dict[str, str]:
    """Return the settings with which every session of the tests starts; `folder` is for its files."""
    folder.mkdir(parents=True, exist_ok=True)
    logging = folder / "log4j2.properties"
    logging.write_text(LOGGING)
    quiet = f"-Dlog4j2.configurationFile=file:{logging} -Duser.timezone=UTC -Dderby.system.home={folder}"
    return {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.driver.defaultJavaOptions": QUICK_JAVA,
        "spark.driver.extraJavaOptions": quiet,
        "spark.executor.defaultJavaOptions": QUICK_JAVA,
        "spark.executor.extraJavaOptions": quiet,
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        # Compiling a plan takes longer than running it over a few rows. Separate commands and programs do compile.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stopTimeout": "30s",
    }


@contextmanager
def started_spark(folder: Path, *, master: str = "local[2]", **more: str) -> "Generator[SparkSession]":
    """Start the session of this process, which can have one at a time; `more` are further settings, `__` for a dot.

    Raises: ServerMissingError: Java is not installed.
    """
    require_java()
    from pyspark.sql import SparkSession

    os.environ.update(environment())
    builder = SparkSession.builder.appName("popgate tests").master(master)
    for name, value in (settings(folder) | {name.replace("__", "."): value for name, value in more.items()}).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        end(session)


def end(session: "SparkSession") -> None:
    """Stop the session and its JVM, so that the next session of this process may have other settings."""
    from pyspark import SparkContext

    context: Any = SparkContext  # there is no public way to end the JVM
    gateway = context._gateway
    session.stop()
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()  # which makes it end
        gateway.proc.wait(timeout=END_SECONDS)
    context._gateway = context._jvm = None
