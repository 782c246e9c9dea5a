"""The log on standard error."""

import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from popgate.runtime.logs import KeyValueFormatter, StandardErrorHandler

PIPE_BYTES = 8192


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def log(pipe: tuple[int, int]) -> Iterator[logging.Logger]:
    logger, handler = logging.getLogger("of a test of the log"), StandardErrorHandler(pipe[1])
    handler.setFormatter(KeyValueFormatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    yield logger
    logger.removeHandler(handler)


def test_a_reader_that_stalls_stops_nobody_and_is_told_how_many_lines_it_missed(
    pipe: tuple[int, int], log: logging.Logger
) -> None:
    began = time.monotonic()
    for number in range(1_000):
        log.warning("%s", f"{number:0>99}")
    assert time.monotonic() - began < 5
    lines = os.read(pipe[0], PIPE_BYTES).decode().splitlines()
    assert [int(line.removeprefix("WARNING ")) for line in lines] == list(range(len(lines)))
    log.warning("after")
    assert os.read(pipe[0], PIPE_BYTES).decode().splitlines() == [
        f"WARNING log lines were dropped, because standard error was not read count={1_000 - len(lines)}",
        "WARNING after",
    ]


def test_a_line_of_which_only_a_part_was_written_is_ended(pipe: tuple[int, int], log: logging.Logger) -> None:
    log.warning("%s", "x" * 2 * PIPE_BYTES)
    assert not os.read(pipe[0], PIPE_BYTES).endswith(b"\n")
    log.warning("after")
    assert os.read(pipe[0], PIPE_BYTES).decode().splitlines() == [
        "",
        "WARNING log lines were dropped, because standard error was not read count=1",
        "WARNING after",
    ]


def test_lines_of_any_length_and_any_text_are_written_whole(pipe: tuple[int, int]) -> None:
    record = logging.makeLogRecord(
        {"msg": "\udc80" + "x" * 3 * 2000}
    )  # pytest-xdist can't pass it on as a captured log
    StandardErrorHandler(pipe[1]).handle(record)
    assert os.read(pipe[0], PIPE_BYTES).decode() == "\\udc80" + "x" * 3 * 2000 + "\n"


def test_a_closed_standard_error_stops_nobody(log: logging.Logger, pipe: tuple[int, int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, pipe[0])  # no program reads the pipe any more
    os.close(null)
    log.warning("without a reader")


PROGRAM = """
import logging, sys
from popgate.runtime.logs import configure_logging
configure_logging("info")
for number in range(300):
    logging.warning("%s", "x" * 300)
print("done")
"""


def test_a_terminal_that_shows_nothing_more_stops_nobody() -> None:
    terminal, end = os.openpty()  # no program reads the terminal
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=end, timeout=60, check=True
        )
    finally:
        os.close(terminal)
        os.close(end)
    assert done.stdout == b"done\n"
