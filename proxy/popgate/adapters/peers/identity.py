"""Checks which proxy is at the other end of a TLS connection."""

import ssl
from collections.abc import Sequence
from typing import cast

from popgate.domain.names import InstanceId
from popgate.wire.admission import instance_in


class AnotherPeer(ConnectionError):
    """Another proxy of the cluster, ``instance``, is at the address."""

    def __init__(self, instance: InstanceId | None) -> None:
        super().__init__(f"another proxy ({instance}) is at this address")
        self.instance = instance


class ForeignPeer(ConnectionError):
    """What is at the address has no certificate of this cluster, or does not accept the one of this proxy: it is a
    proxy with another secret, or another program. ``reason`` is that of OpenSSL."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"it has another secret, or is no proxy of this cluster ({reason.lower().replace('_', ' ')})")


def named_instance(connection: ssl.SSLObject) -> InstanceId | None:
    """Return the instance that the verified certificate of the other side names."""
    names = cast("Sequence[tuple[str, str]]", (connection.getpeercert() or {}).get("subjectAltName", ()))
    return instance_in(name for kind, name in names if kind == "URI")
