"""Serves the admin interface for topics and groups (decision 1).

This module translates requests to calls of the engine's registry of topics. It makes no decisions: the registry does.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Response

from popgate.api.admin_models import (
    GroupAnswer,
    PolicyAnswer,
    PolicyChange,
    TopicAnswer,
    TopicChange,
    TopicList,
)
from popgate.api.openapi_errors import problem_responses
from popgate.api.visit import Sight, SightOfCaller
from popgate.domain.errors import InvalidRequest
from popgate.domain.names import NAME_PATTERN, GroupName, Subscription, TopicName
from popgate.domain.permissions import Action, Resource
from popgate.domain.topics import TopicSpec
from popgate.engine.engine import Engine
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.journal.counters import EventCounters

SEEN_AT_ONCE_MAX = 64
"""Maximum number of topics that are compared with a caller's patterns in one turn of the event loop."""

TopicInPath = Annotated[str, Path(pattern=NAME_PATTERN)]
GroupInPath = Annotated[str, Path(pattern=NAME_PATTERN)]
WITHOUT_REPLICAS = "min_replicas is stored, but has no effect here: the embedded store's queues have no replicas"


def admin_router(engine: Engine, counters: EventCounters) -> APIRouter:
    """Return the routes below /v1/admin that list, create, change and delete topics and groups."""
    router = APIRouter(prefix="/v1/admin", tags=["admin"], responses=problem_responses(400, 503))
    _add_topics(router, engine, counters)
    _add_groups(router, engine, counters)
    return router


def _add_topics(router: APIRouter, engine: Engine, counters: EventCounters) -> None:
    path = "/topics/{topic}"

    @router.get("/topics")
    async def list_topics(sight: SightOfCaller) -> TopicList:
        """List the topics that the caller may see, which are all topics if no keys are configured."""
        groups: dict[TopicName, list[Subscription]] = {}
        for name in engine.topics.served:
            groups.setdefault(name.topic, []).append(name)
        answers: list[TopicAnswer] = []
        for count, spec in enumerate(list(engine.topics.specs.values())):
            if count % SEEN_AT_ONCE_MAX == 0:
                await asyncio.sleep(0)
            if sight.sees(Resource(topic=spec.topic)):
                answers.append(_topic_answer(spec, groups.get(spec.topic, ()), sight))
        return TopicList(topics=answers)

    @router.put(
        path,
        responses={
            200: {"description": "It existed already, and is now as requested"},
            201: {"description": "Created", "model": TopicAnswer},
            **problem_responses(409, 413, 415),
        },
    )
    async def put_topic(
        topic: TopicInPath, change: TopicChange, response: Response, sight: SightOfCaller
    ) -> TopicAnswer:
        """Create a topic, adopt existing queues as a topic, or change the number of its queues. For this,
        they must be drained: pause the publishers first."""
        named = change.model_fields_set
        if change.unique_message_ids and "adopt" not in named:
            detail = "unique_message_ids is for adopted queues; popgate's own queues do not need it"
            raise InvalidRequest(detail, field="unique_message_ids")
        sight.park_behind(engine.topics)
        spec, is_new, warnings = await engine.changes.put_topic(
            topic,
            queues=change.queues if "queues" in named else None,
            adopt=change.adopt if "adopt" in named else None,
            unique_message_ids=change.unique_message_ids,
            permit=sight.permit,
        )
        response.status_code = 201 if is_new else 200
        answer = _topic_answer(spec, _groups(engine, spec), sight)
        answer.warnings = warnings
        return answer

    @router.get(path, responses=problem_responses(404))
    async def get_topic(topic: TopicInPath, sight: SightOfCaller) -> TopicAnswer:
        """Return one topic and the names of those of its groups that the caller may see."""
        spec = engine.topics.topic(topic)
        return _topic_answer(spec, _groups(engine, spec), sight)

    @router.delete(path, status_code=204, response_class=Response, responses=problem_responses(404))
    async def delete_topic(topic: TopicInPath, sight: SightOfCaller) -> None:
        """Delete the topic with its groups and messages. Adopted queues stay as they are."""
        sight.park_behind(engine.topics)
        await engine.deletions.delete_topic(topic, sight.permit)
        counters.forget_topic(TopicName(topic))


def _add_groups(router: APIRouter, engine: Engine, counters: EventCounters) -> None:
    path = "/topics/{topic}/groups/{group}"

    @router.put(
        path,
        responses={
            200: {"description": "It existed already, and is now as requested"},
            201: {"description": "Created", "model": GroupAnswer},
            **problem_responses(404, 409, 413, 415),
        },
    )
    async def put_group(
        topic: TopicInPath,
        group: GroupInPath,
        response: Response,
        sight: SightOfCaller,
        change: PolicyChange | None = None,
    ) -> GroupAnswer:
        """Create a group or change its policy. For callers with the permission admin, queues of the group that were
        deleted on the broker are declared again."""
        sight.park_behind(engine.topics)
        repairs = sight.may(Action.ADMIN, Resource(topic, group))
        policy = None if change is None else change.applied_to
        served, is_new = await engine.changes.put_group(topic, group, policy, sight.permit, repairs=repairs)
        response.status_code = 201 if is_new else 200
        answer = _group_answer(served)
        if change is not None and change.min_replicas is not None and engine.capabilities.vhost is None:
            answer.warnings = [WITHOUT_REPLICAS]
        return answer

    @router.get(path, responses=problem_responses(404))
    async def get_group(topic: TopicInPath, group: GroupInPath) -> GroupAnswer:
        """Return one group: its consume mode and its policy."""
        return _group_answer(engine.topics.subscription(topic, group))

    @router.post(f"{path}/pause", responses=problem_responses(404))
    async def pause(topic: TopicInPath, group: GroupInPath, sight: SightOfCaller) -> GroupAnswer:
        """Stop handing out the group's messages. Leased messages can still be settled; buffered messages go back to the
        broker. Idempotent."""
        sight.park_behind(engine.topics)
        return _group_answer(await engine.changes.pause_group(topic, group, paused=True, permit=sight.permit))

    @router.post(f"{path}/resume", responses=problem_responses(404))
    async def resume(topic: TopicInPath, group: GroupInPath, sight: SightOfCaller) -> GroupAnswer:
        """Hand out the group's messages again after a pause. Idempotent."""
        sight.park_behind(engine.topics)
        return _group_answer(await engine.changes.pause_group(topic, group, paused=False, permit=sight.permit))

    @router.delete(path, status_code=204, response_class=Response, responses=problem_responses(404))
    async def delete_group(topic: TopicInPath, group: GroupInPath, sight: SightOfCaller) -> None:
        """Delete the group with its messages and dead letters. Adopted queues stay as they are."""
        sight.park_behind(engine.topics)
        await engine.deletions.delete_group(topic, group, sight.permit)
        counters.forget(Subscription(TopicName(topic), GroupName(group)))


def _groups(engine: Engine, spec: TopicSpec) -> list[Subscription]:
    return [served.name for served in engine.topics.groups(spec.topic)]


def _topic_answer(spec: TopicSpec, groups: Iterable[Subscription], sight: Sight) -> TopicAnswer:
    return TopicAnswer(
        topic=spec.topic,
        queues=spec.queue_count,
        adopted=list(spec.adopted),
        unique_message_ids=spec.unique_message_ids,
        groups=sorted(name.group for name in groups if sight.sees(Resource(*name))),
    )


def _group_answer(served: ServedSubscription) -> GroupAnswer:
    policy = PolicyAnswer.model_validate(asdict(served.spec.policy))
    return GroupAnswer(topic=served.name.topic, group=served.name.group, mode=served.spec.mode.value, policy=policy)
