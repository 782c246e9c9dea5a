"""Carries out the changes of topics and groups that administrators ask for, but deletions (``deletion``)."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from popgate.domain.errors import Conflict
from popgate.domain.modes import switched
from popgate.domain.names import Subscription, group_name, topic_name
from popgate.domain.permissions import ANY, Action, Permit, Resource, permit_all
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy, TopicSpec
from popgate.engine.catalog.queue_count import are_unused, check_drained, declared_count
from popgate.engine.catalog.topic_requests import asked_topic, check_adoption
from popgate.engine.catalog.topics import PolicyChange, Topics, applied
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.subscription.subscription import ServedSubscription

_log = logging.getLogger(__name__)


class Changes:
    """Changes ``topics``."""

    def __init__(self, context: EngineContext, topics: Topics) -> None:
        self._context = context
        self._topics = topics

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
        async with self._topics.changing:
            present, warnings = await self._topics.decided(partial(self._put_asked, wanted, permit))
        is_followed = await self._topics.announce()
        if present is not None and present.queue_count > wanted.queue_count:
            async with self._topics.change():
                is_lowered = await self._topics.decided(
                    partial(self._end_lowering, present, wanted, is_followed=is_followed)
                )
            if not is_lowered:
                raise Conflict(
                    f"the surplus queues of topic {name!r} can't be deleted: a message came in meanwhile, they have a "
                    "consumer, or another proxy can't be reached; try again"
                )
        return wanted, present is None, warnings

    async def _put_asked(self, wanted: TopicSpec, permit: Permit) -> tuple[TopicSpec | None, list[str]]:
        """Create or change a topic. Return what it was before, and warnings for the admin."""
        present = self._topics.specs.get(wanted.topic)
        whole_topic = Resource(wanted.topic, ANY)
        if wanted.adopted:
            permit(Action.ADMIN, whole_topic)
            for queue in wanted.adopted:
                permit(Action.ADMIN, Resource(wanted.topic, ANY, queue=queue))
        if present is None:
            permit(Action.CREATE, Resource(wanted.topic))
            warnings = await check_adoption(wanted, self._topics.specs.values(), self._context.broker)
            await self._topics.write_topic(wanted)
            return None, warnings
        if present.adopted != wanted.adopted or present.unique_message_ids != wanted.unique_message_ids:
            raise Conflict(f"topic {wanted.topic!r} uses other queues; delete it before you create it with these")
        if present.queue_count != wanted.queue_count:
            permit(Action.ADMIN, whole_topic)
            await self._change_queue_count(wanted)
            return present, []
        await self._topics.declare_topic(present)
        if present.adopted:
            return present, []
        declared = await declared_count(self._context, present, self._topics.group_names(present.topic))
        if declared != present.queue_count:  # a change to the present number was interrupted: complete it
            permit(Action.ADMIN, whole_topic)
        return replace(present, queue_count=declared), []

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
        async with self._topics.change():
            name = Subscription(self._topics.topic(topic).topic, group_name(group))
            served, is_new = await self._topics.decided(partial(self._topics.ensure_group, name, policy, permit))
            if is_new:
                return served, True

            def changed(spec: GroupSpec) -> GroupSpec:
                wanted = applied(policy, spec.policy)
                if wanted != spec.policy:
                    permit(Action.ADMIN, Resource(*name))
                return replace(spec, policy=wanted)

            if policy is not None:
                await self._topics.change_spec(served, changed)
            if repairs or self._topics.missing_queues(name.topic):
                await self._topics.declare_topic(self._topics.topic(topic))
                await self._context.broker.declare_group(served.layout)
                await served.queues_declared()
            return served, False

    async def pause_group(
        self, topic: str, group: str, *, paused: bool, permit: Permit = permit_all
    ) -> ServedSubscription:
        """Pause or resume a group. ``permit`` is asked for ``admin`` on it.

        Raises: TopicNotFound, GroupNotFound, StateUnavailable, and the errors of ``permit``.
        """
        async with self._topics.change():
            permit(Action.ADMIN, Resource(topic, group))
            served = self._topics.subscription(topic, group)
            was_paused = served.spec.policy.paused
            await self._topics.change_spec(
                served, lambda spec: replace(spec, policy=replace(spec.policy, paused=paused))
            )
            if was_paused != paused:
                _log.info("a group was paused" if paused else "a group was resumed", extra=served.name._asdict())
            return served

    async def switch(
        self, topic: str, group: str, mode: ConsumeMode, drain_seconds: float | None, permit: Permit = permit_all
    ) -> ServedSubscription:
        """Switch a group to ``mode``, at once or after a drain in which its leases end (``domain.modes``). Idempotent.

        A switch back to the former mode cancels the drain. ``permit`` is asked for ``admin`` on the group.

        Raises: TopicNotFound, GroupNotFound, StateUnavailable, and the errors of ``permit``.
        """
        async with self._topics.change():
            permit(Action.ADMIN, Resource(topic, group))
            served = self._topics.subscription(topic, group)
            now = await self._context.catalog.now()
            await self._topics.change_spec(
                served, lambda spec: switched(spec, mode, now=now, drain_seconds=drain_seconds)
            )
            if (drain := served.spec.drain) is not None:
                fields = {**served.name._asdict(), "mode": drain.to, "seconds": round(drain.ends_at - now, 1)}
                _log.info("a group drains before its consume mode is switched", extra=fields)
            return served

    # -- the number of queues ---------------------------------------------------------------------------------

    async def _change_queue_count(self, wanted: TopicSpec) -> None:
        """Change the queue count. Raise Conflict if queues are not empty, as ordering keys move to other queues.

        Surplus queues are not deleted yet (``_end_lowering``).
        """
        served = self._topics.groups(wanted.topic)
        self._topics.check_queues(sum(wanted.queue_count - len(one.layout.queues) for one in served))
        async with self._topics.publishers.kept_out(wanted.topic):
            for one in served:
                await check_drained(self._context, one)
            await self._use_queues(wanted)

    async def _use_queues(self, spec: TopicSpec) -> None:
        """Give a topic the queues of ``spec``. Its groups claim them at their next pops."""
        groups = self._topics.groups(spec.topic)
        for one in groups:
            await self._context.broker.declare_group(spec.layout(one.name))
        await self._topics.write_topic(spec)
        for one in groups:
            await one.stop()
            self._context.missing_queues.difference_update(one.layout.queues)
            self._topics.served[one.name] = self._topics.subscription_of(one.spec)

    async def _end_lowering(self, former: TopicSpec, wanted: TopicSpec, *, is_followed: bool) -> bool:
        """Delete the queues that ``wanted`` no longer has, or let the topic use those of ``former`` again.

        The latter if not all proxies have followed the change, or if the queues are used. Return whether the queues
        were deleted. Do not delete them if another request has changed the topic meanwhile.
        """
        await self._topics.catch_up()
        if self._topics.specs.get(wanted.topic) != wanted:
            return False
        layouts = [former.layout(one.name) for one in self._topics.groups(wanted.topic)]
        surplus = [layout.queues[wanted.queue_count :] for layout in layouts]
        is_unused = is_followed and await are_unused(self._context, [queue for queues in surplus for queue in queues])
        if not is_unused:
            async with self._topics.publishers.kept_out(former.topic):
                await self._use_queues(former)
            return False
        await self._topics.write_topic(wanted)  # ensures that no other proxy has changed the topic during the looks
        for layout, queues in zip(layouts, surplus, strict=True):
            await self._context.broker.delete_group(replace(layout, queues=queues[1:], dead=queues[0]))
        return True
