"""Code cites design decisions by number (CONTRIBUTING.md): each number has a record in docs/decisions, and each record
is in the list there."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDS = sorted((REPOSITORY / "docs" / "decisions").glob("[0-9]*.md"))
SOURCES = sorted(
    path
    for folder in ("proxy", "clients", "tests")
    for path in (REPOSITORY / folder).rglob("*")
    if path.suffix in (".py", ".lua", ".tla", ".js", ".md")
)
CITATION = re.compile(r"\bdecisions?\s+(\d+)")
PRIVATE_CITATION = re.compile(r"\(design\b|\b(?:design|facts)(?:'s)?:?\s+sections?\b")


def numbers_of_records() -> set[int]:
    return {int(path.name.partition("-")[0]) for path in RECORDS}


def test_every_decision_that_is_cited_has_a_record() -> None:
    cited = {(int(number), path.name) for path in SOURCES for number in CITATION.findall(path.read_text())}
    assert cited
    assert [one for one in sorted(cited) if one[0] not in numbers_of_records()] == []


def test_no_source_cites_a_design_that_its_reader_does_not_have() -> None:
    others = [path for path in SOURCES if path != Path(__file__)]
    assert [str(path) for path in others if PRIVATE_CITATION.search(path.read_text())] == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_its_number_its_parts_and_its_place_in_the_list(record: Path) -> None:
    text = record.read_text()
    number, title = text.splitlines()[0].removeprefix("# ").split(". ", 1)
    assert int(number) == int(record.name.partition("-")[0])
    assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
    assert len(text.splitlines()) <= 40
    assert f"{number}. [{title}]({record.name})" in (record.parent / "README.md").read_text()


def test_the_records_are_numbered_without_gaps() -> None:
    assert numbers_of_records() == {*range(1, len(RECORDS) + 1)}
