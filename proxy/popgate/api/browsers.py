"""Prevents pages of other sites from using the proxy through a user's browser. Two rules check the head of each
request.

A browser lets every page send any request that an HTML form can send, to any server. The browser only hides the answer
from the page. So a request that changes something must come from a page of this proxy's own origin, or must have a
content type that no form can send. Before a browser sends such a content type to a server of another origin, it asks
this server for permission (OPTIONS). popgate never grants this permission. Clients other than browsers send neither
``Origin`` nor ``Sec-Fetch-Site``, and may omit the content type.

If a page's host name is redirected to this machine after the page was loaded (DNS rebinding), the browser treats the
page as a page of the proxy's own origin. But the browser still sends the page's host name as ``Host``. So the proxy
accepts only its own names as ``Host``.
"""

from collections.abc import Collection, Mapping

from popgate.api.formats import JSON, MSGPACK, MSGPACK_TYPES, REMEMBERED_MAX, media_type
from popgate.api.problems import HostNotAllowed, UnsupportedMediaType
from popgate.domain.hosts import ANY_HOST, is_address, is_localhost

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_NO_FORM_SENDS = MSGPACK_TYPES | {JSON}
_OWN_SITE = (b"same-origin", b"none")
"""Values of ``Sec-Fetch-Site`` in requests of the proxy's own page, and in requests for an address that the user typed.
The value ``same-site`` is not sufficient, because browsers treat all ports of a host as the same site."""


class BrowserGuard:
    """Refuses requests that a page of another site may have sent.

    ``allowed_hosts`` lists the host names of the proxy, or contains ``ANY_HOST``. localhost and IP addresses are always
    allowed, because DNS can't redirect them.
    """

    def __init__(self, allowed_hosts: Collection[str] = (ANY_HOST,)) -> None:
        self._allowed = frozenset(allowed_hosts)
        self._any_host = ANY_HOST in self._allowed
        self._remembered: set[bytes] = set()
        """The ``Host`` headers that have already been accepted."""

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise an error if a page of another site may have sent this request. Raises: HostNotAllowed,
        UnsupportedMediaType."""
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
