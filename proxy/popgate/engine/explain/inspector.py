"""The entry point of this package: the API asks it for this proxy's part of each answer."""

import asyncio
from collections.abc import Callable, Sequence

from popgate.domain.located import LocatedGroup
from popgate.domain.names import InstanceId, TopicName
from popgate.domain.peeked import Peek
from popgate.domain.standing import GroupStanding, ProxyStanding, UnreachableProxy
from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.explain.finding import find_here, find_records
from popgate.engine.explain.peeking import PeekRequest, peek
from popgate.engine.explain.standing import group_standing, proxy_standing, queues_of, unowned
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.stories import Stories


class Inspector:
    """Answers questions about groups and messages, from what this proxy knows. It changes nothing."""

    def __init__(self, context: EngineContext, topics: Topics, is_stopping: Callable[[], bool]) -> None:
        """``is_stopping`` returns whether this proxy is shutting down, and refuses pops."""
        self._context = context
        self._topics = topics
        self._is_stopping = is_stopping
        self.stories: Stories | None = None
        """Reads the journal. It is None if no journal is configured."""

    def members(self) -> list[InstanceId]:
        """Return all other proxies of the cluster. Each of them may have waiting pops."""
        cluster = self._context.router.cluster
        return [] if cluster is None else [one for one in cluster.ownership.view.members if one != cluster.me]

    def owners(self, topic: str, group: str | None = None) -> list[InstanceId]:
        """Return the other proxies that own queues of a group, or of any group of a topic.

        Raises: TopicNotFound, GroupNotFound.
        """
        found = [self._context.router.others(served.layout) for served in self._served(topic, group)]
        return list(dict.fromkeys(owner for owners in found for owner in owners))

    def unreachable(self, topic: str, group: str, owner: InstanceId, detail: str) -> UnreachableProxy:
        """Describe a proxy that has not answered. Raises: TopicNotFound, GroupNotFound."""
        served = self._topics.subscription(topic, group)
        return UnreachableProxy(proxy=owner, detail=detail, queues=queues_of(self._context, served, owner))

    def unowned(self, topic: str, group: str) -> list[int]:
        """Return the numbers of the group's queues that no proxy owns now. Raises: TopicNotFound, GroupNotFound."""
        return [host.queue.number for host in unowned(self._context, self._topics.subscription(topic, group))]

    def groups(self, topic: str) -> list[str]:
        """Return the names of the groups of a topic. Raises: TopicNotFound."""
        return sorted(served.name.group for served in self._served(topic, None))

    def _served(self, topic: str, group: str | None) -> Sequence[ServedSubscription]:
        if group is not None:
            return [self._topics.subscription(topic, group)]
        self._topics.topic(topic)
        return self._topics.groups(TopicName(topic))

    # -- the questions --------------------------------------------------------------------------------------------

    async def proxy_standing(self, topic: str, group: str, *, with_contents: bool) -> ProxyStanding:
        """Return what this proxy knows of a group. Raises: TopicNotFound, GroupNotFound."""
        served = self._topics.subscription(topic, group)
        return await proxy_standing(self._context, served, is_stopping=self._is_stopping(), with_contents=with_contents)

    async def group_standing(
        self,
        topic: str,
        group: str,
        proxies: Sequence[ProxyStanding],
        unreachable: Sequence[UnreachableProxy],
    ) -> GroupStanding:
        """Return the standing of a group. Raises: TopicNotFound, GroupNotFound."""
        served = self._topics.subscription(topic, group)
        return await group_standing(self._context, served, proxies, unreachable)

    async def peek(self, topic: str, group: str, request: PeekRequest) -> Peek:
        """Return messages of a group in the queues of this proxy. Raises: TopicNotFound, GroupNotFound."""
        return await peek(self._context, self._topics.subscription(topic, group), request)

    async def find(
        self, topic: str, groups: Sequence[str], message_id: str, *, readable: Sequence[str], fetches: bool
    ) -> list[LocatedGroup]:
        """Find a message in the queues and dead letters of this proxy. ``readable``: the groups whose messages the
        caller may read. ``fetches``: whether messages of these groups are first read from the broker. Raises:
        TopicNotFound, GroupNotFound."""
        many = [self._topics.subscription(topic, group) for group in groups]
        return await asyncio.gather(
            *(
                find_here(
                    self._context,
                    served,
                    message_id,
                    with_contents=served.name.group in readable,
                    fetches=fetches and served.name.group in readable,
                )
                for served in many
            )
        )

    async def find_records(
        self, topic: str, groups: Sequence[str], message_id: str, *, readable: Sequence[str]
    ) -> list[LocatedGroup]:
        """Find a message by the lease records of its copy id. Raises: TopicNotFound, GroupNotFound,
        StateUnavailable."""
        many = [self._topics.subscription(topic, group) for group in groups]
        return [
            await find_records(self._context, served, message_id, with_contents=served.name.group in readable)
            for served in many
        ]
