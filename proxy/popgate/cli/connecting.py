"""Creates a client of the server from parsed flags."""

import argparse
import logging

from popgate import config
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import TIMEOUT_SECONDS
from popgate_client import Client, RequestInvalid, token_in
from popgate_client.transport import url_complaint

URL_DEFAULT = "http://127.0.0.1:8080"


def url_of(arguments: argparse.Namespace) -> str:
    """Return the server's URL from the flag --url, the variable POPGATE_URL, or the default."""
    url: str = getattr(arguments, "url", None) or config.environment().get("POPGATE_URL") or URL_DEFAULT
    return url


def open_client(arguments: argparse.Namespace) -> Client:
    """Return a client that has not sent any request. The caller must close it. Raises: CommandFailed if the URL or the
    token is invalid."""
    url = url_of(arguments)
    if (complaint := url_complaint(url)) is not None:
        raise CommandFailed(f"{complaint}; give one with --url or POPGATE_URL", ExitCode.USAGE)
    file: str | None = getattr(arguments, "token_file", None)
    # A command says itself what went wrong, without what may be a misplaced key.
    logging.getLogger("popgate_client.exchange").setLevel(logging.ERROR)
    try:
        return Client(
            url,
            token=None if file is None else token_in(file),  # None: the client reads the environment
            retry_seconds_max=getattr(arguments, "timeout", TIMEOUT_SECONDS),
        )
    except RequestInvalid as error:
        raise CommandFailed(f"{error.detail}; see POPGATE_TOKEN and SSL_CERT_FILE", ExitCode.USAGE) from error
