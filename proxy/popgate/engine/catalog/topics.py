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
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TypeAlias, TypeVar

from popgate.domain.errors import Conflict, GroupNotFound, StateUnavailable, TopicNotFound
from popgate.domain.modes import drained
from popgate.domain.names import DEFAULT_GROUP, BrokerQueue, GroupName, Subscription, TopicName, group_name, topic_name
from popgate.domain.permissions import Action, Permit, Resource, permit_all
from popgate.domain.quotas import Quota
from popgate.domain.receipt import ReceiptSigner
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy, TopicSpec
from popgate.engine.catalog.served_groups import ServedGroups
from popgate.engine.catalog.topic_requests import check_new_topic, log_topic
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


class CatalogChangedError(Exception):
    """Nothing was written, because another proxy has changed the catalog since this proxy has read it."""


class Topics:
    """The topics and groups that this proxy knows. Look-ups do no I/O; changes do."""

    def __init__(self, context: EngineContext, signer: ReceiptSigner) -> None:
        self._context = context
        self._signer = signer
        self.changing = asyncio.Lock()
        self.version = 0
        """The version of the catalog from which ``specs`` and ``served`` were made."""
        self.publishers = PublisherGate()
        self.specs: dict[TopicName, TopicSpec] = {}
        self.served = ServedGroups()
        self.deleted_topics: dict[TopicName, TopicSpec] = {}
        self.deleted_groups: set[Subscription] = set()
        """What has the mark ``deleted`` in the catalog. ``specs`` and ``served`` don't contain it."""

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Declare the topics of the catalog at the broker, and serve the groups of the catalog.

        Raises: BrokerUnavailable, StateUnavailable, Conflict.
        """
        self.version = await self._context.catalog.version()
        specs, groups = await self._entries()
        for topic in specs.values():
            await self.declare_topic(topic)
            self.specs[topic.topic] = topic
        for group in groups.values():
            await self._serve(group)

    async def follow(self) -> None:
        """Apply changes that other proxies have made to the catalog. Raises: StateUnavailable.

        An error about one group is raised at the end, so that it does not affect the other groups.
        """
        try:
            async with self.changing:
                await self.read_catalog()
        finally:
            if self._context.router.cluster is not None:
                self._context.router.cluster.ownership.queues_changed()

    async def catch_up(self) -> None:
        """Read the catalog if another proxy has changed it since this proxy has read it."""
        if await self._context.catalog.version() != self.version:
            await self.read_catalog()

    async def read_catalog(self) -> None:
        """Read the catalog, and apply its changes. Call it within ``change``. Raises: StateUnavailable."""
        version = await self._context.catalog.version()  # first: a change during the reads makes it outdated
        specs, groups = await self._entries()
        self._keep_unreadable(specs, groups)
        for name, served in list(self.served.items()):
            if name not in groups or name.topic not in specs:
                del self.served[name]
                await self._leave(served)
        for topic in [topic for topic, spec in self.specs.items() if specs.get(topic) != spec]:
            async with self.publishers.kept_out(topic):  # no publish uses the former spec when this method returns
                self.specs.pop(topic)
                self.specs.update({topic: specs[topic]} if topic in specs else {})
        self.specs = specs
        for name, served in list(self.served.items()):
            if specs[name.topic].layout(name) != served.layout:
                await self._leave(served)
                self.served[name] = self.subscription_of(groups[name])  # at once, because clients use the group
        self.version = version
        await in_turn(partial(self._follow, group) for group in groups.values())

    async def _leave(self, served: ServedSubscription) -> None:
        await served.stop()
        self._context.missing_queues.difference_update(served.layout.queues)

    async def _entries(self) -> tuple[dict[TopicName, TopicSpec], dict[Subscription, GroupSpec]]:
        """Read the catalog, and return the topics and groups to serve: those that are not being deleted."""
        specs = {spec.topic: spec for spec in await self._context.catalog.topics()}
        groups = {group.subscription: group for group in await self._context.catalog.groups()}
        self.deleted_topics = {name: spec for name, spec in specs.items() if spec.deleted}
        self.deleted_groups = {
            name for name, group in groups.items() if group.deleted or name.topic in self.deleted_topics
        }
        return (
            {name: spec for name, spec in specs.items() if name not in self.deleted_topics},
            {name: group for name, group in groups.items() if name not in self.deleted_groups},
        )

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
        return list(self.served.of(topic).values())

    def group_names(self, topic: TopicName) -> list[GroupName]:
        """Return the names of the topic's groups."""
        return list(self.served.of(topic))

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
            async with self.change():
                group = Subscription(topic_name(name), DEFAULT_GROUP)

                def permit_both(action: Action, resource: Resource) -> None:
                    permit(action, resource)
                    permit(action, Resource(*group))

                spec, is_new = await self.decided(partial(self._ensure_topic, group.topic, permit_both))
                if is_new:
                    await self.decided(partial(self.ensure_group, group))
        return spec or self.topic(name)

    def _is_half_made(self, topic: TopicName) -> bool:
        """Whether the topic has no group yet, but one may be in creation. A publish must wait for that group."""
        return self.changing.locked() and not self.groups(topic)

    async def subscription_to_pop(self, topic: str, group: str, permit: Permit = permit_all) -> ServedSubscription:
        """Return the subscription. If it does not exist and creation by use is on, create its topic and group, if
        ``permit`` allows this.

        Raises: TopicNotFound, GroupNotFound, Conflict, and the errors of ``permit``.
        """
        served = self.served.get(Subscription(topic, group))  # type: ignore[arg-type]  # checked below where unknown
        if served is None and self._context.options.auto_create:
            name = Subscription(topic_name(topic), group_name(group))
            async with self.change():
                if name not in self.served:
                    permit(Action.CREATE, Resource(*name))
                await self.decided(partial(self._ensure_topic, name.topic, permit))
                return (await self.decided(partial(self.ensure_group, name)))[0]
        return served or self.subscription(topic, group)

    async def _ensure_topic(self, topic: TopicName, permit: Permit) -> tuple[TopicSpec, bool]:
        """Return the topic, and whether it is new."""
        spec = self.specs.get(topic)
        if spec is not None:
            return spec, False
        permit(Action.CREATE, Resource(topic))
        spec = TopicSpec(topic=topic, queue_count=self._context.options.auto_create_queues)
        self.check_queues(spec.queue_count)  # the queues that the first group will have
        return await self.write_topic(spec), True

    async def ensure_group(
        self, name: Subscription, policy: Policy | PolicyChange | None = None, permit: Permit = permit_all
    ) -> tuple[ServedSubscription, bool]:
        """Return the group, and whether it is new."""
        served = self.served.get(name)
        if served is not None:
            return served, False
        permit(Action.CREATE, Resource(*name))
        return await self._put_group(name, applied(policy, Policy())), True

    async def decided(self, decide: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Call ``decide`` again while other proxies change the catalog before it can write what it has decided."""
        for _ in range(CHANGES_MAX):
            try:
                return await decide()
            except CatalogChangedError:
                await self.read_catalog()
        raise StateUnavailable("other proxies keep changing topics and groups; try again")

    @property
    def is_changing(self) -> bool:
        """Whether a request that changes something must wait for another one."""
        return self.changing.locked()

    @contextlib.asynccontextmanager
    async def change(self) -> AsyncGenerator[None]:
        """Make one change at a time, and announce it to the other proxies at the end of the context.

        The announcement follows the release of the lock. Otherwise two proxies that make a change at the same time
        would wait for each other: each would hold its lock while the other one needs its own lock to apply the change.
        """
        async with self.changing:
            yield
        await self.announce()

    async def announce(self) -> bool:
        """Announce a change to the other proxies. Return whether all of them have applied it."""
        return await self._context.router.announce(
            lambda: [queue for one in self.served.values() for queue in one.layout.queues]
        )

    # -- steps ----------------------------------------------------------------------------------------------------

    async def change_spec(self, served: ServedSubscription, change: Callable[[GroupSpec], GroupSpec]) -> None:
        """Replace a group's catalog entry with ``change(entry)``. Retry if another proxy has changed the entry."""
        for _ in range(CHANGES_MAX):
            present = await self._context.catalog.group(served.name)
            if present is None:
                raise GroupNotFound(f"group {served.name.group!r} of topic {served.name.topic!r} was deleted just now")
            wanted = change(present)
            if wanted == present or await self._context.catalog.change_group(present, wanted):
                if wanted.mode is not present.mode and wanted.mode is not ConsumeMode.DRAINING:
                    self.note(EventKind.MODE_CHANGED, served.name, wanted.mode)
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

    async def write_topic(self, spec: TopicSpec) -> TopicSpec:
        """Declare a topic at the broker, write its entry, and return it.

        Raises: Conflict if it is being deleted; QuotaExceeded; CatalogChangedError.
        """
        if spec.topic not in self.specs:
            check_new_topic(spec.topic)
            if spec.topic in self.deleted_topics:
                raise _being_deleted(f"topic {spec.topic!r}", spec.topic)
            self._context.options.quotas.check(Quota.TOPICS, len(self.specs))
        await self.declare_topic(spec)
        self.written(await self._context.catalog.put_topic(spec, self.version))
        log_topic(self.specs.get(spec.topic), spec)
        self.specs[spec.topic] = spec
        return spec

    def written(self, version: int) -> None:
        """Remember the version of the catalog that a write has returned. Raises: CatalogChangedError if it is 0."""
        if not version:
            raise CatalogChangedError
        self.version = version

    async def declare_topic(self, spec: TopicSpec) -> None:
        """Declare a topic at the broker, unless it uses adopted queues. Idempotent."""
        if not spec.adopted:
            await self._context.broker.declare_topic(spec.topic)

    async def _put_group(self, name: Subscription, policy: Policy) -> ServedSubscription:
        spec = self.topic(name.topic)
        if name in self.deleted_groups:
            raise _being_deleted(f"group {name.group!r} of topic {name.topic!r}", f"{name.topic}/groups/{name.group}")
        unreadable = self._context.catalog.unreadable().groups - self.served.keys()
        others = [*self.group_names(spec.topic), *(other.group for other in unreadable if other.topic == spec.topic)]
        if spec.adopted and others:  # the text does not name the group, because the caller may not see it
            raise Conflict(
                f"topic {spec.topic!r} uses adopted queues and already has a group, and messages of adopted queues "
                "can't be copied to a second group"
            )
        self._context.options.quotas.check(Quota.GROUPS, len(others))
        self.check_queues(spec.queue_count)
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
        self.written(await self._context.catalog.change_group(None, group, self.version))
        self.note(EventKind.GROUP_CREATED, name)
        return await self._serve(group)

    def check_queues(self, more: int) -> None:
        """Check that ``more`` queues fit into the quota of queues. Raises: QuotaExceeded.

        The quota can be exceeded slightly if other proxies create queues at the same time.
        """
        present = sum(len(served.layout.queues) for served in self.served.values())
        self._context.options.quotas.check(Quota.QUEUES, present, more)

    async def _serve(self, group: GroupSpec) -> ServedSubscription:
        """Start to serve a group. Its queues must be declared, and its entry must be in the catalog."""
        served = self.subscription_of(group)
        await served.start()
        self.served[group.subscription] = served
        return served

    def subscription_of(self, group: GroupSpec) -> ServedSubscription:
        """Return a new subscription with the queues that the group's topic has now."""
        layout = self.specs[group.subscription.topic].layout(group.subscription)
        end_drain = partial(self._end_drain, group.subscription)
        return ServedSubscription(self._context, group, layout, self._signer, self.publishers, end_drain)

    async def _end_drain(self, name: Subscription, spec: GroupSpec) -> None:
        """End the drain of a group. Do nothing if its mode or drain is no longer the one in ``spec``."""
        async with self.change():
            served = self.served.get(name)
            if served is not None:
                step = (spec.mode_generation, spec.drain)
                await self.change_spec(
                    served, lambda now: drained(now) if (now.mode_generation, now.drain) == step else now
                )

    def note(self, kind: EventKind, name: Subscription, detail: str = "") -> None:
        """Write an event of a group to the journal."""
        self._context.journal.note(kind, name.topic, self._context.clock.wall(), group=name.group, detail=detail)


def _being_deleted(what: str, path: str) -> Conflict:
    return Conflict(
        f"{what} is being deleted; if its deletion was interrupted, complete it with DELETE /v1/admin/topics/{path}"
    )


def applied(policy: Policy | PolicyChange | None, present: Policy) -> Policy:
    """Return the policy that ``policy`` asks for. None: the present one."""
    if policy is None:
        return present
    return policy if isinstance(policy, Policy) else policy(present)
