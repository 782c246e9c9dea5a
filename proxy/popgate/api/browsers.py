"""Prevents pages of other sites in a browser from using the proxy, by two rules for all paths. Both read only the head.

A browser lets every page send any request that an HTML form can send, to any server. It only hides the answer from the
page. So a request that changes something must come from a page of this proxy's own origin, or must have a content type
that no form can send. Before a browser sends such a type to another origin, it asks that server for permission
(OPTIONS), and popgate never grants it. Clients other than browsers send neither ``Origin`` nor ``Sec-Fetch-Site``, and
may omit the content type.

If a page's host name is redirected to this machine after the page was loaded (DNS rebinding), the browser treats the
page as one of the proxy's own origin. The browser still sends the page's host name as ``Host``. So ``Host`` must be one
of the proxy's names.
"""

from collections.abc import Collection, Mapping

from popgate.api.formats import JSON, MSGPACK, MSGPACK_TYPES, REMEMBERED_MAX, media_type
from popgate.api.problems import HostNotAllowed, UnsupportedMediaType
from popgate.domain.hosts import ANY_HOST, is_address, is_localhost

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_NO_FORM_SENDS = MSGPACK_TYPES | {JSON}
_OWN_SITE = (b"same-origin", b"none")
"""Values of ``Sec-Fetch-Site`` for the proxy's own page and for typed addresses. Browsers treat all ports of a host as
the same site, so ``same-site`` is not sufficient."""


class BrowserGuard:
    """Checks requests of browsers.

    ``allowed_hosts`` lists the proxy's names, besides localhost and IP addresses, which are always allowed because DNS
    can't redirect them.
    """

    def __init__(self, allowed_hosts: Collection[str] = (ANY_HOST,)) -> None:
        self._allowed = frozenset(allowed_hosts)
        self._any_host = ANY_HOST in self._allowed
        self._remembered: set[bytes] = set()
        """The ``Host`` headers that have already been accepted."""

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Check a request. Raises: HostNotAllowed, UnsupportedMediaType."""
        host = headers.get(b"host")
        if not self._any_host and host is not None and host not in self._remembered:
            self._check_host(host)
        if (b"origin" in headers or b"sec-fetch-site" in headers) and method not in _READING:
            kind = media_type(headers.get(b"content-type", b""))
            if kind not in _NO_FORM_SENDS and not _is_own_page(headers):
                raise UnsupportedMediaType(
                    f"content-type: a request from another site's page must have {JSON} or {MSGPACK}"
                )

    def _check_host(self, header: bytes) -> None:
        name = _name_in(header.decode("latin-1"))
        if not (name in self._allowed or is_localhost(name) or is_address(name)):
            raise HostNotAllowed(name)
        if len(self._remembered) < REMEMBERED_MAX:
            self._remembered.add(header)


def _is_own_page(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the request comes from the proxy's own page.

    Browsers send ``Sec-Fetch-Site`` only to trustworthy servers (https, loopback), but ``Origin`` to all servers.
    """
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site in _OWN_SITE
    return headers[b"origin"].partition(b"://")[2].lower() == headers.get(b"host", b"").lower() != b""


def _name_in(host: str) -> str:
    """Return the name or address in a ``Host`` header, without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")
