"""Classifies host names in requests and settings. This module does not resolve names."""

from collections.abc import Iterable
from ipaddress import ip_address

ANY_HOST = "*"
"""In a setting, this value allows every host name."""
_ANY_ADDRESSES = (0, 0xFFFF_0000_0000)
"""The addresses ``0.0.0.0`` and ``::``, and ``::ffff:0.0.0.0``."""


def is_localhost(name: str) -> bool:
    """Return whether ``name`` always means the local machine (RFC 6761)."""
    return name == "localhost" or name.endswith(".localhost")


def is_address(name: str) -> bool:
    """Return whether ``name`` is an IP address; IPv6 addresses must have no brackets."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_any_address(host: str) -> bool:
    """Return whether a server that listens on ``host`` listens on all addresses of the machine."""
    return is_address(host) and int(ip_address(host)) in _ANY_ADDRESSES


def names_other_machines(names: Iterable[str]) -> bool:
    """Return whether clients on other machines can use one of the ``names`` for a proxy.

    A proxy on a loopback address needs such a name only if a server in front of it lets other machines in.
    """
    return not all(map(is_localhost, names))


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can reach a server that listens on ``host``."""
    return ip_address(host).is_loopback if is_address(host) else is_localhost(host)
