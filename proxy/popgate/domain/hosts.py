"""Names of hosts in requests and settings. Pure: nothing is looked up."""

from ipaddress import ip_address

ANY_HOST = "*"
"""Stands for every name."""


def is_localhost(name: str) -> bool:
    """Whether ``name`` means this machine on every machine (RFC 6761)."""
    return name == "localhost" or name.endswith(".localhost")


def is_address(name: str) -> bool:
    """Whether it is an IP address; without brackets, where it is of version 6."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach what listens there."""
    return ip_address(host).is_loopback if is_address(host) else is_localhost(host)
