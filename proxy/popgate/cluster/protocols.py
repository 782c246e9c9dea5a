"""Which version of their protocol the proxies of a cluster speak. Pure.

Every member publishes the lowest and the highest version that it speaks, and every sender chooses by the view in which
it finds whom to ask: so nobody is asked in a version that it does not speak, however views differ for a moment.
"""

from collections.abc import Collection, Iterable

from popgate.domain.errors import NoCommonVersion
from popgate.ports.claims import Member

NAMED_COUNT_MAX = 3
"""So many proxies are named in an error."""

Protocols = tuple[int, int]
"""The lowest and the highest version spoken."""


def common_version(own: Protocols, members: Iterable[Member]) -> int:
    """The highest version that all ``members`` speak and this proxy, which speaks ``own``.

    Raises: NoCommonVersion, naming those with whom it has none.
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
        f"this proxy speaks version {span(own)} of the protocol between proxies, but the cluster has "
        f"{_named(strangers)}: upgrade by way of a release that speaks both, or stop those before this one starts"
    )


def span(protocols: Protocols) -> str:
    lowest, highest = protocols
    return f"{lowest}" if lowest == highest else f"{lowest} to {highest}"


def _named(members: Collection[Member]) -> str:
    first = [f"{one.instance} at {one.address} ({span(one.protocols)})" for one in members][:NAMED_COUNT_MAX]
    more = [f"{len(members) - len(first)} more"] if len(members) > len(first) else []
    return ", ".join([*first, *more])
