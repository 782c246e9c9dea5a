"""Manages topics and groups: looks them up, applies an administrator's changes, and serves their subscriptions.

Every change is written to the catalog and the broker first, then to memory. If the process crashes between these steps,
the administrator completes the change by repeating the request. A proxy makes one change at a time, under a lock that
stays locked during I/O. It decides from its memory what a request may do to topics, and what it creates. It writes this
only if no other proxy has changed the catalog since this proxy has read it; otherwise it reads the catalog, and decides
again. A client's request waits for this lock only if the request creates its topic or group, or if
its topic has no group yet and another request may be creating the first one.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

from popgate.domain.errors import Conflict, GroupNotFound, StateUnavailable, TopicNotFound
from popgate.domain.modes import drained, switched
from popgate.domain.names import DEFAULT_GROUP, BrokerQueue, GroupName, Subscription, TopicName, group_name, topic_name
from popgate.domain.permissions import ANY, Action, Permit, Resource, permit_all
from popgate.domain.quotas import Quota
from popgate.domain.receipt import ReceiptSigner
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy, TopicSpec
from popgate.engine.catalog.queue_count import are_unused, check_drained, declared_count
from popgate.engine.catalog.topic_requests import asked_topic, check_adoption, check_new_topic
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.publish.publishing import PublisherGate
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind
from popgate.runtime.in_turn import in_turn

AnswerT = TypeVar("AnswerT")

PolicyChange: TypeAlias = Callable[[Policy], Policy]
"""Returns the new policy of a group for its present policy."""

CHANGES_MAX = 20
"""Maximum number of attempts to change the catalog while other proxies change it."""


class _CatalogChangedError(Exception):
    """Nothing was written, because another proxy has changed the catalog since this proxy has read it."""


class Topics:
    """The topics and groups that this proxy knows. Look-ups do no I/O; changes do."""

    def __init__(self, context: EngineContext, signer: ReceiptSigner) -> None:
        self._context = context
        self._signer = signer
        self._changing = asyncio.Lock()
        self._version = 0
        """The version of the catalog from which ``specs`` and ``served`` were made."""
        self.publishers = PublisherGate()
        self.specs: dict[TopicName, TopicSpec] = {}
        self.served: dict[Subscription, ServedSubscription] = {}

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Declare the topics of the catalog at the broker, and serve the groups of the catalog.

        Raises: BrokerUnavailable, StateUnavailable, Conflict.
        """
        self._version = await self._context.catalog.version()
        for topic in await self._context.catalog.topics():
            await self._declare_topic(topic)
            self.specs[topic.topic] = topic
        for group in await self._context.catalog.groups():
            await self._serve(group)

    async def follow(self) -> None:
        """Apply changes that other proxies have made to the catalog. Raises: StateUnavailable.

        An error about one group is raised at the end, so that it does not affect the other groups.
        """
        try:
            async with self._changing:
                await self._read_catalog()
        finally:
            if self._context.router.cluster is not None:
                self._context.router.cluster.ownership.queues_changed()

    async def _read_catalog(self) -> None:
        version = await self._context.catalog.version()  # first: a change during the reads makes it outdated
        specs = {spec.topic: spec for spec in await self._context.catalog.topics()}
        groups = {group.subscription: group for group in await self._context.catalog.groups()}
        self._keep_unreadable(specs, groups)
        for name, served in list(self.served.items()):
            if name not in groups or name.topic not in specs or specs[name.topic].layout(name) != served.layout:
                del self.served[name]
                await served.stop()
                self._context.missing_queues.difference_update(served.layout.queues)
        for topic in [topic for topic, spec in self.specs.items() if specs.get(topic) != spec]:
            async with self.publishers.kept_out(topic):  # no publish uses the former spec when this method returns
                self.specs.pop(topic)
                self.specs.update({topic: specs[topic]} if topic in specs else {})
        self.specs, self._version = specs, version
        await in_turn(partial(self._follow, group) for group in groups.values())

    def _keep_unreadable(self, specs: dict[TopicName, TopicSpec], groups: dict[Subscription, GroupSpec]) -> None:
        """Add what this proxy serves already, if it exists in the catalog but can't be read. It may have messages."""
        topics, left_out = self._context.catalog.unreadable()
        specs.update({name: spec for name, spec in self.specs.items() if name in topics})
        groups.update({name: served.spec for name, served in self.served.items() if name in left_out})

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
        """Return the names of the topic's groups."""
        return [name.group for name in self.served if name.topic == topic]

    def missing_queues(self, topic: TopicName) -> dict[int, BrokerQueue]:
        """Return the topic's queues that were deleted at the broker, by number. Groups miss the messages for them."""
        if not self._context.missing_queues:
            return {}
        hosts = (host for served in self.groups(topic) for host in served.hosts)
        return {host.queue.number: host.broker_queue for host in hosts if host.queue_gone}

    # -- creation by use ----------------------------------------------------------------------------------------

    async def topic_to_publish(self, name: str, permit: Permit = permit_all) -> TopicSpec:
        """Return the topic. If it does not exist and creation by use is on, create it with the group ``default``, if
        ``permit`` allows this.

        Raises: TopicNotFound, and the errors of ``permit``.
        """
        spec = self.specs.get(TopicName(name))
        if self._context.options.auto_create and (spec is None or self._is_half_made(spec.topic)):
            async with self._change():
                group = Subscription(topic_name(name), DEFAULT_GROUP)

                def permit_both(action: Action, resource: Resource) -> None:
                    permit(action, resource)
                    permit(action, Resource(*group))

                spec, is_new = await self._decided(partial(self._ensure_topic, group.topic, permit_both))
                if is_new:
                    await self._decided(partial(self._ensure_group, group))
        return spec or self.topic(name)

    def _is_half_made(self, topic: TopicName) -> bool:
        """Whether the topic has no group yet, but one may be in creation. A publish must wait for that group."""
        return self._changing.locked() and not self.groups(topic)

    async def subscription_to_pop(self, topic: str, group: str, permit: Permit = permit_all) -> ServedSubscription:
        """Return the subscription. If it does not exist and creation by use is on, create its topic and group, if
        ``permit`` allows this.

        Raises: TopicNotFound, GroupNotFound, Conflict, and the errors of ``permit``.
        """
        served = self.served.get(Subscription(topic, group))  # type: ignore[arg-type]  # checked below where unknown
        if served is None and self._context.options.auto_create:
            name = Subscription(topic_name(topic), group_name(group))
            async with self._change():
                if name not in self.served:
                    permit(Action.CREATE, Resource(*name))
                await self._decided(partial(self._ensure_topic, name.topic, permit))
                return (await self._decided(partial(self._ensure_group, name)))[0]
        return served or self.subscription(topic, group)

    async def _ensure_topic(self, topic: TopicName, permit: Permit) -> tuple[TopicSpec, bool]:
        """Return the topic, and whether it is new."""
        spec = self.specs.get(topic)
        if spec is not None:
            return spec, False
        permit(Action.CREATE, Resource(topic))
        spec = TopicSpec(topic=topic, queue_count=self._context.options.auto_create_queues)
        self._check_queues(spec.queue_count)  # the queues that the first group will have
        return await self._put_topic(spec), True

    async def _ensure_group(
        self, name: Subscription, policy: Policy | PolicyChange | None = None, permit: Permit = permit_all
    ) -> tuple[ServedSubscription, bool]:
        """Return the group, and whether it is new."""
        served = self.served.get(name)
        if served is not None:
            return served, False
        permit(Action.CREATE, Resource(*name))
        return await self._put_group(name, _applied(policy, Policy())), True

    async def _decided(self, decide: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Call ``decide`` again while other proxies change the catalog before it can write what it has decided."""
        for _ in range(CHANGES_MAX):
            try:
                return await decide()
            except _CatalogChangedError:
                await self._read_catalog()
        raise StateUnavailable("other proxies keep changing topics and groups; try again")

    @property
    def is_changing(self) -> bool:
        """Whether a request that changes something must wait for another one."""
        return self._changing.locked()

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncGenerator[None]:
        """Make one change at a time, and announce it to the other proxies at the end of the context.

        The announcement follows the release of the lock. Otherwise two proxies that make a change at the same time
        would wait for each other: each would hold its lock while the other one needs its own lock to apply the change.
        """
        async with self._changing:
            yield
        await self._announce()

    async def _announce(self) -> bool:
        return await self._context.router.announce(
            lambda: [queue for one in self.served.values() for queue in one.layout.queues]
        )

    # -- changes ------------------------------------------------------------------------------------------------

    async def put_topic(
        self,
        name: str,
        *,
        queues: int | None,
        adopt: Sequence[str] | None,
        unique_message_ids: bool = False,
        permit: Permit = permit_all,
    ) -> tuple[TopicSpec, bool, list[str]]:
        """Create or change a topic. Return its spec, whether it is new, and warnings for the admin.

        ``permit`` is asked for ``create`` on a new topic, for ``admin`` on the topic if queues are adopted or their
        number changes, and for ``admin`` on each adopted queue.

        Raises: the errors of ``permit``; InvalidRequest; Conflict if an adopted queue is missing, has other consumers
        or is a stream; if the queue count would change while queues contain messages; if it would fall while another
        proxy can't be reached; or if the existing topic uses other adopted queues, or has another
        ``unique_message_ids``.
        """
        wanted = asked_topic(topic_name(name), queues, adopt, unique_message_ids=unique_message_ids)
        async with self._changing:
            present, warnings = await self._decided(partial(self._put_asked, wanted, permit))
        is_followed = await self._announce()
        if present is not None and present.queue_count > wanted.queue_count:
            async with self._change():
                is_lowered = await self._decided(partial(self._end_lowering, present, wanted, is_followed=is_followed))
            if not is_lowered:
                raise Conflict(
                    f"the surplus queues of topic {name!r} can't be deleted: a message came in meanwhile, they have a "
                    "consumer, or another proxy can't be reached; try again"
                )
        return wanted, present is None, warnings

    async def _put_asked(self, wanted: TopicSpec, permit: Permit) -> tuple[TopicSpec | None, list[str]]:
        """Create or change a topic. Return what it was before, and warnings for the admin."""
        present = self.specs.get(wanted.topic)
        whole_topic = Resource(wanted.topic, ANY)
        if wanted.adopted:
            permit(Action.ADMIN, whole_topic)
            for queue in wanted.adopted:
                permit(Action.ADMIN, Resource(wanted.topic, ANY, queue=queue))
        if present is None:
            permit(Action.CREATE, Resource(wanted.topic))
            warnings = await check_adoption(wanted, self.specs.values(), self._context.broker)
            await self._put_topic(wanted)
            return None, warnings
        if present.adopted != wanted.adopted or present.unique_message_ids != wanted.unique_message_ids:
            raise Conflict(f"topic {wanted.topic!r} uses other queues; delete it before you create it with these")
        if present.queue_count != wanted.queue_count:
            permit(Action.ADMIN, whole_topic)
            await self._change_queue_count(wanted)
            return present, []
        await self._declare_topic(present)
        if present.adopted:
            return present, []
        declared = await declared_count(self._context, present, self.group_names(present.topic))
        if declared != present.queue_count:  # a change to the present number was interrupted: complete it
            permit(Action.ADMIN, whole_topic)
        return replace(present, queue_count=declared), []

    async def delete_topic(self, name: str, permit: Permit = permit_all) -> None:
        """Delete the topic, its groups and their messages. Adopted queues are not deleted.

        ``permit`` is asked for ``admin`` on the topic. Raises: the errors of ``permit``; TopicNotFound; Conflict if a
        group's entry can't be read.
        """
        async with self._change():
            permit(Action.ADMIN, Resource(name, ANY))
            spec = self.topic(name)
            await self._context.catalog.groups()
            unreadable = self._context.catalog.unreadable().groups - self.served.keys()
            for group in (other.group for other in unreadable if other.topic == spec.topic):
                raise Conflict(
                    f"the entry of group {group!r} of topic {name!r} can't be read, so its queues can't be deleted; "
                    "repair it in the store, or delete it there if its messages are not needed"
                )
            for served in self.groups(spec.topic):
                await self._delete_group(served)
            await self._context.dedup.drop_topic(spec.topic)
            await self._context.catalog.delete_topic(spec.topic)
            async with self.publishers.kept_out(spec.topic):
                self.specs.pop(spec.topic, None)
                if not spec.adopted:
                    await self._context.broker.delete_topic(spec.topic)
            self._context.journal.note(EventKind.TOPIC_DELETED, spec.topic, self._context.clock.wall())

    async def put_group(
        self,
        topic: str,
        group: str,
        policy: Policy | PolicyChange | None,
        permit: Permit = permit_all,
        *,
        repairs: bool = True,
    ) -> tuple[ServedSubscription, bool]:
        """Create a group, or change the policy of an existing group. Return the group, and whether it is new.

        ``policy`` is the new policy; a function that converts the present one, or the default one of a new group; or
        None for the default policy of a new group, and no change of an existing one. ``permit`` is asked for ``create``
        of a new group, and for ``admin`` if the policy of an existing group changes. With ``repairs``, all queues of an
        existing group are declared again, which can take seconds; otherwise only if this proxy knows that some were
        deleted at the broker. Raises: TopicNotFound, Conflict, and the errors of ``permit``.
        """
        async with self._change():
            name = Subscription(self.topic(topic).topic, group_name(group))
            served, is_new = await self._decided(partial(self._ensure_group, name, policy, permit))
            if is_new:
                return served, True

            def changed(spec: GroupSpec) -> GroupSpec:
                wanted = _applied(policy, spec.policy)
                if wanted != spec.policy:
                    permit(Action.ADMIN, Resource(*name))
                return replace(spec, policy=wanted)

            if policy is not None:
                await self._change_spec(served, changed)
            if repairs or self.missing_queues(name.topic):
                await self._declare_topic(self.topic(topic))
                await self._context.broker.declare_group(served.layout)
                await served.queues_declared()
            return served, False

    async def pause_group(
        self, topic: str, group: str, *, paused: bool, permit: Permit = permit_all
    ) -> ServedSubscription:
        """Pause or resume a group. ``permit`` is asked for ``admin`` on it.

        Raises: TopicNotFound, GroupNotFound, StateUnavailable, and the errors of ``permit``.
        """
        async with self._change():
            permit(Action.ADMIN, Resource(topic, group))
            served = self.subscription(topic, group)
            await self._change_spec(served, lambda spec: replace(spec, policy=replace(spec.policy, paused=paused)))
            return served

    async def switch(
        self, topic: str, group: str, mode: ConsumeMode, drain_seconds: float | None, permit: Permit = permit_all
    ) -> ServedSubscription:
        """Switch a group to ``mode``, at once or after a drain in which its leases end (``domain.modes``). Idempotent.

        A switch back to the former mode cancels the drain. ``permit`` is asked for ``admin`` on the group.

        Raises: TopicNotFound, GroupNotFound, StateUnavailable, and the errors of ``permit``.
        """
        async with self._change():
            permit(Action.ADMIN, Resource(topic, group))
            served = self.subscription(topic, group)
            now = await self._context.catalog.now()
            await self._change_spec(served, lambda spec: switched(spec, mode, now=now, drain_seconds=drain_seconds))
            return served

    async def delete_group(self, topic: str, group: str, permit: Permit = permit_all) -> None:
        """Delete the group with its messages and dead letters. ``permit`` is asked for ``admin`` on the group.

        Raises: TopicNotFound, GroupNotFound, and the errors of ``permit``.
        """
        async with self._change():
            permit(Action.ADMIN, Resource(topic, group))
            await self._delete_group(self.subscription(topic, group))

    # -- steps ----------------------------------------------------------------------------------------------------

    async def _change_spec(self, served: ServedSubscription, change: Callable[[GroupSpec], GroupSpec]) -> None:
        """Replace a group's catalog entry with ``change(entry)``. Retry if another proxy has changed the entry."""
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

    async def _follow(self, spec: GroupSpec) -> None:
        """Apply the group's entry in the catalog, or replace it if its mode generation is earlier than the served one.
        Serve the group if it is new.

        The replacement happens after the store has lost its data, if a proxy with outdated data has restored the entry.
        """
        served = self.served.get(spec.subscription)
        if served is None:
            if spec.subscription.topic in self.specs:
                await self._serve(spec)
            return
        if spec.mode_generation < served.spec.mode_generation:
            await self._context.catalog.change_group(spec, served.spec)
        await served.follow(spec)

    async def _put_topic(self, spec: TopicSpec) -> TopicSpec:
        if spec.topic not in self.specs:
            check_new_topic(spec.topic)
            self._context.options.quotas.check(Quota.TOPICS, len(self.specs))
        await self._declare_topic(spec)
        self._written(await self._context.catalog.put_topic(spec, self._version))
        self.specs[spec.topic] = spec
        return spec

    def _written(self, version: int) -> None:
        if not version:
            raise _CatalogChangedError
        self._version = version

    async def _declare_topic(self, spec: TopicSpec) -> None:
        if not spec.adopted:
            await self._context.broker.declare_topic(spec.topic)

    async def _put_group(self, name: Subscription, policy: Policy) -> ServedSubscription:
        spec = self.topic(name.topic)
        unreadable = self._context.catalog.unreadable().groups - self.served.keys()
        others = [*self.group_names(spec.topic), *(other.group for other in unreadable if other.topic == spec.topic)]
        if spec.adopted and others:  # the text does not name the group, because the caller may not see it
            raise Conflict(
                f"topic {spec.topic!r} uses adopted queues and already has a group, and messages of adopted queues "
                "can't be copied to a second group"
            )
        self._context.options.quotas.check(Quota.GROUPS, len(others))
        self._check_queues(spec.queue_count)
        await self._context.broker.declare_group(spec.layout(name))
        # A deleted group of this name may have used mode generations. The new group's generation is later than these,
        # so the store grants no lease under the deleted group's generation.
        generation = await self._context.leases.allow_mode(name, 0) + 1
        group = GroupSpec(
            subscription=name,
            policy=policy,
            mode=self._context.options.first_mode,
            mode_generation=generation,
            lease_generation=generation,
        )
        self._written(await self._context.catalog.change_group(None, group, self._version))
        self._note(EventKind.GROUP_CREATED, name)
        return await self._serve(group)

    def _check_queues(self, more: int) -> None:
        """Check that ``more`` queues fit into the quota of queues. Raises: QuotaExceeded.

        The quota can be exceeded slightly if other proxies create queues at the same time.
        """
        present = sum(len(served.layout.queues) for served in self.served.values())
        self._context.options.quotas.check(Quota.QUEUES, present, more)

    async def _serve(self, group: GroupSpec) -> ServedSubscription:
        """Start to serve a group. Its queues must be declared, and its entry must be in the catalog."""
        served = self._subscription(group)
        await served.start()
        self.served[group.subscription] = served
        return served

    def _subscription(self, group: GroupSpec) -> ServedSubscription:
        layout = self.specs[group.subscription.topic].layout(group.subscription)
        end_drain = partial(self._end_drain, group.subscription)
        return ServedSubscription(self._context, group, layout, self._signer, self.publishers, end_drain)

    async def _end_drain(self, name: Subscription, spec: GroupSpec) -> None:
        """End the drain of a group. Do nothing if its mode or drain is no longer the one in ``spec``."""
        async with self._change():
            served = self.served.get(name)
            if served is not None:
                step = (spec.mode_generation, spec.drain)
                await self._change_spec(
                    served, lambda now: drained(now) if (now.mode_generation, now.drain) == step else now
                )

    async def _delete_group(self, served: ServedSubscription) -> None:
        """Delete a group. The last step deletes its catalog entry, so the request can be repeated if a step fails."""
        await served.stop()
        try:
            async with self.publishers.kept_out(served.name.topic):  # RabbitMQ before 4.3 ends their connection
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
        """Change the queue count. Raise Conflict if queues are not empty, as ordering keys move to other queues.

        Surplus queues are not deleted yet (``_end_lowering``).
        """
        served = self.groups(wanted.topic)
        self._check_queues(sum(wanted.queue_count - len(one.layout.queues) for one in served))
        async with self.publishers.kept_out(wanted.topic):
            for one in served:
                await check_drained(self._context, one)
            await self._use_queues(wanted)

    async def _use_queues(self, spec: TopicSpec) -> None:
        """Give a topic the queues of ``spec``. Its groups claim them at their next pops."""
        groups = self.groups(spec.topic)
        for one in groups:
            await self._context.broker.declare_group(spec.layout(one.name))
        await self._put_topic(spec)
        for one in groups:
            await one.stop()
            self._context.missing_queues.difference_update(one.layout.queues)
            self.served[one.name] = self._subscription(one.spec)

    async def _end_lowering(self, former: TopicSpec, wanted: TopicSpec, *, is_followed: bool) -> bool:
        """Delete the queues that ``wanted`` no longer has, or let the topic use those of ``former`` again.

        The latter if not all proxies have followed the change, or if the queues are used. Return whether the queues
        were deleted. Do not delete them if another request has changed the topic meanwhile.
        """
        if await self._context.catalog.version() != self._version:
            await self._read_catalog()
        if self.specs.get(wanted.topic) != wanted:
            return False
        layouts = [former.layout(one.name) for one in self.groups(wanted.topic)]
        surplus = [layout.queues[wanted.queue_count :] for layout in layouts]
        is_unused = is_followed and await are_unused(self._context, [queue for queues in surplus for queue in queues])
        if not is_unused:
            async with self.publishers.kept_out(former.topic):
                await self._use_queues(former)
            return False
        await self._put_topic(wanted)  # ensures that no other proxy has changed the topic during the looks
        for layout, queues in zip(layouts, surplus, strict=True):
            await self._context.broker.delete_group(replace(layout, queues=queues[1:], dead=queues[0]))
        return True


def _applied(policy: Policy | PolicyChange | None, present: Policy) -> Policy:
    if policy is None:
        return present
    return policy if isinstance(policy, Policy) else policy(present)
