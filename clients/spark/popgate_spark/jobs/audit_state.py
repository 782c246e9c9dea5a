"""Stores what an audit remembers of the hours that it has read, so that the next run reads only the new ones.

Owns the state folder: `through=YYYYMMDDTHH/` with one table for each field of `Memory`, and `done`, which is written
last. A folder without `done` is from a run that was killed: it is not read, and the next run overwrites it. Older
folders are removed when a newer one is complete.
"""

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession

from popgate_spark.storage import found, remove

VERSION = 2
NAME = "through=%Y%m%dT%H"


class StateUnreadable(Exception):
    """The state folder has another version. The text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of all hours before the time `through`."""

    rows: DataFrame
    """`told` rows of stories that are not closed."""
    buckets: DataFrame
    deleted: DataFrame
    frontier: DataFrame
    newest: DataFrame
    faults: DataFrame
    """Faults of closed stories, and all faults of order."""
    accounts: DataFrame
    """Accounts of closed stories."""
    evidence: DataFrame
    """`told` rows of the copies in `faults`."""


class Remembered(NamedTuple):
    through: datetime
    memory: Memory


def remembered(spark: SparkSession, folder: str) -> Remembered | None:
    """Return the memory of the latest complete run; None if there is none. Raises: StateUnreadable, StorageFailed."""
    done = sorted(found(spark, f"{folder}/through=*/done/_SUCCESS"), key=lambda file: file.outer)
    if not done:
        return None
    name = done[-1].outer
    place = f"{folder}/{name}"
    row = spark.read.parquet(f"{place}/done").first()
    version = row["version"] if row is not None else None
    if version != VERSION:
        raise StateUnreadable(
            f"{folder} was written by another release (version {version} of the state, this one has {VERSION}): pass"
            " an empty folder with --state to audit the whole journal again"
        )
    tables = {one.name: spark.read.parquet(f"{place}/{one.name}") for one in fields(Memory)}
    return Remembered(datetime.strptime(name, NAME).replace(tzinfo=UTC), Memory(**tables))


def remember(spark: SparkSession, folder: str, through: datetime, memory: Memory) -> None:
    """Write the state of a run, and remove older state when it is complete. Raises: StorageFailed."""
    place = f"{folder}/{through.strftime(NAME)}"
    for one in fields(Memory):
        getattr(memory, one.name).write.mode("overwrite").parquet(f"{place}/{one.name}")
    version = spark.sql(f"select {VERSION} as version")
    version.write.mode("overwrite").parquet(f"{place}/done")
    for other in found(spark, f"{folder}/through=*"):
        if other.name < through.strftime(NAME):
            remove(spark, other.path)
