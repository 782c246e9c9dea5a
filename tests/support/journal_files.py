"""The journal's files as any Parquet reader sees them, and the properties that each must have."""

import importlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

parquet: Any = importlib.import_module("pyarrow.parquet")

Row: TypeAlias = dict[str, Any]


def finished_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("date=*/hour=*/*.parquet"))


def rows_of(folder: Path) -> list[Row]:
    """Return every row of every finished file, by proxy and number.

    Each file's name matches its content, its folder matches its hour, and no number of a proxy occurs twice.
    """
    rows: list[Row] = []
    for file in finished_files(folder):
        found: list[Row] = parquet.ParquetFile(file).read().to_pylist()
        numbers = [row["journal_seq"] for row in found]
        assert numbers == sorted(numbers)
        assert {row["proxy"] for row in found} == {file.name.split("-")[1]}
        assert file.name == f"journal-{found[0]['proxy']}-{numbers[0]:012d}.parquet"
        hours = {f"date={row['at'].astimezone(UTC):%Y-%m-%d}/hour={row['at'].astimezone(UTC):%H}" for row in found}
        assert hours == {f"{file.parent.parent.name}/{file.parent.name}"}
        rows += found
    rows.sort(key=lambda row: (row["proxy"], row["journal_seq"]))
    numbered = {(row["proxy"], row["journal_seq"]) for row in rows}
    assert len(numbered) == len(rows)
    return rows


def assert_without_gaps(rows: list[Row]) -> None:
    """Assert that each proxy's numbers begin with 1 and have no gaps."""
    for proxy in {row["proxy"] for row in rows}:
        numbers = [row["journal_seq"] for row in rows if row["proxy"] == proxy]
        assert numbers == [*range(1, len(numbers) + 1)]


def in_order_of_time(rows: list[Row]) -> list[Row]:
    """Return all rows merged by time; each proxy's own rows keep their order."""
    return sorted(rows, key=lambda row: (row["at"], row["proxy"], row["journal_seq"]))


def utc(seconds: float) -> datetime:
    """Return the time as the files store it, in microseconds."""
    return datetime.fromtimestamp(round(seconds * 1e6) / 1e6, UTC)
