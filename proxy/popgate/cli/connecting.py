"""From parsed flags to a connected client: where the server is, and for how long to keep trying."""

import argparse

import httpx

from popgate import config
from popgate.cli.endings import CommandFailed, ExitCode, without_credentials
from popgate.cli.flags import TIMEOUT_SECONDS
from popgate_client import Client, RequestInvalid

URL_DEFAULT = "http://127.0.0.1:8080"


def url_of(arguments: argparse.Namespace) -> str:
    """Flag, variable, default."""
    url: str = getattr(arguments, "url", None) or config.environment().get("POPGATE_URL") or URL_DEFAULT
    return url


def open_client(arguments: argparse.Namespace) -> Client:
    """The caller closes it. Raises: CommandFailed for a bad URL; nothing is sent yet."""
    url = url_of(arguments)
    try:
        return Client(
            url,
            token=config.environment().get("POPGATE_TOKEN"),
            retry_seconds_max=getattr(arguments, "timeout", TIMEOUT_SECONDS),
        )
    except (RequestInvalid, httpx.InvalidURL) as error:
        reason = error.detail if isinstance(error, RequestInvalid) else f"{url!r} is not a URL: {error}"
        if "@" in url and repr(url) in reason:  # of a password with a slash in it, httpx may quote any part
            reason = f"{without_credentials(url).rpartition('@')[2]!r}, credentials left out, is no http:// URL"
        raise CommandFailed(f"{reason}; give one with --url or POPGATE_URL", ExitCode.USAGE) from error
