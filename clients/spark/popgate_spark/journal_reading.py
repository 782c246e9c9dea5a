"""Opens a journal's folder for Spark: returns one DataFrame of the requested hours, or raises an error with the remedy.

Owns the location and the version of the files; `jobs` interprets them. The folder may be on any file system that Spark
reads. Files that are still being written have other names, and are ignored.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from popgate_spark.journal_schema import COLUMNS, PARTITIONS, SPARK_SCHEMA, VERSION, VERSION_KEY
from popgate_spark.storage import File, StorageFailed, footer_of, found

FILES = "*.parquet"
HOUR = timedelta(hours=1)
FILES_A_TRIGGER = 500


class JournalUnreadable(Exception):
    """There is no journal, or this version can't read it. The text says which, and what to do."""


class HoursEmpty(JournalUnreadable):
    """The journal has no files for the range."""


class Hours(NamedTuple):
    """A range of whole hours, UTC. `until` is not part of it."""

    since: datetime
    until: datetime

    def __str__(self) -> str:
        return f"{self.since:%Y-%m-%d %H:%M} to {self.until:%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """An opened range of a journal. `rows` has the journal's columns, `date` and `hour`."""

    path: str
    hours: Hours
    files: int
    rows: DataFrame


def open_journal(
    spark: SparkSession, path: str, *, since: datetime | None = None, until: datetime | None = None
) -> Journal:
    """Open the journal from `since` to before `until`, both rounded down to whole hours; None: from its first hour, or
    to its last.

    Raises: JournalUnreadable.
    """
    there = journal_hours(spark, path)
    if not there:
        raise JournalUnreadable(
            f"there is no journal in {path}: it has no date=YYYY-MM-DD/hour=HH folders with Parquet files."
            " Name the folder that the proxies were given with --journal; files appear there when the first is"
            " rotated"
        )
    low = _whole_hour(since) if since is not None else there[0].hour
    high = _whole_hour(until) if until is not None else there[-1].hour + HOUR
    chosen = [one for one in there if low <= one.hour < high]
    if not chosen:
        raise HoursEmpty(
            f"the journal in {path} has no files for {Hours(low, high)}: it goes from {there[0].hour:%Y-%m-%d %H:%M}"
            f" to {there[-1].hour + HOUR:%Y-%m-%d %H:%M}. Ask for another range with --from and --to"
        )
    for one in (chosen[0], chosen[-1]):
        _check_version(spark, one.first_file)
    hours = Hours(low, high)
    return Journal(path=path, hours=hours, files=sum(one.files for one in chosen), rows=_rows(spark, path, hours))


class HourFolder(NamedTuple):
    hour: datetime
    files: int
    first_file: str


def journal_hours(spark: SparkSession, path: str) -> list[HourFolder]:
    """Return the hours that have files, in order. Raises: JournalUnreadable if the folder can't be listed."""
    hours: dict[datetime, HourFolder] = {}
    try:
        for file in found(spark, f"{path.rstrip('/')}/date=*/hour=*/{FILES}"):
            hour = _hour_of(file)
            if hour is not None and file.name[0] not in "._":
                before = hours.get(hour)
                hours[hour] = HourFolder(hour, before.files + 1 if before else 1, file.path)
    except StorageFailed as error:
        raise JournalUnreadable(f"the journal can't be opened: {error}") from error
    return sorted(hours.values())


def _hour_of(file: File) -> datetime | None:
    try:
        return datetime.strptime(f"{file.outer} {file.folder}", "date=%Y-%m-%d hour=%H").replace(tzinfo=UTC)
    except ValueError:
        return None


def journal_stream(spark: SparkSession, path: str) -> DataFrame:
    """Return the journal's rows as a stream, file by file, beginning with the existing files."""
    schema = StructType([*SPARK_SCHEMA.fields, *PARTITIONS.fields])
    reader = spark.readStream.schema(schema).option("pathGlobFilter", FILES)
    return reader.option("maxFilesPerTrigger", FILES_A_TRIGGER).parquet(path.rstrip("/"))


def _rows(spark: SparkSession, path: str, hours: Hours) -> DataFrame:
    schema = StructType([*SPARK_SCHEMA.fields, *PARTITIONS.fields])
    rows = spark.read.schema(schema).option("pathGlobFilter", FILES).parquet(path.rstrip("/"))
    last = hours.until - HOUR
    place = F.struct("date", "hour")
    return rows.where(
        (place >= F.struct(F.lit(f"{hours.since:%Y-%m-%d}").alias("date"), F.lit(hours.since.hour).alias("hour")))
        & (place <= F.struct(F.lit(f"{last:%Y-%m-%d}").alias("date"), F.lit(last.hour).alias("hour")))
        # A condition without functions, so that Spark does not list the other folders.
        & F.col("date").between(f"{hours.since:%Y-%m-%d}", f"{last:%Y-%m-%d}")
    )


def _check_version(spark: SparkSession, file: str) -> None:
    try:
        metadata, names = footer_of(spark, file)
    except StorageFailed as error:
        raise JournalUnreadable(str(error)) from error
    version = metadata.get(VERSION_KEY)
    if version is None:
        raise JournalUnreadable(
            f"{file} is not a file of popgate's journal: its metadata has no {VERSION_KEY}. Name the folder that the"
            " proxies were given with --journal"
        )
    if version != str(VERSION):
        raise JournalUnreadable(
            f"{file} has version {version} of the journal, but this popgate_spark reads version {VERSION}. Install"
            " the popgate[spark] of the same release as the proxies, or ask for other hours with --from and --to"
        )
    missing = [column.name for column in COLUMNS if column.name not in names]
    if missing:
        raise JournalUnreadable(f"{file} lacks the columns {', '.join(missing)}, although it has version {VERSION}")


def _whole_hour(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
