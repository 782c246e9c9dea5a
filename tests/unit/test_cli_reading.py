"""Standard input as lines and batches: nothing is lost or delayed, and memory is bounded."""

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import pytest

from popgate.cli.endings import CommandFailed
from popgate.cli.reading import (
    BATCH_BYTES_MAX,
    BATCH_COUNT_MAX,
    CHUNK_BYTES,
    Line,
    LineSource,
    batches,
    read_whole,
)

LINE_BYTES_MAX = 1_000


class Pipe(NamedTuple):
    reading: BinaryIO
    writing: BinaryIO

    def write(self, data: bytes) -> None:
        self.writing.write(data)

    def end(self) -> None:
        self.writing.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "wb", buffering=0) as writer:
        yield Pipe(reader, writer)


@pytest.fixture
def source(pipe: Pipe) -> LineSource:
    return LineSource(pipe.reading.fileno(), line_bytes_max=LINE_BYTES_MAX)


def contents(lines: list[Line]) -> list[bytes]:
    return [line.content for line in lines]


def test_lines_are_cut_at_newlines_only_and_numbered_from_one(pipe: Pipe, source: LineSource) -> None:
    pipe.write(b"a\n\n b\r\nc\x00\x85d\xff\n")
    lines = source.read(1)
    assert contents(lines) == [b"a", b"", b" b\r", b"c\x00\x85d\xff"]
    assert [line.number for line in lines] == [1, 2, 3, 4]


def test_a_line_that_comes_in_pieces_is_one_line(pipe: Pipe, source: LineSource) -> None:
    pipe.write(b"hel")
    assert source.read(1) == []
    pipe.write(b"lo\nwor")
    assert contents(source.read(1)) == [b"hello"]
    pipe.write(b"ld\n")
    assert contents(source.read(1)) == [b"world"]


def test_the_last_line_needs_no_newline(pipe: Pipe, source: LineSource) -> None:
    pipe.write(b"a\nb")
    pipe.end()
    assert contents(source.read(1)) == [b"a"]
    assert contents(source.read(1)) == [b"b"]
    assert source.ended


def test_an_empty_input_has_no_lines(pipe: Pipe, source: LineSource) -> None:
    pipe.end()
    assert source.read(1) == []
    assert source.ended


def test_waiting_for_input_ends_in_time(source: LineSource) -> None:
    assert source.read(0.01) == []
    assert not source.ended


def test_a_line_that_is_too_long_is_skipped_and_said_to_be(pipe: Pipe, source: LineSource) -> None:
    pipe.write(b"a\n" + b"x" * (LINE_BYTES_MAX + 1) + b"\nb\n" + b"y" * LINE_BYTES_MAX + b"\n")
    lines = source.read(1)
    assert [line.too_long for line in lines] == [False, True, False, False]
    assert [len(line.content) for line in lines] == [1, 0, 1, LINE_BYTES_MAX]


def test_a_line_without_end_takes_no_memory(pipe: Pipe, source: LineSource) -> None:
    for _ in range(100):
        pipe.write(b"x" * LINE_BYTES_MAX)
        assert source.read(1) == []
    pipe.write(b"\nb\n")
    assert [(line.number, line.too_long) for line in source.read(1)] == [(1, True), (2, False)]


def test_a_file_goes_in_full_batches(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("input") / "lines"
    count = 10 * BATCH_COUNT_MAX + 1
    file.write_bytes(b"".join(b"%d\n" % number for number in range(count)))
    with file.open("rb") as stream:
        got = [batch for batch in batches(LineSource(stream.fileno(), line_bytes_max=LINE_BYTES_MAX)) if batch]
    assert [len(batch) for batch in got] == [BATCH_COUNT_MAX] * 10 + [1]
    assert [int(line.content) for batch in got for line in batch] == list(range(count))


def test_a_batch_of_long_lines_is_bounded_in_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("input") / "lines"
    length = BATCH_BYTES_MAX // 3
    file.write_bytes((b"x" * length + b"\n") * 7)
    with file.open("rb") as stream:
        got = [batch for batch in batches(LineSource(stream.fileno(), line_bytes_max=length)) if batch]
    assert sum(len(batch) for batch in got) == 7
    assert max(sum(len(line.content) for line in batch) for batch in got) <= BATCH_BYTES_MAX


def test_a_line_that_trickles_in_goes_at_once_and_silence_is_told(pipe: Pipe, source: LineSource) -> None:
    stream = batches(source)
    pipe.write(b"a\n")
    assert contents(next(stream)) == [b"a"]
    assert next(stream) == []
    pipe.write(b"b\nc")
    assert contents(next(stream)) == [b"b"]


def test_an_input_that_cannot_be_read_is_said_to_be(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = os.open(tmp_path_factory.mktemp("folder"), os.O_RDONLY)
    with pytest.raises(CommandFailed, match="can't read standard input: Is a directory"):
        LineSource(folder, line_bytes_max=LINE_BYTES_MAX).read(1)
    os.close(folder)


def test_a_whole_input_is_read_byte_for_byte_up_to_its_limit(pipe: Pipe) -> None:
    data = bytes(range(256)) * 16
    assert len(data) < CHUNK_BYTES
    pipe.write(data)
    pipe.end()
    assert read_whole(pipe.reading.fileno(), len(data)) == data


def test_a_whole_input_beyond_its_limit_is_none(pipe: Pipe) -> None:
    pipe.write(b"x" * 11)
    assert read_whole(pipe.reading.fileno(), 10) is None
