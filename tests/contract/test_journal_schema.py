"""The journal's one schema: the writer's, the reader's, and that of a file which a real proxy has written."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from popgate.adapters.journal_parquet.tables import SCHEMA, VERSION, VERSION_KEY
from popgate.ports.journal import EventKind
from support.journal_files import finished_files, rows_of
from support.proxy import ProxyProcess

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")
DOCUMENT = Path(__file__).parents[2] / "docs" / "journal.md"


@pytest.fixture(scope="module")
def reader() -> Any:
    return importlib.import_module("popgate_spark.journal_schema")


def test_the_writer_writes_what_the_reader_reads(reader: Any) -> None:
    written = [(field.name, str(field.type), field.nullable) for field in SCHEMA]
    assert written == [tuple(column) for column in reader.COLUMNS]
    assert (VERSION, VERSION_KEY) == (reader.VERSION, reader.VERSION_KEY)


def test_a_file_of_a_real_proxy_has_exactly_this_schema(tmp_path: Path, reader: Any) -> None:
    with ProxyProcess(tmp_path / "proxy", "--journal", str(tmp_path / "journal")) as proxy:
        answer = proxy.client.post("/v1/topics/t/messages", json={"messages": [{"body": "a"}, {"body": "ä"}]})
        assert answer.json()["results"][1]["status"] == "published"
        assert proxy.stop() == 0
    (file,) = finished_files(tmp_path / "journal")
    found = parquet.read_schema(file)
    assert found.equals(SCHEMA)
    assert [(field.name, str(field.type), field.nullable) for field in found] == [*map(tuple, reader.COLUMNS)]
    assert found.metadata[reader.VERSION_KEY.encode()] == str(reader.VERSION).encode()
    group = parquet.ParquetFile(file).metadata.row_group(0)
    columns = {group.column(place).path_in_schema: group.column(place) for place in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert {"event", "topic", "group", "proxy", "client"} <= {
        name for name, column in columns.items() if "RLE_DICTIONARY" in column.encodings
    }
    for row in rows_of(tmp_path / "journal"):
        empty = [column.name for column in reader.COLUMNS if not column.nullable and row[column.name] is None]
        assert not empty
    assert [row["size_bytes"] for row in rows_of(tmp_path / "journal") if row["event"] == "published"] == [1, 2]


def test_every_column_and_every_event_is_documented() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in SCHEMA.names if f"| `{name}` |" not in text] == []
    assert [kind.value for kind in EventKind if f"| `{kind}` |" not in text] == []
