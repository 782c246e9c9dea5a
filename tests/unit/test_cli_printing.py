"""The printed output: tables for people, one clear line for each error."""

import io
import sys

import pytest

from popgate.cli.client_errors import code_of, explain
from popgate.cli.endings import ExitCode
from popgate.cli.printing import Column, Printer, duration, field, reader_gone, visible
from popgate.cli.progress import Progress
from popgate_client import (
    BrokerUnavailable,
    Forbidden,
    GroupNotFound,
    PopgateError,
    RequestInvalid,
    ServerFault,
    ServerUnreachable,
    TopicNotFound,
    Unauthorized,
)

URL = "http://127.0.0.1:8080"
COLUMNS = (Column("NAME", field("name")), Column("N", field("n", missing="none")))


def test_a_table_has_one_header_and_stays_aligned_over_batches(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(COLUMNS, as_table=True)
    printer.print([])
    printer.print([{"name": "a", "n": 1}, {"name": "a long name", "n": None}])
    printer.print([{"name": "b", "n": 2}])
    assert capsys.readouterr().out == (
        "NAME         N\n"
        "a            1\n"
        "a long name  none\n"
        "b            2\n"
    )  # fmt: skip


def test_json_lines_have_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    Printer(COLUMNS, as_table=False).print([{"name": "ü", "n": None, "other": [1]}])
    assert capsys.readouterr().out == '{"name":"ü","n":null,"other":[1]}\n'


@pytest.mark.parametrize(
    ("text", "shown"),
    [("grüße", "grüße"), ("a\tb\n", "a\\tb\\n"), ("\x1b]0;x\x07", "\\x1b]0;x\\x07"), ("\x9b", "\\x9b"), ("", "")],
)
def test_a_cell_shows_what_a_terminal_would_obey(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0, "0.0s"),
        (9.94, "9.9s"),
        (59.6, "1m 0s"),
        (125, "2m 5s"),
        (7_322, "2h 2m"),
        (86_400 * 3, "3d 0h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


# ---------------------------------------------------------------- errors


def unreachable(sent: bool) -> ServerUnreachable:
    error = ServerUnreachable("server_unreachable", "no answer: ConnectError(...)")
    error.sent = sent
    error.__cause__ = OSError("[Errno 111] Connection refused")
    return error


def forbidden(detail: str) -> Forbidden:
    error = Forbidden("forbidden", detail, 403)
    error.action = "admin"
    return error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (unreachable(sent=False), ExitCode.UNREACHABLE, ["can't reach", URL, "(Connection refused)", "popgate serve"]),
        (unreachable(sent=True), ExitCode.UNREACHABLE, ["no answer", URL, "may or may not have been carried out"]),
        (ServerUnreachable("http_502", "Bad Gateway", 502), ExitCode.UNREACHABLE, ["gateway", URL]),
        (BrokerUnavailable("broker_unavailable", "RabbitMQ is away", 503), ExitCode.FAILED, ["away", "--timeout"]),
        (
            TopicNotFound("topic_not_found", "topic 'x' does not exist; create it with PUT /v1/admin/topics/x", 404),
            ExitCode.FAILED,
            ["topic 'x' does not exist; create it with: popgate topics create x --queues 4"],
        ),
        (
            GroupNotFound("group_not_found", "no such; create it with PUT /v1/admin/topics/x/groups/y", 404),
            ExitCode.FAILED,
            ["no such; create it with: popgate groups create x y"],
        ),
        (TopicNotFound("topic_not_found", "queue 'q' is gone", 404), ExitCode.FAILED, ["queue 'q' is gone"]),
        (RequestInvalid("invalid_request", "topic must be\n1 to 64", 400), ExitCode.USAGE, ["topic must be 1 to 64"]),
        (Unauthorized("unauthorized", "unknown token", 401), ExitCode.FAILED, ["POPGATE_TOKEN"]),
        (forbidden("no permission"), ExitCode.FAILED, ["no permission (missing: admin)", "POPGATE_TOKEN"]),
        (forbidden("no permission 'admin'"), ExitCode.FAILED, ["no permission 'admin', or", "--token-file"]),
        (ServerFault("http_500", "<html>\n\n</html>", 500), ExitCode.FAILED, [URL, "<html> </html>"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PopgateError) else "",
)
def test_an_error_is_one_line_that_names_what_to_do(error: PopgateError, code: ExitCode, words: list[str]) -> None:
    line = explain(error, URL)
    assert "\n" not in line
    for word in words:
        assert word in line
    assert code_of(error) is code


# ---------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The time, which a test advances."""
    clock = {"now": 100.0}

    def monotonic() -> float:
        return clock["now"]

    monkeypatch.setattr("popgate.cli.progress.time.monotonic", monotonic)
    return clock


def test_progress_on_a_terminal_is_one_line_that_is_taken_away_again(now: dict[str, float]) -> None:
    stream = Terminal()
    progress = Progress(stream, shown=None)
    progress.tell(10, 0)
    assert stream.getvalue() == ""
    now["now"] += 2
    progress.tell(1_000, 1)
    assert stream.getvalue() == "1,000 published, 1 failed, 500/s"
    progress.clear()
    progress.clear()
    assert stream.getvalue() == "1,000 published, 1 failed, 500/s\r\x1b[K"


def test_progress_elsewhere_is_a_plain_line_every_few_seconds_where_asked_for(now: dict[str, float]) -> None:
    for shown, wanted in ((None, ""), (False, ""), (True, "1,000 published, 200/s\n1,000 published, 100/s\n")):
        stream = io.StringIO()
        progress = Progress(stream, shown=shown)
        for _ in range(10):
            now["now"] += 1
            progress.tell(1_000, 0)
        progress.clear()
        assert stream.getvalue() == wanted


def test_a_reader_is_never_said_to_be_gone_where_output_is_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not reader_gone()
