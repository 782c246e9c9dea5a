"""The state port's catalog half: which topics and groups exist.

Small, read whole at start and after a change, written on admin changes.
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
        """Write ``after`` where ``before`` stands, or where there is no such group (None); whether that was so. So two
        proxies never undo each other's changes. Durable when it returns."""
        ...

    async def delete_group(self, subscription: Subscription) -> None: ...

    async def now(self) -> float:
        """The time in which specs tell deadlines, in Unix seconds: one clock for all proxies."""
        ...

    async def version(self) -> int:
        """Another one, and a higher one, after every change; 0 before the first, and where the store has lost its data.
        Cheap. Who reads it first and the catalog then may read that once too often, and misses nothing."""
        ...

    async def changed(self) -> None:
        """Return when somebody, this process included, has changed the catalog since this returned last, as far as one
        hears of it: for who can't hear there is ``version``. For one caller at a time."""
        ...
