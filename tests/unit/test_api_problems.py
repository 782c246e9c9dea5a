"""The one table from errors to HTTP answers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from popgate.api import problems
from popgate.domain import errors
from popgate.domain.errors import BrokerUnavailable, Conflict, InvalidRequest, PopgateError, RetryLater, WrongMode

PAGE = Path(__file__).parents[2] / "docs" / "http.md"


def families(root: type[PopgateError]) -> Iterator[type[PopgateError]]:
    yield root
    for family in root.__subclasses__():
        yield from families(family)


def test_every_error_of_the_domain_has_a_row_but_those_that_end_the_process() -> None:
    unserved = {errors.StartupError, *errors.StartupError.__subclasses__()}
    for family in families(PopgateError):
        if family.__module__ == errors.__name__ and family not in unserved:
            assert family in problems.TABLE, f"{family.__name__} has no row"


def test_the_page_about_http_tells_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| (`.+?) \|", PAGE.read_text(), flags=re.MULTILINE)
    told: set[tuple[int, str]] = set()
    for statuses, codes in rows:
        named = re.findall(r"`(\w+)`", codes)
        numbers = [int(status) for status in statuses.split(", ")]
        told |= set(zip(numbers if len(numbers) > 1 else numbers * len(named), named, strict=True))
    of_http = [
        problems.NotFound("/x"),
        problems.ProxyNotFound("x"),
        problems.MethodNotAllowed("GET"),
        problems.UnsupportedMediaType("x"),
        problems.InternalError(),
        problems.HostNotAllowed("x"),
        problems.RequestTimeout("slow"),
        problems.HeadTooLarge("long", status=414),
        problems.HeadTooLarge("large"),
    ]
    known = {(error.status, error.code) for error in of_http}
    for family, kind in problems.TABLE.items():
        if not issubclass(family, problems.HttpError):
            known.add((kind.status, family.code))
    assert told == known


def test_an_error_without_a_row_takes_that_of_its_nearest_ancestor() -> None:
    class FullDisk(RetryLater):
        code = "full_disk"

    status, _, body = problems.problem_answer(FullDisk("later"))
    assert status == 503
    assert json.loads(body)["code"] == "full_disk"


@pytest.mark.parametrize(("seconds", "header"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.1, b"2"), (30.0, b"30")])
def test_retry_after_is_whole_seconds_and_never_zero(seconds: float, header: bytes) -> None:
    answer = problems.problem_answer(BrokerUnavailable("away", retry_after_seconds=seconds))
    assert answer.status == 503
    assert (b"retry-after", header) in answer.headers


def test_a_problem_says_what_where_and_how_to_mend_it() -> None:
    status, headers, body = problems.problem_answer(InvalidRequest("a must be b", field="a"))
    assert status == 400
    assert dict(headers)[b"content-type"] == b"application/problem+json"
    assert int(dict(headers)[b"content-length"]) == len(body)
    assert json.loads(body) == {
        "type": "urn:popgate:problem:invalid_request",
        "title": "The request is not valid",
        "status": 400,
        "code": "invalid_request",
        "detail": "a must be b",
        "field": "a",
    }


def test_a_clients_error_does_not_say_that_popgate_has_failed() -> None:
    status, _, body = problems.problem_answer(problems.HttpError(400, "invalid_request", "no HTTP"))
    assert (status, json.loads(body)["title"]) == (400, "The request is not valid")
    status, _, body = problems.problem_answer(problems.InternalError())
    assert (status, json.loads(body)["title"]) == (500, "popgate has failed")


def test_a_wrong_mode_names_the_present_one() -> None:
    status, _, body = problems.problem_answer(WrongMode("pull it", mode="pull"))
    assert status == 409
    assert json.loads(body)["mode"] == "pull"


def test_a_detail_that_can_not_be_encoded_is_answered_all_the_same() -> None:
    _, _, body = problems.problem_answer(Conflict("no such queue: \ud800"))
    assert json.loads(body)["detail"] == "no such queue: ?"


def test_a_long_detail_is_cut() -> None:
    _, _, body = problems.problem_answer(Conflict("x" * 100_000))
    assert len(body) < 3_000


def test_a_bug_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    status, headers, body = problems.internal_problem(ZeroDivisionError("secret"), operation="pop")
    assert status == 500
    assert json.loads(body)["code"] == "internal_error"
    assert b"secret" not in body
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert dict(headers)[b"x-request-id"] == record.__dict__["request_id"].encode()
