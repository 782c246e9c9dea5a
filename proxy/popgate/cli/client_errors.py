"""Converts the errors of the client library to exit codes, and to one line that tells the user what to do."""

import re
import ssl

from popgate.cli.endings import ExitCode
from popgate.cli.suggestions import did_you_mean
from popgate_client import (
    Forbidden,
    PopgateError,
    RequestInvalid,
    RetryLater,
    ServerFault,
    ServerUnreachable,
    TooManyInFlight,
    Unauthorized,
)
from popgate_client.transport import without_password


def code_of(error: PopgateError) -> ExitCode:
    """Return the exit code for an error of the client library."""
    if isinstance(error, ServerUnreachable):
        return ExitCode.UNREACHABLE
    return ExitCode.USAGE if error.code == "invalid_request" else ExitCode.FAILED


def explain(error: PopgateError, url: str, suggestion: str | None = None) -> str:
    """Return one line that explains an error of the client library. ``url`` is the URL of the server. ``suggestion`` is
    the name that the user may have meant."""
    url = without_password(url)
    if isinstance(error, ServerUnreachable):
        return _unreachable(error, url)
    if isinstance(error, Unauthorized):
        return f"{url} requires a valid key or token ({_line(error.detail)}); give one in POPGATE_TOKEN or --token-file"
    if isinstance(error, Forbidden):
        return _forbidden(error)
    if isinstance(error, ServerFault):
        return f"the server at {url} has failed or is not popgate: {_line(error.detail)}"
    if isinstance(error, RetryLater) and not isinstance(error, TooManyInFlight):  # --timeout-seconds does not limit it
        return f"{_line(error.detail)} ({error.code}); try again later, or wait longer with --timeout-seconds"
    if isinstance(error, RequestInvalid):
        return _with_suggestion(_on_the_command_line(_line(error.detail)), suggestion)
    return _with_suggestion(_line(str(error)), suggestion)


def _with_suggestion(line: str, suggestion: str | None) -> str:
    """Put the suggestion before the advice to create what does not exist, because a misspelt name is more likely."""
    if suggestion is None:
        return line
    what, semicolon, advice = line.partition("; ")
    return f"{what}{did_you_mean(suggestion)}" + (f" Or {advice}" if semicolon else "")


def _unreachable(error: ServerUnreachable, url: str) -> str:
    if error.status is not None:
        return f"the gateway at {url} can't reach popgate: {_line(error.detail)}"
    if _is_untrusted(error):
        return f"{url} has no trusted certificate ({_cause(error)}); name its authority in SSL_CERT_FILE"
    if error.sent:
        return (
            f"no answer from {url}: the request may or may not have been carried out ({_cause(error)}); is the proxy "
            "running? see --url and --timeout-seconds"
        )
    return f"can't reach {url} ({_cause(error)}); start the proxy with 'popgate serve' or name another URL with --url"


def _forbidden(error: Forbidden) -> str:
    """Name the missing action, also if a newer server's detail does not, and both ways out."""
    detail = _line(error.detail)
    missing = f" (missing: {error.action})" if error.action is not None and error.action not in detail else ""
    return f"{detail}{missing}, or give another key or token in POPGATE_TOKEN or --token-file"


def _is_untrusted(error: BaseException | None) -> bool:
    """Return whether the server's certificate was refused. httpx and httpcore wrap the error of ``ssl``."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _cause(error: ServerUnreachable) -> str:
    return re.sub(r"^\[Errno -?\d+\] ", "", _line(str(error.__cause__))) or type(error.__cause__).__name__


def _on_the_command_line(detail: str) -> str:
    """Replace the HTTP request that the server's error suggests by the equivalent ``popgate`` command."""

    def command(match: re.Match[str]) -> str:
        topic, group = match.groups()
        if group is None:
            return f"create it with: popgate topics create {topic} --queues 4"
        return f"create it with: popgate groups create {topic} {group}"

    detail = re.sub(r"make it with PUT /v1/locks/(\S+)$", r"make it with: popgate locks set \1 --kind mutex", detail)
    return re.sub(r"create it with PUT /v1/admin/topics/([^/\s]+)(?:/groups/(\S+))?$", command, detail)


def _line(text: str) -> str:
    return " ".join(text.split())
