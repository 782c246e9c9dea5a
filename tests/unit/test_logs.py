"""The log on standard error."""

import asyncio
import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.domain.topics import ConsumeMode
from popgate.runtime.current_request import carried, current_request_id, serving_request
from popgate.runtime.logs import JsonFormatter, KeyValueFormatter, StandardErrorHandler

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


def in_json(formatter: JsonFormatter | None = None, **given: Any) -> Any:
    record = logging.makeLogRecord({"name": "popgate.part", "levelname": "WARNING", "msg": "it was so", **given})
    line = (formatter or JsonFormatter()).format(record)
    assert "\n" not in line
    return json.loads(line)


def test_a_line_of_json_has_the_time_the_level_the_logger_the_message_and_the_extras() -> None:
    at = datetime(2026, 11, 27, 8, 30, 0, 123_000, tzinfo=UTC)
    found = in_json(JsonFormatter(worker=2), created=at.timestamp(), queue="q", count=3, why=None)
    assert found == {
        "time": "2026-11-27T08:30:00.123Z",
        "level": "warning",
        "logger": "popgate.part",
        "message": "it was so",
        "worker": 2,
        "queue": "q",
        "count": 3,
        "why": None,
    }


def test_any_extra_can_be_written_as_json() -> None:
    found = in_json(
        subscription=Subscription(TopicName("t"), GroupName("g")),
        mode=ConsumeMode.PULL,
        queues={"b", "a"},
        by_name={TopicName("t"): 1},
        error=OSError("no"),
        raw=b"\xff",
        text="a\nb\u2028c\udc80",
        message_=1,
        level="an extra, not the level of the line",
    )
    assert found["subscription"] == ["t", "g"]
    assert (found["mode"], found["queues"], found["by_name"]) == ("pull", ["a", "b"], {"t": 1})
    assert (found["error"], found["raw"], found["text"]) == ("no", "b'\\xff'", "a\nb\u2028c\udc80")
    assert (found["level"], found["level_"]) == ("warning", "an extra, not the level of the line")


@pytest.mark.parametrize("extra", [float("nan"), [float("inf")], {1: {(1, 2): "x"}}], ids=repr)
def test_what_json_lacks_is_written_as_text(extra: object) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = logging.makeLogRecord({"msg": "it was so", "levelname": "INFO", "extra": extra, "count": 3})
    found = json.loads(JsonFormatter().format(record), parse_constant=refuse)
    assert (found["count"], type(found["extra"])) == (3, str)


def test_a_hostile_text_forges_no_line_and_controls_no_terminal() -> None:
    try:
        raise ValueError("x\n2026-11-27 08:30:00,123 INFO    popgate.forged: \x1b[31mred\r")
    except ValueError:
        record = logging.makeLogRecord({"msg": "it failed", "topic": "a\nb\x1b[31m", "exc_info": sys.exc_info()})
    first, *rest = KeyValueFormatter("%(message)s").format(record).split("\n")
    assert first == r"it failed topic='a\nb\x1b[31m'"
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert rest[-1].endswith(r"popgate.forged: \x1b[31mred\r")


def test_a_library_logs_warnings_only_also_at_the_level_debug(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    program = (
        "import logging; from popgate.runtime.logs import configure_logging; configure_logging('debug')\n"
        "for name in ('botocore.auth', 'httpcore.http11', 'popgate.part', 'popgater'):\n"
        "    logging.getLogger(name).debug('detail'); logging.getLogger(name).warning('trouble')"
    )
    subprocess.run([sys.executable, "-c", program], stderr=writer, timeout=60, check=True)
    said = [line.split(": ") for line in os.read(reader, 10_000).decode().splitlines()]
    assert [(head.split()[-1], text) for head, text in said] == [
        ("botocore.auth", "trouble"),
        ("httpcore.http11", "trouble"),
        ("popgate.part", "detail"),
        ("popgate.part", "trouble"),
        ("popgater", "trouble"),
    ]


def test_wrong_trace_headers_of_clients_do_not_flood_the_log(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    program = (
        "import logging; from popgate.runtime.logs import configure_logging; configure_logging('debug')\n"
        "from popgate.adapters.tracing.contexts import context_in\n"
        "context_in({'traceparent': 'x' * 600}); print('done')\n"
        "context_in({'traceparent': f'00-{1:032x}-{1:016x}-01', 'tracestate': 'é, a=1, a=2'}); print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writer, timeout=60, check=True
    )
    assert done.stdout == b"done\ndone\n"
    assert not select.select([reader], [], [], 0)[0]


def test_a_traceback_is_a_field_of_the_line() -> None:
    try:
        raise ValueError("a reason")
    except ValueError:
        found = in_json(exc_info=sys.exc_info())
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: a reason")


def test_a_text_line_shows_an_enum_as_its_value() -> None:
    line = KeyValueFormatter("%(message)s").format(logging.makeLogRecord({"msg": "switched", "mode": ConsumeMode.POP}))
    assert line == "switched mode='pop'"


async def test_only_the_lines_of_the_task_that_serves_a_request_have_its_id() -> None:
    seen: dict[str, object] = {}

    async def later() -> None:
        seen["started task"] = current_request_id()

    async def carried_on() -> None:
        seen["carried task"] = current_request_id()

    with serving_request("r-1"):
        seen["json"] = in_json()["request_id"]
        seen["text"] = KeyValueFormatter("%(message)s").format(logging.makeLogRecord({"msg": "here"}))
        seen["given"] = in_json(request_id="of another request")["request_id"]
        seen["thread"] = await asyncio.to_thread(current_request_id)
        await asyncio.create_task(later())
        await asyncio.create_task(carried(carried_on()))
    assert seen == {
        "json": "r-1",
        "text": "here request_id='r-1'",
        "given": "of another request",
        "thread": None,
        "started task": None,
        "carried task": "r-1",
    }
    assert "request_id" not in in_json()
