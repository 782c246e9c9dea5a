"""Lists, reads and writes folders and small files on all storage of Spark: this machine, HDFS, object stores.

Uses Hadoop's file systems, which every Spark has but PySpark does not expose. Defines no file names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import SparkSession

_NO_FILE_SYSTEM = ("No FileSystem for scheme", "ClassNotFoundException")


class StorageFailed(Exception):
    """A folder or file could not be listed, read, written or removed. The text says which, and why."""


class File(NamedTuple):
    path: str
    name: str
    folder: str
    """The name of its folder."""
    outer: str
    """The name of that folder's parent."""


def found(spark: SparkSession, pattern: str) -> Iterator[File]:
    """Return the files and folders whose path matches `pattern` (with `*`). Raises: StorageFailed."""
    try:
        path = _jvm(spark).org.apache.hadoop.fs.Path(pattern)
        statuses = path.getFileSystem(hadoop_configuration(spark)).globStatus(path)
    except Exception as error:  # py4j's, for any error of the file system
        raise StorageFailed(f"{pattern} can't be listed: {_why(spark, error)}") from error
    for status in statuses or ():
        at = status.getPath()
        folder = at.getParent()
        outer = folder.getParent() if folder is not None else None
        yield File(str(at.toString()), at.getName(), _name(folder), _name(outer))


def remove(spark: SparkSession, path: str) -> None:
    """Remove a folder and its content if it exists. Raises: StorageFailed."""
    try:
        at = _jvm(spark).org.apache.hadoop.fs.Path(path)
        at.getFileSystem(hadoop_configuration(spark)).delete(at, True)
    except Exception as error:  # py4j's
        raise StorageFailed(f"{path} can't be removed: {_why(spark, error)}") from error


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Write a small file, replacing an existing one. Raises: StorageFailed."""
    try:
        if "://" not in path:
            place = Path(path.removeprefix("file:"))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
            return
        at = _jvm(spark).org.apache.hadoop.fs.Path(path)
        stream = at.getFileSystem(hadoop_configuration(spark)).create(at, True)
        try:
            stream.write(text.encode())
        finally:
            stream.close()
    except Exception as error:  # py4j's
        raise StorageFailed(f"{path} can't be written: {_why(spark, error)}") from error


def footer_of(spark: SparkSession, path: str) -> tuple[dict[str, str], list[str]]:
    """Return the metadata and the column names of a Parquet file. Raises: StorageFailed."""
    jvm = _jvm(spark)
    try:
        at = jvm.org.apache.hadoop.fs.Path(path)
        source = jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(at, hadoop_configuration(spark))
        reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(source)
        try:
            footer = reader.getFooter().getFileMetaData()
            schema = footer.getSchema()
            names = [str(schema.getFieldName(index)) for index in range(schema.getFieldCount())]
            return {str(key): str(value) for key, value in dict(footer.getKeyValueMetaData()).items()}, names
        finally:
            reader.close()
    except Exception as error:  # py4j's
        raise StorageFailed(f"{path} can't be read as Parquet: {_why(spark, error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error of Spark, whose full text may have pages."""
    java = getattr(error, "java_exception", None)
    return str(java if java is not None else error).partition("\n")[0]


def _why(spark: SparkSession, error: BaseException) -> str:
    why = first_line(error)
    if any(told in why for told in _NO_FILE_SYSTEM):
        version = _jvm(spark).org.apache.hadoop.util.VersionInfo.getVersion()
        why += (
            "; this Spark has no package for this file system: for S3 write s3a://... and add "
            f"--conf spark.jars.packages=org.apache.hadoop:hadoop-aws:{version}"
        )
    return why


def hadoop_configuration(spark: SparkSession) -> Any:
    session: Any = spark._jsparkSession  # pyright: ignore[reportPrivateUsage]  # the only access to file systems
    return session.sessionState().newHadoopConf()


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm  # pyright: ignore[reportPrivateUsage]  # as above


def _name(path: Any) -> str:
    return "" if path is None else str(path.getName())
