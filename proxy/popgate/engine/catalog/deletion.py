"""Deletes topics and groups, on all proxies.

A deletion has two steps. First the entry in the catalog gets the mark ``deleted``, and all proxies that can be reached
follow: they no longer serve the topic or group. Only then its queues and its exchange are deleted, and at last the
entry. Otherwise another proxy could publish to the exchange or begin to consume a queue while RabbitMQ deletes it, and
RabbitMQ would end the connection, which the other topics and groups of that proxy use too. If a deletion is
interrupted, the mark stays, and a repetition of the request completes the deletion. It may do so at another proxy while
the first one is paused between the steps. So each step begins with the present catalog.
"""

from dataclasses import replace
from functools import partial

from popgate.domain.errors import Conflict
from popgate.domain.names import GroupName, Subscription, TopicName, group_name, topic_name
from popgate.domain.permissions import ANY, Action, Permit, Resource, permit_all
from popgate.domain.topics import TopicSpec
from popgate.engine.catalog.queue_count import declared_count
from popgate.engine.catalog.topics import CatalogChangedError, Topics
from popgate.engine.context.engine_context import EngineContext
from popgate.ports.journal import EventKind


class Deletions:
    """Deletes the topics and groups of ``topics``."""

    def __init__(self, context: EngineContext, topics: Topics) -> None:
        self._context = context
        self._topics = topics

    async def delete_topic(self, topic: str, permit: Permit = permit_all) -> None:
        """Delete the topic, its groups and their messages. Adopted queues are not deleted.

        ``permit`` is asked for ``admin`` on the topic. Raises: the errors of ``permit``; TopicNotFound; Conflict if a
        group's entry can't be read.
        """
        name = topic_name(topic)
        async with self._topics.change():
            permit(Action.ADMIN, Resource(name, ANY))
            await self._check_readable(name)
            await self._topics.decided(partial(self._mark_topic, name))
        async with self._topics.change():
            await self._topics.catch_up()
            spec = self._topics.deleted_topics.get(name)
            if spec is not None:
                await self._complete(spec)
            else:  # another request has completed it
                self._topics.topic(name)

    async def delete_group(self, topic: str, group: str, permit: Permit = permit_all) -> None:
        """Delete the group with its messages and dead letters. ``permit`` is asked for ``admin`` on the group.

        Raises: TopicNotFound, GroupNotFound, and the errors of ``permit``.
        """
        name = Subscription(topic_name(topic), group_name(group))
        async with self._topics.change():
            permit(Action.ADMIN, Resource(*name))
            await self._check_readable(*name)
            await self._topics.decided(partial(self._mark_group, name))
        async with self._topics.change():
            await self._topics.catch_up()
            if name in self._topics.deleted_groups:
                await self._delete_group(name, self._topics.topic(topic))
            else:
                self._topics.subscription(*name)

    async def _mark_topic(self, name: TopicName) -> None:
        if name in self._topics.deleted_topics:
            return
        spec = self._topics.topic(name)
        self._topics.written(await self._context.catalog.put_topic(replace(spec, deleted=True), self._topics.version))
        await self._topics.read_catalog()

    async def _check_readable(self, topic: TopicName, group: GroupName | None = None) -> None:
        """Check that the entry of the group, or of all groups of the topic, can be read. Raises: Conflict."""
        await self._context.catalog.groups()
        for one in self._context.catalog.unreadable().groups:
            if one.topic == topic and group in (None, one.group):
                raise Conflict(
                    f"the entry of group {one.group!r} of topic {topic!r} can't be read, so its queues can't be "
                    "deleted; repair it in the store, or delete it there if its messages are not needed"
                )

    async def _mark_group(self, name: Subscription) -> None:
        if name in self._topics.deleted_groups:
            return
        self._topics.subscription(*name)
        present = await self._context.catalog.group(name)
        if present is None:
            raise CatalogChangedError
        if not await self._context.catalog.change_group(present, replace(present, deleted=True)):
            raise CatalogChangedError
        await self._topics.read_catalog()

    async def _complete(self, spec: TopicSpec) -> None:
        """Delete all that a topic with the mark has. The entry goes last, so that the request can be repeated."""
        name, groups = spec.topic, [one for one in self._topics.deleted_groups if one.topic == spec.topic]
        for group in groups:
            await self._delete_group(group, spec)
        await self._context.dedup.drop_topic(name)
        if not spec.adopted:
            await self._context.broker.delete_topic(name)
        await self._context.catalog.delete_topic(name)
        del self._topics.deleted_topics[name]
        self._context.journal.note(EventKind.TOPIC_DELETED, name, self._context.clock.wall())

    async def _delete_group(self, name: Subscription, spec: TopicSpec) -> None:
        """Delete all that a group with the mark has, and its entry last, so that the request can be repeated."""
        if not spec.adopted:  # a change to a lower number of queues may have been interrupted
            spec = replace(spec, queue_count=await declared_count(self._context, spec, [name.group]))
        layout = spec.layout(name)
        async with self._topics.publishers.kept_out(name.topic):  # RabbitMQ before 4.3 ends their connection
            await self._context.broker.delete_group(layout)
        for queue in (*layout.queues, layout.dead):
            await self._context.leases.drop_queue(queue)
        await self._context.lease_groups.drop(name)
        await self._context.assignments.drop(name)
        await self._context.catalog.delete_group(name)
        self._topics.deleted_groups.discard(name)
        self._topics.note(EventKind.GROUP_DELETED, name)
