"""Defines the catalog part of the state port: the topics and groups that exist.

The catalog is small. It is read completely at start and after each change, and written when an admin changes it.
"""

from typing import Protocol

from popgate.domain.names import Subscription, TopicName
from popgate.domain.topics import GroupSpec, TopicSpec


class Catalog(Protocol):
    """All calls raise StateUnavailable when the store can't be reached or can't write."""

    async def topics(self) -> list[TopicSpec]: ...

    async def groups(self) -> list[GroupSpec]: ...

    async def put_topic(self, spec: TopicSpec) -> None:
        """Create or replace; durable when it returns."""
        ...

    async def delete_topic(self, topic: TopicName) -> None:
        """Delete the topic and all its groups. Idempotent."""
        ...

    async def group(self, subscription: Subscription) -> GroupSpec | None: ...

    async def change_group(self, before: GroupSpec | None, after: GroupSpec) -> bool:
        """Replace ``before`` (None: no such group) by ``after``, and return whether ``before`` was stored.

        So two proxies never undo each other's changes. The change is durable when the call returns.
        """
        ...

    async def delete_group(self, subscription: Subscription) -> None: ...

    async def now(self) -> float:
        """Return the time, in Unix seconds, on which the specs' deadlines are based: one clock for all proxies."""
        ...

    async def version(self) -> int:
        """Return the catalog's version, which is higher after every change. Cheap.

        It is 0 before the first change, and after the store has lost its data. A caller that reads the version before
        the catalog may read the catalog once too often, but misses no change.
        """
        ...

    async def changed(self) -> None:
        """Return when any process, including this one, has changed the catalog since the last return.

        Notifications may be lost, so callers also poll ``version``. For one caller at a time.
        """
        ...
