"""What the command line prints about the address it was given: never the credentials that a URL may contain."""

import pytest

from popgate.cli.commands import run
from popgate.cli.printing import complain, without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://user:hunter2@popgate:8080/base", "http://...@popgate:8080/base"),
        ("https://user:hunter2@@popgate", "https://...@popgate"),
        ("unrecognized arguments: --amqp-ulr=amqp://u:hunter2@h/", "unrecognized arguments: --amqp-ulr=amqp://...@h/"),
        ("/tmp/amqp:/u:hunter2@h/ and ann@example.org", "/tmp/amqp:/...@h/ and ann@example.org"),
        ("http://popgate/ann and ann@example.org", "http://popgate/ann and ann@example.org"),
    ],
)
def test_a_url_is_shown_without_its_credentials(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_an_error_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    complain("first \x1b]52;c;cm0=\x07\nsecond \x9b31m")
    assert capsys.readouterr().err == "popgate: first \\x1b]52;c;cm0=\\x07\nsecond \\x9b31m\n"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://user:hunter2@127.0.0.1:1", 3),
        ("http://user:hunter2@127.0.0.1:port", 2),
        ("http://user:hun/ter2@127.0.0.1:1", 2),
        ("http://user:1/hunter2@127.0.0.1:1", 3),
        ("http://user:1?hunter2@127.0.0.1:1", 3),
        ("user:hunter2@127.0.0.1:1", 2),
    ],
)
def test_no_password_of_a_url_is_printed(
    url: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POPGATE_URL", url)
    assert run(["topics", "--timeout-seconds", "0"]) == code
    said = capsys.readouterr().err
    assert "127.0.0.1" in said
    assert "hun" not in said
    assert "ter2" not in said


def test_a_bad_token_is_not_taken_for_a_bad_url(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POPGATE_URL", "http://user:hunter2@127.0.0.1:1")
    monkeypatch.setenv("POPGATE_TOKEN", "a\nb")
    assert run(["topics"]) == 2
    assert "token" in capsys.readouterr().err
