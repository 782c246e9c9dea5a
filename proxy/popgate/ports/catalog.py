"""Defines the catalog part of the state port: the topics and groups that exist.

The catalog is small. It is read completely at start and after each change, and written when an admin changes it.
"""

from typing import NamedTuple, Protocol

from popgate.domain.names import Subscription, TopicName
from popgate.domain.topics import GroupSpec, TopicSpec


class Unreadable(NamedTuple):
    """The topics and groups that exist, but whose entries can't be read."""

    topics: frozenset[TopicName]
    groups: frozenset[Subscription]


class Catalog(Protocol):
    """All calls raise StateUnavailable when the store can't be reached or can't write.

    A newer popgate, or another program, may have written an entry that this popgate can't read. Such an entry is left
    out, and is never replaced: ``put_topic`` and ``change_group`` raise Conflict.
    """

    async def topics(self) -> list[TopicSpec]: ...

    async def groups(self) -> list[GroupSpec]: ...

    def unreadable(self) -> Unreadable:
        """Return the names that the latest calls of ``topics`` and ``groups`` have left out."""
        ...

    async def put_topic(self, spec: TopicSpec, version: int | None = None) -> int:
        """Create or replace the topic, and return the new version of the catalog.

        If the catalog does not have ``version`` any more, change nothing and return 0; None: any version. So what was
        decided from a catalog is written only while that catalog is the present one. The change is durable when the
        call returns. Raises: Conflict.
        """
        ...

    async def delete_topic(self, topic: TopicName) -> None:
        """Delete the topic and all its groups. Idempotent."""
        ...

    async def group(self, subscription: Subscription) -> GroupSpec | None: ...

    async def change_group(self, before: GroupSpec | None, after: GroupSpec, version: int | None = None) -> int:
        """Replace the stored spec ``before`` by ``after``, and return the new version of the catalog.

        If another spec is stored, or the catalog does not have ``version`` any more, change nothing and return 0.
        ``before`` None: the group must not exist yet. The comparison ensures that two proxies never undo each other's
        changes. The change is durable when the call returns. Raises: Conflict.
        """
        ...

    async def delete_group(self, subscription: Subscription) -> None: ...

    async def now(self) -> float:
        """Return the store's time in Unix seconds. The deadlines in specs are times of this clock.

        All proxies use this one clock.
        """
        ...

    async def version(self) -> int:
        """Return the catalog's version, which is higher after every change. This call is cheap.

        The version is 0 before the first change, and after the store has lost its data. A caller that reads the version
        before the catalog may read the catalog once too often, but misses no change.
        """
        ...

    async def changed(self) -> None:
        """Wait until any process, including this one, has changed the catalog since the previous call returned.

        Notifications may be lost, so callers must also poll ``version``. Only one caller may wait at a time.
        """
        ...
