"""Serves the admin interface for dead letters, and the purge of a group (decision 1).

This module translates requests to calls of the engine, which makes all decisions.
"""

import asyncio
import contextlib
import logging
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Query, Response
from starlette.types import Scope

from popgate.api.answers import json_bytes
from popgate.api.dead_letter_models import (
    ID_LENGTH_MAX,
    DeadLetterAnswer,
    DeadLetterList,
    ListQuery,
    PurgedGroupAnswer,
    PurgedLettersAnswer,
    PurgeRequest,
    RedriveAnswer,
    RedriveRequest,
)
from popgate.api.formats import JSON
from popgate.api.openapi_errors import problem_responses
from popgate.api.visit import Sight, SightOfCaller
from popgate.domain.attempts import Attempt
from popgate.domain.dead_letter import bare, dead_letter_details, publisher_headers
from popgate.domain.errors import InvalidRequest
from popgate.domain.message import Message
from popgate.domain.names import NAME_PATTERN, CopyId, InstanceId, TopicName
from popgate.domain.permissions import Action, Resource
from popgate.engine.dead_letters.dead_letters import DeadLetters
from popgate.engine.dead_letters.dead_pages import ListedLetter, PageRequest
from popgate.engine.dead_letters.redriving import LetterChoice, Redrive, RedriveOrder
from popgate.engine.engine import Engine
from popgate.runtime.timeouts import expire_now

_log = logging.getLogger(__name__)

_PATH = "/v1/admin/topics/{topic}/groups/{group}"
_NOTE_BYTES_MAX = 48 * 1024
"""Maximum size in bytes of the fields that a dead letter has in addition to a popped message, including the reason and
the attempts."""

TopicInPath = Annotated[str, Path(pattern=NAME_PATTERN)]
GroupInPath = Annotated[str, Path(pattern=NAME_PATTERN)]
LetterInPath = Annotated[str, Path(min_length=1, max_length=ID_LENGTH_MAX)]


def dead_letters_router(engine: Engine) -> APIRouter:
    """Return the routes of a group's dead letters, and the route that purges a group."""
    router = APIRouter(tags=["admin"], responses=problem_responses(400, 404, 409, 503))
    _add_redrives(router, engine)  # first: otherwise "redrive" in a path would be read as the id of a dead letter
    _add_letters(router, engine)
    _add_purges(router, engine)
    return router


def dead_letters_proxy(engine: Engine, scope: Scope) -> InstanceId | None:
    """Return the peer proxy that must answer a request about dead letters.

    Return None if this proxy must answer, or if the request is not about dead letters.

    Raises: PeerUnavailable if no proxy owns the dead letters at the moment.
    """
    match scope["path"].split("/"):
        case ["", "v1", "admin", "topics", topic, "groups", group, "dead-letters", *_]:
            return engine.dead_letters_at(topic, group)
        case _:
            return None


def _dead_letters(engine: Engine, topic: str, group: str) -> DeadLetters:
    return engine.topics.subscription(topic, group).dead_letters


def _add_letters(router: APIRouter, engine: Engine) -> None:
    @router.get(f"{_PATH}/dead-letters", response_model=DeadLetterList)
    async def list_dead_letters(
        topic: TopicInPath, group: GroupInPath, query: Annotated[ListQuery, Query()]
    ) -> Response:
        """List the dead letters of a group in the order in which they became dead letters, one page at a time. With
        conditions, list the letters that meet all of them: a page of such a search ends after 5 seconds, even if it has
        no letters yet, and `next` goes on with the search. Changes nothing."""
        limit = query.body_bytes_max
        request = PageRequest(
            max_messages=query.max_messages,
            after=None if query.after is None else CopyId(query.after),
            filter=query.filter,
            cut=lambda message: _cut(message, limit),
            answer_bytes=lambda message: json_bytes(message) + _NOTE_BYTES_MAX,
        )
        page = await _dead_letters(engine, topic, group).page(request)
        letters = [_letter_json(shown) for shown in page.letters]
        answer: dict[str, Any] = {"messages": letters, "dead": page.dead}
        if page.next is not None:
            answer["next"] = page.next
        if request.is_search:
            answer |= {"searched": page.searched, "matching": page.matching}
        return _json(answer)

    @router.get(f"{_PATH}/dead-letters/{{id}}", response_model=DeadLetterAnswer)
    async def get_dead_letter(topic: TopicInPath, group: GroupInPath, id: LetterInPath) -> Response:
        """Return one dead letter with its whole body."""
        letter = await _dead_letters(engine, topic, group).find(CopyId(id))
        return _json(_letter_json(ListedLetter(letter, len(letter.message.body))))


def _add_redrives(router: APIRouter, engine: Engine) -> None:
    path = f"{_PATH}/dead-letters/redrive"
    answers: dict[int | str, dict[str, Any]] = {
        200: {"description": "It has ended"},
        202: {"description": "It is running; GET returns the progress", "model": RedriveAnswer},
    }

    @router.post(path, responses={**answers, **problem_responses(413, 415)})
    async def start_redrive(
        topic: TopicInPath,
        group: GroupInPath,
        response: Response,
        sight: SightOfCaller,
        request: RedriveRequest | None = None,
    ) -> RedriveAnswer:
        """Move dead letters back to their queues, or to another topic, in the background. Only one redrive of a
        group runs at a time."""
        request = request or RedriveRequest()
        target = request.target_topic
        sight.permit(Action.PUBLISH, Resource(topic=target or topic))
        if target is not None:  # the caller may be able to read them there, even in another group of this topic
            sight.permit(Action.CONSUME, Resource(topic=topic, group=group))
        order = RedriveOrder(
            choice=_choice(request),
            max_messages=request.max_messages,
            target_topic=None if target is None else TopicName(target),
            rate_per_second=request.rate_per_second,
        )
        start = partial(engine.redrive, topic, group, order)
        wait_seconds = request.wait_seconds
        redrive = await _started_and_ended(start, wait_seconds, sight) if wait_seconds else start()
        response.status_code = 202 if redrive.is_running else 200
        return _progress(redrive)

    @router.get(path)
    async def get_redrive(topic: TopicInPath, group: GroupInPath) -> RedriveAnswer:
        """Return the group's running redrive or, if none is running, the latest one. When the proxy that runs a redrive
        stops, the redrive ends, and its state is lost."""
        return _progress(_dead_letters(engine, topic, group).latest_redrive())

    @router.delete(path, responses=answers)
    async def cancel_redrive(topic: TopicInPath, group: GroupInPath, response: Response) -> RedriveAnswer:
        """Cancel the group's running redrive. Dead letters that were already moved are not moved back. The others
        remain dead letters."""
        redrive = await _dead_letters(engine, topic, group).cancel()
        response.status_code = 202 if redrive.is_running else 200
        return _progress(redrive)


async def _started_and_ended(start: Callable[[], Redrive], seconds: float, sight: Sight) -> Redrive:
    """Start a redrive if the request may wait for it. Wait until the redrive has ended, or the time is over.

    Raises: the errors of ``start`` and ``Sight.waiting``. If the wait is cut off, the redrive goes on.
    """
    over = asyncio.timeout(seconds)
    with sight.waiting(partial(expire_now, over)):
        redrive = start()
        with contextlib.suppress(TimeoutError):
            async with over:
                await redrive.ended.wait()
    return redrive


def _add_purges(router: APIRouter, engine: Engine) -> None:
    @router.post(f"{_PATH}/dead-letters/purge", responses=problem_responses(413, 415))
    async def purge_dead_letters(
        topic: TopicInPath, group: GroupInPath, request: PurgeRequest | None = None
    ) -> PurgedLettersAnswer:
        """Permanently delete dead letters of a group: all of them, those that the request lists, those that meet the
        conditions of a filter, or those older than a given age."""
        request = request or PurgeRequest()
        choice = _choice(request)
        if request.older_than_seconds is not None:
            choice = replace(choice, before=engine.now() - request.older_than_seconds)
        purged = await _dead_letters(engine, topic, group).purge(choice)
        return PurgedLettersAnswer(purged=purged.purged, dead=purged.dead, complete=purged.complete)

    @router.post(f"{_PATH}/purge")
    async def purge_group(topic: TopicInPath, group: GroupInPath) -> PurgedGroupAnswer:
        """Permanently delete the visible messages of a group. Leased messages and messages that wait for a retry
        stay."""
        purged = await engine.purge(topic, group)
        return PurgedGroupAnswer(purged=purged.purged, complete=purged.complete)


def _choice(request: RedriveRequest | PurgeRequest) -> LetterChoice:
    """Return the selection of dead letters. Raises: InvalidRequest if both ``ids`` and ``message_ids`` are given."""
    ids, message_ids = request.ids, request.message_ids
    if ids is not None and message_ids is not None:
        raise InvalidRequest("give either ids or message_ids", field="message_ids")
    return LetterChoice(
        ids=None if ids is None else frozenset(map(CopyId, ids)),
        message_ids=None if message_ids is None else frozenset(message_ids),
        filter=None if request.filter is None else request.filter.filter,
    )


def _cut(message: Message, limit: int | None) -> Message:
    """Return the message with its body cut to at most ``limit`` bytes (None: not cut). A text is never cut within a
    character."""
    body = message.body
    if limit is None or len(body) <= limit:
        return message
    cut = body[:limit]
    if _is_text(body):
        cut = cut.decode(errors="ignore").encode()
    return message._replace(body=cut)


def _is_text(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _letter_json(shown: ListedLetter) -> orjson.Fragment:
    """Return a dead letter as JSON. If it can't be encoded, omit its contents, so that the other dead letters of the
    page are still shown."""
    try:
        return orjson.Fragment(orjson.dumps(_letter(shown), default=str))
    except Exception as error:
        letter = shown.letter
        _log.error("a dead letter can't be shown", exc_info=error, extra={"copy_id": letter.copy_id})
        bared = letter._replace(message=bare(letter.message))
        return orjson.Fragment(orjson.dumps(_letter(shown._replace(letter=bared))))


def _letter(shown: ListedLetter) -> dict[str, Any]:
    letter, message = shown.letter, shown.letter.message
    note = dead_letter_details(message.headers)
    error = note.last_error
    fields: dict[str, Any] = {
        "id": letter.copy_id,
        "message_id": message.message_id or None,
        "body_bytes": shown.body_bytes,
        "body_is_cut": True if len(message.body) < shown.body_bytes else None,
        "headers": publisher_headers(message.headers),
        "ordering_key": message.ordering_key,
        "published_at": message.published_at or None,
        "cause": note.cause,
        "reason": note.reason,
        "error": None if error is None else {"type": error.error_type, "text": error.error_text},
        "client": note.last_client,
        "attempts": [_attempt(one) for one in note.attempts] or None,
        "delivery_count": note.delivery_count,
        "first_delivered_at": note.first_delivered_at,
        "dead_lettered_at": note.dead_lettered_at,
        "source_queue": note.queue,
    }
    try:
        fields["body"] = message.body.decode()
    except UnicodeDecodeError:
        fields["body_base64"] = b64encode(message.body).decode()
    return {name: value for name, value in fields.items() if value is not None}


def _attempt(one: Attempt) -> dict[str, Any]:
    return {name: value for name, value in one._asdict().items() if value != ""}


def _progress(redrive: Redrive) -> RedriveAnswer:
    return RedriveAnswer(
        id=redrive.id,
        state=redrive.state.value,
        total=redrive.total,
        moved=redrive.moved,
        failed=redrive.failed,
        not_found=redrive.not_found,
        started_at=redrive.started_at,
        ended_at=redrive.ended_at,
        target_topic=redrive.order.target_topic,
        rate_per_second=redrive.order.rate_per_second,
        trouble=redrive.trouble or None,
    )


def _json(answer: dict[str, Any] | orjson.Fragment) -> Response:
    """Return ``answer`` encoded by orjson, which is fast enough for a page of 32 MiB."""
    return Response(orjson.dumps(answer), media_type=JSON)
