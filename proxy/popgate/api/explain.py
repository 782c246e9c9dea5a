"""Serves the questions of an operator: why does a pop get nothing, what is in a group, and where is a message?

The owner of a queue knows the queue's messages. So the proxy that answers a client asks the other owners with the same
request, and combines their answers. A proxy that another proxy asks answers only for itself. A proxy that does not
answer is named in the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from popgate.api.asking import Asked, ask_all
from popgate.api.openapi_errors import problem_responses
from popgate.api.scope_keys import forwarding_of
from popgate.api.visit import Sight, SightOfCaller
from popgate.domain.errors import StateUnavailable
from popgate.domain.located import LocatedGroup, located, with_story
from popgate.domain.message import SHORT_STRING_BYTES_MAX
from popgate.domain.names import NAME_PATTERN, InstanceId
from popgate.domain.peeked import (
    CURSOR_PATTERN,
    FIRST,
    PEEKED_MAX,
    Peek,
    PeekedMessage,
    PeekState,
    cursor_of,
    place_of_cursor,
)
from popgate.domain.permissions import Action, Resource
from popgate.domain.reasons import Reason, available, reasons
from popgate.domain.standing import GroupStanding, UnreachableProxy
from popgate.domain.story import Story
from popgate.engine.engine import Engine
from popgate.engine.explain.peeking import PeekRequest
from popgate.ports.peers import Peers

TopicInPath = Annotated[str, Path(pattern=NAME_PATTERN)]
GroupInPath = Annotated[str, Path(pattern=NAME_PATTERN)]
MessageIdInPath = Annotated[str, Path(min_length=1, max_length=SHORT_STRING_BYTES_MAX)]
FetchInQuery = Annotated[
    Literal["true", "false"],
    Query(description="first read messages from the broker, as a pop does, in groups that the caller may consume"),
]
_Peers: TypeAlias = Peers | None


class PeekQuery(BaseModel):
    """The query of a peek. Numbers arrive as texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Literal["ready", "leased", "delayed", "blocked", "any"] = "any"
    key: Annotated[
        str | None, Field(min_length=1, max_length=SHORT_STRING_BYTES_MAX, description="only this ordering key")
    ] = None
    limit: Annotated[int, Field(ge=1, le=PEEKED_MAX)] = 20
    after: Annotated[
        str | None,
        Field(
            pattern=CURSOR_PATTERN,
            description="`next` of the last page, or the `cursor` of a message",
        ),
    ] = None
    fetch: Annotated[
        Literal["true", "false"],
        Field(description="first read messages from the broker, as a pop does, if few are in memory"),
    ] = "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainAnswer:
    """Why a pop of the group gets nothing now. ``would_get``: whether a pop without a filter gets a message.

    ``available`` counts the messages that such a pop may get. ``reasons`` lists the most important reason first.
    ``standing`` has the facts.
    """

    topic: str
    group: str
    would_get: bool
    summary: str
    available: int
    reasons: list[Reason]
    standing: GroupStanding


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekAnswer:
    """Messages of a group, oldest first. ``unreachable`` lists proxies whose messages are missing."""

    messages: list[PeekedMessage]
    next: str | None
    not_shown: int | None
    unreachable: list[UnreachableProxy]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageAnswer:
    """Where a message is in each group of its topic that the caller may see. ``story`` is what the journal tells of it;
    it is null without a journal."""

    topic: str
    message_id: str
    groups: list[LocatedGroup]
    unreachable: list[UnreachableProxy]
    story: Story | None = None


def explain_router(engine: Engine, peers: _Peers) -> APIRouter:
    """Return the routes. ``peers`` sends requests to the other proxies, or is None for a proxy that runs alone."""
    router = APIRouter(tags=["admin"], responses=problem_responses(400, 404, 503))
    _add_explain(router, engine, peers)
    _add_peek(router, engine, peers)
    _add_message(router, engine, peers)
    return router


def _add_explain(router: APIRouter, engine: Engine, peers: _Peers) -> None:
    inspector = engine.inspector

    @router.get("/v1/admin/topics/{topic}/groups/{group}/explain")
    async def explain_group(
        topic: TopicInPath, group: GroupInPath, request: Request, sight: SightOfCaller
    ) -> ExplainAnswer:
        """Explain why a pop of a group gets no message, with a remedy for each reason. Changes nothing. Ordering keys
        and filters are shown only to callers with the permission consume."""
        reads = sight.may(Action.CONSUME, Resource(topic, group))
        here = await inspector.proxy_standing(topic, group, with_contents=reads)
        proxies, unreachable = [here], list[UnreachableProxy]()
        if peers is not None and forwarding_of(request.scope) is None:
            asked = await ask_all(peers, inspector.members(), request, ExplainAnswer)
            proxies += [proxy for _, answer in asked.answers for proxy in answer.standing.proxies]
            unreachable = [inspector.unreachable(topic, group, *failed) for failed in asked.failures]
        standing = await inspector.group_standing(topic, group, proxies, unreachable)
        return _explained(standing)


def _explained(standing: GroupStanding) -> ExplainAnswer:
    found, count = reasons(standing), available(standing)
    stopped = next((reason for reason in found if reason.stops_all), None)
    would_get = stopped is None and count > 0
    if would_get:
        summary = f"A pop gets a message: {count} available."
    elif stopped is not None:
        summary = stopped.detail
    else:
        summary = found[0].detail if found else "A pop gets nothing now, and the proxies know no reason. Try again."
    return ExplainAnswer(
        topic=standing.topic,
        group=standing.group,
        would_get=would_get,
        summary=summary,
        available=count,
        reasons=found,
        standing=standing,
    )


def _add_peek(router: APIRouter, engine: Engine, peers: _Peers) -> None:
    inspector = engine.inspector

    @router.get("/v1/admin/topics/{topic}/groups/{group}/messages")
    async def peek_messages(
        topic: TopicInPath, group: GroupInPath, query: Annotated[PeekQuery, Query()], request: Request
    ) -> PeekAnswer:
        """Show messages of a group without leasing them, the oldest first: those in the memory of the proxies. Long
        bodies and headers are cut."""
        order = PeekRequest(
            state=PeekState(query.state),
            key=query.key,
            count_max=query.limit,
            after=FIRST if query.after is None else place_of_cursor(query.after),
            fetches=query.fetch == "true",
        )
        pages = [await inspector.peek(topic, group, order)]
        unreachable: list[UnreachableProxy] = []
        if peers is not None and forwarding_of(request.scope) is None:
            asked = await ask_all(peers, inspector.owners(topic, group), request, PeekAnswer)
            pages += [
                Peek(messages=answer.messages, next=answer.next, not_shown=answer.not_shown)
                for _, answer in asked.answers
            ]
            unreachable = [inspector.unreachable(topic, group, *failed) for failed in asked.failures]
        return _page(pages, query.limit, unreachable)


def _page(pages: list[Peek], limit: int, unreachable: list[UnreachableProxy]) -> PeekAnswer:
    """Combine the pages of several proxies. A page with a ``next`` says nothing of the messages behind that place."""
    ends = [place_of_cursor(page.next) for page in pages if page.next is not None]
    placed = sorted(
        ((place_of_cursor(one.cursor), one) for page in pages for one in page.messages), key=lambda one: one[0]
    )
    known = [one for one in placed if not ends or one[0] <= min(ends)]
    end = known[limit - 1][0] if len(known) > limit else min(ends, default=None)
    counts = [page.not_shown for page in pages]
    return PeekAnswer(
        messages=[one for _, one in known[:limit]],
        next=None if end is None else cursor_of(end),
        not_shown=None if None in counts else sum(count or 0 for count in counts),
        unreachable=unreachable,
    )


def _add_message(router: APIRouter, engine: Engine, peers: _Peers) -> None:
    @router.get("/v1/admin/topics/{topic}/messages/{message_id}")
    async def find_message(
        topic: TopicInPath,
        message_id: MessageIdInPath,
        request: Request,
        sight: SightOfCaller,
        fetch: FetchInQuery = "false",
    ) -> MessageAnswer:
        """Find a message in each group of its topic: ready, leased, delayed, blocked, dead, settled or unknown. The id
        is the publisher's message_id, or popgate's own id of a copy."""
        return await _find(engine, peers, topic, message_id, request, sight, fetches=fetch == "true")

    @router.get("/v1/admin/topics/{topic}/messages")
    async def find_message_by_query(
        topic: TopicInPath,
        find: Annotated[str, Query(min_length=1, max_length=SHORT_STRING_BYTES_MAX, description="id of the message")],
        request: Request,
        sight: SightOfCaller,
        fetch: FetchInQuery = "false",
    ) -> MessageAnswer:
        """Find a message like GET /v1/admin/topics/{topic}/messages/{message_id}, for ids that contain a slash."""
        return await _find(engine, peers, topic, find, request, sight, fetches=fetch == "true")


async def _find(
    engine: Engine, peers: _Peers, topic: str, message_id: str, request: Request, sight: Sight, *, fetches: bool
) -> MessageAnswer:
    inspector = engine.inspector
    groups = [group for group in inspector.groups(topic) if sight.sees(Resource(topic, group))]
    readable = [group for group in groups if sight.may(Action.CONSUME, Resource(topic, group))]
    parts = await inspector.find(topic, groups, message_id, readable=readable, fetches=fetches)
    if forwarding_of(request.scope) is not None:
        return MessageAnswer(topic=topic, message_id=message_id, groups=parts, unreachable=[])
    unread: list[str] = []
    try:
        parts += await inspector.find_records(topic, groups, message_id, readable=readable)
    except StateUnavailable as error:
        unread.append(f"Its lease record can't be read: {error.detail}.")
    asked: Asked[MessageAnswer] = Asked([], [])
    if peers is not None:
        asked = await ask_all(peers, inspector.owners(topic), request, MessageAnswer)
        parts += [part for _, answer in asked.answers for part in answer.groups]
    story = await _story(engine, topic, message_id, groups, readable)
    found = [
        located(
            group,
            [part for part in parts if part.group == group],
            [*unread, *_missing(engine, topic, group, asked.failures)],
        )
        for group in groups
    ]
    return MessageAnswer(
        topic=topic,
        message_id=message_id,
        groups=found if story is None else [with_story(group, story) for group in found],
        unreachable=[UnreachableProxy(proxy=owner, detail=detail) for owner, detail in asked.failures],
        story=story,
    )


async def _story(
    engine: Engine, topic: str, message_id: str, groups: Sequence[str], readable: Sequence[str]
) -> Story | None:
    """Return what the journal tells of a message in the given groups, without reasons that the caller may not read."""
    stories = engine.inspector.stories
    if stories is None:
        return None
    story = await stories.story(topic, message_id)
    events = [one for one in story.events if one.group is None or one.group in groups]
    shown = [one if one.group is None or one.group in readable else replace(one, detail=None) for one in events]
    return replace(story, events=shown)


def _missing(engine: Engine, topic: str, group: str, failures: Sequence[tuple[InstanceId, str]]) -> list[str]:
    """Return sentences about the queues of a group whose messages no proxy has reported."""
    inspector = engine.inspector
    silent = [one for one in (inspector.unreachable(topic, group, *failed) for failed in failures) if one.queues]
    sentences = [f"Proxy {one.proxy} owns queues of this group, and does not answer: {one.detail}." for one in silent]
    unowned = inspector.unowned(topic, group)
    if unowned:
        sentences.append(f"No proxy owns queue {', '.join(map(str, unowned))} of this group at the moment.")
    return sentences
