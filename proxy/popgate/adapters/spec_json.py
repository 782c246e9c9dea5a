"""Converts specs of topics and groups to JSON for the stores, and back.

The JSON contains all fields except the name, which is the key in the store. If a stored spec does not contain a field
that a newer popgate has added, the field gets its default value. So a stored spec can still be read after an upgrade.
Fields that a newer popgate has written are ignored.

Another program may have written to the store, or may have damaged it. So what is read must fit the same bounds as a
request: one entry must not make a proxy allocate without bound, nor keep it from serving the others. An entry that
can't be read is never replaced: it may name queues with messages.
"""

import logging
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias

import msgspec
import orjson
from msgspec import Meta

from popgate.domain.errors import Conflict, InvalidRequest
from popgate.domain.names import (
    QUEUES_MAX,
    BrokerQueue,
    GroupName,
    Subscription,
    TopicName,
    group_name,
    topic_name,
)
from popgate.domain.replica_wanted import REPLICAS_MAX
from popgate.domain.topics import (
    INVISIBILITY_SECONDS_MAX,
    MAX_DELIVERIES_MAX,
    MAX_IN_FLIGHT_MAX,
    MULTIPLIER_MAX,
    RELEASE_DELAY_SECONDS_MAX,
    ConsumeMode,
    Drain,
    GroupSpec,
    Policy,
    RetryPolicy,
    TopicSpec,
)
from popgate.ports.catalog import Unreadable
from popgate.runtime.logs import OnceLogger

_log = logging.getLogger(__name__)

GENERATION_MAX = 2**53 - 1
"""Maximum generation of a mode. The scripts in Redis can represent it exactly."""
ENDS_AT_MAX = 2**52 / 1e6
"""Maximum time of a drain's end, in Unix seconds: the year 2112."""

_REMEDY = "repair it in the store, or delete it there if its messages are not needed"

Fields = dict[str, Any]
_DEFAULT_RETRY, _DEFAULT = RetryPolicy(), Policy()
_AdoptedName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=255, pattern="^(?!popgate:)")]
_LeaseSeconds: TypeAlias = Annotated[float, Meta(gt=0, le=INVISIBILITY_SECONDS_MAX)]
_DelaySeconds: TypeAlias = Annotated[float, Meta(ge=0, le=RELEASE_DELAY_SECONDS_MAX)]
_Generation: TypeAlias = Annotated[int, Meta(ge=0, le=GENERATION_MAX)]


class _Topic(msgspec.Struct, frozen=True):
    queue_count: Annotated[int, Meta(ge=1, le=QUEUES_MAX)]
    adopted: Annotated[tuple[_AdoptedName, ...], Meta(max_length=QUEUES_MAX)] = ()
    unique_message_ids: bool = False
    deleted: bool = False


class _Retry(msgspec.Struct, frozen=True):
    initial_seconds: _DelaySeconds = _DEFAULT_RETRY.initial_seconds
    multiplier: Annotated[float, Meta(ge=1, le=MULTIPLIER_MAX)] = _DEFAULT_RETRY.multiplier
    max_seconds: _DelaySeconds = _DEFAULT_RETRY.max_seconds


class _Policy(msgspec.Struct, frozen=True):
    invisibility_seconds: _LeaseSeconds = _DEFAULT.invisibility_seconds
    max_lease_seconds: _LeaseSeconds = _DEFAULT.max_lease_seconds
    max_deliveries: Annotated[int, Meta(ge=1, le=MAX_DELIVERIES_MAX)] | None = _DEFAULT.max_deliveries
    retry: _Retry = _Retry()
    max_in_flight: Annotated[int, Meta(ge=1, le=MAX_IN_FLIGHT_MAX)] | None = _DEFAULT.max_in_flight
    paused: bool = _DEFAULT.paused
    min_replicas: Annotated[int, Meta(ge=0, le=REPLICAS_MAX)] | None = _DEFAULT.min_replicas


class _Drain(msgspec.Struct, frozen=True):
    to: ConsumeMode
    ends_at: Annotated[float, Meta(ge=0, le=ENDS_AT_MAX)]


class _Group(msgspec.Struct, frozen=True):
    policy: _Policy = _Policy()
    mode: ConsumeMode = ConsumeMode.POP
    mode_generation: _Generation = 1
    lease_generation: _Generation = 1
    drain: _Drain | None = None
    deleted: bool = False


_decoded_topic = msgspec.json.Decoder(_Topic).decode
_decoded_group = msgspec.json.Decoder(_Group).decode


class SpecReader:
    """Reads the specs in a store. Leaves out the entries that can't be read, and logs each of them once.

    ``unreadable`` has the names of the entries that the latest calls of ``topics`` and ``groups`` have left out.
    """

    def __init__(self) -> None:
        self._unreadable = OnceLogger(_log, "an entry of the catalog can't be read; it is ignored")
        self.unreadable = Unreadable(frozenset(), frozenset())

    def topics(self, entries: Iterable[tuple[str, str]]) -> list[TopicSpec]:
        """Read topics from their names and their JSON."""
        found: list[TopicSpec] = []
        left_out: set[str] = set()
        for name, text in entries:
            try:
                found.append(read_topic(name, text))
            except InvalidRequest as error:
                left_out.add(name)
                self._unreadable.warn(f"topic {name}", error.detail)
        self.unreadable = self.unreadable._replace(topics=frozenset(map(TopicName, left_out)))
        return found

    def groups(self, entries: Iterable[tuple[str, str, str]], topics: Iterable[TopicSpec]) -> list[GroupSpec]:
        """Read those groups of ``topics`` whose entries can be read. An entry is a topic, a group, and its JSON."""
        names = {topic.topic for topic in topics}
        found: list[GroupSpec] = []
        left_out: set[Subscription] = set()
        for topic, name, text in entries:
            if topic not in names:
                self._unreadable.warn(f"group {name} of topic {topic}", "its topic is missing, or can't be read")
                spec = None
            else:
                spec = self._group(topic, name, text)
            if spec is None:
                left_out.add(Subscription(TopicName(topic), GroupName(name)))
            else:
                found.append(spec)
        self.unreadable = self.unreadable._replace(groups=frozenset(left_out))
        return found

    def group(self, name: Subscription, text: str | None) -> GroupSpec | None:
        """Read a group, or return None if there is no entry, or none that can be read."""
        return None if text is None else self._group(*name, text)

    def check_topic(self, name: TopicName, text: str | None) -> None:
        """Raises: Conflict if there is an entry of the topic that can't be read. It must not be replaced."""
        if text is None:
            return
        try:
            read_topic(name, text)
        except InvalidRequest as error:
            raise Conflict(f"the entry of topic {name!r} can't be read ({error.detail}); {_REMEDY}") from error

    def check_group(self, name: Subscription, text: str | None) -> None:
        """Raises: Conflict if there is an entry of the group that can't be read. It must not be replaced."""
        if text is not None and self._group(*name, text) is None:
            raise Conflict(f"the entry of group {name.group!r} of topic {name.topic!r} can't be read; {_REMEDY}")

    def _group(self, topic: str, name: str, text: str) -> GroupSpec | None:
        try:
            return read_group(topic, name, text)
        except InvalidRequest as error:
            self._unreadable.warn(f"group {name} of topic {topic}", error.detail)
            return None


def topic_json(spec: TopicSpec) -> str:
    return orjson.dumps(_fields(spec, without="topic")).decode()


def group_json(spec: GroupSpec) -> str:
    """Return the JSON of ``spec``. If ``min_replicas`` is not set, leave it out.

    Older versions of popgate can't read this field.
    """
    fields = _fields(spec, without="subscription")
    if spec.policy.min_replicas is None:
        del fields["policy"]["min_replicas"]
    return orjson.dumps(fields).decode()


def read_topic(name: str, text: str) -> TopicSpec:
    """Return a topic from its name and its JSON. Raises: InvalidRequest."""
    topic = topic_name(name)
    try:
        fields = _decoded_topic(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from error
    adopted = tuple(map(BrokerQueue, fields.adopted))
    if len(set(adopted)) < len(adopted):
        raise InvalidRequest("it adopts a queue twice", field="adopted")
    return TopicSpec(
        topic=topic,
        queue_count=fields.queue_count,
        adopted=adopted,
        unique_message_ids=fields.unique_message_ids,
        deleted=fields.deleted,
    )


def read_group(topic: str, name: str, text: str) -> GroupSpec:
    """Return a group from its names and its JSON. Raises: InvalidRequest."""
    subscription = Subscription(topic_name(topic), group_name(name))
    try:
        fields = _decoded_group(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from error
    drain = fields.drain
    if (fields.mode is ConsumeMode.DRAINING) != (drain is not None and drain.to is not ConsumeMode.DRAINING):
        raise InvalidRequest("a group has a drain only while it changes to the mode pop or pull", field="drain")
    policy = msgspec.structs.asdict(fields.policy)
    policy["retry"] = RetryPolicy(**msgspec.structs.asdict(fields.policy.retry))
    return GroupSpec(
        subscription=subscription,
        policy=Policy(**policy),
        mode=fields.mode,
        mode_generation=fields.mode_generation,
        lease_generation=fields.lease_generation,
        drain=None if drain is None else Drain(to=drain.to, ends_at=drain.ends_at),
        deleted=fields.deleted,
    )


def _unreadable(error: Exception) -> InvalidRequest:
    return InvalidRequest(str(error), field="")


def _fields(spec: TopicSpec | GroupSpec, *, without: str) -> Fields:
    fields = asdict(spec)
    del fields[without]
    return fields
