"""Which versions of the peers' protocol this proxy speaks, and which one a cluster does. Pure."""

from collections.abc import Collection, Iterable

from popgate.ports.claims import Member
from popgate.wire.errors import NoCommonVersion, NotUnderstood

PROTOCOLS = (1, 1)
"""The lowest and the highest version spoken."""


def check_version(version: int) -> None:
    """Raises: NotUnderstood, where this proxy does not speak it."""
    lowest, highest = PROTOCOLS
    if not lowest <= version <= highest:
        raise NotUnderstood(f"version {version} of the peers' protocol is not spoken here, only {_span(PROTOCOLS)}")


def common_version(members: Collection[Member]) -> int:
    """The highest version that all of them speak; this proxy's own highest where there are none.

    Raises: NoCommonVersion.
    """
    lowest = max((member.protocols[0] for member in members), default=PROTOCOLS[0])
    highest = min((member.protocols[1] for member in members), default=PROTOCOLS[1])
    if lowest <= highest:
        return highest
    newest = _named(member for member in members if member.protocols[0] > highest)
    oldest = _named(member for member in members if member.protocols[1] < lowest)
    raise NoCommonVersion(
        f"the proxies of the cluster have no version of their protocol in common: {newest} can't speak {highest}, "
        f"{oldest} can't speak {lowest}; upgrade by way of a release that speaks both"
    )


def _named(members: Iterable[Member]) -> str:
    return ", ".join(f"{one.instance} at {one.address} ({_span(one.protocols)})" for one in members)


def _span(protocols: tuple[int, int]) -> str:
    lowest, highest = protocols
    return f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
