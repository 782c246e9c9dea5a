"""Serves lease groups over HTTP (decision 12): form, read in slices, ack, extend, release, list.

Below, ``S`` is ``/v1/topics/{topic}/groups/{group}``. This module defines the paths below ``S/lease-groups``, and
writes a slice part by part while the slice is read. It makes no decisions: the engine does.
"""

import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial

import msgspec
from msgspec import UNSET

from popgate.api import answers
from popgate.api.arrow import ArrowEncoder
from popgate.api.asked import whole
from popgate.api.complaints import QUOTED_LENGTH_MAX
from popgate.api.formats import ARROW, Reader, as_text
from popgate.api.message_encoder import Failed, MessageEncoder
from popgate.api.paths import GROUP
from popgate.api.requests import (
    LeaseGroupAckRequest,
    LeaseGroupExtendRequest,
    LeaseGroupReleaseRequest,
    LeaseGroupRequest,
)
from popgate.api.routes import Call, Route, Streamed
from popgate.domain.errors import InvalidRequest
from popgate.domain.lease_group import EPOCH_MAX, GroupState
from popgate.domain.names import StreamName, stream_name
from popgate.engine.engine import Engine
from popgate.engine.lease_groups.slices import GroupMessage, Slice
from popgate.ports.lease_groups import StoredGroup

SEGMENT = "lease-groups"

_PUT = Reader(LeaseGroupRequest)
_ACK = Reader(LeaseGroupAckRequest)
_EXTEND = Reader(LeaseGroupExtendRequest)
_RELEASE = Reader(LeaseGroupReleaseRequest)
_PACKED_START = b"\x81" + msgspec.msgpack.encode("messages")
_ARRAY_32 = b"\xdd"
_DIGITS = re.compile(r"[0-9]{1,19}")


class LeaseGroupHandlers:
    """The handlers for the lease groups of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups = engine.lease_groups

    def routes(self) -> Iterator[Route]:
        """Return the routes of lease groups."""
        stream = f"{GROUP}/lease-groups/{{}}"
        yield Route("lease_groups_list", "GET", f"{GROUP}/lease-groups", self.list, query=("stream",))
        yield Route("lease_groups_put", "PUT", f"{stream}/{{}}", self.put)
        yield Route("lease_groups_read", "GET", f"{stream}/{{}}/messages", self.messages, query=("slice",))
        yield Route("lease_groups_ack", "POST", f"{stream}/ack", self.ack)
        yield Route("lease_groups_extend", "POST", f"{stream}/extend", self.extend)
        yield Route("lease_groups_release", "POST", f"{stream}/release", self.release)

    async def put(self, call: Call) -> bytes:
        topic, group, stream, epoch = call.path
        name, number = stream_name(stream), _whole_text(epoch, "epoch", EPOCH_MAX)
        asked = _PUT.read(call.body, call.form.packed)
        formed = await self._groups.put(
            topic,
            group,
            name,
            number,
            max_messages=whole(asked.max_messages, "max_messages"),
            slices=1 if asked.slices is UNSET else whole(asked.slices, "slices"),
            invisibility_seconds=asked.invisibility_seconds or None,
            permit=call.permit,
        )
        return call.form.encode(
            answers.LeaseGroupAnswer(
                count=formed.message_count, slices=formed.slices, lost=formed.lost, existing=formed.existing
            )
        )

    async def messages(self, call: Call) -> Streamed:
        (topic, group, stream, epoch), form = call.path, call.form
        number = call.query.get("slice", "0")
        found = await self._groups.read(
            topic,
            group,
            stream_name(stream),
            _whole_text(epoch, "epoch", EPOCH_MAX),
            _whole_text(number, "slice", EPOCH_MAX),
        )
        # An error can be answered with its own status only before the first part is sent, so the first part is read
        # here. The default is a list, because CPython 3.11 fails with a tuple.
        nothing: list[GroupMessage] = []
        first = await anext(found.parts, nothing)
        failed = partial(self._engine.message_failed, topic, group)
        if form.wants_arrow:
            return Streamed((b"content-type", ARROW.encode()), _as_arrow(found, first, failed))
        encoder = MessageEncoder(_packed if form.answer_packed else _shown, form.encode, failed)
        parts = _as_msgpack(found, first, encoder) if form.answer_packed else _as_json(found, first, encoder)
        return Streamed(form.content_type, parts)

    async def ack(self, call: Call) -> bytes:
        topic, group, stream = call.path
        through = whole(_ACK.read(call.body, call.form.packed).through_epoch, "through_epoch")
        acked = await self._groups.ack(topic, group, stream_name(stream), through)
        return call.form.encode(answers.LeaseGroupsAcked(**acked._asdict()))

    async def extend(self, call: Call) -> bytes:
        topic, group, stream = call.path
        seconds = _EXTEND.read(call.body, call.form.packed).invisibility_seconds
        extended = await self._groups.extend(topic, group, stream_name(stream), seconds)
        return call.form.encode(
            answers.LeaseGroupsExtended(
                [
                    answers.ExtendedLeaseGroup(
                        epoch=one.group.epoch,
                        status="extended" if one.is_held else "expired",
                        count=one.group.message_count,
                        lost=one.group.lost,
                        remaining_seconds=one.group.remaining_seconds,
                    )
                    for one in extended
                ]
            )
        )

    async def release(self, call: Call) -> bytes:
        topic, group, stream = call.path
        after = whole(_RELEASE.read(call.body, call.form.packed).after_epoch, "after_epoch")
        released = await self._groups.release(topic, group, stream_name(stream), after)
        return call.form.encode(answers.LeaseGroupsReleased(released))

    async def list(self, call: Call) -> bytes:
        topic, group = call.path
        stream = call.query.get("stream")
        name: StreamName | None = None if stream is None else stream_name(stream)
        groups = await self._groups.groups(topic, group, name)
        return call.form.encode(answers.LeaseGroupList([_state(one) for one in groups]))


# -- slices -----------------------------------------------------------------------------------------------------------


async def _as_json(found: Slice, first: Sequence[GroupMessage], encoder: MessageEncoder) -> AsyncGenerator[bytes]:
    yield b'{"messages":[' + b",".join(encoder.one(one) for one in first)
    async for part in found.parts:
        yield b"," + b",".join(encoder.one(one) for one in part)
    yield b"]}"


async def _as_msgpack(found: Slice, first: Sequence[GroupMessage], encoder: MessageEncoder) -> AsyncGenerator[bytes]:
    yield _PACKED_START + _ARRAY_32 + found.message_count.to_bytes(4, "big")
    yield b"".join(encoder.one(one) for one in first)
    async for part in found.parts:
        yield b"".join(encoder.one(one) for one in part)


async def _as_arrow(found: Slice, first: Sequence[GroupMessage], failed: Failed) -> AsyncGenerator[bytes]:
    encoder = ArrowEncoder(as_text, failed)
    if first:
        yield encoder.part(first)
    async for part in found.parts:
        yield encoder.part(part)
    yield encoder.end()


def _shown(one: GroupMessage) -> answers.LeaseGroupMessage:
    return answers.in_json(_packed(one), one.message.body)


def _packed(one: GroupMessage) -> answers.LeaseGroupMessage:
    message = one.message
    return answers.LeaseGroupMessage(
        position=one.position,
        message_id=message.message_id or UNSET,
        body=message.body,
        headers=message.headers,
        ordering_key=UNSET if message.ordering_key is None else message.ordering_key,
        queue=one.queue,
        delivery_count=one.delivery_count,
        published_at=message.published_at or UNSET,
        first_delivered_at=one.first_delivered_at,
    )


def _state(one: StoredGroup) -> answers.LeaseGroupState:
    state: answers.LeaseGroupStateName = "leased" if one.remaining_seconds > 0 else "expired"
    return answers.LeaseGroupState(
        stream=one.stream,
        epoch=one.epoch,
        state="forming" if one.state is GroupState.FORMING else state,
        count=one.message_count,
        slices=one.slices,
        lost=one.lost,
        remaining_seconds=one.remaining_seconds if one.message_count else 0.0,
        age_seconds=one.age_seconds,
        held_seconds=one.held_seconds,
    )


# -- parameters -------------------------------------------------------------------------------------------------------


def _whole_text(text: str, field: str, maximum: int) -> int:
    if _DIGITS.fullmatch(text) is None or int(text) > maximum:
        raise InvalidRequest(
            f"{field} must be a whole number from 0 to {maximum}, not {text[:QUOTED_LENGTH_MAX]!r}", field=field
        )
    return int(text)
