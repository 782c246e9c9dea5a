"""The state port's catalog half: which topics and groups exist.

Small, read whole at start, written on admin changes.
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

    async def put_group(self, spec: GroupSpec) -> None: ...

    async def delete_group(self, subscription: Subscription) -> None: ...
