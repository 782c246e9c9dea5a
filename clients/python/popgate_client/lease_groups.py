"""Lease groups: batches with a fixed membership, leased, read and settled as a whole (decision 12).

Owns their types and requests. `LeaseStream` and its asyncio twin send them through a client; every call is idempotent
and is repeated like a pop. A stream is a sequence of batches that the caller names, such as one streaming query; epochs
number its batches.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlencode

from popgate_client.exchange import Exchange, Exchanges
from popgate_client.wire import JsonObject, Request, T, encode, lease_group_path, read_answer, without_none

FORM_SECONDS = 120.0
"""Seconds that the server may be silent while it works on a batch: leasing 100,000 messages takes a while."""
FORM_NOTHING = 0
"""The `max_messages` of a caller that wants an existing batch again and must not get another one in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGroup:
    """The content of a lease group: `count` messages can be read in `slices` parts; `lost` messages went to other
    clients after their leases had expired. `existing`: the group existed before, with exactly these members. `count` 0:
    no message was ready, and no group was kept; try the same epoch again."""

    epoch: int
    count: int
    slices: int
    lost: int
    existing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGroupMessage:
    """One message of a lease group; each read returns the same one. `position` is its place in the group."""

    position: int
    body: bytes
    headers: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    message_id: str | None = None
    ordering_key: str | None = None
    queue: int
    delivery_count: int
    published_at: float | None = None
    first_delivered_at: float

    @property
    def text(self) -> str:
        """The body as text. Raises: UnicodeDecodeError when the body is not UTF-8."""
        return self.body.decode("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGroupsAcked:
    """Numbers of messages. `already_acked`: acked by earlier calls with the same epoch. `lost`: not acked, because they
    went to other clients."""

    acked: int
    already_acked: int
    lost: int


class _Caller(Protocol):
    def perform(self, exchange: Exchange[T]) -> T: ...


class _AsyncCaller(Protocol):
    async def perform(self, exchange: Exchange[T]) -> T: ...


class _Exchanges:
    """The exchanges of one stream."""

    def __init__(self, exchanges: Exchanges, topic: str, group: str, stream: str) -> None:
        self._exchanges = exchanges
        self._place = (topic, group, stream)

    def lease(
        self, epoch: int, max_messages: int, slices: int, invisibility_seconds: float | None
    ) -> Exchange[LeaseGroup]:
        fields = {"max_messages": max_messages, "slices": slices, "invisibility_seconds": invisibility_seconds}
        request = Request(
            method="PUT",
            path=lease_group_path(*self._place, str(epoch)),
            content=encode(without_none(fields)),
            silence_seconds=FORM_SECONDS,
        )
        return self._call(request, lambda body: LeaseGroup(epoch=epoch, **_named(body, *_LEASED)))

    def messages(self, epoch: int, number: int) -> Exchange[list[LeaseGroupMessage]]:
        path = f"{lease_group_path(*self._place, str(epoch), 'messages')}?{urlencode({'slice': number})}"
        return self._call(
            Request(method="GET", path=path, silence_seconds=FORM_SECONDS),
            lambda body: [_message(entry) for entry in body["messages"]],
        )

    def ack(self, through_epoch: int) -> Exchange[LeaseGroupsAcked]:
        return self._post(
            "ack", {"through_epoch": through_epoch}, lambda body: LeaseGroupsAcked(**_named(body, *_ACKED))
        )

    def extend(self, invisibility_seconds: float) -> Exchange[list[JsonObject]]:
        return self._post("extend", {"invisibility_seconds": invisibility_seconds}, _list)

    def release(self, after_epoch: int) -> Exchange[int]:
        return self._post("release", {"after_epoch": after_epoch}, lambda body: int(body["released"]))

    def groups(self) -> Exchange[list[JsonObject]]:
        topic, group, stream = self._place
        return list_exchange(self._exchanges, topic, group, stream)

    def _post(self, verb: str, fields: JsonObject, reader: Callable[[JsonObject], T]) -> Exchange[T]:
        request = Request(
            method="POST",
            path=lease_group_path(*self._place, verb),
            content=encode(fields),
            silence_seconds=FORM_SECONDS,
        )
        return self._call(request, reader)

    def _call(self, request: Request, reader: Callable[[JsonObject], T]) -> Exchange[T]:
        answer = yield from self._exchanges.repeatable(request)
        return read_answer(answer, reader)


class LeaseStream:
    """The lease groups of one stream, from `Client.lease_stream`.

    Calls raise what every call of `Client` may raise, and LeaseGroupAcked (the epoch was acked), LeaseGroupNotFound
    (the group does not exist; it may have been empty) and LeaseGroupExpired (its leases expired: `lease` it again).
    """

    def __init__(self, client: _Caller, exchanges: Exchanges, topic: str, group: str, stream: str) -> None:
        self._client = client
        self._exchanges = _Exchanges(exchanges, topic, group, stream)

    def lease(
        self, epoch: int, max_messages: int, slices: int = 1, invisibility_seconds: float | None = None
    ) -> LeaseGroup:
        """Lease a batch of at most `max_messages` (1 to 100,000) of the ready messages, to be read in `slices` parts.

        A repeat with the same epoch gets the same batch and renews its leases. If they had expired, the same messages
        are leased again, and those that other clients got are counted as `lost`. `max_messages` 0 only renews, and
        never forms a new batch. Raises: LeaseGroupAcked; with 0 LeaseGroupNotFound if the batch does not exist.
        """
        return self._client.perform(self._exchanges.lease(epoch, max_messages, slices, invisibility_seconds))

    def messages(self, epoch: int, slice_number: int = 0) -> list[LeaseGroupMessage]:
        """Read one slice, 0 to slices-1: the same messages in the same order each time."""
        return self._client.perform(self._exchanges.messages(epoch, slice_number))

    def ack(self, through_epoch: int) -> LeaseGroupsAcked:
        """Settle every batch up to this epoch: never delivered again, and their epochs can't be used again."""
        return self._client.perform(self._exchanges.ack(through_epoch))

    def extend(self, invisibility_seconds: float) -> list[JsonObject]:
        """Make all leases of the stream end this long from now. Return for each group: epoch, status (`extended`, or
        `expired` if the leases had already expired), count, lost, remaining_seconds."""
        return self._client.perform(self._exchanges.extend(invisibility_seconds))

    def release(self, after_epoch: int) -> int:
        """Release the batches of later epochs (-1: all), and forget them; return how many messages are visible
        again."""
        return self._client.perform(self._exchanges.release(after_epoch))

    def groups(self) -> list[JsonObject]:
        """Return the batches that are not acked; see `Client.lease_groups`."""
        return self._client.perform(self._exchanges.groups())


class AsyncLeaseStream:
    """The lease groups of one stream, from `AsyncClient.lease_stream`. Arguments and errors are `LeaseStream`'s."""

    def __init__(self, client: _AsyncCaller, exchanges: Exchanges, topic: str, group: str, stream: str) -> None:
        self._client = client
        self._exchanges = _Exchanges(exchanges, topic, group, stream)

    async def lease(
        self, epoch: int, max_messages: int, slices: int = 1, invisibility_seconds: float | None = None
    ) -> LeaseGroup:
        """Lease a batch, or the same batch again; see `LeaseStream.lease`."""
        return await self._client.perform(self._exchanges.lease(epoch, max_messages, slices, invisibility_seconds))

    async def messages(self, epoch: int, slice_number: int = 0) -> list[LeaseGroupMessage]:
        """Read one slice; see `LeaseStream.messages`."""
        return await self._client.perform(self._exchanges.messages(epoch, slice_number))

    async def ack(self, through_epoch: int) -> LeaseGroupsAcked:
        """Settle every batch up to this epoch; see `LeaseStream.ack`."""
        return await self._client.perform(self._exchanges.ack(through_epoch))

    async def extend(self, invisibility_seconds: float) -> list[JsonObject]:
        """Make all leases of the stream end this long from now; see `LeaseStream.extend`."""
        return await self._client.perform(self._exchanges.extend(invisibility_seconds))

    async def release(self, after_epoch: int) -> int:
        """Release the batches of later epochs; see `LeaseStream.release`."""
        return await self._client.perform(self._exchanges.release(after_epoch))

    async def groups(self) -> list[JsonObject]:
        """Return the batches that are not acked; see `Client.lease_groups`."""
        return await self._client.perform(self._exchanges.groups())


def list_exchange(
    exchanges: Exchanges, topic: str, group: str, stream: str | None = None
) -> Exchange[list[JsonObject]]:
    """Return the lease groups of a subscription that are not acked, or only those of one stream."""
    query = "" if stream is None else f"?{urlencode({'stream': stream})}"
    request = Request(method="GET", path=f"{lease_group_path(topic, group)}{query}")
    answer = yield from exchanges.repeatable(request)
    return read_answer(answer, _list)


_LEASED = ("count", "slices", "lost", "existing")
_ACKED = ("acked", "already_acked", "lost")


def _named(body: JsonObject, *names: str) -> JsonObject:
    """Return only the fields `names`; a newer server may send more."""
    return {name: body[name] for name in names}


def _list(body: JsonObject) -> list[JsonObject]:
    return [dict(entry) for entry in body["lease_groups"]]


def _message(entry: JsonObject) -> LeaseGroupMessage:
    text: str | None = entry.get("body")
    published_at = entry.get("published_at")
    return LeaseGroupMessage(
        position=entry["position"],
        body=base64.b64decode(entry["body_base64"], validate=True) if text is None else text.encode("utf-8"),
        headers=entry.get("headers") or {},
        message_id=entry.get("message_id"),
        ordering_key=entry.get("ordering_key"),
        queue=entry["queue"],
        delivery_count=entry["delivery_count"],
        published_at=None if published_at is None else float(published_at),
        first_delivered_at=float(entry["first_delivered_at"]),
    )
