"""Classifies host names in requests and settings. This module does not resolve names."""

from ipaddress import ip_address

ANY_HOST = "*"
"""In a setting, this value allows every host name."""


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


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can reach a server that listens on ``host``."""
    return ip_address(host).is_loopback if is_address(host) else is_localhost(host)
