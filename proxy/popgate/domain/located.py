"""Describes where a message is: one or several copies in each group of its topic, or why it is unknown there.

These values are sent between proxies and to clients as they are, so each field has a plain JSON type. Times are Unix
seconds of the store's clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum

from popgate.domain.attempts import AttemptEnd, read, without_attempt
from popgate.domain.dead_letter import DeadLetterDetails
from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.modes import is_pulled
from popgate.domain.peeked import PeekedMessage
from popgate.domain.story import Story


class CopyState(StrEnum):
    """Where one copy of a message is."""

    READY = "ready"
    LEASED = "leased"
    DELAYED = "delayed"
    BLOCKED = "blocked"
    MOVING = "moving"
    DEAD = "dead"
    EXPIRED = "expired"
    SETTLED = "settled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedCopy:
    """One copy of the message in one group. ``detail`` is a sentence for people.

    ``source`` says who knows it: ``memory`` (the owner of the queue), ``store`` (the lease record), ``dead_letters`` or
    ``journal``.
    ``at``: when it was settled, dead-lettered or discarded. ``dead_letter`` is the id of its dead letter, and
    ``reason`` why it died; the reason is null if the caller may not read messages. ``message`` has no body and no
    headers.
    """

    id: str
    state: str
    detail: str
    source: str
    queue: int | None = None
    at: float | None = None
    dead_letter: str | None = None
    reason: str | None = None
    message: PeekedMessage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedGroup:
    """The copies of a message in one group. ``state`` is that of the first copy, or ``unknown``.

    ``because`` says, if the message is unknown, what this can mean. ``not_shown`` counts messages of the group at the
    broker that no proxy has read, and ``unnamed`` those whose content, and so their message id, is not in memory.
    ``is_searched``: whether all dead letters of the group were searched.
    """

    group: str
    state: str
    copies: Sequence[LocatedCopy] = ()
    because: Sequence[str] = ()
    not_shown: int | None = 0
    unnamed: int = 0
    is_searched: bool = False


_ORDER = tuple(CopyState)


def located(group: str, parts: Iterable[LocatedGroup], missing: Sequence[str]) -> LocatedGroup:
    """Return what all proxies together know of the message in a group.

    ``missing``: sentences about queues whose messages no proxy has reported.
    """
    parts = list(parts)
    copies: dict[str, LocatedCopy] = {}
    for copy in (
        copy
        for source in ("memory", "dead_letters", "store")
        for part in parts
        for copy in part.copies
        if copy.source == source
    ):
        copies.setdefault(copy.id, copy)
    ordered = sorted(copies.values(), key=lambda copy: _ORDER.index(CopyState(copy.state)))
    shown = [part.not_shown for part in parts]
    whole = LocatedGroup(
        group=group,
        state=ordered[0].state if ordered else CopyState.UNKNOWN,
        copies=ordered,
        not_shown=None if None in shown else sum(count or 0 for count in shown),
        unnamed=sum(part.unnamed for part in parts),
        is_searched=any(part.is_searched for part in parts),
    )
    return whole if ordered else _unknown(whole, missing)


def _unknown(whole: LocatedGroup, missing: Sequence[str]) -> LocatedGroup:
    because: list[str] = []
    if whole.not_shown is None:
        because.append("The broker does not answer, so it is unknown how many messages wait there.")
    elif whole.not_shown:
        because.append(
            f"It may wait at the broker, or be delayed there: no proxy has read {_messages(whole.not_shown)} of this "
            "group. To read some of them first, ask with fetch (popgate explain TOPIC --message-id ID --fetch)."
        )
    if whole.unnamed:
        because.append(
            f"The content of {_messages(whole.unnamed)} in memory was dropped to save memory, or was not delivered "
            f"again yet, for example after a restart: it may be {'this one' if whole.unnamed == 1 else 'one of them'}. "
            "Fetch helps here, too."
        )
    because += missing
    if not whole.is_searched:
        because.append("Not all dead letters of this group were searched.")
    because.append(
        "It may be settled, or discarded at the end of its time to live: popgate keeps the record of this for a short "
        "time only, and finds it by popgate's own id of the copy. The journal keeps the whole story."
    )
    because.append("It may be delayed by its publisher: popgate can't look up such messages at the broker.")
    because.append("It may never have been published to this topic, or only before this group was created.")
    return LocatedGroup(
        group=whole.group,
        state=CopyState.UNKNOWN,
        because=because,
        not_shown=whole.not_shown,
        unnamed=whole.unnamed,
        is_searched=whole.is_searched,
    )


def in_memory(message: PeekedMessage, now: float, ended: str = "") -> LocatedCopy:
    """Describe a copy that the owner of its queue has in memory. ``now``: Unix seconds. ``ended``: how the last attempt
    ended (``last_attempt``)."""
    is_visible = message.state in (CopyState.READY, CopyState.BLOCKED)
    if is_visible and message.expires_at is not None and message.expires_at <= now:
        state = CopyState.EXPIRED
        detail = f"Its time to live ended at {utc(message.expires_at)}: it is discarded when its turn comes."
    else:
        state, detail = CopyState(message.state), _in_memory(message)
    return LocatedCopy(
        id=message.id,
        state=state,
        detail=f"{detail}{ended}",
        source="memory",
        queue=message.queue,
        message=message,
    )


def _in_memory(message: PeekedMessage) -> str:
    where = f"queue {message.queue}"
    attempts = f"attempt {message.attempt}" if message.attempt else "never handed out"
    match message.state:
        case CopyState.LEASED if message.lease is not None:
            if message.lease.deadline is None:
                pull_client = f"the pull client {message.lease.client}" if message.lease.client else "a pull client"
                return f"It is leased to {pull_client}, {_UNTIL_COMMIT} ({attempts}, {where})."
            by = message.lease.client or "a client whose client_id is not known,"
            return f"It is leased to {by} until {utc(message.lease.deadline)} ({attempts}, {where})."
        case CopyState.DELAYED:
            until = "" if message.visible_at is None else f" until {utc(message.visible_at)}"
            what = "waits for its next attempt" if message.attempt else "is delayed"
            return f"It {what}{until} ({attempts}, {where})."
        case CopyState.BLOCKED:
            return f"It waits in {where}, behind {_blocked_by(message)}."
        case CopyState.MOVING:
            return f"It is being moved to the dead letters ({attempts}, {where})."
        case CopyState.EXPIRED:
            return f"Its time to live is over, and it is being discarded ({attempts}, {where})."
        case _:
            place = "" if message.place is None else f" at place {message.place}"
            return f"It is ready{place} of {where} ({attempts})."


_UNTIL_COMMIT = "until the client commits it or its session ends"
_ENDINGS = {AttemptEnd.RELEASED: "was released", AttemptEnd.REJECTED: "was rejected", AttemptEnd.EXPIRED: "expired"}


def last_attempt(record: LeaseRecord, *, with_contents: bool) -> str:
    """Return a sentence that says how the last attempt ended, or an empty text. It begins with a space."""
    if record.state is RecordState.LEASED:  # the end of a lease needs no write
        return f" The lease of attempt {record.delivery_count} expired at {utc(record.visible_at)}."
    attempts = read(record.reason)[1]
    if not attempts or attempts[-1].attempt != record.delivery_count:
        return ""
    last = attempts[-1]
    by = f" of {last.client}" if last.client else ""
    texts = [text for text in (last.reason, last.error_type, last.error_text) if text] if with_contents else []
    return f" Attempt {last.attempt}{by} {_ENDINGS[AttemptEnd(last.outcome)]} at {utc(last.ended_at)}{_told(texts)}."


def dead_detail(at: float | None, note: DeadLetterDetails, *, with_contents: bool) -> str:
    """Return the sentence that describes a dead letter."""
    count, error = note.delivery_count, note.last_error
    attempts = "" if count is None else f" after {count} {'attempt' if count == 1 else 'attempts'}"
    by = f", the last one by {note.last_client}" if note.last_client else ""
    texts = [note.reason, *((error.error_type, error.error_text) if error else ())] if with_contents else []
    since = "" if at is None else f" since {utc(at)}"
    return f"It is dead{since}{attempts}{by}{_told([text for text in texts if text])}."


def _told(texts: Sequence[str]) -> str:
    return f": {': '.join(texts)}" if texts else ""


def _blocked_by(message: PeekedMessage) -> str:
    first = message.blocked_by
    if first is None:
        return "earlier messages that the broker has not delivered again yet"
    by = f" by {first.client}" if first.client else ""
    until = "" if first.until is None else f" until {utc(first.until)}"
    ahead = f"; {_messages(first.ahead)} of its key in front of it" if first.ahead > 1 else ""
    return f"message {first.message_id or first.id} of the same ordering key, which is {first.state}{by}{until}{ahead}"


def recorded(copy_id: str, queue: int, record: LeaseRecord, *, with_contents: bool) -> LocatedCopy:
    """Describe a copy by its lease record in the store."""
    state, detail = _recorded(record)
    is_over = state in (CopyState.SETTLED, CopyState.EXPIRED, CopyState.DEAD)
    return LocatedCopy(
        id=copy_id,
        state=state,
        detail=detail,
        source="store",
        queue=queue,
        at=record.changed_at if is_over else None,
        dead_letter=record.target_copy_id if state is CopyState.DEAD else None,
        reason=(without_attempt(record.reason) or None) if state is CopyState.DEAD and with_contents else None,
    )


def _recorded(record: LeaseRecord) -> tuple[CopyState, str]:
    attempts = f"attempt {record.delivery_count}"
    match record.state:
        case RecordState.ACKED:
            return CopyState.SETTLED, f"It was acknowledged at {utc(record.changed_at)} ({attempts})."
        case RecordState.DISCARDED:
            return CopyState.EXPIRED, f"It was discarded at {utc(record.changed_at)}: its time to live was over."
        case RecordState.DEAD:
            return CopyState.DEAD, f"It was moved to the dead letters at {utc(record.changed_at)} ({attempts})."
        case RecordState.MOVING:
            return CopyState.MOVING, f"It is being moved to the dead letters ({attempts})."
        case RecordState.LEASED if is_pulled(record.lease_id):
            return CopyState.LEASED, f"It is leased to a pull client, {_UNTIL_COMMIT} ({attempts})."
        case RecordState.LEASED:
            return CopyState.LEASED, f"It is leased until {utc(record.visible_at)} ({attempts})."
        case _:
            return CopyState.DELAYED, f"It is visible from {utc(record.visible_at)} ({attempts})."


_ENDED = {
    "acked": (CopyState.SETTLED, "acknowledged"),
    "purged": (CopyState.SETTLED, "purged by an administrator"),
    "discarded": (CopyState.EXPIRED, "discarded, because its time to live was over"),
    "dead_lettered": (CopyState.DEAD, "moved to the dead letters"),
    "rejected": (CopyState.DEAD, "moved to the dead letters"),
}
"""The events of the journal after which a copy is gone, with the state and the words for it."""


def with_story(group: LocatedGroup, story: Story) -> LocatedGroup:
    """If no proxy knows the message, but the last event of the journal in this group ended it, say how it ended."""
    events = [one for one in story.events if one.group == group.group]
    last = events[-1] if events else None
    if group.copies or last is None or last.event not in _ENDED or last.copy_id is None:
        return group
    state, words = _ENDED[last.event]
    by = f" by {last.client}" if last.client and state is not CopyState.EXPIRED else ""
    attempt = "" if last.delivery_count is None else f" (attempt {last.delivery_count})"
    copy = LocatedCopy(
        id=last.copy_id,
        state=state,
        detail=f"It was {words}{by} at {utc(last.at)}{attempt}, as the journal tells.",
        source="journal",
        queue=last.queue,
        at=last.at,
        dead_letter=last.new_copy_id if state is CopyState.DEAD else None,
        reason=last.detail if state is CopyState.DEAD else None,
    )
    return replace(group, state=state, copies=[copy], because=[])


def utc(at: float) -> str:
    """Return Unix seconds in the form of RFC 3339, with milliseconds."""
    try:
        moment = datetime.fromtimestamp(at, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f}"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"
