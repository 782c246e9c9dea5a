"""The topics and groups that exist, the subscriptions that this proxy serves, and the admin's changes to them.

Every change is written to the catalog and the broker first, then to memory. So if the process crashes between these
steps, repeating the request completes the change. Changes are rare and made one at a time. The lock for changes is the
only one that is held during I/O, and no message waits for it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial

from popgate.domain.errors import Conflict, GroupNotFound, StateUnavailable, TopicNotFound
from popgate.domain.modes import drained, switched
from popgate.domain.names import DEFAULT_GROUP, BrokerQueue, GroupName, Subscription, TopicName, group_name, topic_name
from popgate.domain.quotas import Quota
from popgate.domain.receipt import ReceiptSigner
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy, TopicSpec
from popgate.engine.catalog.topic_requests import asked_topic, check_adoption
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.publish.publishing import PublisherGate
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind

CHANGES_MAX = 20
"""Maximum number of attempts at changing a group that other proxies change at the same time."""


class Topics:
    """Holds the topics and groups of this proxy. Look-ups are synchronous; changes are awaited."""

    def __init__(self, context: EngineContext, signer: ReceiptSigner) -> None:
        self._context = context
        self._signer = signer
        self._changing = asyncio.Lock()
        self.publishers = PublisherGate()
        self.specs: dict[TopicName, TopicSpec] = {}
        self.served: dict[Subscription, ServedSubscription] = {}

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Declare and serve everything in the catalog. Raises: BrokerUnavailable, StateUnavailable, Conflict."""
        for topic in await self._context.catalog.topics():
            await self._declare_topic(topic)
            self.specs[topic.topic] = topic
        for group in await self._context.catalog.groups():
            await self._serve(group)

    async def follow(self) -> None:
        """Apply changes that other proxies have made to the catalog. Raises: StateUnavailable."""
        async with self._changing:
            specs = {spec.topic: spec for spec in await self._context.catalog.topics()}
            groups = {group.subscription: group for group in await self._context.catalog.groups()}
            for name, served in list(self.served.items()):
                if name not in groups or name.topic not in specs or specs[name.topic].layout(name) != served.layout:
                    del self.served[name]
                    await served.stop()
                    self._context.missing_queues.difference_update(served.layout.queues)
            self.specs = specs
            for name, group in groups.items():
                known = self.served.get(name)
                if known is not None:
                    await self._follow(known, group)
                elif name.topic in specs:
                    await self._serve(group)
        if self._context.router.cluster is not None:
            self._context.router.cluster.ownership.queues_changed()

    async def stop(self) -> None:
        await asyncio.gather(*(served.stop() for served in self.served.values()))

    # -- look-ups -----------------------------------------------------------------------------------------------

    def topic(self, name: str) -> TopicSpec:
        """Return a topic. Raises: TopicNotFound."""
        spec = self.specs.get(topic_name(name))
        if spec is None:
            raise TopicNotFound(f"topic {name!r} does not exist; create it with PUT /v1/admin/topics/{name}")
        return spec

    def subscription(self, topic: str, group: str) -> ServedSubscription:
        """Return a subscription. Raises: TopicNotFound, GroupNotFound."""
        served = self.served.get(Subscription(topic, group))  # type: ignore[arg-type]  # checked below where unknown
        if served is None:
            self.topic(topic)
            name = group_name(group)
            raise GroupNotFound(
                f"group {name!r} of topic {topic!r} does not exist; "
                f"create it with PUT /v1/admin/topics/{topic}/groups/{name}"
            )
        return served

    def groups(self, topic: TopicName) -> list[ServedSubscription]:
        return [served for served in self.served.values() if served.name.topic == topic]

    def group_names(self, topic: TopicName) -> list[GroupName]:
        """Return the names of ``groups``."""
        return [name.group for name in self.served if name.topic == topic]

    def missing_queues(self, topic: TopicName) -> dict[int, BrokerQueue]:
        """Return the queues, by number, that were deleted on the broker. Their messages don't reach the group."""
        if not self._context.missing_queues:
            return {}
        return {
            host.queue.number: host.broker_queue
            for served in self.groups(topic)
            for host in served.hosts
            if host.queue_gone
        }

    # -- creation by use ----------------------------------------------------------------------------------------

    async def topic_to_publish(self, name: str) -> TopicSpec:
        """Return the topic; create it with the group ``default`` if creation by use is on. Raises: TopicNotFound."""
        spec = self.specs.get(TopicName(name))
        if self._context.options.auto_create and (spec is None or self._is_half_made(spec.topic)):
            async with self._change():
                is_new = name not in self.specs
                spec = await self._ensure_topic(topic_name(name))
                if is_new:
                    await self._ensure_group(Subscription(spec.topic, DEFAULT_GROUP))
        return spec or self.topic(name)

    def _is_half_made(self, topic: TopicName) -> bool:
        """Whether the topic's first group may be under construction. A publish must wait until that group exists."""
        return self._changing.locked() and not self.groups(topic)

    async def subscription_to_pop(self, topic: str, group: str) -> ServedSubscription:
        """Return the subscription; create it if creation by use is on. Raises: TopicNotFound, GroupNotFound,
        Conflict."""
        served = self.served.get(Subscription(topic, group))  # type: ignore[arg-type]  # checked below where unknown
        if served is None and self._context.options.auto_create:
            name = Subscription(topic_name(topic), group_name(group))
            async with self._change():
                await self._ensure_topic(name.topic)
                return await self._ensure_group(name)
        return served or self.subscription(topic, group)

    async def _ensure_topic(self, topic: TopicName) -> TopicSpec:
        spec = self.specs.get(topic)
        if spec is None:
            spec = TopicSpec(topic=topic, queue_count=self._context.options.auto_create_queues)
            self._check_queues(spec.queue_count)  # the first group's queues: a topic without a group is useless
            await self._put_topic(spec)
        return spec

    async def _ensure_group(self, name: Subscription) -> ServedSubscription:
        return self.served.get(name) or (await self._put_group(name, Policy()))[0]

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncGenerator[None]:
        """Allow one change at a time, and announce it to the other proxies before the context exits.

        The other proxies are notified after the lock is released. Otherwise two proxies that change something at the
        same time would wait for each other.
        """
        async with self._changing:
            yield
        await self._context.router.announce(
            lambda: [queue for one in self.served.values() for queue in one.layout.queues]
        )

    # -- changes ------------------------------------------------------------------------------------------------

    async def put_topic(
        self, name: str, *, queues: int | None, adopt: Sequence[str] | None, unique_message_ids: bool = False
    ) -> tuple[TopicSpec, bool, list[str]]:
        """Create or change a topic. Return its spec, whether it is new, and warnings for the admin.

        Raises: InvalidRequest, Conflict (an adopted queue is missing, has other consumers or is a stream; the queue
        count would change while the topic is not drained; the request adopts queues for a topic that has popgate's own
        queues, or the reverse).
        """
        wanted = asked_topic(topic_name(name), queues, adopt, unique_message_ids=unique_message_ids)
        async with self._change():
            present = self.specs.get(wanted.topic)
            if present is None:
                warnings = await check_adoption(wanted, self.specs.values(), self._context.broker)
                return await self._put_topic(wanted), True, warnings
            if present.adopted != wanted.adopted or present.unique_message_ids != wanted.unique_message_ids:
                raise Conflict(f"topic {name!r} uses other queues; delete it before you create it with these")
            if present.queue_count != wanted.queue_count:
                await self._change_queue_count(wanted)
            else:
                await self._declare_topic(present)
            return wanted, False, []

    async def delete_topic(self, name: str) -> None:
        """Delete the topic, its groups and their messages. Adopted queues are not deleted. Raises: TopicNotFound."""
        async with self._change():
            spec = self.topic(name)
            for served in self.groups(spec.topic):
                await self._delete_group(served)
            await self._context.dedup.drop_topic(spec.topic)
            await self._context.catalog.delete_topic(spec.topic)
            self.specs.pop(spec.topic, None)
            if not spec.adopted:
                await self._context.broker.delete_topic(spec.topic)
            self._context.journal.note(EventKind.TOPIC_DELETED, spec.topic, self._context.clock.wall())

    async def put_group(self, topic: str, group: str, policy: Policy | None) -> tuple[ServedSubscription, bool]:
        """Create a group, or change its policy (None: keep the present policy). Return the group and whether it is new.

        Queues of the group that were deleted are declared again. Raises: TopicNotFound, Conflict.
        """
        async with self._change():
            spec = self.topic(topic)
            name = Subscription(spec.topic, group_name(group))
            served = self.served.get(name)
            if served is None:
                served, is_new = await self._put_group(name, policy or Policy())
                if is_new:
                    return served, True
            if policy is not None:
                await self._change_spec(served, lambda spec: replace(spec, policy=policy))
            await self._declare_topic(spec)
            await self._context.broker.declare_group(served.layout)
            await served.queues_declared()
            return served, False

    async def pause_group(self, topic: str, group: str, *, paused: bool) -> ServedSubscription:
        """Pause or resume a group. Raises: TopicNotFound, GroupNotFound, StateUnavailable."""
        async with self._change():
            served = self.subscription(topic, group)
            await self._change_spec(served, lambda spec: replace(spec, policy=replace(spec.policy, paused=paused)))
            return served

    async def switch(
        self, topic: str, group: str, mode: ConsumeMode, drain_seconds: float | None
    ) -> ServedSubscription:
        """Set a group's consume mode, or let the group drain first (``domain.modes``). Idempotent.

        During a drain, a switch to the former mode cancels the drain.

        Raises: TopicNotFound, GroupNotFound, StateUnavailable.
        """
        async with self._change():
            served = self.subscription(topic, group)
            now = await self._context.catalog.now()
            await self._change_spec(served, lambda spec: switched(spec, mode, now=now, drain_seconds=drain_seconds))
            return served

    async def delete_group(self, topic: str, group: str) -> None:
        """Delete the group with its messages and dead letters. Raises: TopicNotFound, GroupNotFound."""
        async with self._change():
            await self._delete_group(self.subscription(topic, group))

    # -- steps ----------------------------------------------------------------------------------------------------

    async def _change_spec(self, served: ServedSubscription, change: Callable[[GroupSpec], GroupSpec]) -> None:
        """Change a group's entry in the catalog. Try again if another proxy changes the entry at the same time."""
        for _ in range(CHANGES_MAX):
            present = await self._context.catalog.group(served.name)
            if present is None:
                raise GroupNotFound(f"group {served.name.group!r} of topic {served.name.topic!r} was deleted just now")
            wanted = change(present)
            if wanted == present or await self._context.catalog.change_group(present, wanted):
                if wanted.mode is not present.mode and wanted.mode is not ConsumeMode.DRAINING:
                    self._note(EventKind.MODE_CHANGED, served.name, wanted.mode)
                await served.follow(wanted)
                return
        raise StateUnavailable("other proxies keep changing this group; try again")

    async def _follow(self, served: ServedSubscription, spec: GroupSpec) -> None:
        """Apply the catalog's ``spec``.

        After the store lost its data, a proxy with outdated knowledge may have restored an earlier generation than
        this proxy serves. In that case write this proxy's generation back.
        """
        if spec.mode_generation < served.spec.mode_generation:
            await self._context.catalog.change_group(spec, served.spec)
        await served.follow(spec)

    async def _put_topic(self, spec: TopicSpec) -> TopicSpec:
        if spec.topic not in self.specs:
            self._context.options.quotas.check(Quota.TOPICS, len(self.specs))
        await self._declare_topic(spec)
        await self._context.catalog.put_topic(spec)
        self.specs[spec.topic] = spec
        return spec

    async def _declare_topic(self, spec: TopicSpec) -> None:
        if not spec.adopted:
            await self._context.broker.declare_topic(spec.topic)

    async def _put_group(self, name: Subscription, policy: Policy) -> tuple[ServedSubscription, bool]:
        """Create a group and serve it. Return False as the second value if another proxy created the group first."""
        spec = self.specs[name.topic]
        others = [served.name.group for served in self.groups(spec.topic)]
        if spec.adopted and others:
            raise Conflict(
                f"topic {spec.topic!r} uses adopted queues and already has the group {others[0]!r}; "
                "messages of adopted queues can't be copied to a second group"
            )
        self._context.options.quotas.check(Quota.GROUPS, len(others))
        self._check_queues(spec.queue_count)
        await self._context.broker.declare_group(spec.layout(name))
        # A deleted group of this name had generations, too. The new group's generation is later, so that no lease is
        # granted under an old generation.
        generation = await self._context.leases.allow_mode(name, 0) + 1
        group = GroupSpec(
            subscription=name,
            policy=policy,
            mode=self._context.options.first_mode,
            mode_generation=generation,
            lease_generation=generation,
        )
        is_new = await self._context.catalog.change_group(None, group)
        present = group if is_new else await self._context.catalog.group(name)
        if present is None:
            raise StateUnavailable(f"group {name.group!r} was created and deleted by other requests just now")
        if is_new:
            self._note(EventKind.GROUP_CREATED, name)
        return await self._serve(present), is_new

    def _check_queues(self, more: int) -> None:
        """Check the quota of queues. Raises: QuotaExceeded.

        The quota can be exceeded slightly if other proxies create queues at the same time.
        """
        present = sum(len(served.layout.queues) for served in self.served.values())
        self._context.options.quotas.check(Quota.QUEUES, present, more)

    async def _serve(self, group: GroupSpec) -> ServedSubscription:
        """Start to serve a group whose queues are declared and whose entry is in the catalog."""
        served = self._subscription(group)
        await served.start()
        self.served[group.subscription] = served
        return served

    def _subscription(self, group: GroupSpec) -> ServedSubscription:
        layout = self.specs[group.subscription.topic].layout(group.subscription)
        end_drain = partial(self._end_drain, group.subscription)
        return ServedSubscription(self._context, group, layout, self._signer, self.publishers, end_drain)

    async def _end_drain(self, name: Subscription, spec: GroupSpec) -> None:
        """End the drain that ``spec`` describes. Do nothing if the group's mode or drain has changed since."""
        async with self._change():
            served = self.served.get(name)
            if served is not None:
                step = (spec.mode_generation, spec.drain)
                await self._change_spec(
                    served, lambda now: drained(now) if (now.mode_generation, now.drain) == step else now
                )

    async def _delete_group(self, served: ServedSubscription) -> None:
        """Delete a group. Its catalog entry is deleted last, so that the request can be repeated if a step fails."""
        await served.stop()
        try:
            await self._context.broker.delete_group(served.layout)
            for queue in (*served.layout.queues, served.layout.dead):
                await self._context.leases.drop_queue(queue)
            await self._context.lease_groups.drop(served.name)
            await self._context.assignments.drop(served.name)
            await self._context.catalog.delete_group(served.name)
        except BaseException:
            self.served[served.name] = self._subscription(served.spec)
            raise
        del self.served[served.name]
        self._context.missing_queues.difference_update(served.layout.queues)
        self._note(EventKind.GROUP_DELETED, served.name)

    def _note(self, kind: EventKind, name: Subscription, detail: str = "") -> None:
        self._context.journal.note(kind, name.topic, self._context.clock.wall(), group=name.group, detail=detail)

    async def _change_queue_count(self, wanted: TopicSpec) -> None:
        """Change the number of queues. Every queue must be drained, because the change moves ordering keys.

        Raises: Conflict.
        """
        served = self.groups(wanted.topic)
        self._check_queues(sum(wanted.queue_count - len(one.layout.queues) for one in served))
        async with self.publishers.kept_out(wanted.topic):
            for one in served:
                depths = await self._context.broker.depth(one.layout.queues)
                elsewhere = await one.status()
                if (
                    elsewhere.in_flight
                    or any(host.messages() for host in one.hosts)
                    or any(depth.ready or depth.delayed for depth in depths)
                ):
                    raise Conflict(
                        f"the queues of group {one.name.group!r} are not drained, delayed messages included; "
                        "another number of queues would move ordering keys"
                    )
            for one in served:
                await self._context.broker.declare_group(wanted.layout(one.name))
            await self._put_topic(wanted)
            for one in served:
                await one.stop()
                self._context.missing_queues.difference_update(one.layout.queues)
                self.served[one.name] = self._subscription(one.spec)  # it claims its queues at the first pop
        for one in served:
            surplus = one.layout.queues[wanted.queue_count :]
            if surplus:
                await self._context.broker.delete_group(replace(one.layout, queues=surplus[1:], dead=surplus[0]))
