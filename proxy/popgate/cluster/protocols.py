"""Chooses the version of the peer protocol that the proxies of a cluster speak. Pure.

Every member publishes the lowest and the highest version that it speaks. A sender looks up the receiver and chooses the
version in the same view of the cluster. So no member receives a request in a version that it does not speak, even while
the members' views differ.
"""

from collections.abc import Collection, Iterable

from popgate.domain.errors import NoCommonVersion
from popgate.ports.claims import Member

NAMED_COUNT_MAX = 3
"""Maximum number of proxies that an error message names."""

Protocols = tuple[int, int]
"""The lowest and the highest version of the peer protocol that a proxy speaks."""


def common_version(own: Protocols, members: Iterable[Member]) -> int:
    """Return the highest version that all ``members`` and this proxy (``own``) speak.

    Raises: NoCommonVersion, naming the members that have no version in common with this proxy.
    """
    ranges = [own]
    strangers: list[Member] = []
    for member in members:
        ranges.append(member.protocols)
        if min(own[1], member.protocols[1]) < max(own[0], member.protocols[0]):
            strangers.append(member)
    lowest, highest = max(low for low, _ in ranges), min(high for _, high in ranges)
    if lowest <= highest:
        return highest
    raise NoCommonVersion(
        f"this proxy speaks version {span(own)} of the peer protocol, but the cluster has {_named(strangers)}: "
        "upgrade through a release that speaks both, or stop those proxies before you start this one"
    )


def span(protocols: Protocols) -> str:
    lowest, highest = protocols
    return f"{lowest}" if lowest == highest else f"{lowest} to {highest}"


def _named(members: Collection[Member]) -> str:
    first = [f"{one.instance} at {one.address} ({span(one.protocols)})" for one in members][:NAMED_COUNT_MAX]
    more = [f"{len(members) - len(first)} more"] if len(members) > len(first) else []
    return ", ".join([*first, *more])
