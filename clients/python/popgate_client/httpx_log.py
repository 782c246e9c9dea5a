"""Keeps the requests of this client out of httpx's log, which has a line at the level info for each of them.

A consumer would fill the log of a program at this level. Requests to other servers, and programs that set the level of
the logger "httpx" themselves, are not affected.
"""

import logging

import httpx

_httpx = logging.getLogger("httpx")


class _OtherServers(logging.Filter):
    """Passes the lines about all servers but those in `ours`."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: set[tuple[str, str, int | None]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if _httpx.level != logging.NOTSET or not isinstance(record.args, tuple):
            return True
        return not any(isinstance(one, httpx.URL) and _origin(one) in self.ours for one in record.args)


_other_servers = _OtherServers()
_httpx.addFilter(_other_servers)


def keep_out(base_url: httpx.URL) -> None:
    """Keep requests to this server out of httpx's log."""
    _other_servers.ours.add(_origin(base_url))


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
