"""Finds the copies of one message in a group: in memory, in the store's lease records, and among the dead letters.

A message id is the publisher's, and has no index. So the messages in memory are visited a slice at a time, and the dead
letters are searched for a limited time. A lease record is found by the copy id, which is the message id of a message
that was published without one.
"""

import logging
from contextlib import suppress
from dataclasses import replace

from popgate.domain.dead_letter import dead_letter_details, origin_of
from popgate.domain.errors import BrokerUnavailable, PopgateError, RetryLater
from popgate.domain.located import (
    CopyState,
    LocatedCopy,
    LocatedGroup,
    dead_detail,
    in_memory,
    last_attempt,
    recorded,
)
from popgate.domain.names import CopyId
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.dead_letters.dead_walk import Letter
from popgate.engine.explain.fetching import FETCH_SECONDS, fetch
from popgate.engine.explain.peeking import Showing, not_shown_here
from popgate.engine.explain.slices import slices
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.host import QueueHost
from popgate.engine.subscription.subscription import ServedSubscription

_log = logging.getLogger(__name__)

COPIES_MAX = 20
"""Maximum number of copies with the same message id that are described in each group and each place."""
FETCHED_MAX = 1_000
"""Maximum number of messages of a group that are in memory when a search stops reading more from the broker."""
SEARCH_SECONDS = 2.0
"""Maximum seconds for which the dead letters of one group are searched; with a fetch, less by its time."""


async def find_here(
    context: EngineContext, served: ServedSubscription, message_id: str, *, with_contents: bool, fetches: bool = False
) -> LocatedGroup:
    """Return the copies of a message in the queues, and among the dead letters, that this proxy owns.

    ``with_contents``: whether the caller may read the group's messages. ``fetches``: whether messages are first read
    from the broker.
    """
    if fetches:
        with suppress(BrokerUnavailable):
            await fetch(context, served, FETCHED_MAX)
    found: list[BufferedMessage] = []
    undelivered: dict[QueueHost, int] = {}
    unnamed = 0
    for host in served.hosts:
        if not host.is_owned:
            continue
        undelivered[host] = 0
        async for messages in slices(host):
            for message in messages:
                undelivered[host] += message.tag is None
                unnamed += message.message is None
                if message.copy_id == message_id or _has_id(message, message_id):
                    found.append(message)
    described = await Showing(context, served, found[:COPIES_MAX]).all()
    ended = await _last_attempts(context, served, found[:COPIES_MAX], with_contents=with_contents)
    now = context.clock.wall()
    copies = [
        in_memory(replace(one, headers=None, body_preview=None, body_preview_base64=None), now, ended.get(one.id, ""))
        for one in described
    ]
    if not with_contents:
        copies = [replace(one, message=one.message and replace(one.message, ordering_key=None)) for one in copies]
    seconds = SEARCH_SECONDS - FETCH_SECONDS if fetches else SEARCH_SECONDS
    letters, is_searched = await _dead(context, served, message_id, seconds, with_contents=with_contents)
    return LocatedGroup(
        group=served.name.group,
        state=CopyState.UNKNOWN,
        copies=[*copies, *letters],
        not_shown=await not_shown_here(context, undelivered),
        unnamed=unnamed,
        is_searched=is_searched,
    )


async def find_records(
    context: EngineContext, served: ServedSubscription, message_id: str, *, with_contents: bool
) -> LocatedGroup:
    """Return the copies of a message that have lease records under ``message_id`` as copy id.

    Any proxy can do this. Raises: StateUnavailable.
    """
    copies: list[LocatedCopy] = []
    copy_id = CopyId(message_id)
    for number, queue in enumerate(served.layout.queues):
        record = (await context.leases.peek(queue, [copy_id])).get(copy_id)
        if record is not None:
            copies.append(recorded(copy_id, number, record, with_contents=with_contents))
    return LocatedGroup(group=served.name.group, state=CopyState.UNKNOWN, copies=copies)


async def _last_attempts(
    context: EngineContext, served: ServedSubscription, found: list[BufferedMessage], *, with_contents: bool
) -> dict[str, str]:
    """Return by copy id how the last attempt on a waiting message ended, as far as its lease record tells."""
    ended: dict[str, str] = {}
    if context.leases.unavailable_reason() is not None:
        return ended
    for host in served.hosts:
        waiting = [one for one in found if one.queue_index == host.queue.number and one.delivery_count]
        copy_ids = [one.copy_id for one in waiting if one.state is not MessageState.LEASED]
        if copy_ids:
            with suppress(RetryLater):
                records = await context.leases.peek(host.broker_queue, copy_ids)
                ended |= {one: last_attempt(record, with_contents=with_contents) for one, record in records.items()}
    return ended


def _has_id(message: BufferedMessage, message_id: str) -> bool:
    return message.message is not None and message.message.message_id == message_id


async def _dead(
    context: EngineContext, served: ServedSubscription, message_id: str, seconds: float, *, with_contents: bool
) -> tuple[list[LocatedCopy], bool]:
    """Search the dead letters if this proxy owns them. Return also whether all of them were searched."""
    if not served.dead_letters.is_open:
        return [], False
    try:
        (depth,) = await context.broker.depth([served.layout.dead])
        if not (depth.ready or served.dead_letters.held_count):
            return [], True
        letters, is_whole = await served.dead_letters.search(
            lambda letter: _is_wanted(letter, message_id), count_max=COPIES_MAX, seconds=seconds
        )
    except BrokerUnavailable:
        return [], False
    except PopgateError as error:  # for example, another program consumes the queue
        _log.info("dead letters can't be searched", extra={"queue": served.layout.dead, "error": error.detail})
        return [], False
    return [_dead_copy(letter, with_contents=with_contents) for letter in letters], is_whole


def _is_wanted(letter: Letter, message_id: str) -> bool:
    message = letter.message
    return message_id in (letter.copy_id, message.message_id, origin_of(message.headers))


def _dead_copy(letter: Letter, *, with_contents: bool) -> LocatedCopy:
    note = dead_letter_details(letter.message.headers)
    return LocatedCopy(
        id=origin_of(letter.message.headers) or letter.copy_id,
        state=CopyState.DEAD,
        detail=dead_detail(letter.dead_lettered_at, note, with_contents=with_contents),
        source="dead_letters",
        queue=note.queue,
        at=letter.dead_lettered_at,
        dead_letter=letter.copy_id,
        reason=note.reason if with_contents else None,
    )
